# SPDX-License-Identifier: Apache-2.0
"""How a Hugging Face model rotates its keys by position, found by asking its own rotation: a vector is turned and compared."""
from __future__ import annotations

import dataclasses
import sys
from typing import Any, Optional

import numpy as np
import torch

PROBED_POSITION = 7
CHANGING = ("dynamic", "longrope")  # frequencies that depend on the length of the prompt


@dataclasses.dataclass(frozen=True)
class Rope:
    """pairing: "none", "halves", "neighbours". inv_freq: float32 [dims / 2], or [layers, dims / 2] where layers differ."""

    pairing: str
    inv_freq: np.ndarray

    @property
    def dims(self) -> int:
        return 2 * self.inv_freq.shape[-1]


def turned(x: torch.Tensor, angle: torch.Tensor, pairing: str) -> torch.Tensor:
    """x [head_dim], its first 2 * len(angle) dims turned."""
    n = len(angle)
    first, second = (slice(0, n), slice(n, 2 * n)) if pairing == "halves" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out = x.clone()
    out[first] = x[first] * angle.cos() - x[second] * angle.sin()
    out[second] = x[second] * angle.cos() + x[first] * angle.sin()
    return out


def pairing_of(model: Any, rotary: Any, prefix: str, kind: "tuple[str, ...]", head_dim: int) -> Optional[str]:
    """What the model's own functions do to a random vector; None: neither pairing."""
    apply = getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        return None
    x = torch.randn(head_dim, generator=torch.Generator().manual_seed(1))
    inv_freq = getattr(rotary, prefix + "inv_freq")
    scaling = float(getattr(rotary, prefix + "attention_scaling", 1.0))
    probe = x.to(inv_freq.device).reshape(1, 1, 1, -1)
    try:
        with torch.inference_mode():
            cos, sin = rotary(probe, torch.tensor([[PROBED_POSITION]], device=inv_freq.device), *kind)
            got = apply(probe, probe, cos, sin)[1].reshape(-1).cpu()
    except (TypeError, ValueError, RuntimeError, IndexError):  # other arguments than Llama's
        return None
    angle = PROBED_POSITION * inv_freq.cpu().float()
    for pairing in ("halves", "neighbours"):
        want = turned(x, angle, pairing)
        want[:2 * len(angle)] *= scaling
        if got.shape == want.shape and torch.allclose(got, want, atol=1e-4):
            return pairing
    return None


def rope_of(model: Any, head_dim: int) -> Optional[Rope]:
    """None where it cannot be told."""
    config, base = model.config.get_text_config(), model.base_model
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return Rope("none", np.zeros(0, np.float32))
    base = getattr(base, "language_model", base)
    rotary = getattr(base, "rotary_emb", None)
    kinds = [p for p in (parameters, *parameters.values()) if isinstance(p, dict)]
    if rotary is None or any(p.get("rope_type") in CHANGING for p in kinds):
        return None
    layers = config.num_hidden_layers
    if hasattr(rotary, "inv_freq"):
        types: "list[tuple[str, ...]]" = [()]
    else:
        types = [(t,) for t in getattr(config, "layer_types", None) or []]
    found = {}
    for kind in dict.fromkeys(types):
        prefix = "".join(f"{t}_" for t in kind)
        if not hasattr(rotary, prefix + "inv_freq"):
            return None
        found[kind] = (pairing_of(base, rotary, prefix, kind, head_dim), getattr(rotary, prefix + "inv_freq").cpu().float().numpy())
    pairings, lengths = {pairing for pairing, _ in found.values()}, {len(f) for _, f in found.values()}
    if len(pairings) != 1 or len(lengths) != 1 or None in pairings:
        return None
    rows = [found[kind][1] for kind in types]
    turns = getattr(config, "no_rope_layers", None)  # 0: the layer does not rotate
    if turns is not None and not all(turns):
        rows = [row * bool(turn) for row, turn in zip(rows if len(rows) > 1 else rows * layers, turns)]
    same = all(np.array_equal(row, rows[0]) for row in rows)
    return Rope(pairings.pop(), np.asarray(rows[0] if same else np.stack(rows), np.float32))
