"""The store: the compressed cache of many sequences, from the tokens of a prompt to attention, on the host or a GPU.

    config = StoreConfig(num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128, num_pages=40000, max_sequences=64, max_tokens=8192)
    with Store(config) as store:                    # NumPy; Store.on_device(config, stream) for tensors in GPU memory
        id = store.add_sequence()
        store.begin_prompt(id, n)
        for layer in range(32):
            store.append(id, layer, k, v)           # [1, n, 8, 128]
            store.score_prompt(id, layer, significance)
        store.end_prompt(id)                        # tiers, pages
        store.begin_step(id)
        for layer in range(32):
            store.append(id, layer, k, v)           # [1, 1, 8, 128]
            seen = store.attend(id, layer, q, probabilities=True)
            store.update_scores(id, layer, seen.probabilities)

include/tierkv/store.h says what each call does, in which order they may come, and what each refuses.
"""
from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

import numpy as np

from . import _device
from . import _library as lib
from ._arrays import DTYPES, Array, ArrayLike, pointer, shaped, values
from .errors import BufferTooSmallError, StaleSequenceError
from .store_config import StoreConfig

Ids = Union[int, Sequence[int]]


@dataclass(frozen=True)
class StoreStats:
    """Counts over all rows (sequence, layer, kv_head)."""

    window_tokens: int  # sinks among them
    high_tokens: int
    low_tokens: int
    pruned_tokens: int
    sequences: int
    pages: int
    pages_free: int
    pages_shared: int
    page_bytes: int
    raw_bytes: int  # the same tokens, pruned ones included, as 16-bit values
    nominal_bytes: int  # codes, metadata, scores and positions of the tokens kept

    @property
    def nominal_ratio(self) -> float:
        return self.raw_bytes / self.nominal_bytes if self.nominal_bytes else 0.0

    @property
    def pool_gain(self) -> float:
        held = (self.pages - self.pages_free) * self.page_bytes
        return self.raw_bytes / held if held else 0.0


class Attention(NamedTuple):
    """What attend() found; NumPy arrays of a host store, the tensors of a device store."""

    out: Any  # like q
    lse: Any = None  # float32, q's shape without head_dim, natural logarithm
    # float32 [sequences, num_kv_heads, stride], by position: the largest of the group's heads; of several queries a sequence
    # [q_len, sequences, num_kv_heads, stride]. Of a host store zeros follow the tokens of a sequence, of a device store whatever was
    # there.
    probabilities: Any = None


class _Argument(NamedTuple):
    address: Optional[int]
    shape: Tuple[int, ...]
    dtype: str
    owner: object


