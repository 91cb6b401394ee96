# SPDX-License-Identifier: Apache-2.0
"""LMCache: a serde that keeps chunks of the KV cache in 8, 4 or 2 bits a value.

    import tierkv.lmcache           # before LMCache reads its configuration

    {"type": "fs", "base_path": "/cache", "serde": {"type": "tierkv", "format": "k8v4", "head_dim": 128}}

Settings: `format` (k8v8, k8v4, k4v4, k4v2, ...; k8v4), `head_dim` (required) and `max_workers` (1). Chunks are [2, layers, tokens, hidden] in
fp16, bf16 or fp32; each token of each head has a scale and a zero point of its own. The size of what is written follows from the shape, so
a store never keeps more than it needs.
"""
from __future__ import annotations

import importlib
import operator
import re
from typing import Any, Dict, Tuple

from ._lmcache_bytes import ChunkFormat, pack_chunk, unpack_chunk
from .errors import ArgumentTypeError, InvalidArgumentError

# Types are checked where neither is installed.
torch: Any = importlib.import_module("torch")
serde: Any = importlib.import_module("lmcache.v1.distributed.serde")

NAME = "tierkv"


class Serializer(serde.Serializer):  # type: ignore[misc]
    def __init__(self, format: ChunkFormat) -> None:
        self._format = format

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        x = _values(src, "source")
        return pack_chunk(self._format, x.detach().to("cpu", torch.float32).numpy(), _bytes(dst, "destination"))

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        return self._format.size(_shape(layout_desc))


class Deserializer(serde.Deserializer):  # type: ignore[misc]
    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        out = _values(dst, "destination")
        out.copy_(torch.from_numpy(unpack_chunk(_bytes(src, "source"), tuple(out.shape))))


def create(settings: Dict[str, Any]) -> Any:
    """The processor that LMCache asks for; ValueError names a setting that is wrong."""
    unknown = set(settings) - {"format", "head_dim", "max_workers"}
    if unknown:
        raise InvalidArgumentError(f"serde tierkv: unknown setting {min(unknown)!r}")
    if "head_dim" not in settings:
        raise InvalidArgumentError("serde tierkv: the setting head_dim is missing")
    name = str(settings.get("format", "k8v4"))
    widths = re.fullmatch(r"[kK]([842])[vV]([842])", name)
    if widths is None:
        raise InvalidArgumentError(f"serde tierkv: format {name!r} is not one of k8v8, k8v4, k4v4, k4v2, k2v2, ...")
    format = ChunkFormat(int(widths[1]), int(widths[2]), _whole(settings, "head_dim", 0))
    return serde.AsyncSerdeProcessor(Serializer(format), Deserializer(), max_workers=_whole(settings, "max_workers", 1))


def _whole(settings: Dict[str, Any], name: str, default: int) -> int:
    value = settings.get(name, default)
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"serde tierkv: {name} {value!r} is not an integer") from None


def _shape(layout: Any) -> Tuple[int, ...]:
    if len(layout.shapes) != 1:
        raise InvalidArgumentError(f"serde tierkv: {len(layout.shapes)} groups of layers; it takes one")
    return tuple(int(n) for n in layout.shapes[0])


def _tensor(memory: Any, name: str) -> Any:
    if memory.tensor is None:
        raise InvalidArgumentError(f"serde tierkv: the {name} has no tensor")
    return memory.tensor


def _values(memory: Any, name: str) -> Any:
    tensor = _tensor(memory, name)
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentTypeError(f"serde tierkv: the {name} is of {tensor.dtype}; it takes float16, bfloat16 and float32")
    return tensor


def _bytes(memory: Any, name: str) -> Any:
    tensor = _tensor(memory, name)
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"serde tierkv: the {name} is not contiguous")
    return tensor.flatten().view(torch.uint8).numpy()


if NAME not in serde.get_registered_serde_types():
    serde.register_serde_factory(NAME, create)
