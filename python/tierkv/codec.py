# SPDX-License-Identifier: Apache-2.0
"""The codec: rows of codes, unified pages, entropy-coded blocks."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Iterable, Optional, Tuple

import numpy as np
import numpy.typing as npt

from . import _library as lib
from ._arrays import DTYPES, FLOAT32, AnyArray, Array, ArrayLike, Bytes, byte_memory, floats, integers, like, pointer, shaped, to_numpy, values
from .errors import ArgumentTypeError, InvalidArgumentError

BLOCK_TOKENS = 64


@dataclass(frozen=True)
class QuantizedRows:
    """Token-wise min-max codes: x' = scale * code + zero_point per group of channels. Tensors where quantize() was given one."""

    codes: AnyArray  # uint8 [tokens, head_dim]
    scale: AnyArray  # float16 [tokens, head_dim / group]
    zero_point: AnyArray  # likewise
    bits: int
    group: int

    def _struct(self) -> lib.Codes:
        """The arrays are NumPy's."""
        tokens, head_dim = self.codes.shape
        return lib.Codes(tokens=tokens, head_dim=head_dim, bits=self.bits, group=self.group, codes=pointer(self.codes),
                         scale=pointer(self.scale), zero_point=pointer(self.zero_point))


def quantize(x: ArrayLike, bits: int, group: int = 0) -> QuantizedRows:
    """Codes of the rows of x [tokens, head_dim], `bits` 1 to 8, each `group` of channels on its own (0: all together)."""
    rows = np.ascontiguousarray(values(x, "x", (None, None)).to_float32())
    tokens, head_dim = rows.shape
    width = group or head_dim
    if group < 0 or width == 0 or head_dim % width != 0:
        raise InvalidArgumentError(f"group {group} does not divide head_dim {head_dim}")
    groups = head_dim // width
    out = QuantizedRows(np.empty((tokens, head_dim), np.uint8), np.empty((tokens, groups), np.float16),
                        np.empty((tokens, groups), np.float16), bits, width)
    lib.core().call("tkv_quantize", pointer(rows), out._struct())
    return QuantizedRows(like(out.codes, x), like(out.scale, x), like(out.zero_point, x), bits, width)


def dequantize(rows: QuantizedRows) -> AnyArray:
    """The values that the codes stand for, float32 [tokens, head_dim]. A tensor where the codes are one."""
    tokens, head_dim = rows.codes.shape
    if rows.group < 1 or head_dim % rows.group != 0:
        raise InvalidArgumentError(f"group {rows.group} does not divide head_dim {head_dim}")
    groups = head_dim // rows.group
    checked = QuantizedRows(
        integers(rows.codes, np.uint8, "codes"),
        shaped(floats(rows.scale, np.float16, "scale"), (tokens, groups), "scale"),
        shaped(floats(rows.zero_point, np.float16, "zero_point"), (tokens, groups), "zero_point"), rows.bits, rows.group)
    out = np.empty((tokens, head_dim), np.float32)
    lib.core().call("tkv_dequantize", checked._struct(), pointer(out))
    return like(out, rows.codes)


@dataclass(frozen=True)
class PageFormat:
    """How a page stores tokens: bits per key and value code (16: raw), channels that share a scale (0: all)."""

    head_dim: int
    k_bits: int = 8
    v_bits: int = 4
    k_group: int = 0
    v_group: int = 0
    page_bytes: int = 0  # 0: the size that choose_page_bytes() finds for this format alone
    raw_dtype: str = "float16"

    def _struct(self) -> lib.PageFormatStruct:
        if self.raw_dtype not in DTYPES:
            raise InvalidArgumentError(f"raw_dtype {self.raw_dtype!r} is not one of {', '.join(DTYPES)}")
        page_bytes = self.page_bytes or choose_page_bytes([self]).page_bytes
        return lib.PageFormatStruct(head_dim=self.head_dim, k_bits=self.k_bits, v_bits=self.v_bits, k_group=self.k_group,
                                    v_group=self.v_group, page_bytes=page_bytes, raw_dtype=DTYPES[self.raw_dtype])

    @property
    def tokens(self) -> int:
        """Tokens that a page holds."""
        out = ctypes.c_int32()
        lib.core().call("tkv_page_tokens", self._struct(), out)
        return out.value


