# SPDX-License-Identifier: Apache-2.0
"""What a KV store is made of: the model's layout, the format of its body, its capacities. tierkv.kv_store has the store."""
from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple, Union

import numpy as np

from . import _library as lib
from ._arrays import DTYPES, pointer
from .errors import ArgumentTypeError, InvalidArgumentError, OutOfRangeError
from .profile import PAIRINGS, ProfileData, Rope, frequencies, profile_struct, read_profile


@dataclass(frozen=True)
class CodedFormat:
    """Entropy-coded weighted steps: a step per row, an exponent per token, Huffman codes."""

    k: float = 0.0  # deviation of a logit that key steps aim at; 0: 0.55, without a profile of energies and sensitivities 0.33
    v: float = 0.0  # share of a token that value steps are; 0: 0.5, without one 0.28
    max_length: int = 10  # bits of the longest code word, 8 to 14, if a GPU has room for its tables
    streams_per_lane: int = 2  # or 1
    key_books: int = 1  # codebooks of a layer's keys, 1 to 4


@dataclass(frozen=True)
class TierFormat:
    """How a tier stores tokens: bits per key and value code (16: raw), channels that share a scale (0: all). A store takes 8, 4 or 2 bits, groups 0."""

    k_bits: int
    v_bits: int
    k_group: int = 0
    v_group: int = 0

    def _struct(self) -> lib.TierFormatStruct:
        return lib.TierFormatStruct(k_bits=self.k_bits, v_bits=self.v_bits, k_group=self.k_group, v_group=self.v_group)


@dataclass(frozen=True)
class TierClass:
    """The formats of a class of heads: of important tokens and of the others."""

    high: TierFormat = TierFormat(8, 4)
    low: TierFormat = TierFormat(4, 2)
    alpha_high: float = 1.0  # position (from 1) times significance at least this: high
    alpha_low: float = 0.0  # below this: pruned
    share: float = 0.0  # of the heads, most sensitive first; the last class takes the rest


@dataclass(frozen=True)
class TiersFormat:
    """Fixed widths by importance, by class of heads. Several classes need a profile."""

    classes: Tuple[TierClass, ...] = (TierClass(),)
    rotate_keys: bool = True
    rotate_values: bool = True


@dataclass(frozen=True)
class ChannelFormat:
    """Blocks whose keys share a scale per channel."""

    k_bits: int = 4  # or 2
    v_bits: int = 4  # or 2
    block_tokens: int = 64  # or 128, but for head_dim 256


BodyFormat = Union[CodedFormat, TiersFormat, ChannelFormat]

PRESETS: Dict[str, BodyFormat] = {
    "small": CodedFormat(),
    "fast": TiersFormat((TierClass(TierFormat(8, 4), TierFormat(8, 4), share=0.1), TierClass(TierFormat(4, 4), TierFormat(4, 2), share=0.375),
                         TierClass(TierFormat(4, 2), TierFormat(2, 2)))),
    "k8v4": TiersFormat((TierClass(TierFormat(8, 4), TierFormat(8, 4)),)),
    "k4v4": TiersFormat((TierClass(TierFormat(4, 4), TierFormat(4, 4)),)),
    "channel": ChannelFormat(),
}


