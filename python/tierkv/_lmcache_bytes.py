# SPDX-License-Identifier: Apache-2.0
"""Chunks of a KV cache as bytes of a size that is known beforehand: token-wise codes of 8, 4 or 2 bits with a scale and a zero point for each
token and head. NumPy alone.

    header   little-endian, 32 bytes: "TKLM", version, key bits, value bits, 0 (u8 each), head_dim, layers, tokens, hidden (u32 each),
             CRC-32 of all that follows (u32), 0 (u32)
    keys     codes [layers, tokens, hidden], the first of a byte in its lowest bits; scales, zero points: fp16 [layers, tokens, heads]
    values   likewise
"""
from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Tuple

import numpy as np
import numpy.typing as npt

from ._arrays import FloatArray
from .codec import QuantizedRows, dequantize, quantize
from .errors import CorruptError, InvalidArgumentError

HEADER = struct.Struct("<4s4B4I2I")
MAGIC, VERSION = b"TKLM", 1
WIDTHS = (8, 4, 2)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ChunkFormat:
    """Bits of a key's and of a value's code, and channels of a head."""

    k_bits: int
    v_bits: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("k_bits", "v_bits"):
            if getattr(self, name) not in WIDTHS:
                raise InvalidArgumentError(f"{name}: {getattr(self, name)} is not one of {', '.join(map(str, WIDTHS))}")
        if self.head_dim < 4 or self.head_dim % 4:
            raise InvalidArgumentError(f"head_dim: {self.head_dim} is not a multiple of 4")

    def sizes(self, shape: "Tuple[int, ...]") -> Tuple[int, int]:
        """Bytes of the keys and of the values of a chunk [2, layers, tokens, hidden]."""
        if len(shape) != 4 or shape[0] != 2:
            raise InvalidArgumentError(f"a chunk has the shape [2, layers, tokens, hidden], not {list(shape)}")
        rows, odd = divmod(shape[1] * shape[2] * shape[3], self.head_dim)
        if odd or shape[3] % self.head_dim:
            raise InvalidArgumentError(f"hidden size {shape[3]} is not a multiple of head_dim {self.head_dim}")
        return rows * (self.head_dim * self.k_bits // 8 + 4), rows * (self.head_dim * self.v_bits // 8 + 4)

    def size(self, shape: "Tuple[int, ...]") -> int:
        return HEADER.size + sum(self.sizes(shape))


def pack_chunk(format: ChunkFormat, x: FloatArray, out: Bytes) -> int:
    """x: float32 [2, layers, tokens, hidden]. Fills the first format.size(x.shape) bytes of `out` and returns how many these are.
    NonFiniteError, OutOfRangeError beyond fp16."""
    size = format.size(x.shape)
    if out.size < size:
        raise InvalidArgumentError(f"the chunk needs {size} bytes, {out.size} are there")
    at = HEADER.size
    for part, bits in zip(x, (format.k_bits, format.v_bits)):
        rows = quantize(np.ascontiguousarray(part).reshape(-1, format.head_dim), bits)
        for piece in (_pack(rows.codes, bits), rows.scale.view(np.uint8), rows.zero_point.view(np.uint8)):
            out[at:at + piece.size] = piece.reshape(-1)
            at += piece.size
    out[:HEADER.size] = np.frombuffer(HEADER.pack(MAGIC, VERSION, format.k_bits, format.v_bits, 0, format.head_dim, *x.shape[1:],
                                                  zlib.crc32(out[HEADER.size:size].data), 0), np.uint8)
    return size


def unpack_chunk(data: Bytes, shape: "Tuple[int, ...]") -> FloatArray:
    """The chunk, float32, which must have this shape; bytes behind it are not looked at. CorruptError."""
    if data.size < HEADER.size:
        raise CorruptError(f"chunk: {data.size} bytes are fewer than its header's {HEADER.size}")
    magic, version, k_bits, v_bits, zero, head_dim, layers, tokens, hidden, checksum, zeros = HEADER.unpack(data[:HEADER.size].tobytes())
    if magic != MAGIC or version != VERSION or zero or zeros:
        raise CorruptError("chunk: it does not begin as a chunk of this version does")
    if (2, layers, tokens, hidden) != tuple(shape):
        raise CorruptError(f"chunk: it has the shape {[2, layers, tokens, hidden]}, expected is {list(shape)}")
    try:
        format = ChunkFormat(k_bits, v_bits, head_dim)
        size = format.size(tuple(shape))
    except ValueError as e:
        raise CorruptError(f"chunk: {e}") from None
    if data.size < size or zlib.crc32(data[HEADER.size:size].data) != checksum:
        raise CorruptError("chunk: its checksum is another")
    out = np.empty(shape, np.float32)
    at, rows = HEADER.size, layers * tokens * hidden // head_dim
    for part, bits in zip(out, (k_bits, v_bits)):
        codes = data[at:at + rows * head_dim * bits // 8]
        scales = data[at + codes.size:at + codes.size + 4 * rows].view(np.float16).reshape(2, rows, 1)
        at += codes.size + scales.nbytes
        if not np.isfinite(scales).all():
            raise CorruptError("chunk: a scale or zero point is not finite")
        part[...] = dequantize(QuantizedRows(_unpack(codes, bits).reshape(rows, head_dim), scales[0], scales[1], bits, head_dim)).reshape(part.shape)
    return out


def _pack(codes: Bytes, bits: int) -> Bytes:
    packed = codes.reshape(-1, 8 // bits)
    out = packed[:, 0].copy()
    for i in range(1, 8 // bits):
        out |= packed[:, i] << np.uint8(bits * i)
    return out


def _unpack(packed: Bytes, bits: int) -> Bytes:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (packed[:, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(-1)