@dataclass(frozen=True)
class PageChoice:
    page_bytes: int
    worst_waste: float  # share of a full page that no token uses, for the worst of the formats
    within_limit: bool  # False: no size keeps max_waste; this one wastes least


def choose_page_bytes(formats: Iterable[PageFormat], max_waste: float = 0.06, min_tokens: int = 64) -> PageChoice:
    """The page size that serves all formats of a pool."""
    lib.not_zero({"max_waste": max_waste, "min_tokens": min_tokens})
    formats = list(formats)
    structs = (lib.PageFormatStruct * len(formats))()
    for i, f in enumerate(formats):
        structs[i] = PageFormat(f.head_dim, f.k_bits, f.v_bits, f.k_group, f.v_group, 128, f.raw_dtype)._struct()
    choice = lib.PageChoiceStruct(max_waste=max_waste, min_tokens=min_tokens)
    lib.core().call("tkv_page_choose_size", structs, len(formats), choice)
    return PageChoice(choice.page_bytes, choice.worst_waste, bool(choice.within_limit))


@dataclass
class Page:
    """A page and how many tokens it holds. The bytes are those that the GPU kernels read."""

    format: PageFormat
    data: AnyArray = field(repr=False)  # uint8; a tensor in CPU memory makes decode() give tensors
    used: int = 0

    @classmethod
    def empty(cls, format: PageFormat) -> "Page":
        """A page of `format` without tokens."""
        return cls(format, np.zeros(format._struct().page_bytes, np.uint8))

    def append(self, k: ArrayLike, v: ArrayLike, scores: Optional[ArrayLike] = None,
               positions: Optional[ArrayLike] = None) -> None:
        """Appends tokens: k and v [tokens, head_dim] of one dtype. Scores default to 0, positions to the slots. OutOfRangeError where
        the page is full."""
        keys = values(k, "k", (None, self.format.head_dim))
        vals = values(v, "v", keys.bits.shape)
        if vals.dtype != keys.dtype:
            raise ArgumentTypeError(f"k is {keys.dtype} but v is {vals.dtype}")
        count = keys.bits.shape[0]
        s = None if scores is None else shaped(floats(scores, np.float32, "scores"), (count,), "scores")
        p = None if positions is None else shaped(integers(positions, np.int32, "positions"), (count,), "positions")
        tokens = lib.Tokens(count=count, dtype=DTYPES[keys.dtype], k=pointer(keys.bits), v=pointer(vals.bits), scores=pointer(s),
                            positions=pointer(p))
        lib.core().call("tkv_page_encode", *self._storage(writes=True), lib.integer(self.used, "used"), tokens)
        self.used += count

    def decode(self) -> "PageTokens":
        """The tokens of the page, in the order in which they were appended."""
        shape = (self.used, self.format.head_dim)
        out = PageTokens(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(self.used, np.float32),
                         np.empty(self.used, np.int32))
        tokens = lib.Tokens(count=self.used, dtype=FLOAT32, k=pointer(out.k), v=pointer(out.v), scores=pointer(out.scores),
                            positions=pointer(out.positions))
        lib.core().call("tkv_page_decode", *self._storage(), 0, tokens)
        return PageTokens(*(like(a, self.data) for a in (out.k, out.v, out.scores, out.positions)))

    def _storage(self, writes: bool = False) -> "Tuple[lib.PageFormatStruct, Optional[int]]":
        """The format, and the address of the bytes."""
        struct, data = self.format._struct(), to_numpy(self.data, "data")
        if data.dtype != np.uint8 or data.shape != (struct.page_bytes,) or not data.flags.c_contiguous:
            raise InvalidArgumentError(f"data must be {struct.page_bytes} contiguous bytes")
        if writes and not data.flags.writeable:
            raise InvalidArgumentError("data: not writable")
        return struct, pointer(data)