def preset(name: str) -> BodyFormat:
    """ValueError for a name that is not one of PRESETS."""
    if not isinstance(name, str) or name not in PRESETS:
        raise InvalidArgumentError(f"format {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class StoreConfig:
    """The model's layout, the format and the capacities of a store."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequences: int  # at once
    max_tokens: int  # of a sequence
    dtype: str = "float16"  # or "bfloat16": of keys and values as they are appended
    sm_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    rope: Optional[Rope] = None  # None: the profile's, or none
    format: BodyFormat = CodedFormat()
    profile: Union[None, ProfileData, lib.Path] = None  # a path is read
    raw_layers: Tuple[int, ...] = ()  # these stay fp16; ascending
    sink_tokens: int = 4
    window_tokens: int = 64
    memory_bytes: int = 0  # for all sequences; 0: found by with_memory()
    page_bytes: int = 0  # 0: the format's choice

    def __post_init__(self) -> None:
        if isinstance(self.profile, (str, os.PathLike)):
            object.__setattr__(self, "profile", read_profile(self.profile))
        if not isinstance(self.profile, (type(None), ProfileData)):
            raise ArgumentTypeError(f"profile {self.profile!r} is neither a profile nor a path")

    def tokens_that_fit(self) -> Tuple[int, int]:
        """Tokens of all sequences together, when all are open and equally long: with codes of typical size, and whatever the values are."""
        typical, least = ctypes.c_int64(), ctypes.c_int64()
        lib.core().call("tkv_kv_tokens_that_fit", self._struct(), typical, least)
        return typical.value, least.value

    def with_memory(self) -> "StoreConfig":
        """The config with memory_bytes. Where it is 0, for max_sequences of max_tokens with codes of typical size and a quarter more."""
        if self.memory_bytes:
            return self
        low, high = 0, 1 << 20
        while not self._suffices(high):
            low, high = high, 2 * high
        while high - low > high >> 6:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(middle) else (middle, high)
        return dataclasses.replace(self, memory_bytes=high + high // 4)

    def _suffices(self, memory: int) -> bool:
        """For all tokens, and for the beginnings of sequences whatever their values are: these may be raw for a while."""
        try:
            typical, least = dataclasses.replace(self, memory_bytes=memory).tokens_that_fit()
        except OutOfRangeError:  # too little for max_sequences
            if memory >= 1 << 46:  # the most that is asked for: it is too much of something else
                raise
            return False
        wanted = self.max_sequences * self.max_tokens
        return typical >= wanted and least >= self.max_sequences * min(self.max_tokens, 512)

    def _struct(self) -> lib.KvConfigStruct:
        if self.dtype not in ("float16", "bfloat16"):
            raise InvalidArgumentError(f"dtype {self.dtype!r} is not float16 or bfloat16")
        if not isinstance(self.rope, (type(None), Rope)):
            raise ArgumentTypeError(f"rope {self.rope!r} is not a Rope")
        if not isinstance(self.raw_layers, Iterable):
            raise ArgumentTypeError(f"raw_layers {self.raw_layers!r} is not a tuple of layers")
        if self.sink_tokens < 0 or self.window_tokens < 1:  # the C ABI has its own meanings of these
            raise InvalidArgumentError("sink_tokens must be at least 0, window_tokens at least 8")
        raw_layers = np.array([lib.integer(layer, "raw_layers") for layer in self.raw_layers], np.int32)
        profile = profile_struct(self.profile) if isinstance(self.profile, ProfileData) else None
        rope, inv_freq = None, None
        if self.rope is not None:
            inv_freq = frequencies(self.rope)
            rope = ctypes.pointer(lib.RopeStruct(pairing=PAIRINGS.index(self.rope.pairing), dims=self.rope.dims, layers=len(inv_freq),
                                                 inv_freq=pointer(inv_freq)))
        struct = lib.KvConfigStruct(
            num_layers=self.num_layers, num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype], sm_scale=self.sm_scale, rope=rope, profile=None if profile is None else ctypes.pointer(profile),
            raw_layers=pointer(raw_layers) if raw_layers.size else None, num_raw_layers=raw_layers.size,
            sink_tokens=self.sink_tokens or -1, window_tokens=self.window_tokens, max_sequences=self.max_sequences,
            max_tokens=self.max_tokens, memory_bytes=self.memory_bytes, page_bytes=self.page_bytes, **_format(self.format))
        struct.arrays = [raw_layers, profile, inv_freq]  # as long as the struct
        return struct


def _format(format: BodyFormat) -> Dict[str, Any]:
    """The field of the config's struct."""
    lib.not_zero({f"format: {name}": getattr(format, name, None)
                  for name in ("max_length", "streams_per_lane", "key_books", "k_bits", "v_bits", "block_tokens")})
    if isinstance(format, CodedFormat):
        return {"coded": ctypes.pointer(lib.CodedFormatStruct(**dataclasses.asdict(format)))}
    if isinstance(format, ChannelFormat):
        return {"channel": ctypes.pointer(lib.ChannelConfigStruct(**dataclasses.asdict(format)))}
    if not isinstance(format, TiersFormat):
        raise ArgumentTypeError(f"format: {type(format).__name__} is not CodedFormat, TiersFormat or ChannelFormat")
    if not isinstance(format.classes, Iterable) or not all(isinstance(c, TierClass) for c in format.classes):
        raise ArgumentTypeError(f"format: classes {format.classes!r} are not a tuple of TierClass")
    lib.not_zero({f"format: alpha_high of class {i}": c.alpha_high for i, c in enumerate(format.classes)})
    classes = [ctypes.pointer(lib.TierClassStruct(high=ctypes.pointer(c.high._struct()), low=ctypes.pointer(c.low._struct()),
                                                  alpha_high=c.alpha_high, alpha_low=c.alpha_low, share=c.share)) for c in format.classes]
    if not classes:
        raise InvalidArgumentError("format: it has no class of heads")
    array = (ctypes.POINTER(lib.TierClassStruct) * len(classes))(*classes)
    return {"tiers": ctypes.pointer(lib.TiersFormatStruct(classes=array, num_classes=len(classes), plain_keys=not format.rotate_keys,
                                                          plain_values=not format.rotate_values))}
