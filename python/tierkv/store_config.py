"""What a store is made of: the model's layout, formats, thresholds, bases, capacities."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Iterable, List, Optional, Tuple, Union

import numpy as np

from . import _library as lib
from ._arrays import DTYPES, Array, ArrayLike, pointer, values
from .codec import Codebook

BASIS_KINDS = {"mean": 1, "hadamard": 2, "matrix": 3}
MEAN_SOURCES = {"prompt": 0, "none": 1, "given": 2}
CODEBOOK_SOURCES = {"host": 0, "device": 1}
GIVEN_CODEBOOKS = 2
GIVEN_STEPS, PROMPT_STEPS = 0, 1


def _floats(array: Optional[ArrayLike], name: str, shape: Tuple[int, ...]) -> Optional[Array]:
    return None if array is None else np.ascontiguousarray(values(array, name, shape).to_float32())


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
        square = (*rows, head_dim, head_dim)
        means, forward, inverse = (_floats(self.means, "means", (*rows, head_dim)), _floats(self.forward, "forward", square),
                                   _floats(self.inverse, "inverse", square))
        struct = lib.BasisStruct(kind=BASIS_KINDS[self.kind], means=pointer(means), forward=pointer(forward), inverse=pointer(inverse))
        struct.arrays = [means, forward, inverse]  # as long as the struct
        return struct


@dataclass(frozen=True)
class CodedConfig:
    """Entropy-coded pages instead of tiers: one step per row and component, Huffman-coded blocks of 64 tokens, the newest tokens raw.

    Steps are those of a profile, read_profile(path).key.steps(0.3), .value.steps(0.25), or, where none are given, shares of the range of
    each row's prompt: key_relative, value_relative."""

    key_steps: Optional[ArrayLike] = None  # [num_layers, num_kv_heads], positive
    value_steps: Optional[ArrayLike] = None
    means: str = "prompt"  # taken off before quantisation: each row's own of its prompt, "none", or "given"
    codebooks: Union[str, Iterable[Codebook]] = "host"  # made from the first blocks by the "host" or the "device", or these
    key_means: Optional[ArrayLike] = None  # [num_layers, num_kv_heads, head_dim]
    value_means: Optional[ArrayLike] = None
    max_length: int = 10  # bits of the longest code word; not for given codebooks
    streams_per_lane: int = 2  # likewise
    key_relative: float = 0.0  # without key_steps: step / (largest - smallest), 2^-14 to 1
    value_relative: float = 0.0
    # Of blocks with sinks, or with tokens whose significance is that of policy.alpha_high: 8 or 4 bits; None: all blocks are coded.
    fixed_format: Optional[TierFormat] = None

    def __post_init__(self) -> None:
        if not isinstance(self.codebooks, str):  # an iterator would serve one store alone
            object.__setattr__(self, "codebooks", tuple(self.codebooks))

    def _struct(self, rows: Tuple[int, int], head_dim: int) -> lib.CodedConfigStruct:
        if self.means not in MEAN_SOURCES:
            raise ValueError(f"means {self.means!r} is not one of {', '.join(MEAN_SOURCES)}")
        given: List[Codebook] = []
        if not isinstance(self.codebooks, str):
            given = list(self.codebooks)
        elif self.codebooks not in CODEBOOK_SOURCES:
            raise ValueError(f"codebooks {self.codebooks!r} is not one of {', '.join(CODEBOOK_SOURCES)}")
        source = CODEBOOK_SOURCES[self.codebooks] if isinstance(self.codebooks, str) else GIVEN_CODEBOOKS
        arrays = [_floats(self.key_steps, "key_steps", rows), _floats(self.value_steps, "value_steps", rows),
                  _floats(self.key_means, "key_means", (*rows, head_dim)), _floats(self.value_means, "value_means", (*rows, head_dim))]
        handles = (ctypes.c_void_p * len(given))(*(book._handle for book in given))
        struct = lib.CodedConfigStruct(
            key_steps=pointer(arrays[0]), value_steps=pointer(arrays[1]), means=MEAN_SOURCES[self.means], codebooks=source,
            key_means=pointer(arrays[2]), value_means=pointer(arrays[3]), given=handles, num_given=len(given),
            max_length=self.max_length, streams_per_lane=self.streams_per_lane,
            steps=GIVEN_STEPS if self.key_steps is not None or self.value_steps is not None else PROMPT_STEPS,
            key_relative=self.key_relative, value_relative=self.value_relative,
            fixed_format=None if self.fixed_format is None else ctypes.pointer(self.fixed_format._struct()))
        struct.arrays = [arrays, given]  # as long as the struct
        return struct


@dataclass(frozen=True)
class ChannelConfig:
    """Blocks of channel-wise keys instead of tiers: a scale per channel of a block's keys and per token of its values, the newest tokens raw."""

    k_bits: int = 4  # or 2
    v_bits: int = 4  # or 2
    block_tokens: int = 64  # or 128, but for head_dim 256


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
    coded: Optional[CodedConfig] = None  # instead of tiers; formats, alphas, sinks, score_interval then keep their defaults
    # (with coded.fixed_format: but for alpha_high and sinks)
    channel: Optional[ChannelConfig] = None  # likewise, and not with coded

    def _struct(self) -> lib.StoreConfigStruct:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        p = self.policy
        policy = lib.TierPolicyStruct(alpha_high=p.alpha_high, alpha_low=p.alpha_low, window_tokens=p.window_tokens,
                                      sink_tokens=p.sink_tokens)
        channel = None
        if self.channel is not None:
            channel = ctypes.pointer(lib.ChannelConfigStruct(k_bits=self.channel.k_bits, v_bits=self.channel.v_bits,
                                                             block_tokens=self.channel.block_tokens))
        return lib.StoreConfigStruct(
            num_layers=self.num_layers, num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype], before_rope=not self.rope_applied, rope_theta=self.rope_theta, sm_scale=self.sm_scale,
            window_format=ctypes.pointer(self.window_format._struct()), high_format=ctypes.pointer(self.high_format._struct()),
            low_format=ctypes.pointer(self.low_format._struct()), policy=ctypes.pointer(policy), score_interval=self.score_interval,
            num_pages=self.num_pages, page_bytes=self.page_bytes, max_sequences=self.max_sequences, max_tokens=self.max_tokens,
            key_basis=self._of_rows(self.key_basis), value_basis=self._of_rows(self.value_basis), coded=self._of_rows(self.coded),
            channel=channel)

    def _of_rows(self, part: Union[Basis, CodedConfig, None]) -> Any:
        return None if part is None else ctypes.pointer(part._struct((self.num_layers, self.num_kv_heads), self.head_dim))