class Store:
    """A store in host memory, or, from on_device(), in GPU memory. Calls exclude each other by a lock.

    Arrays of a host store are NumPy's or whatever NumPy can share. Those of a device store are tensors in memory of its GPU, dense,
    read and written in place on the store's stream: keep them until that work is done, and let other streams wait for it. Sequences
    are named by the numbers that add_sequence(), fork() and import_sequence() return, one or a list of them; lists and counts are
    the host's. A released number raises StaleSequenceError.
    """

    def __init__(self, config: StoreConfig) -> None:
        """On the host. OutOfMemoryError where there is no memory for the pool."""
        handle = ctypes.c_void_p()
        lib.core().call("tkv_store_create", config._struct(), handle)
        self._set_up(config, handle, None)

    @classmethod
    def on_device(cls, config: StoreConfig, stream: Any) -> "Store":
        """On the GPU that is current, all work on `stream`: a cudaStream_t as a number (0: the default stream) or a
        torch.cuda.Stream, which must outlive the store. UnsupportedError where the library was built without CUDA."""
        number = int(getattr(stream, "cuda_stream", stream))
        handle = ctypes.c_void_p()
        lib.core().call("tkv_store_create_device", config._struct(), number, handle)
        store = cls.__new__(cls)
        store._set_up(config, handle, number)
        return store

    def _set_up(self, config: StoreConfig, handle: ctypes.c_void_p, stream: Optional[int]) -> None:
        self.config = config
        self._handle: Optional[ctypes.c_void_p] = handle
        self._stream = stream
        self._lock = threading.Lock()
        # Of counted queries on a device; all are kept, because captured graphs write to them.
        self._scratch: List[_Argument] = []
        info = lib.StoreInfoStruct()
        lib.core().call("tkv_store_get_info", handle, info)
        self.page_bytes: int = info.page_bytes

    @property
    def is_on_device(self) -> bool:
        return self._stream is not None

    def add_sequence(self) -> int:
        """An empty sequence, in its prompt. OutOfRangeError when max_sequences are open."""
        id = ctypes.c_uint64()
        self._call("tkv_store_add_sequence", id)
        return id.value

    def begin_prompt(self, sequences: Ids, tokens: int) -> None:
        """Room for `tokens` more tokens of each sequence, all of them in their prompts. OutOfPagesError."""
        self._call("tkv_store_begin_prompt", *_ids(sequences), tokens)

    def append(self, sequences: Ids, layer: int, k: ArrayLike, v: ArrayLike) -> None:
        """The newest tokens of one layer: k and v [sequences, tokens, num_kv_heads, head_dim] of config.dtype."""
        ids, count = _ids(sequences)
        shape = (count, None, self.config.num_kv_heads, self.config.head_dim)
        keys = self._input(k, "k", (self.config.dtype,), shape)
        vals = self._input(v, "v", (self.config.dtype,), keys.shape)
        self._call("tkv_store_append", lib.AppendCall(sequences=ids, num_sequences=count, layer=layer, tokens=keys.shape[1],
                                                      k=keys.address, v=vals.address))

    def score_prompt(self, sequences: Ids, layer: int, significance: ArrayLike) -> None:
        """Significances of the prompt so far, of one layer: float32 [sequences, num_kv_heads, stride], by position, where stride is at
        least the tokens of the longest sequence. Tokens without any are neutral: theirs is 1 / i, i counted from 1, which alpha_high <= 1
        puts into the high tier."""
        ids, count = _ids(sequences)
        x = self._input(significance, "significance", ("float32",), (count, self.config.num_kv_heads, None))
        self._call("tkv_store_score_prompt", lib.PromptScores(sequences=ids, num_sequences=count, layer=layer,
                                                              significance=x.address, stride=x.shape[2]))

    def end_prompt(self, sequences: Ids) -> None:
        """The prompt phase: tiers, pages, moves, surplus returned. OutOfPagesError: the prompts stay as they were."""
        self._call("tkv_store_end_prompt", *_ids(sequences))

    def begin_step(self, sequences: Ids, tokens: int = 1) -> None:
        """A step of 1 to 8 tokens for each sequence: compacts all layers and makes room. OutOfPagesError."""
        self._call("tkv_store_begin_step", *_ids(sequences), tokens)

    def attend(self, sequences: Ids, layer: int, q: ArrayLike, probabilities: bool = False, into: Optional[Attention] = None,
               count_query: bool = False, sinks: Optional[ArrayLike] = None) -> Attention:
        """Attention of the newest token's queries q, float16 or bfloat16 [sequences, num_q_heads, head_dim], over all that the layer
        holds; of the 1 to 8 newest tokens' with [sequences, q_len, num_q_heads, head_dim], oldest first, each over the tokens up to its
        own. A sequence must have q_len tokens, and all but the oldest of these in its window, as what was appended since the last
        truncate() is. Raw tiers want q in the dtype of their pages, coded and channel-wise pages take either; a store with a basis takes
        bfloat16 where its keys are. `sinks`, float32 [num_q_heads]: learned sinks of the layer, logits in the denominators without values.

        `probabilities` asks for what update_scores() takes, those of query j with back = q_len - 1 - j. `into` gives the arrays for the
        results, as a CUDA graph needs them; those that are None are not computed. `count_query` does what update_scores() would do with
        the probabilities, oldest query first; what it needs on a GPU is allocated with the first call for so many sequences and
        queries, which should come before any capture."""
        ids, count = _ids(sequences)
        per_query = (self.config.num_q_heads, self.config.head_dim)
        several = len(getattr(q, "shape", ())) == 4
        queries = self._input(q, "q", ("float16", "bfloat16"), (count, None, *per_query) if several else (count, *per_query))
        q_len = queries.shape[1] if several else 1
        if q_len == 0:
            raise ValueError("q: no queries")
        seen = (*((q_len,) if several else ()), count, self.config.num_kv_heads)
        extra = _NOTHING if sinks is None else self._input(sinks, "sinks", ("float32",), (self.config.num_q_heads,))
        if into is None:
            into = self._results(sequences, q, queries, seen if probabilities else None)
        out = self._output(into.out, "out", queries.dtype, queries.shape)
        lse = self._output(into.lse, "lse", "float32", queries.shape[:-1])
        p = self._output(into.probabilities, "probabilities", "float32", (*seen, None))
        scratch = self._count_scratch(q, count, q_len) if count_query else _NOTHING
        self._call("tkv_store_attend", lib.AttendRequest(
            sequences=ids, num_sequences=count, layer=layer, q=queries.address, out=out.address, lse=lse.address,
            probabilities=p.address, stride=p.shape[-1] if p.shape else 0, dtype=DTYPES[queries.dtype], count_query=count_query,
            scratch=scratch.address, scratch_bytes=4 * scratch.shape[0] if scratch.shape else 0,
            q_len=q_len, sinks=extra.address))
        return into

    def update_scores(self, sequences: Ids, layer: int, probabilities: ArrayLike, back: int = 0) -> None:
        """Feeds the running means with what one query saw: float32 [sequences, num_kv_heads, stride]; `back`: the query was that of the
        newest token but so many."""
        ids, count = _ids(sequences)
        x = self._input(probabilities, "probabilities", ("float32",), (count, self.config.num_kv_heads, None))
        self._call("tkv_store_update_scores", lib.ScoreUpdate(sequences=ids, num_sequences=count, layer=layer, back=back,
                                                              probabilities=x.address, stride=x.shape[2]))

    def fork(self, source: int) -> int:
        """A copy that shares full pages of the high and low tiers."""
        id = ctypes.c_uint64()
        self._call("tkv_store_fork", _id(source), id)
        return id.value

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets all tokens from position `tokens` on; what stays keeps its precision."""
        self._call("tkv_store_truncate", _id(sequence), tokens)

    def release(self, sequence: int) -> None:
        self._call("tkv_store_release", _id(sequence))

    def num_tokens(self, sequence: int) -> int:
        """Tokens so far, pruned ones included."""
        n = ctypes.c_int32()
        self._call("tkv_store_num_tokens", _id(sequence), n)
        return n.value

    def stats(self) -> StoreStats:
        s = lib.StoreStatsStruct()
        self._call("tkv_store_get_stats", s)
        return StoreStats(*(getattr(s, name) for name, *_ in s._fields_[1:]))

    def export_sequence(self, sequence: int) -> bytes:
        """A sequence past its prompt as bytes, for any store of the same layout, formats, window and sinks."""
        return self._bytes("tkv_store_export_sequence", _id(sequence))

    def _bytes(self, function: str, *arguments: object) -> bytes:
        buffer = lib.Buffer()
        with self._lock:
            try:
                lib.core().call(function, self._open(), *arguments, buffer)
            except BufferTooSmallError:
                pass
            out: Array = np.empty(buffer.size, np.uint8)
            buffer.data, buffer.capacity = pointer(out), out.size
            lib.core().call(function, self._open(), *arguments, buffer)
        return out.tobytes()

    def save_sequence(self, sequence: int, *, entropy_coded: bool = False, threads: int = 0) -> bytes:
        """The cold tier: a sequence past its prompt as the bytes of a `.tkv` container, page by page, to be kept in memory or in a file.
        `entropy_coded`: the codes of tiered pages are, which saves a few percent; threads 0: all cores."""
        return self._bytes("tkv_store_save_sequence", _id(sequence), int(entropy_coded), threads)

    def load_sequence(self, data: bytes, *, threads: int = 0) -> int:
        """The sequence that save_sequence() wrote, in the same state. CorruptError, VersionError; InvalidArgumentError for another config."""
        id = ctypes.c_uint64()
        self._call("tkv_store_load_sequence", data, len(data), threads, id)
        return id.value

    def import_sequence(self, data: bytes) -> int:
        """The sequence that export_sequence() wrote. CorruptError, VersionError; InvalidArgumentError for another config."""
        id = ctypes.c_uint64()
        self._call("tkv_store_import_sequence", data, len(data), id)
        return id.value

    def take_status(self) -> None:
        """Device store: waits for the stream, and raises the first failure that the device found since the last call. From such a
        failure on nothing that was enqueued is done."""
        self._call("tkv_store_take_status")

    def note_replay(self, sequences: Ids, tokens: int = 1) -> None:
        """Device store: a captured step was replayed once more."""
        self._call("tkv_store_note_replay", *_ids(sequences), tokens)

    def close(self) -> None:
        """Frees all memory; waits for the stream of a device store."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                lib.core().dll.tkv_store_destroy(handle)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def __repr__(self) -> str:
        c = self.config
        where = "host" if self._stream is None else f"device, stream {self._stream:#x}"
        return (f"<tierkv.Store on {where}: {c.num_layers} layers, {c.num_kv_heads} kv heads, {c.num_pages} pages of "
                f"{self.page_bytes} bytes>")

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError("the store is closed")
        return self._handle

    def _call(self, function: str, *arguments: Any) -> None:
        with self._lock:
            lib.core().call(function, self._open(), *arguments)

    def _input(self, x: ArrayLike, name: str, dtypes: Sequence[str], shape: "Sequence[Union[int, None]]") -> _Argument:
        if self._stream is not None:
            a = _device.device_array(x, name, dtypes, shape, self._stream)
            return _Argument(a.address, a.shape, a.dtype, a.owner)
        v = values(x, name, shape)
        if v.dtype not in dtypes:
            raise TypeError(f"{name}: dtype {v.dtype} instead of {' or '.join(dtypes)}")
        return _Argument(pointer(v.bits), v.bits.shape, v.dtype, v.bits)

    def _output(self, x: Any, name: str, dtype: str, shape: "Sequence[Union[int, None]]") -> _Argument:
        if x is None:
            return _NOTHING
        if self._stream is not None:
            return self._input(x, name, (dtype,), shape)
        if not isinstance(x, np.ndarray) or not x.flags.c_contiguous or not x.flags.writeable:
            raise TypeError(f"{name}: not a writable contiguous NumPy array")
        if x.dtype.name != dtype:
            raise TypeError(f"{name}: dtype {x.dtype} instead of {dtype}")
        shaped(x, shape, name)
        return _Argument(pointer(x), x.shape, dtype, x)

    def _results(self, sequences: Ids, q: ArrayLike, queries: _Argument, seen: Optional[Tuple[int, ...]]) -> Attention:
        """`seen`: the shape of the probabilities without their stride."""
        ids: List[int] = [sequences] if isinstance(sequences, int) else list(sequences)
        shape = queries.shape
        if seen is not None:
            seen = (*seen, max((self.num_tokens(id) for id in ids), default=0))
        if self._stream is not None:
            return Attention(_device.empty(q, queries.dtype, shape), _device.empty(q, "float32", shape[:-1]),
                             None if seen is None else _device.empty(q, "float32", seen))
        if queries.dtype == "bfloat16" and not isinstance(q, np.ndarray):
            raise TypeError("results in bfloat16 must be given with `into`: NumPy has no such type of its own")
        out: Array = np.empty(shape, q.dtype if queries.dtype == "bfloat16" else np.float16)
        return Attention(out, np.empty(shape[:-1], np.float32), None if seen is None else np.zeros(seen, np.float32))

    def _count_scratch(self, q: Any, count: int, q_len: int) -> _Argument:
        if self._stream is None:
            return _NOTHING
        size = ctypes.c_size_t()
        lib.core().call("tkv_store_count_scratch_bytes", self._open(), count, self.config.max_tokens, q_len, size)
        needed = -(-size.value // 4)
        if not self._scratch or self._scratch[-1].shape[0] < needed:
            self._scratch.append(self._input(_device.empty(q, "float32", (needed,)), "scratch", ("float32",), (needed,)))
        return self._scratch[-1]


_NOTHING = _Argument(None, (), "", None)


def _id(sequence: int) -> ctypes.c_uint64:
    if not 0 <= sequence < 1 << 64:
        raise StaleSequenceError(f"sequence {sequence} is not open")
    return ctypes.c_uint64(sequence)


def _ids(sequences: Ids) -> Tuple[Any, int]:
    numbers = [sequences] if isinstance(sequences, int) else list(sequences)
    return (ctypes.c_uint64 * len(numbers))(*(_id(n) for n in numbers)), len(numbers)
