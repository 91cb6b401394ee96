# SPDX-License-Identifier: Apache-2.0
"""The KV store: the compressed cache of many sequences, from the tokens of a prompt to attention.

    config = StoreConfig(num_layers=30, num_q_heads=9, num_kv_heads=3, head_dim=64, rope=rope, profile=read_profile("model.h5"),
                         max_sequences=8, max_tokens=8192)
    with KvStore(config) as store:
        id = store.add_sequence()
        store.begin(id, n)                              # a prompt, a turn or a step: any n >= 1
        for layer in range(30):
            store.append(id, layer, k, v)               # [1, n, 3, 64]
            seen = store.attend(id, layer, q)           # [1, 1 to n, 9, 64]: of the newest tokens

include/tierkv/kv_store.h says what each call does and what it refuses.
"""
from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

import numpy as np

from . import _device
from . import _library as lib
from ._arrays import DTYPES, Array, ArrayLike, byte_memory, is_tensor, like, pointer, values
from .errors import ArgumentTypeError, BufferTooSmallError, InvalidArgumentError, OutOfRangeError, StaleSequenceError
from .profile import PAIRINGS, ProfileData, Rope, frequencies, profile_struct

Ids = Union[int, Iterable[int]]


@dataclass(frozen=True)
class CodedFormat:
    """Entropy-coded weighted steps: a step per row, an exponent per token, Huffman codes."""

    k: float = 0.0  # deviation of a logit that key steps aim at; 0: 0.55, without a profile 0.33
    v: float = 0.0  # share of a token that value steps are; 0: 0.5, without a profile 0.28
    max_length: int = 10  # bits of the longest code word, 8 to 14
    streams_per_lane: int = 2  # or 1
    key_books: int = 1  # codebooks of a layer's keys, 1 to 4


@dataclass(frozen=True)
class TierFormat:
    """How a tier stores tokens: bits per key and value code (16: raw), channels that share a scale (0: all)."""

    k_bits: int
    v_bits: int
    k_group: int = 0
    v_group: int = 0

    def _struct(self) -> lib.TierFormatStruct:
        return lib.TierFormatStruct(k_bits=self.k_bits, v_bits=self.v_bits, k_group=self.k_group, v_group=self.v_group)


@dataclass(frozen=True)
class TierClass:
    """The formats of a class of heads: of important tokens and of the others."""

    high: TierFormat = TierFormat(8, 4)
    low: TierFormat = TierFormat(4, 2)
    alpha_high: float = 1.0  # position (from 1) times significance at least this: high
    alpha_low: float = 0.0  # below this: pruned
    share: float = 0.0  # of the heads, most sensitive first; the last class takes the rest


@dataclass(frozen=True)
class TiersFormat:
    """Fixed widths by importance, by class of heads. Several classes need a profile."""

    classes: Tuple[TierClass, ...] = (TierClass(),)
    rotate_keys: bool = True
    rotate_values: bool = True


@dataclass(frozen=True)
class ChannelFormat:
    """Blocks whose keys share a scale per channel."""

    k_bits: int = 4  # or 2
    v_bits: int = 4  # or 2
    block_tokens: int = 64  # or 128, but for head_dim 256


BodyFormat = Union[CodedFormat, TiersFormat, ChannelFormat]

PRESETS: Dict[str, BodyFormat] = {
    "small": CodedFormat(),
    "fast": TiersFormat((TierClass(TierFormat(8, 4), TierFormat(8, 4), share=0.1), TierClass(TierFormat(4, 4), TierFormat(4, 2), share=0.375),
                         TierClass(TierFormat(4, 2), TierFormat(2, 2)))),
    "k8v4": TiersFormat((TierClass(TierFormat(8, 4), TierFormat(8, 4)),)),
    "k4v4": TiersFormat((TierClass(TierFormat(4, 4), TierFormat(4, 4)),)),
    "channel": ChannelFormat(),
}


