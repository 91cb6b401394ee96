# SPDX-License-Identifier: Apache-2.0
"""What the backend cannot serve, by name. Looked at when the engine starts, so that no request finds out."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from .settings import BLOCK_TOKENS
from ..errors import InvalidArgumentError

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP = 16
MAX_QUERIES = 8  # of a sequence that attends directly


@dataclass(frozen=True)
class LayerShape:
    """What a layer asks for."""

    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str = "bfloat16"
    attn_type: str = "decoder"
    kv_cache_dtype: str = "auto"
    sliding_window: Optional[int] = None
    logits_soft_cap: Optional[float] = None
    has_alibi: bool = False
    has_sinks: bool = False
    shares_cache: bool = False  # with another layer
    other_arguments: "tuple[str, ...]" = ()


@dataclass(frozen=True)
class EngineShape:
    """What the engine is started with."""

    block_tokens: int = BLOCK_TOKENS
    draft_tokens: int = 0
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1
    sleep_mode: bool = False


def refused_layer(s: LayerShape) -> List[str]:
    found = []
    if s.head_dim not in HEAD_DIMS:
        found.append(f"head_dim {s.head_dim}: 64, 96, 128 or 256 are needed")
    if s.num_kv_heads < 1 or s.num_q_heads % s.num_kv_heads != 0 or s.num_q_heads > MAX_GROUP * s.num_kv_heads:
        found.append(f"{s.num_q_heads} query heads on {s.num_kv_heads} kv heads: 1 to {MAX_GROUP} of each are needed")
    if s.dtype not in ("float16", "bfloat16"):
        found.append(f"dtype {s.dtype}: float16 or bfloat16 are needed")
    if s.attn_type != "decoder":
        found.append(f"attention of type {s.attn_type}: only decoders have a cache of this kind")
    if s.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
        found.append(f"kv_cache_dtype {s.kv_cache_dtype}: leave it at auto, formats are settings of tierkv")
    if s.sliding_window is not None:
        found.append(f"a sliding window of {s.sliding_window} tokens")
    if s.logits_soft_cap:
        found.append(f"a soft cap of logits at {s.logits_soft_cap}")
    if s.has_alibi:
        found.append("ALiBi")
    if s.has_sinks:
        found.append("learned sinks")
    if s.shares_cache:
        found.append("a cache that layers share")
    found += [f"the argument {name}" for name in s.other_arguments]
    return found


def refused_engine(s: EngineShape) -> List[str]:
    found = []
    if s.block_tokens % BLOCK_TOKENS != 0:
        found.append(f"block_size {s.block_tokens}: a multiple of {BLOCK_TOKENS} is needed")
    if 1 + s.draft_tokens > MAX_QUERIES:
        found.append(f"{s.draft_tokens} draft tokens: at most {MAX_QUERIES - 1} attend at a time")
    if s.decode_context_parallel > 1:
        found.append("decode context parallelism")
    if s.prefill_context_parallel > 1:
        found.append("prefill context parallelism")
    if s.sleep_mode:
        found.append("sleep mode, which loses what workspaces hold")
    return found


def refuse(reasons: List[str], where: str) -> None:
    if reasons:
        raise InvalidArgumentError(f"tierkv cannot serve {where}: " + "; ".join(reasons))
