# SPDX-License-Identifier: Apache-2.0
"""What a run shows: percentiles of waiting, tokens a second, and which part of a step a kernel belongs to."""
import re
from typing import Any, Dict, Iterable, List, Optional, Sequence

from scheduler import Served

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], p: float) -> Optional[float]:
    """Between neighbours by proportion; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(values: Sequence[float], scale: float = 1.0) -> Dict[str, Optional[float]]:
    found = {f"p{p}": percentile(values, p) for p in PERCENTILES}
    return {name: None if x is None else scale * x for name, x in found.items()}


def summary(served: Served) -> Dict[str, Any]:
    """Waiting times are those of requests that got what they measure."""
    begun = [r for r in served.requests if r.token_times]
    gaps = [b - a for r in begun for a, b in zip(r.token_times, r.token_times[1:])]
    means = [(r.token_times[-1] - r.token_times[0]) / (len(r.token_times) - 1) for r in begun if len(r.token_times) > 1]
    tokens = sum(len(r.answer) for r in served.requests)
    return {
        "seconds": served.seconds, "requests": len(served.requests), "finished": sum(r.is_done for r in served.requests), "tokens": tokens,
        "tokens_per_s": tokens / served.seconds if served.seconds > 0 else None, "steps": served.steps,
        "mean_batch": sum(served.batch) / len(served.batch) if served.batch else None,
        "first_token_s": spread([r.token_times[0] - r.arrival for r in begun]),
        "queued_s": spread([r.started - r.arrival for r in served.requests if r.started is not None]),
        "token_ms": spread(means, 1e3), "gap_ms": spread(gaps, 1e3),
        "preemptions": served.preemptions, "preempted_requests": sum(r.preemptions > 0 for r in served.requests),
        "refused_prompts": served.refused_prompts, "longest_queue": served.longest_queue}


# The first that matches a kernel's name without its arguments. What the model and torch launch matches none.
PARTS = (
    ("significance", re.compile(r"mma_scores|join_lse")),
    ("attention", re.compile(r"attention|attend|join_|raw_count|merge_kernel|pack_queries|unpack_outputs|block_rows|few_rows|many_rows|"
                             r"raw_rows|convert_kernel|channel_plan|tierkv::plan_kernel|tierkv::decode_kernel|MakeAttentionRows|"
                             r"flash_fwd|fmha|sdpa", re.I)),
    ("management", re.compile(r"store::(anon::)?(ids|commit|count|needs|page_copy)_kernel|"
                              r"tierkv::anon::(take|give|mark|fill|initialize|plan|count)_kernel")),
    ("copies", re.compile(r"^Mem(set|cpy)")),
    ("compression", re.compile(r"tierkv")),
)


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to: attention, management (pages and counts), compression (plans of formats, codes, raw tokens),
    significance of a prompt, copies of the driver, or model."""
    name = kernel.replace("(anonymous namespace)", "anon").split("(")[0]
    return next((part for part, pattern in PARTS if pattern.search(name)), "model")


def kernel_shares(kernels: Iterable["tuple[str, float, float]"]) -> Dict[str, Any]:
    """The time and the share of each part. kernels: (name, begin, end) in microseconds. Kernels overlap: one that is launched early begins by
    waiting for another. So each counts for as long as it ends behind all that began before it."""
    by_part: Dict[str, float] = {}
    names: Dict[str, Dict[str, float]] = {}
    done = float("-inf")
    for name, begin, end in sorted(kernels, key=lambda x: x[1:]):
        us = max(0.0, end - max(begin, done))
        done = max(done, end)
        part = part_of(name)
        by_part[part] = by_part.get(part, 0.0) + us
        of = names.setdefault(part, {})
        short = name[:120]
        of[short] = of.get(short, 0.0) + us
    total = sum(by_part.values())
    return {"us": by_part, "share": {part: us / total for part, us in by_part.items()} if total else {},
            "largest": {part: dict(sorted(of.items(), key=lambda x: -x[1])[:6]) for part, of in names.items()}}
