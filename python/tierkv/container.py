# SPDX-License-Identifier: Apache-2.0
"""`.tkv` containers: compressed caches in files."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import List

import numpy as np
import numpy.typing as npt

from . import _library as lib
from ._arrays import DTYPES, Bytes, FloatArray, byte_memory, pointer
from .errors import OutOfRangeError


@dataclass(frozen=True)
class ContainerInfo:
    """What a container says about the cache that it holds."""

    file_bytes: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # before it was compressed
    rope_applied: bool
    rope_theta: float
    sm_scale: float
    preset: str
    model_id: str
    created_by: str


@dataclass(frozen=True)
class ContainerSequence:
    """A sequence of a container."""

    id: str
    kind: str
    tokens: npt.NDArray[np.int32]  # token ids


@dataclass(frozen=True)
class ContainerLayer:
    """A layer of a sequence, decoded."""

    k: FloatArray  # [num_kv_heads, tokens, head_dim]; pruned tokens are zeros
    v: FloatArray
    pruned: npt.NDArray[np.bool_]  # [num_kv_heads, tokens]


class Container(lib.Owner):
    """An open `.tkv` file.

    Several threads may decode from it at once. close() must not run beside them.
    """

    _name, _destroy = "container", "tkv_container_destroy"

    def __init__(self, path: lib.Path) -> None:
        """Opens the file and checks its header, index and sequences. InputOutputError, CorruptError, VersionError."""
        handle = ctypes.c_void_p()
        lib.core().call("tkv_container_open", lib.encode_path(path), handle)
        self._read(handle)

    @classmethod
    def from_bytes(cls, data: Bytes, name: str = "bytes") -> "Container":
        """Opens a container in memory: bytes, or an array or CPU tensor of uint8. Messages call it `name`."""
        array, handle = byte_memory(data, "data"), ctypes.c_void_p()
        lib.core().call("tkv_container_open_bytes", pointer(array), array.size, lib.encode_path(name), handle)
        container = cls.__new__(cls)
        container._read(handle)
        return container

    def _read(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle
        info = lib.ContainerInfo()
        lib.core().call("tkv_container_get_info", handle, info)
        names = {number: name for name, number in DTYPES.items()}
        self.info = ContainerInfo(info.file_bytes, info.num_layers, info.num_q_heads, info.num_kv_heads, info.head_dim,
                                  names[info.dtype], bool(info.rope_applied), info.rope_theta, info.sm_scale, _text(info.preset),
                                  _text(info.model_id), _text(info.created_by))
        self.sequences: List[ContainerSequence] = [self._sequence(i) for i in range(info.num_sequences)]

    def decode_layer(self, layer: int, sequence: int = 0, threads: int = 0) -> ContainerLayer:
        """Keys, values and pruned tokens of a layer of a sequence (by index). 0 threads: all cores. OutOfRangeError for an index that
        is not there."""
        layer, sequence = lib.integer(layer, "layer"), lib.integer(sequence, "sequence")
        # Before anything is allocated: a negative index would select from the end of the list.
        if not 0 <= sequence < len(self.sequences):
            raise OutOfRangeError(f"sequence {sequence} is not one of {len(self.sequences)}")
        tokens, heads = self.sequences[sequence].tokens.size, self.info.num_kv_heads
        k = np.empty((heads, tokens, self.info.head_dim), np.float32)
        v = np.empty_like(k)
        pruned = np.empty((heads, tokens), np.uint8)
        request = lib.LayerStruct(sequence=sequence, layer=layer, threads=threads, k=pointer(k), v=pointer(v),
                                  pruned=pointer(pruned))
        lib.core().call("tkv_container_decode_layer", self._open(), request)
        return ContainerLayer(k, v, pruned.astype(np.bool_))

    def verify(self, threads: int = 0) -> None:
        """Checks every checksum and decodes everything. CorruptError names the first chunk that is wrong."""
        lib.core().call("tkv_container_verify", self._open(), lib.integer(threads, "threads"))

    def __repr__(self) -> str:
        i = self.info
        return f"<tierkv.Container {i.preset}: {len(self.sequences)} sequences, {i.num_layers} layers, {i.file_bytes} bytes>"

    def _sequence(self, index: int) -> ContainerSequence:
        s = lib.SequenceInfo()
        lib.core().call("tkv_container_get_sequence", self._open(), index, s)
        # A copy: the library's array lives as long as the handle only.
        tokens = np.ctypeslib.as_array(s.tokens, (s.num_tokens,)).copy() if s.num_tokens else np.empty(0, np.int32)
        return ContainerSequence(_text(s.id), _text(s.kind), tokens)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
