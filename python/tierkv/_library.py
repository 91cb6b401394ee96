# SPDX-License-Identifier: Apache-2.0
"""The C ABI: structs of tierkv_c.h, tierkv_attention_c.h, tierkv_kv_c.h and tierkv_dumps_c.h, and calls that raise.

Structs repeat the headers' fields in their order; tests/python compares sizes and offsets with the compiler's.
"""
from __future__ import annotations

import ctypes
import functools
import operator
import os
import pathlib
import threading
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, Dict, List, Optional, Tuple, TypeVar, Union

from .errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError, error_of

Path = Union[str, "os.PathLike[str]"]


# What ctypes would cut to its low bits without a word.
_LIMITS: Dict[Any, Tuple[int, int]] = {c_int32: (-2**31, 2**31 - 1), c_int64: (-2**63, 2**63 - 1), c_size_t: (0, 2**64 - 1)}


def integer(value: Any, name: str, kind: Any = c_int32) -> int:
    """`value`, which must be an integer that `kind` holds; InvalidArgumentError, TypeError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: {value!r} is not an integer") from None
    low, high = _LIMITS[kind]
    if not low <= number <= high:
        raise InvalidArgumentError(f"{name}: {number} is not in {low} to {high}")
    return number


def real(value: Any, name: str) -> float:
    """`value`, which must be a number; TypeError."""
    try:
        return float(operator.pos(value))  # a text has no sign
    except TypeError:
        raise ArgumentTypeError(f"{name}: {value!r} is not a number") from None


def text(value: Any, name: str) -> bytes:
    """`value`, a str, for C, where a null character would end it; InvalidArgumentError, TypeError."""
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name}: {value!r} is not a text")
    try:
        data = value.encode()
    except UnicodeEncodeError as e:
        raise InvalidArgumentError(f"{name}: {e}") from None
    if b"\0" in data:
        raise InvalidArgumentError(f"{name}: {value!r} has a null character")
    return data


def not_zero(values: Dict[str, Any]) -> None:
    """InvalidArgumentError for a 0 that the C ABI would take for a default."""
    for name, value in values.items():
        if value == 0:
            raise InvalidArgumentError(f"{name} is 0")


class Struct(ctypes.Structure):
    """A struct of the C ABI; its size is set when it is made. Its integers are checked."""

    def __init__(self, **fields: Any) -> None:
        for name, kind, *_ in self._fields_:
            if kind in _LIMITS and name in fields:
                fields[name] = integer(fields[name], name, kind)
            elif kind in (c_double, c_float) and name in fields:
                fields[name] = real(fields[name], name)
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)


class Error(Struct):
    _fields_ = [("struct_size", c_size_t), ("message", c_char * 504)]


class Buffer(Struct):
    _fields_ = [("struct_size", c_size_t), ("data", c_void_p), ("capacity", c_size_t), ("size", c_size_t)]


class PageFormatStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("head_dim", c_int32), ("k_bits", c_int32), ("v_bits", c_int32),
                ("k_group", c_int32), ("v_group", c_int32), ("page_bytes", c_int32), ("raw_dtype", c_int32)]


class PageChoiceStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("max_waste", c_double), ("min_tokens", c_int32), ("page_bytes", c_int32),
                ("worst_waste", c_double), ("within_limit", c_int32)]


class Tokens(Struct):
    _fields_ = [("struct_size", c_size_t), ("count", c_int32), ("dtype", c_int32), ("k", c_void_p), ("v", c_void_p),
                ("scores", c_void_p), ("positions", c_void_p)]


class Codes(Struct):
    _fields_ = [("struct_size", c_size_t), ("tokens", c_int64), ("head_dim", c_int32), ("bits", c_int32), ("group", c_int32),
                ("codes", c_void_p), ("scale", c_void_p), ("zero_point", c_void_p)]


class CodebookSpec(Struct):
    _fields_ = [("struct_size", c_size_t), ("component", c_int32), ("head_dim", c_int32), ("max_length", c_int32),
                ("streams_per_lane", c_int32)]


class BlockShape(Struct):
    _fields_ = [("struct_size", c_size_t), ("tokens", c_int32), ("head_dim", c_int32)]


class ContainerInfo(Struct):
    _fields_ = [("struct_size", c_size_t), ("file_bytes", c_int64), ("num_sequences", c_int32), ("num_layers", c_int32),
                ("num_q_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32), ("dtype", c_int32),
                ("rope_applied", c_int32), ("rope_theta", c_double), ("sm_scale", c_double), ("preset", c_char_p),
                ("model_id", c_char_p), ("created_by", c_char_p)]


class SequenceInfo(Struct):
    _fields_ = [("struct_size", c_size_t), ("num_tokens", c_int64), ("id", c_char_p), ("kind", c_char_p),
                ("tokens", POINTER(c_int32))]


class LayerStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("sequence", c_int32), ("layer", c_int32), ("threads", c_int32), ("k", c_void_p),
                ("v", c_void_p), ("pruned", c_void_p)]


class TierFormatStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("k_bits", c_int32), ("v_bits", c_int32), ("k_group", c_int32), ("v_group", c_int32)]


class ChannelConfigStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("k_bits", c_int32), ("v_bits", c_int32), ("block_tokens", c_int32)]


class SignificanceCall(Struct):
    _fields_ = [("struct_size", c_size_t), ("q", c_void_p), ("k", c_void_p), ("starts", c_void_p), ("q_token_stride", c_int64),
                ("q_head_stride", c_int64), ("k_token_stride", c_int64), ("k_head_stride", c_int64), ("num_sequences", c_int32),
                ("max_tokens", c_int32), ("total_tokens", c_int32), ("num_q_heads", c_int32), ("num_kv_heads", c_int32),
                ("head_dim", c_int32), ("dtype", c_int32), ("query_stride", c_int32), ("sm_scale", c_double), ("lse", c_void_p),
                ("significance", c_void_p)]


PROGRESS = ctypes.CFUNCTYPE(None, c_void_p, c_double)


class ProgressStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("update", PROGRESS), ("user", c_void_p)]


class AnalyzeOptions(Struct):
    _fields_ = [("struct_size", c_size_t), ("files", POINTER(c_char_p)), ("num_files", c_size_t), ("presets", POINTER(c_char_p)),
                ("num_presets", c_size_t), ("profile", c_char_p), ("sequence", c_char_p), ("first_layer", c_int32),
                ("num_layers", c_int32), ("threads", c_int32), ("progress", POINTER(ProgressStruct))]


class CalibrateOptions(Struct):
    _fields_ = [("struct_size", c_size_t), ("files", POINTER(c_char_p)), ("num_files", c_size_t), ("no_thresholds", c_int32),
                ("error_budget", c_double), ("prune_budget", c_double), ("threads", c_int32), ("progress", POINTER(ProgressStruct)),
                ("alpha_high", c_double), ("alpha_low", c_double), ("model_id", c_char_p), ("overwrite", c_int32)]


class CompressOptions(Struct):
    _fields_ = [("struct_size", c_size_t), ("preset", c_char_p), ("profile", c_char_p), ("threads", c_int32), ("overwrite", c_int32),
                ("without_queries", c_int32), ("progress", POINTER(ProgressStruct)), ("values", c_int64), ("file_bytes", c_int64),
                ("carried_bytes", c_int64), ("tokens", c_int64 * 4)]


class DecompressOptions(Struct):
    _fields_ = [("struct_size", c_size_t), ("convert", c_int32), ("dtype", c_int32), ("threads", c_int32),
                ("gzip_level", c_int32), ("progress", POINTER(ProgressStruct)), ("overwrite", c_int32)]


class ProfileData(Struct):
    _fields_ = [("struct_size", c_size_t), ("model_id", c_char_p), ("num_layers", c_int32), ("num_q_heads", c_int32),
                ("num_kv_heads", c_int32), ("head_dim", c_int32), ("sm_scale", c_double), ("alpha_high", c_double),
                ("alpha_low", c_double), ("rope_pairing", c_int32), ("rope_dims", c_int32), ("rope_layers", c_int32),
                ("rope_inv_freq", c_void_p), ("key_mean", c_void_p), ("value_mean", c_void_p), ("key_mean_before_rope", c_void_p),
                ("query_energy", c_void_p), ("query_trace", c_void_p), ("value_signal", c_void_p), ("key_scale", c_void_p),
                ("value_scale", c_void_p), ("key_sensitivity", c_void_p), ("value_sensitivity", c_void_p), ("joint_sensitivity", c_void_p)]
    arrays: List[Any]


class RopeStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("pairing", c_int32), ("dims", c_int32), ("layers", c_int32), ("inv_freq", c_void_p)]


class CodedFormatStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("k", c_double), ("v", c_double), ("max_length", c_int32), ("streams_per_lane", c_int32),
                ("key_books", c_int32)]


class TierClassStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("high", POINTER(TierFormatStruct)), ("low", POINTER(TierFormatStruct)), ("alpha_high", c_double),
                ("alpha_low", c_double), ("share", c_double)]


class TiersFormatStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("classes", POINTER(POINTER(TierClassStruct))), ("num_classes", c_int32), ("plain_keys", c_int32),
                ("plain_values", c_int32)]


class KvConfigStruct(Struct):
    _fields_ = [("struct_size", c_size_t), ("num_layers", c_int32), ("num_q_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32),
                ("dtype", c_int32), ("sm_scale", c_double), ("rope", POINTER(RopeStruct)), ("coded", POINTER(CodedFormatStruct)),
                ("tiers", POINTER(TiersFormatStruct)), ("channel", POINTER(ChannelConfigStruct)), ("profile", POINTER(ProfileData)),
                ("raw_layers", c_void_p), ("num_raw_layers", c_int32), ("sink_tokens", c_int32), ("window_tokens", c_int32),
                ("max_sequences", c_int32), ("max_tokens", c_int32), ("memory_bytes", c_int64), ("page_bytes", c_int64)]
    arrays: List[Any]


class KvAppendCall(Struct):
    _fields_ = [("struct_size", c_size_t), ("sequences", POINTER(c_uint64)), ("num_sequences", c_int32), ("layer", c_int32),
                ("tokens", c_int32), ("k", c_void_p), ("v", c_void_p), ("significance", c_void_p), ("stride", c_int64), ("q", c_void_p),
                ("query_stride", c_int32)]


class KvAttendCall(Struct):
    _fields_ = [("struct_size", c_size_t), ("sequences", POINTER(c_uint64)), ("num_sequences", c_int32), ("layer", c_int32),
                ("q_len", c_int32), ("dtype", c_int32), ("q", c_void_p), ("out", c_void_p), ("lse", c_void_p), ("probabilities", c_void_p),
                ("stride", c_int64), ("sinks", c_void_p), ("count_query", c_int32)]


class KvRange(Struct):
    _fields_ = [("struct_size", c_size_t), ("sequence", c_uint64), ("layer", c_int32), ("first", c_int32), ("end", c_int32),
                ("dtype", c_int32), ("k", c_void_p), ("v", c_void_p)]


class KvUsage(Struct):
    _fields_ = [("struct_size", c_size_t), *((name, c_int64) for name in (
        "sequences", "sink_tokens", "body_tokens", "ring_tokens", "pages", "pages_free", "pages_shared", "most_pages", "page_bytes",
        "slot_bytes", "raw_bytes", "nominal_bytes", "missing_pages"))]


CORE: Dict[str, List[Any]] = {
    "tkv_page_choose_size": [POINTER(PageFormatStruct), c_size_t, POINTER(PageChoiceStruct)],
    "tkv_page_tokens": [POINTER(PageFormatStruct), POINTER(c_int32)],
    "tkv_page_encode": [POINTER(PageFormatStruct), c_void_p, c_int32, POINTER(Tokens)],
    "tkv_page_decode": [POINTER(PageFormatStruct), c_void_p, c_int32, POINTER(Tokens)],
    "tkv_quantize": [c_void_p, POINTER(Codes)],
    "tkv_dequantize": [POINTER(Codes), c_void_p],
    "tkv_codebook_build": [POINTER(CodebookSpec), c_void_p, c_int64, POINTER(c_void_p)],
    "tkv_codebook_parse": [c_void_p, c_size_t, POINTER(c_void_p)],
    "tkv_codebook_serialize": [c_void_p, POINTER(Buffer)],
    "tkv_block_encode": [c_void_p, POINTER(BlockShape), c_void_p, POINTER(Buffer)],
    "tkv_block_decode": [c_void_p, POINTER(BlockShape), POINTER(Buffer), c_void_p],
    "tkv_container_open": [c_char_p, POINTER(c_void_p)],
    "tkv_container_open_bytes": [c_void_p, c_size_t, c_char_p, POINTER(c_void_p)],
    "tkv_container_get_info": [c_void_p, POINTER(ContainerInfo)],
    "tkv_container_get_sequence": [c_void_p, c_int32, POINTER(SequenceInfo)],
    "tkv_container_decode_layer": [c_void_p, POINTER(LayerStruct)],
    "tkv_container_verify": [c_void_p, c_int32],
    "tkv_prompt_significance": [POINTER(SignificanceCall), c_void_p],
    "tkv_prompt_lse": [POINTER(SignificanceCall), c_void_p],
    "tkv_prompt_significance_host": [POINTER(SignificanceCall)],
    "tkv_prompt_lse_host": [POINTER(SignificanceCall)],
    "tkv_kv_create": [POINTER(KvConfigStruct), POINTER(c_void_p)],
    "tkv_kv_create_device": [POINTER(KvConfigStruct), c_void_p, POINTER(c_void_p)],
    "tkv_kv_note_replay": [c_void_p, POINTER(c_uint64), c_int32, c_int32],
    "tkv_kv_take_status": [c_void_p],
    "tkv_kv_tokens_that_fit": [POINTER(KvConfigStruct), POINTER(c_int64), POINTER(c_int64)],
    "tkv_kv_add_sequence": [c_void_p, POINTER(c_uint64)],
    "tkv_kv_begin": [c_void_p, POINTER(c_uint64), c_int32, c_int32],
    "tkv_kv_append": [c_void_p, POINTER(KvAppendCall)],
    "tkv_kv_attend": [c_void_p, POINTER(KvAttendCall)],
    "tkv_kv_decode_range": [c_void_p, POINTER(KvRange)],
    "tkv_kv_fork": [c_void_p, c_uint64, POINTER(c_uint64)],
    "tkv_kv_truncate": [c_void_p, c_uint64, c_int32],
    "tkv_kv_release": [c_void_p, c_uint64],
    "tkv_kv_num_tokens": [c_void_p, c_uint64, POINTER(c_int32)],
    "tkv_kv_free_pages": [c_void_p, POINTER(c_int64)],
    "tkv_kv_bytes_held": [c_void_p, c_uint64, POINTER(c_int64)],
    "tkv_kv_get_usage": [c_void_p, POINTER(KvUsage)],
    "tkv_kv_export_sequence": [c_void_p, c_uint64, POINTER(Buffer)],
    "tkv_kv_import_sequence": [c_void_p, c_void_p, c_size_t, POINTER(c_uint64)],
}
DUMPS: Dict[str, List[Any]] = {
    "tkv_analyze": [POINTER(AnalyzeOptions), POINTER(c_void_p)],
    "tkv_calibrate": [POINTER(CalibrateOptions), c_char_p],
    "tkv_compress": [c_char_p, c_char_p, POINTER(CompressOptions)],
    "tkv_profile_open": [c_char_p, POINTER(c_void_p)],
    "tkv_profile_get_data": [c_void_p, POINTER(ProfileData)],
    "tkv_profile_write": [POINTER(ProfileData), c_char_p],
    "tkv_head_scales": [c_void_p, c_int32, c_void_p],
    "tkv_assign_classes": [c_void_p, c_int32, c_void_p, c_int32, c_void_p],
    "tkv_decompress": [c_char_p, c_char_p, POINTER(DecompressOptions)],
}


_Self = TypeVar("_Self", bound="Owner")


class Owner:
    """Owns an object of the library; close() gives it back."""

    _name, _destroy = "", ""  # what messages call it, and the function that ends it
    _handle: Optional[c_void_p] = None  # None: closed

    def close(self) -> None:
        """Gives back what it holds. Closing twice is allowed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            getattr(core().dll, self._destroy)(handle)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None:
            self.close()

    def _open(self) -> c_void_p:
        if self._handle is None:
            raise InvalidArgumentError(f"the {self._name} is closed")
        return self._handle

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"{type(self).__name__}: copies and pickles of what the library holds")