def preset(name: str) -> BodyFormat:
    """ValueError for a name that is not one of PRESETS."""
    if name not in PRESETS:
        raise InvalidArgumentError(f"format {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class StoreConfig:
    """The model's layout, the format and the capacities of a store."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequences: int  # at once
    max_tokens: int  # of a sequence
    dtype: str = "float16"  # or "bfloat16": of keys and values as they are appended
    sm_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    rope: Optional[Rope] = None  # None: the profile's, or none
    format: BodyFormat = CodedFormat()
    profile: Optional[ProfileData] = None
    raw_layers: Tuple[int, ...] = ()  # these stay fp16; ascending
    sink_tokens: int = 4
    window_tokens: int = 64
    memory_bytes: int = 0  # for all sequences; 0: found by with_memory()
    page_bytes: int = 0  # 0: the format's choice

    def tokens_that_fit(self) -> Tuple[int, int]:
        """Tokens of all sequences together, when all are open and equally long: with codes of typical size, and whatever the values are."""
        typical, least = ctypes.c_int64(), ctypes.c_int64()
        lib.core().call("tkv_kv_tokens_that_fit", self._struct(), typical, least)
        return typical.value, least.value

    def with_memory(self) -> "StoreConfig":
        """The config with memory_bytes. Where it is 0, for max_sequences of max_tokens with codes of typical size and a quarter more."""
        if self.memory_bytes:
            return self
        low, high = 0, 1 << 20
        while not self._suffices(high):
            low, high = high, 2 * high
        while high - low > high >> 6:
            middle = (low + high) // 2
            low, high = (low, middle) if self._suffices(middle) else (middle, high)
        return dataclasses.replace(self, memory_bytes=high + high // 4)

    def _suffices(self, memory: int) -> bool:
        """For all tokens, and for the beginnings of sequences whatever their values are: these may be raw for a while."""
        try:
            typical, least = dataclasses.replace(self, memory_bytes=memory).tokens_that_fit()
        except OutOfRangeError:  # too little for max_sequences
            if memory >= 1 << 50:
                raise
            return False
        wanted = self.max_sequences * self.max_tokens
        return typical >= wanted and least >= self.max_sequences * min(self.max_tokens, 512)

    def _struct(self) -> lib.KvConfigStruct:
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.sink_tokens < 0 or self.window_tokens < 1:
            raise InvalidArgumentError("sink_tokens must be at least 0, window_tokens at least 1")
        raw_layers = np.array([lib.integer(layer, "raw_layers") for layer in self.raw_layers], np.int32)
        profile = None if self.profile is None else profile_struct(self.profile)
        rope, inv_freq = None, None
        if self.rope is not None:
            inv_freq = frequencies(self.rope)
            rope = ctypes.pointer(lib.RopeStruct(pairing=PAIRINGS.index(self.rope.pairing), dims=self.rope.dims, layers=len(inv_freq),
                                                 inv_freq=pointer(inv_freq)))
        struct = lib.KvConfigStruct(
            num_layers=self.num_layers, num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype], sm_scale=self.sm_scale, rope=rope, profile=None if profile is None else ctypes.pointer(profile),
            raw_layers=pointer(raw_layers) if raw_layers.size else None, num_raw_layers=raw_layers.size,
            sink_tokens=self.sink_tokens or -1, window_tokens=self.window_tokens, max_sequences=self.max_sequences,
            max_tokens=self.max_tokens, memory_bytes=self.memory_bytes, page_bytes=self.page_bytes, **_format(self.format))
        struct.arrays = [raw_layers, profile, inv_freq]  # as long as the struct
        return struct


def _format(format: BodyFormat) -> Dict[str, Any]:
    """The field of the config's struct."""
    if isinstance(format, CodedFormat):
        for name in ("max_length", "streams_per_lane", "key_books"):
            if getattr(format, name) == 0:  # the C ABI takes it for the default
                raise InvalidArgumentError(f"format: {name} is 0")
        return {"coded": ctypes.pointer(lib.CodedFormatStruct(**dataclasses.asdict(format)))}
    if isinstance(format, ChannelFormat):
        return {"channel": ctypes.pointer(lib.ChannelConfigStruct(**dataclasses.asdict(format)))}
    if not isinstance(format, TiersFormat):
        raise ArgumentTypeError(f"format: {type(format).__name__} is not CodedFormat, TiersFormat or ChannelFormat")
    classes = [ctypes.pointer(lib.TierClassStruct(high=ctypes.pointer(c.high._struct()), low=ctypes.pointer(c.low._struct()),
                                                  alpha_high=c.alpha_high, alpha_low=c.alpha_low, share=c.share)) for c in format.classes]
    if not classes:
        raise InvalidArgumentError("format: it has no class of heads")
    array = (ctypes.POINTER(lib.TierClassStruct) * len(classes))(*classes)
    return {"tiers": ctypes.pointer(lib.TiersFormatStruct(classes=array, num_classes=len(classes), plain_keys=not format.rotate_keys,
                                                          plain_values=not format.rotate_values))}


@dataclass(frozen=True)
class StoreUsage:
    """Tokens count once for each row (sequence, layer, kv_head)."""

    sequences: int
    sink_tokens: int
    body_tokens: int  # compressed
    ring_tokens: int  # the window and what waits behind it
    pages: int
    pages_free: int
    pages_shared: int
    most_pages: int  # in use at once, since the store was made
    page_bytes: int
    slot_bytes: int  # of a sequence beside its pages: raw tokens, directories, means
    raw_bytes: int  # the same tokens as 16-bit values
    nominal_bytes: int  # raw tokens, and of the others codes, exponents, means and directories
    missing_pages: int  # that the last call with OutOfPagesError lacked

    @property
    def held_bytes(self) -> int:
        return (self.pages - self.pages_free) * self.page_bytes + self.sequences * self.slot_bytes


class Attention(NamedTuple):
    """What attend() found."""

    out: Any  # like q
    lse: Any  # float32 [sequences, q_len, num_q_heads], natural logarithm
    probabilities: Any = None  # float32 [q_len, sequences, num_kv_heads, positions]: the largest of the group's heads


class _Given(NamedTuple):
    """An array of a call."""

    address: Any  # None: there is none
    shape: Tuple[int, ...]
    dtype: str
    owner: Any


class KvStore:
    """A store in host memory, or with a stream in GPU memory. Calls exclude each other by a lock.

    Arrays of a host store are NumPy's, or PyTorch's tensors in CPU memory; attend() answers in the kind of its queries. Those of a device
    store are PyTorch's tensors on its GPU, dense and aligned to 16 bytes; keep them until the stream has come to them. Sequences are named by the numbers that add_sequence(), fork() and import_sequence()
    return, one or a list of them. A released number raises StaleSequenceError. After OutOfPagesError nothing has changed: release other
    sequences and repeat the call.
    """

    def __init__(self, config: StoreConfig, stream: Any = None) -> None:
        """OutOfMemoryError where there is not as much as memory_bytes. `stream`: a cudaStream_t as a number (0: the default stream) or a
        torch.cuda.Stream, which outlives the store: then it lies on the GPU that is current and does its work there. UnsupportedError where
        the library was built without CUDA."""
        self._handle: Optional[ctypes.c_void_p] = None
        self.config = config.with_memory()
        self._lock = threading.Lock()
        self._stream: Optional[int] = None
        if stream is None:
            self._handle = self._create()
            return
        self._stream = lib.integer(getattr(stream, "cuda_stream", stream), "stream", ctypes.c_size_t)
        if config.memory_bytes:
            self._handle = self._create()
        else:
            self._create_with_workspaces()

    def _create(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if self._stream is None:
            lib.core().call("tkv_kv_create", self.config._struct(), handle)
        else:
            lib.core().call("tkv_kv_create_device", self.config._struct(), self._stream, handle)
        return handle

    def _create_with_workspaces(self) -> None:
        """with_memory() knows nothing of a device's workspaces: they are found with a first store, and added."""
        needed = memory = self.config.memory_bytes
        while self._handle is None:
            self.config = dataclasses.replace(self.config, memory_bytes=memory)
            try:
                self._handle = self._create()
            except OutOfRangeError:
                if memory > needed + (1 << 36):
                    raise
                memory = 2 * memory + (1 << 26)
        u = self.usage()
        beside = memory - u.pages * u.page_bytes - self.config.max_sequences * u.slot_bytes
        self.close()
        self.config = dataclasses.replace(self.config, memory_bytes=needed + beside)
        self._handle = self._create()

    def add_sequence(self) -> int:
        """An empty sequence. OutOfRangeError when max_sequences are open."""
        return self._number("tkv_kv_add_sequence")

    def begin(self, sequences: Ids, tokens: int) -> None:
        """`tokens` more tokens of each sequence, in all layers. OutOfRangeError beyond max_tokens; OutOfPagesError."""
        self._call("tkv_kv_begin", *_ids(sequences), lib.integer(tokens, "tokens"))

    def append(self, sequences: Ids, layer: int, k: ArrayLike, v: ArrayLike, *, significance: Optional[ArrayLike] = None,
               q: Optional[ArrayLike] = None, query_stride: int = 1) -> None:
        """The new tokens of one layer: k and v [sequences, tokens, num_kv_heads, head_dim] of config.dtype. `significance` float32 [sequences,
        num_kv_heads, tokens or more] of tierkv.significance(), or the queries q [sequences, tokens, num_q_heads, head_dim], every query_stride-th."""
        ids, count = _ids(sequences)
        c = self.config
        keys = self._given(k, "k", (c.dtype,), (count, None, c.num_kv_heads, c.head_dim))
        vals = self._given(v, "v", (c.dtype,), keys.shape)
        tokens = keys.shape[1]
        scores = self._given(significance, "significance", ("float32",), (count, c.num_kv_heads, None))
        queries = self._given(q, "q", (c.dtype,), (count, tokens, c.num_q_heads, c.head_dim))
        self._call("tkv_kv_append", lib.KvAppendCall(
            sequences=ids, num_sequences=count, layer=layer, tokens=tokens, k=keys.address, v=vals.address, significance=scores.address,
            stride=scores.shape[2] if scores.shape else 0, q=queries.address,
            query_stride=lib.integer(query_stride, "query_stride")))

    def attend(self, sequences: Ids, layer: int, q: ArrayLike, *, probabilities: bool = False, count_query: bool = False,
               sinks: Optional[ArrayLike] = None) -> Attention:
        """Attention of the newest tokens' queries q, float16 or bfloat16 [sequences, q_len, num_q_heads, head_dim], oldest first, over all that
        the layer holds, each over the tokens up to its own. `count_query`: what they saw counts as importance. `sinks`: learned sinks of the
        layer, float32 [num_q_heads]."""
        numbers = _numbers(sequences)
        ids, count = _ids(numbers)
        c = self.config
        queries = self._given(q, "q", ("float16", "bfloat16"), (count, None, c.num_q_heads, c.head_dim))
        learned = self._given(sinks, "sinks", ("float32",), (c.num_q_heads,))
        q_len = queries.shape[1]
        found: Optional[Tuple[int, ...]] = None
        if probabilities:
            found = (q_len, count, c.num_kv_heads, max((self.num_tokens(id) for id in numbers), default=0))
        out, lse = self._made(queries.dtype, queries.shape), self._made("float32", queries.shape[:-1])
        seen = None if found is None else self._made("float32", found)
        self._call("tkv_kv_attend", lib.KvAttendCall(
            sequences=ids, num_sequences=count, layer=layer, q_len=q_len, dtype=DTYPES[queries.dtype], q=queries.address,
            out=self._address(out), lse=self._address(lse), probabilities=None if seen is None else self._address(seen),
            stride=0 if found is None else found[3], sinks=learned.address, count_query=count_query))
        if self.is_on_device:
            return Attention(out, lse, seen)
        return Attention(_as(out, queries.dtype, q), like(lse, q), None if seen is None else like(seen, q))

    def decode_range(self, sequence: int, layer: int, first: int, end: int, *, dtype: str = "float16") -> Tuple[Any, Any]:
        """Keys (after RoPE) and values of positions [first, end), each [tokens, num_kv_heads, head_dim]; of a host store with "bfloat16" its bits
        as uint16."""
        c = self.config
        if dtype not in ("float16", "bfloat16"):
            raise InvalidArgumentError(f"dtype {dtype!r} is not float16 or bfloat16")
        if not 0 <= first <= end <= c.max_tokens:
            raise OutOfRangeError(f"positions {first} to {end} are not within max_tokens {c.max_tokens}")
        shape = (end - first, c.num_kv_heads, c.head_dim)
        k, v = self._made(dtype, shape), self._made(dtype, shape)
        self._call("tkv_kv_decode_range", lib.KvRange(sequence=_id(sequence).value, layer=layer, first=first, end=end, dtype=DTYPES[dtype],
                                                      k=self._address(k), v=self._address(v)))
        return k, v

    def note_replay(self, sequences: Ids, tokens: int = 1) -> None:
        """Device store: the step of `tokens` tokens that a CUDA graph has captured runs once more. OutOfPagesError where its worst case does
        not fit."""
        self._call("tkv_kv_note_replay", *_ids(sequences), lib.integer(tokens, "tokens"))

    def take_status(self) -> None:
        """Device store: waits, and raises the first failure that kernels have found since the last call."""
        self._call("tkv_kv_take_status")

    def fork(self, source: int) -> int:
        """A copy that shares full pages."""
        return self._number("tkv_kv_fork", _id(source))

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets all tokens from position `tokens` on; what stays keeps its precision."""
        self._call("tkv_kv_truncate", _id(sequence), lib.integer(tokens, "tokens"))

    def release(self, sequence: int) -> None:
        self._call("tkv_kv_release", _id(sequence))

    def num_tokens(self, sequence: int) -> int:
        tokens = ctypes.c_int32()
        self._call("tkv_kv_num_tokens", _id(sequence), tokens)
        return tokens.value

    def bytes_held(self, sequence: int) -> int:
        """Pages, shared ones included, and what the sequence takes beside them."""
        held = ctypes.c_int64()
        self._call("tkv_kv_bytes_held", _id(sequence), held)
        return held.value

    def usage(self) -> StoreUsage:
        u = lib.KvUsage()
        self._call("tkv_kv_get_usage", u)
        return StoreUsage(*(getattr(u, name) for name, *_ in u._fields_[1:]))

    def export_sequence(self, sequence: int, out: Optional[ArrayLike] = None) -> Union[bytes, int]:
        """A sequence as bytes, for any store of the same layout, format and profile; capacities may differ.

        `out`: a writable array or CPU tensor of uint8 that takes them, whose bytes are counted in the result; BufferTooSmallError where it has too few. A store on a GPU
        writes to pinned memory (torch.empty(..., pin_memory=True)) directly, to other memory by a copy."""
        buffer = lib.Buffer()
        if out is not None:
            to = byte_memory(out, "out")
            if not to.flags.writeable:
                raise InvalidArgumentError("out: not writable")
            buffer.data, buffer.capacity = pointer(to), to.size
            with self._lock:
                lib.core().call("tkv_kv_export_sequence", self._open(), _id(sequence), buffer)
            return int(buffer.size)
        # Nearly always enough, so that the store makes the bytes once.
        size = self.bytes_held(sequence) + (1 << 20)
        with self._lock:
            while True:
                new: Array = np.empty(size, np.uint8)
                buffer.data, buffer.capacity = pointer(new), new.size
                try:
                    lib.core().call("tkv_kv_export_sequence", self._open(), _id(sequence), buffer)
                    return new[:buffer.size].tobytes()
                except BufferTooSmallError:
                    size = buffer.size

    def import_sequence(self, data: Union[bytes, bytearray, memoryview, ArrayLike]) -> int:
        """The sequence that export_sequence() wrote: bytes, or an array or CPU tensor of uint8. CorruptError, VersionError; InvalidArgumentError for another config;
        OutOfPagesError."""
        array = byte_memory(data, "data")
        return self._number("tkv_kv_import_sequence", pointer(array), array.size)

    def close(self) -> None:
        """Frees all memory."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                lib.core().dll.tkv_kv_destroy(handle)

    def __enter__(self) -> "KvStore":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def __repr__(self) -> str:
        c = self.config
        where = "host" if self._stream is None else f"device, stream {self._stream:#x}"
        return f"<tierkv.KvStore on {where}: {c.num_layers} layers, {c.num_kv_heads} kv heads, {type(c.format).__name__}, {c.memory_bytes} bytes>"

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise InvalidArgumentError("the store is closed")
        return self._handle

    def _call(self, function: str, *arguments: Any) -> None:
        with self._lock:
            lib.core().call(function, self._open(), *arguments)

    def _number(self, function: str, *arguments: Any) -> int:
        id = ctypes.c_uint64()
        self._call(function, *arguments, id)
        return id.value

    @property
    def is_on_device(self) -> bool:
        return self._stream is not None

    @property
    def stream(self) -> Optional[int]:
        """As a number; None: a store in host memory."""
        return self._stream

    def _given(self, x: Optional[ArrayLike], name: str, dtypes: Sequence[str], shape: "Sequence[Union[int, None]]") -> _Given:
        if x is None:
            return _Given(None, (), "", None)
        if self._stream is not None:
            a = _device.device_array(x, name, dtypes, shape, self._stream)
            return _Given(a.address, a.shape, a.dtype, a.owner)
        v = values(x, name, shape)
        if v.dtype not in dtypes:
            raise ArgumentTypeError(f"{name}: dtype {v.dtype} instead of {' or '.join(dtypes)}")
        return _Given(pointer(v.bits), v.bits.shape, v.dtype, v.bits)

    def _made(self, dtype: str, shape: Tuple[int, ...]) -> Any:
        """For results; of a host store zeros, bfloat16 as uint16."""
        if not self.is_on_device:
            return np.zeros(shape, np.uint16 if dtype == "bfloat16" else dtype)
        torch = sys.modules.get("torch")
        if torch is None:
            raise ArgumentTypeError("results of a store on a device are PyTorch's tensors")
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")

    def _address(self, x: Any) -> Any:
        return x.data_ptr() if self.is_on_device else pointer(x)


def _as(bits: Array, dtype: str, queries: ArrayLike) -> Any:
    """Results in the type of the queries: bfloat16 is torch's or ml_dtypes'."""
    if dtype != "bfloat16":
        return like(bits, queries)
    if not is_tensor(queries):
        return bits.view(queries.dtype)
    return like(bits.view(np.int16), queries).view(sys.modules["torch"].bfloat16)


def _id(sequence: int) -> ctypes.c_uint64:
    if not 0 <= sequence < 1 << 64:
        raise StaleSequenceError(f"sequence {sequence} is not open")
    return ctypes.c_uint64(sequence)


def _numbers(sequences: Ids) -> List[int]:
    """The ids as a list: what they came in may be an iterator, which gives them once."""
    return [int(sequences)] if isinstance(sequences, (int, np.integer)) else list(sequences)


def _ids(sequences: Ids) -> Tuple[Any, int]:
    numbers = _numbers(sequences)
    return (ctypes.c_uint64 * len(numbers))(*(_id(n) for n in numbers)), len(numbers)
