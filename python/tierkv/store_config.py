"""What a store is made of: the model's layout, formats, thresholds, bases, capacities."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import numpy as np

from . import _library as lib
from ._arrays import DTYPES, ArrayLike, pointer, values

BASIS_KINDS = {"mean": 1, "hadamard": 2, "matrix": 3}


@dataclass(frozen=True)
class TierFormat:
    """How a tier stores tokens: bits per key and value code (16: raw), channels that share a scale (0: all)."""

    k_bits: int
    v_bits: int
    k_group: int = 0
    v_group: int = 0

    def _struct(self) -> lib.TierFormatStruct:
        return lib.TierFormatStruct(k_bits=self.k_bits, v_bits=self.v_bits, k_group=self.k_group, v_group=self.v_group)


@dataclass(frozen=True)
class TierPolicy:
    """Which tier a token goes to; significance of token i is compared with alpha / i."""

    alpha_high: float = 1.0
    alpha_low: float = 0.0  # below: pruned; 0 keeps every token
    window_tokens: int = 64  # the newest, never downgraded; at least 8
    sink_tokens: int = 0  # the first, never downgraded


@dataclass(frozen=True)
class Basis:
    """The coordinates in which keys or values are stored: y_j = sum_i (x_i - mean_i) forward[i][j]."""

    kind: str  # "mean", "hadamard" (the library's rotation) or "matrix"
    means: Optional[ArrayLike] = None  # [num_layers, num_kv_heads, head_dim]
    forward: Optional[ArrayLike] = None  # "matrix": [num_layers, num_kv_heads, head_dim, head_dim]
    inverse: Optional[ArrayLike] = None  # likewise

    def _struct(self, rows: Tuple[int, int], head_dim: int) -> lib.BasisStruct:
        if self.kind not in BASIS_KINDS:
            raise ValueError(f"basis {self.kind!r} is not one of {', '.join(BASIS_KINDS)}")
        arrays = [None if a is None else np.ascontiguousarray(values(a, name, shape).to_float32())
                  for a, name, shape in ((self.means, "means", (*rows, head_dim)), (self.forward, "forward", (*rows, head_dim, head_dim)),
                                         (self.inverse, "inverse", (*rows, head_dim, head_dim)))]
        struct = lib.BasisStruct(kind=BASIS_KINDS[self.kind], means=pointer(arrays[0]), forward=pointer(arrays[1]),
                                 inverse=pointer(arrays[2]))
        struct.arrays = arrays  # as long as the struct
        return struct


@dataclass(frozen=True)
class StoreConfig:
    """The model's layout, the formats and the capacities of a store."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    max_sequences: int
    max_tokens: int  # of a sequence
    dtype: str = "float16"  # of keys and values as they are appended
    rope_applied: bool = True
    rope_theta: float = 0.0
    sm_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    window_format: TierFormat = TierFormat(8, 4)
    high_format: TierFormat = TierFormat(8, 4)
    low_format: TierFormat = TierFormat(4, 2)
    policy: TierPolicy = TierPolicy()
    score_interval: int = 1  # every n-th query is counted
    page_bytes: int = 0  # 0: chosen for the three formats
    key_basis: Optional[Basis] = None
    value_basis: Optional[Basis] = None

    def _struct(self) -> lib.StoreConfigStruct:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        p = self.policy
        policy = lib.TierPolicyStruct(alpha_high=p.alpha_high, alpha_low=p.alpha_low, window_tokens=p.window_tokens,
                                      sink_tokens=p.sink_tokens)
        return lib.StoreConfigStruct(
            num_layers=self.num_layers, num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype], before_rope=not self.rope_applied, rope_theta=self.rope_theta, sm_scale=self.sm_scale,
            window_format=ctypes.pointer(self.window_format._struct()), high_format=ctypes.pointer(self.high_format._struct()),
            low_format=ctypes.pointer(self.low_format._struct()), policy=ctypes.pointer(policy), score_interval=self.score_interval,
            num_pages=self.num_pages, page_bytes=self.page_bytes, max_sequences=self.max_sequences, max_tokens=self.max_tokens,
            key_basis=self._basis(self.key_basis), value_basis=self._basis(self.value_basis))

    def _basis(self, basis: Optional[Basis]) -> Any:
        return None if basis is None else ctypes.pointer(basis._struct((self.num_layers, self.num_kv_heads), self.head_dim))