class _Thread(threading.local):
    """Where a thread's calls say what failed, read before its next one."""

    def __init__(self) -> None:
        self.error = Error()
        self.reference = ctypes.byref(self.error)


_thread = _Thread()


class Library:
    """A loaded library. call() raises what the function reports; other functions are attributes of `dll`."""

    def __init__(self, name: str, functions: Dict[str, List[Any]]) -> None:
        self.dll = ctypes.CDLL(str(pathlib.Path(__file__).parent / "lib" / name))
        for function, arguments in functions.items():
            f = getattr(self.dll, function)
            f.argtypes = [*arguments, POINTER(Error)]
            f.restype = c_int32

    def call(self, function: str, *arguments: Any) -> None:
        status: int = getattr(self.dll, function)(*arguments, _thread.reference)
        if status != 0:
            raise error_of(status, _thread.error.message.decode("utf-8", "replace"))


@functools.lru_cache(maxsize=None)
def core() -> Library:
    from ._engine import FUNCTIONS

    library = Library("libtierkv.so", {**CORE, **FUNCTIONS})
    library.dll.tkv_version.restype = c_char_p
    library.dll.tkv_block_max_bytes.restype = c_size_t
    library.dll.tkv_block_max_bytes.argtypes = [c_int32]
    for destroy in (library.dll.tkv_codebook_destroy, library.dll.tkv_container_destroy, library.dll.tkv_engine_destroy,
                    library.dll.tkv_kv_destroy):
        destroy.argtypes = [c_void_p]
        destroy.restype = None
    return library


@functools.lru_cache(maxsize=None)
def dumps() -> Library:
    """Loaded when it is first needed, because it brings HDF5."""
    library = Library("libtierkv_dumps.so", DUMPS)
    library.dll.tkv_text_data.restype = c_char_p
    library.dll.tkv_text_data.argtypes = [c_void_p]
    for destroy in (library.dll.tkv_text_destroy, library.dll.tkv_profile_destroy):
        destroy.argtypes = [c_void_p]
        destroy.restype = None
    return library


def encode_path(path: Path) -> bytes:
    try:
        data = os.fsencode(path)
    except TypeError:
        raise ArgumentTypeError(f"{path!r} is not a path") from None
    if b"\0" in data:
        raise InvalidArgumentError("embedded null byte in a path")
    return data

