# SPDX-License-Identifier: Apache-2.0
"""How a Hugging Face model rotates its keys by position, found by looking at keys of one token at many positions."""
from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

CHANGING = ("dynamic", "longrope")  # frequencies that depend on the length of the prompt
PLAIN_THETA = 10000.0  # of models that have tables of sines in place of frequencies


class UnknownRope(Exception):
    """Why it cannot be told how keys are rotated."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """pairing: "none", "halves", "neighbours". inv_freq: float32 [dims / 2], or [layers, dims / 2] where layers differ."""

    pairing: str
    inv_freq: np.ndarray

    @property
    def dims(self) -> int:
        return 2 * self.inv_freq.shape[-1]


NONE = Rope("none", np.zeros(0, np.float32))


def turned(x: torch.Tensor, angle: torch.Tensor, pairing: str) -> torch.Tensor:
    """x [..., head_dim], its first dims turned: two for each of angle [..., pairs]."""
    n = angle.shape[-1]
    first, second = (slice(0, n), slice(n, 2 * n)) if pairing == "halves" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out = x.clone()
    out[..., first] = x[..., first] * angle.cos() - x[..., second] * angle.sin()
    out[..., second] = x[..., second] * angle.cos() + x[..., first] * angle.sin()
    return out


def difference(k: torch.Tensor) -> float:
    """The largest between keys [heads, positions, head_dim] of different positions, relative to the largest element."""
    return float((k - k[:, :1]).abs().max() / k.abs().max())


def rotation_error(k: torch.Tensor, rope: Rope) -> float:
    """How much keys of one token differ between positions when they are turned back."""
    if rope.dims > k.shape[2]:
        return float("inf")
    angle = -torch.arange(k.shape[1])[:, None].double() * torch.from_numpy(rope.inv_freq)
    return difference(turned(k, angle, rope.pairing))


def candidates(model: Any) -> "list[Rope]":
    """Rotations by the frequencies that the model has, which a layer may use or not."""
    found = [b.detach().float().cpu().numpy() for name, b in model.base_model.named_buffers()
             if name.endswith("inv_freq") and "original" not in name and b.ndim == 1 and b.numel() > 0]
    dims = getattr(model.config.get_text_config(), "rotary_dim", None)
    if not found and isinstance(dims, int):
        found = [PLAIN_THETA ** (-np.arange(0, dims, 2, dtype=np.float32) / dims)]
    return [Rope(pairing, f) for f in found for pairing in ("halves", "neighbours")]


def rounding(k: torch.Tensor) -> float:
    """What differences of rotated keys are allowed for: a few units in the last place of their type."""
    return max(1e-3, 8 * torch.finfo(k.dtype).eps)


def layer_rope(name: str, k: torch.Tensor, turning: "list[Rope]") -> Rope:
    """Of a layer, by keys [heads, positions, head_dim] of one token."""
    allowed = rounding(k)
    k = k.detach().cpu().double()
    if not k.any():
        raise UnknownRope(f"{name}: its keys are zero")
    errors = [difference(k), *(rotation_error(k, rope) for rope in turning)]
    if min(errors) <= allowed:
        return [NONE, *turning][int(np.argmin(errors))]
    size = k.norm(dim=-1)
    if not turning and float((size - size[:, :1]).abs().max() / size.max()) > allowed:
        return NONE  # no rotation changes lengths: embeddings of positions do
    raise UnknownRope(f"{name}: its keys are not rotated by frequencies of the model")


def rope_of(model: Any, keys: "list[torch.Tensor]") -> Rope:
    """keys: of one token at positions 0, 1, 2, ... [heads, positions, head_dim] of each layer."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for p in (parameters, *parameters.values()):
        if isinstance(p, dict) and p.get("rope_type") in CHANGING:
            raise UnknownRope(f"frequencies of type {p['rope_type']!r} change with the length of the prompt")
    turning = candidates(model)
    layers = [layer_rope(f"layer {i}", k, turning) for i, k in enumerate(keys)]
    kinds = {(rope.pairing, rope.dims) for rope in layers if rope.dims}
    if not kinds:
        return NONE
    if len(kinds) > 1:
        raise UnknownRope(f"layers differ in pairing or rotated dims: {sorted(kinds)}")
    pairing, dims = kinds.pop()
    rows = np.stack([rope.inv_freq if rope.dims else np.zeros(dims // 2, np.float32) for rope in layers]).astype(np.float32)
    return Rope(pairing, rows[0] if (rows == rows[0]).all() else rows)
