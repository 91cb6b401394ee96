# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model as a store takes them, and a pass of few tokens through all layers of a store. Part of tierkv.hf."""
from __future__ import annotations

import importlib
from typing import Any, List

from . import _library as lib
from ._arrays import DTYPES
from .errors import ArgumentTypeError, InvalidArgumentError, OutOfRangeError
from .kv_store import KvStore, _ids

# Types are checked where it is not installed.
torch: Any = importlib.import_module("torch")

Tensor = Any


def store_tokens(x: Tensor) -> Any:
    """[heads, tokens, head_dim] as [tokens, heads, head_dim], for significance(): on the CPU in float32."""
    x = x.transpose(0, 1)
    return x if x.is_cuda else x.float().numpy()


def dense(x: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim] as a store takes it: dense [batch, tokens, heads, head_dim], on the CPU in fp16. OutOfRangeError."""
    return in_type(x.transpose(1, 2))


def in_type(x: Tensor) -> Tensor:
    x = x.contiguous()
    if x.is_cuda or x.dtype == torch.float16:
        return x
    half = x.half()
    if bool((half.isinf() & x.isfinite()).any()):
        raise OutOfRangeError("TierCache: a query, key or value beyond fp16")
    return half


def in_dtype_of(like: Tensor, x: Any) -> Tensor:
    return (x if isinstance(x, torch.Tensor) else torch.from_numpy(x)).to(like.dtype)


class Step:
    """append() and attend() of a store for each layer of a pass of few tokens; what the layers share is laid out once."""

    def __init__(self, store: KvStore, ids: List[int], tokens: int, count_query: bool, device: Any) -> None:
        array, count = _ids(ids)
        c = store.config
        self._store, self._dtype, self._device, self._is_one = store, getattr(torch, c.dtype), device, tokens == 1
        self._q_shape, self._k_shape = ((count, heads, tokens, c.head_dim) for heads in (c.num_q_heads, c.num_kv_heads))
        self._append = lib.KvAppendCall(sequences=array, num_sequences=count, tokens=tokens)
        self._attend = lib.KvAttendCall(sequences=array, num_sequences=count, q_len=tokens, dtype=DTYPES[c.dtype], count_query=count_query)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As TierCache._attend(). Tensors may go once the call returns: on the same stream, memory is used again behind the kernels."""
        if q.shape != self._q_shape or k.shape != self._k_shape or v.shape != self._k_shape:
            raise InvalidArgumentError(f"TierCache: layer {layer} has other heads than the first")
        if q.device != self._device or k.device != self._device or v.device != self._device:
            raise ArgumentTypeError(f"TierCache: layer {layer} is not on {self._device}, where the first token was")
        # One token lies in memory as a store takes it.
        given = in_type if self._is_one else dense
        dtype, q, k, v = q.dtype, given(q), given(k), given(v)
        if q.dtype != self._dtype or k.dtype != self._dtype or v.dtype != self._dtype:
            raise ArgumentTypeError(f"TierCache: layer {layer} is not of {self._dtype}, as the first token was")
        append, attend, out = self._append, self._attend, torch.empty_like(q)
        append.layer, append.k, append.v = layer, k.data_ptr(), v.data_ptr()
        attend.layer, attend.q, attend.out = layer, q.data_ptr(), out.data_ptr()
        self._store._call("tkv_kv_append", append)
        self._store._call("tkv_kv_attend", attend)
        if self._is_one:
            out = out.transpose(1, 2)
        return out if dtype == self._dtype else out.to(dtype)
