# SPDX-License-Identifier: Apache-2.0
"""Caches of a fixed budget: the stores of the benchmark's formats, and how many sequences each takes. NumPy alone."""
import dataclasses
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import numpy as np
from tierkv.errors import OutOfRangeError
from tierkv.kv_store import KvStore, StoreConfig, TiersFormat, TierClass, TierFormat, preset
from tierkv.profile import ProfileData, Rope

PAIR = (TierFormat(4, 4), TierFormat(4, 2))


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    rope_theta: float = 500000.0

    @property
    def raw_token_bytes(self) -> int:
        return 4 * self.layers * self.kv_heads * self.head_dim

    def rope(self) -> Rope:
        at = np.arange(0, self.head_dim, 2) / self.head_dim
        return Rope("halves", self.head_dim, (1.0 / self.rope_theta**at).astype(np.float32))


TINY = Shape(layers=2, hidden=128, intermediate=256, q_heads=4, kv_heads=2, head_dim=64, vocabulary=97, rope_theta=10000.0)
SHAPES = {"llama-3-8b": Shape(), "tiny": TINY}
# Beside tierkv's presets. "raw": pages of 16 bits of the same store; "pair": two widths by importance.
FORMATS = {
    "raw": TiersFormat(),
    "k4v2": TiersFormat((TierClass(TierFormat(4, 2), TierFormat(4, 2)),)),
    "pair": TiersFormat((TierClass(*PAIR),)),
}


def plain_profile(shape: Shape) -> ProfileData:
    """What calibration would find in random weights: no means, queries alike in all channels, heads alike but for their order."""
    rows, dims = (shape.layers, shape.kv_heads), (shape.layers, shape.kv_heads, shape.head_dim)
    zeros, order = np.zeros(dims, np.float32), np.arange(rows[0] * rows[1], dtype=np.float64).reshape(rows)
    return ProfileData(model_id="random", num_layers=shape.layers, num_q_heads=shape.q_heads, num_kv_heads=shape.kv_heads,
                       head_dim=shape.head_dim, sm_scale=shape.head_dim**-0.5, key_mean=zeros, value_mean=zeros,
                       query_trace=np.full(rows, float(shape.head_dim)), value_signal=np.full(rows, float(shape.head_dim)),
                       key_mean_before_rope=zeros, query_energy=np.ones(dims, np.float32), key_sensitivity=np.ones(rows),
                       value_sensitivity=np.ones(rows), joint_sensitivity=1.0 + order)


def store_config(shape: Shape, format: str, sequences: int, max_tokens: int, memory_bytes: int, dtype: str = "bfloat16") -> StoreConfig:
    return StoreConfig(num_layers=shape.layers, num_q_heads=shape.q_heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype,
                       rope=shape.rope(), profile=plain_profile(shape), format=FORMATS[format] if format in FORMATS else preset(format),
                       raw_layers=tuple(range(shape.layers)) if format == "raw" else (), max_sequences=sequences, max_tokens=max_tokens,
                       memory_bytes=memory_bytes)


def has_two_tiers(config: StoreConfig) -> bool:
    """Whether significances of a prompt decide anything."""
    return not config.raw_layers and isinstance(config.format, TiersFormat) and any(c.high != c.low for c in config.format.classes)


def step_pages(config: StoreConfig) -> int:
    """Pages that should be free before a captured step, for its worst case. A token that leaves the window may open a page of each tier in each
    row; a unit of coded or channel rows, three in a layer. Units of 16 or 64 tokens seldom leave more than a quarter of the sequences at once."""
    layers = config.max_sequences * config.num_layers
    return layers * config.num_kv_heads * (1 + has_two_tiers(config)) if isinstance(config.format, TiersFormat) else 3 * layers // 4


def fits(config: StoreConfig, lengths: Sequence[int]) -> bool:
    """Whether a store of config.memory_bytes takes sequences of these lengths, with codes of typical size."""
    longest = dataclasses.replace(config, max_sequences=len(lengths))
    try:
        typical, _ = longest.tokens_that_fit()
    except OutOfRangeError:
        return False
    return typical >= sum(lengths)


def sequences_that_fit(config_of: Callable[[int], StoreConfig], lengths: Sequence[int]) -> int:
    """The most of these sequences, from the first, that a store of config_of(count) takes; 0: none. More sequences need more memory beside
    their pages, so that the answer is found by halving."""
    low, high = 0, len(lengths)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(config_of(middle), lengths[:middle]) else (low, middle - 1)
    return low


def raw_sequences(shape: Shape, lengths: Sequence[int], budget: int) -> int:
    """The sequences that fit in the budget of an engine that keeps 16 bits."""
    tokens = count = 0
    for n in lengths:
        tokens += n
        if tokens * shape.raw_token_bytes > budget:
            break
        count += 1
    return count


def better_count(usage: Any, slots: int, bodies: Sequence[int], page_tokens: float, reserve: int) -> int:
    """How many sequences with these compressed tokens at their ends fill a pool but for the reserve, where a page was found to hold page_tokens
    tokens of all rows. What a slot takes beside its pages comes out of the same memory."""
    slot_pages = usage.slot_bytes / usage.page_bytes
    room, count = usage.pages + slots * slot_pages - reserve, 0
    for n in bodies:
        room -= slot_pages + n / page_tokens
        if room < 0:
            break
        count += 1
    return max(1, count)


class Room:
    """How many tokens a store's pool still takes: free pages, but for a reserve, at the density that its body has had so far."""

    def __init__(self, store: KvStore, shape: Shape, reserve: int = 0) -> None:
        self.store, self.rows, self.reserve = store, shape.layers * shape.kv_heads, reserve
        typical, _ = self.store.config.tokens_that_fit()
        self.page_tokens = typical / max(1, self.store.usage().pages)

    def tokens(self) -> int:
        u: Any = self.store.usage()
        used = u.pages - u.pages_free
        held = u.body_tokens / self.rows
        if used > u.pages // 8 and held > 0:
            self.page_tokens = held / used
        return int(max(0, u.pages_free - self.reserve) * self.page_tokens)