@dataclass(frozen=True)
class PageTokens:
    """What a page holds."""

    k: AnyArray  # float32 [tokens, head_dim]
    v: AnyArray  # likewise
    scores: AnyArray  # float32 [tokens]
    positions: AnyArray  # int32 [tokens]


def encode(format: PageFormat, k: ArrayLike, v: ArrayLike, scores: Optional[ArrayLike] = None,
           positions: Optional[ArrayLike] = None) -> Page:
    """A page with these tokens. Where k is a tensor, decode() gives tensors."""
    page = Page.empty(format)
    page.data = like(page.data, k)
    page.append(k, v, scores, positions)
    return page


def decode(page: Page) -> PageTokens:
    """The tokens of a page."""
    return page.decode()


class Codebook(lib.Owner):
    """A Huffman codebook for blocks of signed codes; codes that it does not hold are coded as exceptions."""

    _name, _destroy = "codebook", "tkv_codebook_destroy"

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle

    @classmethod
    def build(cls, codes: ArrayLike, component: str = "key", max_length: int = 12) -> "Codebook":
        """The codebook that suits codes [tokens, head_dim] of a component ("key" or "value")."""
        lib.not_zero({"max_length": max_length})
        c = shaped(integers(codes, np.int16, "codes"), (None, None), "codes")
        spec = lib.CodebookSpec(component=_component(component), head_dim=c.shape[1], max_length=max_length)
        handle = ctypes.c_void_p()
        lib.core().call("tkv_codebook_build", spec, pointer(c), c.shape[0], handle)
        return cls(handle)

    @classmethod
    def parse(cls, data: Bytes) -> "Codebook":
        """From the bytes that bytes(codebook) gave; any bytes are safe."""
        array, handle = byte_memory(data, "data"), ctypes.c_void_p()
        lib.core().call("tkv_codebook_parse", pointer(array), array.size, handle)
        return cls(handle)

    def __bytes__(self) -> bytes:
        return _filled("tkv_codebook_serialize", 1 << 16, self._open())

    def encode(self, codes: ArrayLike) -> bytes:
        """A block of codes [tokens, head_dim], at most 64 tokens; lossless."""
        c = shaped(integers(codes, np.int16, "codes"), (None, None), "codes")
        shape = lib.BlockShape(tokens=c.shape[0], head_dim=c.shape[1])
        room = lib.core().dll.tkv_block_max_bytes(c.shape[1])
        return _filled("tkv_block_encode", room, self._open(), shape, pointer(c))

    def decode(self, data: Bytes, shape: Tuple[int, int]) -> npt.NDArray[np.int16]:
        """The codes of a block, [tokens, head_dim]."""
        try:
            tokens, head_dim = shape
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"shape {shape!r} is not (tokens, head_dim)") from None
        block = lib.BlockShape(tokens=tokens, head_dim=head_dim)
        if not 1 <= tokens <= BLOCK_TOKENS or not 1 <= head_dim <= 4096:
            raise InvalidArgumentError(f"no block has shape {shape}")
        source = byte_memory(data, "data")
        buffer = lib.Buffer(data=pointer(source), capacity=source.size, size=source.size)
        out = np.empty(shape, np.int16)
        lib.core().call("tkv_block_decode", self._open(), block, buffer, pointer(out))
        return out

def _component(name: str) -> int:
    if name not in ("key", "value"):
        raise InvalidArgumentError(f'component {name!r} is neither "key" nor "value"')
    return 0 if name == "key" else 1


def _filled(function: str, room: int, *arguments: object) -> bytes:
    out: Array = np.empty(room, np.uint8)
    buffer = lib.Buffer(data=pointer(out), capacity=room)
    lib.core().call(function, *arguments, buffer)
    return out[:buffer.size].tobytes()
