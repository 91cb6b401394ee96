# SPDX-License-Identifier: Apache-2.0
"""How much later queries look at the tokens of a prompt, by layer, and the log-sum-exp that this needs.

    scores = tierkv.significance(q, k)                            # one prompt of one layer
    store.append(id, layer, k[None], v[None], significance=scores[None])

q is [tokens, num_q_heads, head_dim], k is [tokens, num_kv_heads, head_dim], both after RoPE and of one dtype. Several prompts lie one
after the other: `starts` [sequences + 1] holds their first tokens, then the number of all tokens.

Tensors on a GPU are worked on by kernels, on torch's current stream. Their last dim must be dense, their other strides multiples of 8
elements. `starts` may be an int32 tensor there, for CUDA graphs; `max_tokens` then bounds a prompt. NumPy arrays and tensors in CPU
memory go to the reference, which computes in double: it is for tests and small prompts.

The queries n - 1, n - 1 - stride, ... of a prompt of n tokens are counted: a stride of 1 counts all.
include/tierkv/significance.h has the formulas.
"""
from __future__ import annotations

import sys
from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np

from . import _device
from . import _library as lib
from ._arrays import DTYPES, ArrayLike, integers, like, pointer, shaped, to_numpy, values
from .errors import ArgumentTypeError, InvalidArgumentError

Starts = Union[None, Sequence[int], Any]
MAX_QUERY_STRIDE = 4096


def significance(q: ArrayLike, k: ArrayLike, *, lse: Any = None, starts: Starts = None, max_tokens: Optional[int] = None, stride: int = 16,
                 sm_scale: Optional[float] = None) -> Any:
    """float32 [num_kv_heads, tokens]: the mean over the counted queries behind a token of the largest probability that a head of the group
    gave it; 0 for the last token of a sequence. `lse` float32 [num_q_heads, tokens], on a GPU, spares the kernel that finds it. A score that is
    not finite raises NonFiniteError on the host; on a GPU the significance of its token is not finite either."""
    call = _Call(q, k, starts, max_tokens, stride, sm_scale)
    if not call.on_device and lse is not None:
        raise InvalidArgumentError("lse: the reference for NumPy arrays finds its own")
    if call.on_device:
        call.set("lse", call.new_lse() if lse is None else lse, call.q_heads)
        if lse is None:
            call.run("tkv_prompt_lse")
    out = call.new(call.kv_heads)
    call.set("significance", out, call.kv_heads)
    call.run("tkv_prompt_significance")
    return out


def lse(q: ArrayLike, k: ArrayLike, *, starts: Starts = None, max_tokens: Optional[int] = None, stride: int = 1,
        sm_scale: Optional[float] = None) -> Any:
    """float32 [num_q_heads, tokens]: the logarithm of the sum of exp(sm_scale q . k) over the tokens up to the query's own; NaN where the
    query is not counted."""
    call = _Call(q, k, starts, max_tokens, stride, sm_scale)
    out = call.new_lse()
    call.set("lse", out, call.q_heads)
    call.run("tkv_prompt_lse")
    return out


