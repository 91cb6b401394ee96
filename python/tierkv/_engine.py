# SPDX-License-Identifier: Apache-2.0
"""Calls of tierkv_engine_c.h: the cache of a serving engine that has block tables of its own. Arrays are addresses."""
from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int32, c_int64, c_size_t, c_void_p
from typing import Any, Dict, List

from . import _library as lib


class EngineConfigStruct(lib.Struct):
    _fields_ = [("struct_size", c_size_t), ("num_q_heads", c_int32), ("num_kv_heads", c_int32), ("head_dim", c_int32),
                ("k_bits", c_int32), ("v_bits", c_int32), ("no_rotation", c_int32), ("dtype", c_int32), ("sm_scale", c_double),
                ("block_tokens", c_int32), ("max_sequences", c_int32), ("max_queries", c_int32), ("max_blocks", c_int32),
                ("sliding_window_tokens", c_int32)]


class EngineLayerStruct(lib.Struct):
    _fields_ = [("struct_size", c_size_t), ("blocks", c_void_p), ("block_stride", c_int64), ("num_blocks", c_int64),
                ("key_reflection", c_void_p)]


class EngineTokensStruct(lib.Struct):
    _fields_ = [("struct_size", c_size_t), ("k", c_void_p), ("v", c_void_p), ("k_token_stride", c_int64), ("k_head_stride", c_int64),
                ("v_token_stride", c_int64), ("v_head_stride", c_int64), ("slots", c_void_p), ("count", c_int64),
                ("errors", c_void_p)]


class EngineBatchStruct(lib.Struct):
    _fields_ = [("struct_size", c_size_t), ("block_table", c_void_p), ("table_stride", c_int64), ("table_columns", c_int32),
                ("num_sequences", c_int32), ("seq_lens", c_void_p), ("sequences", c_void_p), ("query_start_loc", c_void_p),
                ("count", c_int32), ("queries", c_int32), ("block_stride", c_int64), ("num_blocks", c_int64),
                ("workspace", c_void_p), ("workspace_bytes", c_size_t)]


class EngineQueriesStruct(lib.Struct):
    _fields_ = [("struct_size", c_size_t), ("q", c_void_p), ("out", c_void_p), ("q_token_stride", c_int64), ("q_head_stride", c_int64),
                ("out_token_stride", c_int64), ("out_head_stride", c_int64), ("lse", c_void_p), ("lse_token_stride", c_int64),
                ("lse_head_stride", c_int64), ("num_tokens", c_int64), ("errors", c_void_p)]


class EngineRangesStruct(lib.Struct):
    _fields_ = [("struct_size", c_size_t), ("block_table", c_void_p), ("table_stride", c_int64), ("num_sequences", c_int32),
                ("count", c_int32), ("sequences", c_void_p), ("first", c_void_p), ("starts", c_void_p), ("max_tokens", c_int32),
                ("num_rows", c_int64), ("k", c_void_p), ("v", c_void_p), ("errors", c_void_p)]


_CONFIG, _LAYER, _TOKENS = POINTER(EngineConfigStruct), POINTER(EngineLayerStruct), POINTER(EngineTokensStruct)
_BATCH, _QUERIES, _RANGES = POINTER(EngineBatchStruct), POINTER(EngineQueriesStruct), POINTER(EngineRangesStruct)
FUNCTIONS: Dict[str, List[Any]] = {
    "tkv_engine_page_bytes": [_CONFIG, POINTER(c_int64)],
    "tkv_engine_create": [_CONFIG, POINTER(c_void_p)],
    "tkv_engine_create_host": [_CONFIG, POINTER(c_void_p)],
    "tkv_engine_workspace_bytes": [c_void_p, POINTER(c_size_t)],
    "tkv_engine_key_reflections": [c_void_p, c_void_p, c_void_p],
    "tkv_engine_encode": [c_void_p, _LAYER, _TOKENS, c_void_p],
    "tkv_engine_encode_host": [c_void_p, _LAYER, _TOKENS],
    "tkv_engine_plan": [c_void_p, _BATCH, c_void_p],
    "tkv_engine_attend": [c_void_p, _BATCH, _LAYER, _QUERIES, c_void_p],
    "tkv_engine_attend_host": [c_void_p, _BATCH, _LAYER, _QUERIES],
    "tkv_engine_decode": [c_void_p, _LAYER, _RANGES, c_void_p],
    "tkv_engine_decode_host": [c_void_p, _LAYER, _RANGES],
}


def page_bytes(config: EngineConfigStruct) -> int:
    """Bytes of one kv_head of a block."""
    bytes_ = c_int64()
    lib.core().call("tkv_engine_page_bytes", config, bytes_)
    return bytes_.value


class Engine(lib.Owner):
    """A tkv_engine. Addresses are device memory, or where on_host is set host memory: streams and workspaces are then not looked at,
    and plan() does nothing. One that was made on_host has no grid; on the device it encodes and decodes, but does not attend."""

    _name, _destroy = "engine", "tkv_engine_destroy"

    def __init__(self, config: EngineConfigStruct, on_host: bool) -> None:
        self.config = config
        self.on_host = on_host
        handle = c_void_p()
        lib.core().call("tkv_engine_create_host" if on_host else "tkv_engine_create", config, handle)
        self._handle = handle

    def workspace_bytes(self) -> int:
        if self.on_host:
            return 0
        bytes_ = c_size_t()
        lib.core().call("tkv_engine_workspace_bytes", self._open(), bytes_)
        return bytes_.value

    def key_reflections(self, key_mean: int, out: int) -> None:
        """Both float32 [num_kv_heads, head_dim] in host memory. What keys are reflected by, so that the zero points of codes hold the mean."""
        lib.core().call("tkv_engine_key_reflections", self._open(), c_void_p(key_mean), c_void_p(out))

    def encode(self, layer: EngineLayerStruct, tokens: EngineTokensStruct, stream: int, on_host: bool) -> None:
        self._call("encode", on_host, stream, layer, tokens)

    def plan(self, batch: EngineBatchStruct, stream: int) -> None:
        if not self.on_host:
            self._call("plan", False, stream, batch)

    def attend(self, batch: EngineBatchStruct, layer: EngineLayerStruct, queries: EngineQueriesStruct, stream: int) -> None:
        self._call("attend", self.on_host, stream, batch, layer, queries)

    def decode(self, layer: EngineLayerStruct, ranges: EngineRangesStruct, stream: int, on_host: bool) -> None:
        self._call("decode", on_host, stream, layer, ranges)

    def _call(self, name: str, on_host: bool, stream: int, *structs: Any) -> None:
        if on_host:
            lib.core().call(f"tkv_engine_{name}_host", self._open(), *structs)
        else:
            lib.core().call(f"tkv_engine_{name}", self._open(), *structs, c_void_p(stream))
