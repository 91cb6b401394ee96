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

import contextlib
import ctypes
import dataclasses
import operator
import sys
import threading
from dataclasses import dataclass
from typing import Any, ContextManager, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union, overload

import numpy as np

from . import _device
from . import _library as lib
from ._arrays import DTYPES, Array, ArrayLike, Bytes, byte_memory, is_tensor, like, pointer, values
from .errors import ArgumentTypeError, BufferTooSmallError, InvalidArgumentError, OutOfRangeError, StaleSequenceError
from .kv_config import PRESETS, BodyFormat, ChannelFormat, CodedFormat, StoreConfig, TierClass, TierFormat, TiersFormat, preset

__all__ = [
    "Attention", "BodyFormat", "ChannelFormat", "CodedFormat", "Ids", "KvStore", "PRESETS", "StoreConfig", "StoreUsage", "TierClass",
    "TierFormat", "TiersFormat", "preset",
]

Ids = Union[int, Iterable[int]]
_NOTHING: ContextManager[object] = contextlib.nullcontext()


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


class KvStore(lib.Owner):
    """A store in host memory, or with a stream in GPU memory. Calls exclude each other by a lock.

    Arrays of a host store are NumPy's, or PyTorch's tensors in CPU memory; attend() answers in the kind of its queries. Those of a device
    store are PyTorch's tensors on its GPU, dense and aligned to 16 bytes; keep them until the stream has come to them. Sequences are named by the numbers that add_sequence(), fork() and import_sequence()
    return, one or a list of them. A released number raises StaleSequenceError. After OutOfPagesError nothing has changed: release other
    sequences and repeat the call.
    """

    _name, _destroy = "store", "tkv_kv_destroy"

    def __init__(self, config: StoreConfig, stream: Any = None) -> None:
        """OutOfMemoryError where there is not as much as memory_bytes. `stream`: a cudaStream_t as a number (0: the default stream) or a
        torch.cuda.Stream, which outlives the store: then it lies on the GPU of that stream (of a number: on the GPU that is current) and does its
        work there, whichever is current later. UnsupportedError where the library was built without CUDA."""
        self.config = config.with_memory()
        self._lock = threading.Lock()
        self._stream: Optional[int] = None
        self._index: Optional[int] = None  # of the GPU, where torch is there to make it current
        if stream is None:
            self._handle = self._create()
            return
        self._stream = lib.integer(getattr(stream, "cuda_stream", stream), "stream", ctypes.c_size_t)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            index = getattr(getattr(stream, "device", None), "index", None)
            self._index = torch.cuda.current_device() if index is None else index
        if config.memory_bytes:
            self._handle = self._create()
        else:
            self._create_with_workspaces()

    def _create(self) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if self._stream is None:
            lib.core().call("tkv_kv_create", self.config._struct(), handle)
        else:
            with self._current():
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
        """The new tokens of one layer: k and v [sequences, tokens, num_kv_heads, head_dim] of config.dtype, for a host store bfloat16 also as
        uint16. `significance` float32 [sequences, num_kv_heads, tokens or more] of tierkv.significance(), or the queries q [sequences, tokens,
        num_q_heads, head_dim], every query_stride-th."""
        ids, count = _ids(sequences)
        c = self.config
        _need(k=k, v=v)
        keys = self._given(k, "k", (c.dtype,), (count, None, c.num_kv_heads, c.head_dim))
        vals = self._given(v, "v", (c.dtype,), keys.shape)
        tokens = keys.shape[1]
        scores = self._given(significance, "significance", ("float32",), (count, c.num_kv_heads, None))
        queries = self._given(q, "q", (c.dtype,), (count, tokens, c.num_q_heads, c.head_dim))
        self._call("tkv_kv_append", lib.KvAppendCall(
            sequences=ids, num_sequences=count, layer=layer, tokens=tokens, k=keys.address, v=vals.address, significance=scores.address,
            stride=scores.shape[2] if scores.shape else 0, q=queries.address,
            query_stride=lib.integer(query_stride, "query_stride") or -1))  # the C ABI takes 0 for 1

    def attend(self, sequences: Ids, layer: int, q: ArrayLike, *, probabilities: bool = False, count_query: bool = False,
               sinks: Optional[ArrayLike] = None) -> Attention:
        """Attention of the newest tokens' queries q, float16 or bfloat16 [sequences, q_len, num_q_heads, head_dim], oldest first, over all that
        the layer holds, each over the tokens up to its own. `count_query`: what they saw counts as importance. `sinks`: learned sinks of the
        layer, float32 [num_q_heads]."""
        _need(q=q)
        numbers = _numbers(sequences)
        ids, count = _ids(numbers)
        c = self.config
        queries = self._given(q, "q", ("float16", "bfloat16"), (count, None, c.num_q_heads, c.head_dim))
        learned = self._given(sinks, "sinks", ("float32",), (c.num_q_heads,))
        q_len = queries.shape[1]
        if q_len == 0:  # the C ABI takes it for 1
            raise InvalidArgumentError("q: it has no query")
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
        first, end = lib.integer(first, "first"), lib.integer(end, "end")
        if not 0 <= first <= end <= c.max_tokens:
            raise OutOfRangeError(f"positions {first} to {end} are not within max_tokens {c.max_tokens}")
        shape = (end - first, c.num_kv_heads, c.head_dim)
        k, v = self._made(dtype, shape), self._made(dtype, shape)
        self._call("tkv_kv_decode_range", lib.KvRange(sequence=_id(sequence).value, layer=layer, first=first, end=end, dtype=DTYPES[dtype],
                                                      k=self._address(k), v=self._address(v)))
        return k, v

    def note_replay(self, sequences: Ids, tokens: int = 1) -> None:
        """Device store: the step of `tokens` tokens that a CUDA graph has captured runs once more, for these sequences: as many as were
        captured, these or others. OutOfPagesError where its worst case does not fit."""
        self._call("tkv_kv_note_replay", *_ids(sequences), lib.integer(tokens, "tokens"))

    def take_status(self) -> None:
        """Device store: waits, and raises the first failure that kernels have found since the last call."""
        self._call("tkv_kv_take_status")

    def fork(self, source: int) -> int:
        """A copy that shares full pages."""
        return self._number("tkv_kv_fork", _id(source))

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets all tokens from position `tokens` on; what stays keeps its precision. OutOfPagesError where it cuts a page that another
        sequence shares."""
        self._call("tkv_kv_truncate", _id(sequence), lib.integer(tokens, "tokens"))

    def release(self, sequence: int) -> None:
        """Ends a sequence. Its number names none from then on, and pages that no other sequence shares are free."""
        self._call("tkv_kv_release", _id(sequence))

    def num_tokens(self, sequence: int) -> int:
        """Tokens of a sequence, with those that begin() has just announced."""
        tokens = ctypes.c_int32()
        self._call("tkv_kv_num_tokens", _id(sequence), tokens)
        return tokens.value

    def free_pages(self) -> int:
        """Pages that are free for sure once every call has run: for the admission of requests. Waits for nothing."""
        pages = ctypes.c_int64()
        self._call("tkv_kv_free_pages", pages)
        return pages.value

    def bytes_held(self, sequence: int) -> int:
        """Pages, shared ones included, and what the sequence takes beside them. Waits for a GPU."""
        held = ctypes.c_int64()
        self._call("tkv_kv_bytes_held", _id(sequence), held)
        return held.value

    def usage(self) -> StoreUsage:
        """What the store holds now. Waits for a GPU."""
        u = lib.KvUsage()
        self._call("tkv_kv_get_usage", u)
        return StoreUsage(*(getattr(u, name) for name, *_ in u._fields_[1:]))

    @overload
    def export_sequence(self, sequence: int) -> bytes: ...

    @overload
    def export_sequence(self, sequence: int, out: ArrayLike) -> int: ...

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
            with self._lock, self._current():
                lib.core().call("tkv_kv_export_sequence", self._open(), _id(sequence), buffer)
            return int(buffer.size)
        # Nearly always enough, so that the store makes the bytes once.
        size = self.bytes_held(sequence) + (1 << 20)
        with self._lock, self._current():
            while True:
                new: Array = np.empty(size, np.uint8)
                buffer.data, buffer.capacity = pointer(new), new.size
                try:
                    lib.core().call("tkv_kv_export_sequence", self._open(), _id(sequence), buffer)
                    return new[:buffer.size].tobytes()
                except BufferTooSmallError:
                    size = buffer.size

    def import_sequence(self, data: Bytes) -> int:
        """The sequence that export_sequence() wrote: bytes, or an array or CPU tensor of uint8. CorruptError, VersionError; InvalidArgumentError for bytes of
        another kind or config; OutOfRangeError where max_sequences are open or it is longer than max_tokens; OutOfPagesError."""
        array = byte_memory(data, "data")
        return self._number("tkv_kv_import_sequence", pointer(array), array.size)

    def close(self) -> None:
        """Frees all memory."""
        with self._lock, self._current():
            super().close()

    def __repr__(self) -> str:
        c = self.config
        where = "host" if self._stream is None else f"device, stream {self._stream:#x}"
        return f"<tierkv.KvStore on {where}: {c.num_layers} layers, {c.num_kv_heads} kv heads, {type(c.format).__name__}, {c.memory_bytes} bytes>"

    def _call(self, function: str, *arguments: Any) -> None:
        with self._lock, self._current():
            lib.core().call(function, self._open(), *arguments)

    def _current(self) -> ContextManager[object]:
        """The store's GPU is the current one inside."""
        if self._index is None:
            return _NOTHING
        context: ContextManager[object] = sys.modules["torch"].cuda.device(self._index)
        return context

    def _number(self, function: str, *arguments: Any) -> int:
        id = ctypes.c_uint64()
        self._call(function, *arguments, id)
        return id.value

    @property
    def is_on_device(self) -> bool:
        """Whether the store lies in GPU memory."""
        return self._stream is not None

    @property
    def stream(self) -> Optional[int]:
        """As a number; None: a store in host memory."""
        return self._stream

    def _given(self, x: Optional[ArrayLike], name: str, dtypes: Sequence[str], shape: "Sequence[Union[int, None]]") -> _Given:
        if x is None:
            return _Given(None, (), "", None)
        if self._stream is not None:
            with self._current():  # where torch may ask for the tensor's stream
                a = _device.device_array(x, name, dtypes, shape, self._stream, index=self._index)
            return _Given(a.address, a.shape, a.dtype, a.owner)
        v = values(x, name, shape, dtypes)
        return _Given(pointer(v.bits), v.bits.shape, v.dtype, v.bits)

    def _made(self, dtype: str, shape: Tuple[int, ...]) -> Any:
        """For results; of a host store zeros, bfloat16 as uint16."""
        if not self.is_on_device:
            return np.zeros(shape, np.uint16 if dtype == "bfloat16" else dtype)
        torch = sys.modules.get("torch")
        if torch is None:
            raise ArgumentTypeError("results of a store on a device are PyTorch's tensors")
        device = torch.device("cuda", torch.cuda.current_device() if self._index is None else self._index)
        current = torch.cuda.current_stream(device)
        if current.cuda_stream == self._stream:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        # Memory that the other stream's work has left must not be written by this one's.
        # ExternalStream(0) is not the default stream, but a new one.
        stream = torch.cuda.ExternalStream(self._stream, device=device) if self._stream else torch.cuda.default_stream(device)
        with torch.cuda.stream(stream):
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        made.record_stream(current)
        return made

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
    try:
        sequence = operator.index(sequence)
    except TypeError:
        raise ArgumentTypeError(f"sequence {sequence!r} is not a number") from None
    if not 0 <= sequence < 1 << 64:
        raise StaleSequenceError(f"sequence {sequence} is not open")
    return ctypes.c_uint64(sequence)


def _numbers(sequences: Ids) -> List[int]:
    """The ids as a list: what they came in may be an iterator, which gives them once."""
    if isinstance(sequences, (int, np.integer)):
        return [int(sequences)]
    try:
        return list(sequences)
    except TypeError:
        raise ArgumentTypeError(f"sequences: {sequences!r} is neither a number nor a list of them") from None


def _need(**arrays: Any) -> None:
    for name, x in arrays.items():
        if x is None:
            raise ArgumentTypeError(f"{name} is None")


def _ids(sequences: Ids) -> Tuple[Any, int]:
    numbers = _numbers(sequences)
    return (ctypes.c_uint64 * len(numbers))(*(_id(n) for n in numbers)), len(numbers)