class _Call:
    """The struct of a call, and what it points to."""

    def __init__(self, q: Any, k: Any, starts: Starts, max_tokens: Optional[int], stride: int, sm_scale: Optional[float]) -> None:
        if not 1 <= lib.integer(stride, "stride") <= MAX_QUERY_STRIDE:
            raise InvalidArgumentError(f"stride: {stride} is not in 1 to {MAX_QUERY_STRIDE}")
        if sm_scale is not None and not 0 < sm_scale < float("inf"):
            raise InvalidArgumentError(f"sm_scale: {sm_scale} is not positive and finite")
        self.on_device = _device.is_on_device(q)
        self._like, self._owners = q, [q, k]
        if self.on_device:
            self._torch: Any = sys.modules.get("torch")
            if self._torch is None or not isinstance(q, self._torch.Tensor):
                raise ArgumentTypeError(f"q: a {type(q).__name__} in GPU memory is no torch tensor")
            self._stream: int = self._torch.cuda.current_stream(q.device).cuda_stream
            self._index: int = q.__dlpack_device__()[1]
        rows = [self._rows(x, name) for x, name in ((q, "q"), (k, "k"))]
        (self.tokens, self.q_heads, head_dim), (k_tokens, self.kv_heads, k_dim) = (shape for _, shape, _, _ in rows)
        if (k_tokens, k_dim) != (self.tokens, head_dim):
            raise InvalidArgumentError(f"k: {k_tokens} tokens of {k_dim} dims beside {self.tokens} of {head_dim} in q")
        if rows[0][3] != rows[1][3]:
            raise ArgumentTypeError(f"q is {rows[0][3]} but k is {rows[1][3]}")
        address, sequences, longest = self._starts(starts, max_tokens)
        (q_at, _, q_strides, dtype), (k_at, _, k_strides, _) = rows
        self._struct = lib.SignificanceCall(
            q=q_at, k=k_at, starts=address, q_token_stride=q_strides[0], q_head_stride=q_strides[1], k_token_stride=k_strides[0],
            k_head_stride=k_strides[1], num_sequences=sequences, max_tokens=longest, total_tokens=self.tokens, num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads, head_dim=head_dim, dtype=DTYPES[dtype], query_stride=stride, sm_scale=sm_scale or 0)

    def new(self, heads: int) -> Any:
        shape = (heads, self.tokens)
        return _device.empty(self._like, "float32", shape) if self.on_device else like(np.empty(shape, np.float32), self._like)

    def new_lse(self) -> Any:
        out = self.new(self.q_heads)
        if isinstance(out, np.ndarray):
            out.fill(np.nan)
        else:
            out.fill_(float("nan"))
        return out

    def set(self, field: str, x: Any, heads: int) -> None:
        """The array of a field."""
        self._owners.append(x)
        setattr(self._struct, field, self._dense(x, field, "float32", (heads, self.tokens)) if self.on_device else pointer(to_numpy(x, field)))

    def run(self, function: str) -> None:
        if not self.on_device:
            return lib.core().call(f"{function}_host", self._struct)
        with self._torch.cuda.device(self._like.device):
            lib.core().call(function, self._struct, self._stream)

    def _rows(self, x: Any, name: str) -> Tuple[Optional[int], Tuple[int, ...], Tuple[int, ...], str]:
        """Address, shape, strides by token and head, dtype."""
        if self.on_device:
            a = _device.device_array(x, name, ("float16", "bfloat16"), (None, None, None), self._stream, dense=False, index=self._index)
            if a.shape[2] > 1 and a.strides[2] != 1:
                raise InvalidArgumentError(f"{name}: the last dim is not dense")
            self._owners.append(a.owner)
            # A stride over one token or head may be anything.
            strides = tuple(stride if extent > 1 else a.shape[2] for extent, stride in zip(a.shape[:2], a.strides))
            return a.address, a.shape, strides, a.dtype
        v = values(x, name, (None, None, None))
        self._owners.append(v.bits)
        _, heads, dims = v.bits.shape
        return pointer(v.bits), v.bits.shape, (heads * dims, dims), v.dtype

    def _dense(self, x: Any, name: str, dtype: str, shape: "Sequence[Optional[int]]") -> int:
        a = _device.device_array(x, name, (dtype,), shape, self._stream, index=self._index)
        self._owners.append(a.owner)
        return a.address

    def _starts(self, starts: Starts, max_tokens: Optional[int]) -> "Tuple[Optional[int], int, int]":
        """Address, number of sequences, tokens of the longest."""
        if self.on_device and starts is not None and _device.is_on_device(starts):
            if max_tokens is None:
                raise InvalidArgumentError("max_tokens: needed where starts lie in GPU memory")
            a = _device.device_array(starts, "starts", ("int32",), (None,), self._stream, index=self._index)
            self._owners.append(a.owner)
            return a.address, a.shape[0] - 1, lib.integer(max_tokens, "max_tokens")
        at = shaped(integers(np.array([0, self.tokens]) if starts is None else starts if hasattr(starts, "dtype") else np.asarray(starts), np.int32, "starts"), (None,), "starts")
        lengths = np.diff(at)
        if at.size < 2 or at[0] != 0 or at[-1] != self.tokens or lengths.min() < 0:
            raise InvalidArgumentError(f"starts: do not ascend from 0 to {self.tokens} tokens")
        on_host = pointer(at)
        if not self.on_device:
            self._owners.append(at)
            return on_host, at.size - 1, int(lengths.max())
        whole: List[int] = at.tolist()
        copy = self._like.new_tensor(whole, dtype=self._torch.int32)
        return self._dense(copy, "starts", "int32", (at.size,)), at.size - 1, int(lengths.max())
