# SPDX-License-Identifier: Apache-2.0
"""Settings of the vLLM backend, from the engine's `additional_config`: {"tierkv": {...}}.

    format        "k8v4", "k4v4" (the default), "k4v2" or "raw": of every layer
    layers        {"0": "k8v4", "2-5": "k4v2"}: formats of single layers and of ranges
    profile       path of a profile (tierkv.calibrate_model): keys are reflected by its key means, so that zero points hold them
    slice_tokens  cached tokens that prefill decodes at a time (default 16384)
    rotate        false: keys and values are not rotated
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

from ..errors import InvalidArgumentError

BLOCK_TOKENS = 64
# Bits of keys and of values.
FORMATS: Dict[str, Tuple[int, int]] = {"k8v4": (8, 4), "k4v4": (4, 4), "k4v2": (4, 2), "raw": (16, 16)}
DEFAULT_FORMAT = "k4v4"
DEFAULT_SLICE_TOKENS = 16384
_KEYS = ("format", "layers", "profile", "slice_tokens", "rotate")


def slot_bytes(format: str, head_dim: int) -> int:
    """Bytes of a token of one kv_head: codes, and 4 bytes of scale and zero point of each component that is not raw."""
    return sum(head_dim * bits // 8 + (4 if bits < 16 else 0) for bits in FORMATS[format])


def layer_index(name: str) -> Optional[int]:
    """The number in a layer's name, such as model.layers.3.self_attn.attn. None for layers of a draft model, which has a count of its own:
    draft_model.model.layers.0, mtp.layers.0. ValueError unless the name has one number."""
    parts = name.split(".")
    if parts[0] == "draft_model" or any(part.startswith("mtp") for part in parts):
        return None
    numbers = [int(part) for part in parts if part.isdigit()]
    if len(numbers) != 1:
        raise InvalidArgumentError(f"tierkv: which layer {name} is, its name does not say")
    return numbers[0]


@dataclass(frozen=True)
class Settings:
    format: str = DEFAULT_FORMAT
    layers: Tuple[Tuple[int, int, str], ...] = ()  # (first, last, format), not overlapping
    profile: Optional[str] = None
    slice_tokens: int = DEFAULT_SLICE_TOKENS
    rotate: bool = True

    def format_of(self, layer: Optional[int]) -> str:
        """None: of a draft model's layer."""
        return next((f for first, last, f in self.layers if layer is not None and first <= layer <= last), self.format)

    def check_layers(self, num_layers: int) -> None:
        """ValueError where a range names a layer that the model lacks."""
        for first, last, _ in self.layers:
            if last >= num_layers:
                raise InvalidArgumentError(f"tierkv.layers: layer {last} of a model with {num_layers} layers")


def _format(name: Any, where: str) -> str:
    if name not in FORMATS:
        raise InvalidArgumentError(f"{where}: {name!r} is not one of {', '.join(FORMATS)}")
    return str(name)


def _layers(given: Any) -> Tuple[Tuple[int, int, str], ...]:
    if not isinstance(given, Mapping):
        raise InvalidArgumentError("tierkv.layers: not an object of layers and formats")
    ranges = []
    for key, name in given.items():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(key))
        if match is None:
            raise InvalidArgumentError(f"tierkv.layers: {key!r} is neither a layer nor a range such as 2-5")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise InvalidArgumentError(f"tierkv.layers: the range {key} is empty")
        ranges.append((first, last, _format(name, f"tierkv.layers: {key}")))
    ranges.sort()
    for before, after in zip(ranges, ranges[1:]):
        if after[0] <= before[1]:
            raise InvalidArgumentError(f"tierkv.layers: layer {after[0]} has two formats")
    return tuple(ranges)


def read_settings(additional_config: Any) -> Settings:
    """ValueError, which names the setting."""
    given = additional_config.get("tierkv", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise InvalidArgumentError("tierkv: not an object of settings")
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        raise InvalidArgumentError(f"tierkv: unknown settings {', '.join(unknown)}; known are {', '.join(_KEYS)}")
    slice_tokens = given.get("slice_tokens", DEFAULT_SLICE_TOKENS)
    if not isinstance(slice_tokens, int) or isinstance(slice_tokens, bool) or slice_tokens < BLOCK_TOKENS:
        raise InvalidArgumentError(f"tierkv.slice_tokens: {slice_tokens!r} is no number of at least {BLOCK_TOKENS} tokens")
    profile, rotate = given.get("profile"), given.get("rotate", True)
    if profile is not None and not isinstance(profile, str):
        raise InvalidArgumentError("tierkv.profile: not a path")
    if not isinstance(rotate, bool):
        raise InvalidArgumentError("tierkv.rotate: neither true nor false")
    return Settings(_format(given.get("format", DEFAULT_FORMAT), "tierkv.format"), _layers(given.get("layers", {})), profile,
                    slice_tokens, rotate)
