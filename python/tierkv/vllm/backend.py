# SPDX-License-Identifier: Apache-2.0
"""The attention backend that vLLM calls: spec and shape of the cache, metadata of a step, attention of a layer.

A layer's cache is [blocks, kv_heads, 64, slot bytes] of bytes: each (block, kv_head) is a page of its own. Each format has a backend
class of its own, because vLLM asks the class, not the layer, for a cache's shape; settings choose the class of a layer.
"""
# torch and vLLM are not installed where types are checked.
# mypy: disable-error-code=import, allow-subclassing-any, no-warn-return-any, no-warn-unused-ignores
from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Optional, Sequence, Tuple

import torch

from .. import _engine as engine
from ._versions import cache_spec, draft_tokens, unserved
from .batches import Slice, classify, head_range, rounds, runs
from .faults import Faults
from .refusals import HEAD_DIMS, MAX_QUERIES, EngineShape, LayerShape, refuse, refused_engine, refused_layer
from .settings import BLOCK_TOKENS, DEFAULT_FORMAT, FORMATS, Settings, layer_index, read_settings, slot_bytes
from ..errors import InvalidArgumentError

try:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention import backend as attention
    from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
                                           AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata)
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
except ImportError as e:
    raise unserved(str(e)) from e

CACHE_SPEC, BYTES_FIELD = cache_spec(AttentionBackend, kv_cache_interface)
DTYPES = {torch.float16: 0, torch.bfloat16: 1}
MAX_TAILS = 32  # of a step; more go the way of chunks


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def address(x: Optional[torch.Tensor]) -> Optional[int]:
    return None if x is None else x.data_ptr()


def check_engine(vllm_config: Any) -> Settings:
    """The settings; ValueError where the engine cannot be served."""
    parallel = vllm_config.parallel_config
    refuse(refused_engine(EngineShape(vllm_config.cache_config.block_size, draft_tokens(attention, vllm_config),
                                      parallel.decode_context_parallel_size,
                                      getattr(parallel, "prefill_context_parallel_size", 1),
                                      bool(getattr(vllm_config.model_config, "enable_sleep_mode", False)))), "this engine")
    return read_settings(vllm_config.additional_config)


# ---- the class that vLLM asks ----

class TierkvBackend(AttentionBackend):
    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[List[torch.dtype]] = list(DTYPES)
    format: ClassVar[str] = DEFAULT_FORMAT

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> "type[TierkvImpl]":
        return TierkvImpl

    @classmethod
    def get_builder_cls(cls) -> "type[TierkvMetadataBuilder]":
        return BUILDERS[cls.format]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[Any]:
        return [BLOCK_TOKENS]

    @classmethod
    def get_supported_head_sizes(cls) -> List[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 9)

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> Tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, slot_bytes(cls.format, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> Tuple[int, ...]:
        # Blocks come first, also where the layers of a block lie side by side.
        return (1, 0, 2, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Tuple[Any, ...]:
        # The tokens of a head and the heads of a block lie side by side, and blocks are whole numbers of such pages apart, which they
        # are not where other layers' blocks, of other formats, come between them.
        return (kv_cache_interface.KVCacheLayout.LBHNC,)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # build() classifies requests by their query lengths on the CPU


BACKENDS: Dict[str, "type[TierkvBackend]"] = {
    name: type(f"TierkvBackend_{name}", (TierkvBackend,), {"format": name, "__module__": __name__}) for name in FORMATS}
globals().update({b.__name__: b for b in BACKENDS.values()})


# ---- a layer's state ----

@functools.lru_cache(maxsize=None)
def key_means(path: str) -> Any:
    """[num_layers, num_kv_heads, head_dim] of a profile."""
    from tierkv import read_profile

    return read_profile(path).key_mean


def layer_key_reflection(settings: Settings, vllm_config: Any, layer: Any, of_layer: engine.Engine) -> Optional[torch.Tensor]:
    """[num_kv_heads, head_dim] on the layer's device."""
    index = layer_index(layer.layer_name)
    if settings.profile is None or index is None:
        return None
    means, layers = key_means(settings.profile), vllm_config.model_config.hf_text_config.num_hidden_layers
    if means.shape[0] != layers or (index < layers and means.shape[2] != layer.head_size):
        raise InvalidArgumentError(f"tierkv.profile: {means.shape[0]} layers of {means.shape[2]} channels for a model with {layers} of {layer.head_size}")
    if index >= layers:  # of a draft model, whose count goes on where the model's ends
        return None
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    first, last = head_range(means.shape[1], layer.num_kv_heads, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    mean = torch.tensor(means[index, first:last], dtype=torch.float32, device="cpu").contiguous()
    reflection = torch.empty_like(mean)
    of_layer.key_reflections(mean.data_ptr(), reflection.data_ptr())
    return reflection.to(vllm_config.device_config.device)


def engine_config(layer: Any, settings: Settings, format: str, dtype: torch.dtype, **sizes: int) -> engine.EngineConfigStruct:
    k_bits, v_bits = FORMATS[format]
    return engine.EngineConfigStruct(num_q_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, head_dim=layer.head_size,
                                     k_bits=k_bits, v_bits=v_bits, no_rotation=0 if settings.rotate else 1, dtype=DTYPES[dtype],
                                     sm_scale=float(layer.impl.scale), block_tokens=BLOCK_TOKENS, **sizes)


# What vLLM had, however often this module is loaded.
_original_get_kv_cache_spec = getattr(Attention.get_kv_cache_spec, "tierkv_wraps", Attention.get_kv_cache_spec)


def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
    """The cache that an Attention layer asks for. Layers of other backends ask as vLLM has it."""
    if not issubclass(layer.attn_backend, TierkvBackend):
        return _original_get_kv_cache_spec(layer, vllm_config)
    if layer.attn_backend not in (TierkvBackend, *BACKENDS.values()):
        refuse([f"{layer.layer_name}, whose class has a {layer.attn_backend.__name__} of its own"], "this model")
    if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
        refuse([f"{layer.layer_name}, with values of {layer.head_size_v} channels beside keys of {layer.head_size}"], "this model")
    settings = check_engine(vllm_config)
    settings.check_layers(vllm_config.model_config.hf_text_config.num_hidden_layers)
    format = settings.format_of(layer_index(layer.layer_name))
    layer.attn_backend = BACKENDS[format]
    of_layer = engine.Engine(engine_config(layer, settings, format, vllm_config.model_config.dtype, max_sequences=1, max_blocks=1), on_host=True)
    layer.impl.bind(of_layer, layer_key_reflection(settings, vllm_config, layer, of_layer))
    return CACHE_SPEC(block_size=vllm_config.cache_config.block_size, num_kv_heads=layer.num_kv_heads, head_size=layer.head_size,
                      head_size_v=layer.head_size, dtype=torch.uint8, **{BYTES_FIELD: slot_bytes(format, layer.head_size)})


setattr(get_kv_cache_spec, "tierkv_wraps", _original_get_kv_cache_spec)
Attention.get_kv_cache_spec = get_kv_cache_spec


# ---- a step ----

@dataclass
class Direct:
    """Requests that attend in the cache; planned once, for all layers."""

    attention: engine.Engine
    batch: engine.EngineBatchStruct
    kept: Tuple[Any, ...]  # what the batch points to


@dataclass
class Round:
    """Slices of cached prefixes that are decoded and attended to at a time."""

    slices: List[Slice]
    ranges: engine.EngineRangesStruct
    tokens: Tuple[int, int]  # of the queries
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int


@dataclass
class Chunk:
    """Neighbouring requests that attend to their own raw keys and values."""

    tokens: Tuple[int, int]
    cu: torch.Tensor
    max_q: int
    rounds: List[Round] = field(default_factory=list)


@dataclass
class TierkvMetadata(AttentionMetadata):
    num_actual_tokens: int
    direct: List[Direct]
    chunks: List[Chunk]
    slice_k: Optional[torch.Tensor]
    slice_v: Optional[torch.Tensor]
    faults: Faults
    kept: Tuple[Any, ...] = ()


class Upload:
    """Small lists of integers that go to the device together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.numbers, self.places = device, [], []  # type: Tuple[torch.device, List[int], List[Tuple[int, int]]]
        self.all: Optional[torch.Tensor] = None

    def add(self, numbers: Sequence[int]) -> int:
        self.places.append((len(self.numbers), len(self.numbers) + len(numbers)))
        self.numbers += numbers
        return len(self.places) - 1

    def send(self) -> None:
        host = torch.tensor(self.numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.all = host.to(self.device, non_blocking=True)

    def get(self, which: int) -> torch.Tensor:
        assert self.all is not None
        first, last = self.places[which]
        return self.all[first:last]


class TierkvMetadataBuilder(AttentionMetadataBuilder[TierkvMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    format: ClassVar[str] = DEFAULT_FORMAT

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.settings = check_engine(vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.decode_queries = int(self.reorder_batch_threshold or 1)
        self.layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        refuse([f"{x.layer_name}, whose class has a cache of its own kind" for x in self.layers if x.impl.engine is None], "this model")
        shapes = {(x.num_heads, x.num_kv_heads, x.head_size, float(x.impl.scale)) for x in self.layers}
        if len(shapes) != 1:
            raise InvalidArgumentError("tierkv: layers of one cache group differ in heads, channels or scale")
        scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
        largest_graph = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        max_blocks = -(-model.max_model_len // BLOCK_TOKENS) + 1
        self.engines = {queries: self._engine(sequences, queries, max_blocks) for queries, sequences in
                        ((self.decode_queries, max(scheduler.max_num_seqs, largest_graph)),
                         (MAX_QUERIES, min(scheduler.max_num_seqs, MAX_TAILS)))[:1 if self.decode_queries == MAX_QUERIES else 2]}
        self.workspaces = {q: torch.zeros(max(e.workspace_bytes(), 1), dtype=torch.uint8, device=device) for q, e in self.engines.items()}
        self.faults = Faults(device)
        for x in self.layers:
            x.impl.faults = self.faults
        self.slices: Optional[torch.Tensor] = None  # [2, ...]: keys, values
        if scheduler.max_num_batched_tokens > MAX_QUERIES:
            shape = (2, self.slice_tokens, self.layers[0].num_kv_heads, self.layers[0].head_size)
            self.slices = slice_buffers(shape, model.dtype, device)

    @property
    def slice_tokens(self) -> int:
        return min(self.settings.slice_tokens, max(self.vllm_config.model_config.max_model_len, BLOCK_TOKENS))

    def _engine(self, sequences: int, queries: int, max_blocks: int) -> engine.Engine:
        config = engine_config(self.layers[0], self.settings, self.format, self.vllm_config.model_config.dtype, max_sequences=sequences,
                               max_queries=queries, max_blocks=max_blocks)
        return engine.Engine(config, on_host=self.device.type != "cuda")

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> TierkvMetadata:
        self.faults.step()
        cam = common_attn_metadata
        if cam.causal is not True:
            refuse(["attention that is not causal"], "this batch")
        if cam.max_query_len <= self.decode_queries:
            direct = [self._direct(cam, self.decode_queries, cam.num_reqs, cam.max_query_len, None)]
            return self._metadata(cam, direct, [], ())
        starts = cam.query_start_loc_cpu.tolist()[:cam.num_reqs + 1]
        bounds = cam.seq_lens_cpu_upper_bound
        lens = (cam.seq_lens if bounds is None else bounds).tolist()[:cam.num_reqs]
        query_lens = [b - a for a, b in zip(starts, starts[1:])]
        classes = classify(query_lens, lens, self.decode_queries)
        tails = classes.tails[:MAX_TAILS]
        in_chunks = sorted(classes.chunks + classes.tails[MAX_TAILS:])
        upload = Upload(self.device)
        direct_lists = [(queries, requests, upload.add(requests)) for queries, requests in
                        ((self.decode_queries, classes.decodes), (MAX_QUERIES, tails)) if requests]
        chunks = [self._chunk(run, starts, lens, upload) for run in runs(in_chunks)]
        upload.send()
        direct = [self._direct(cam, queries, len(requests), max(query_lens[i] for i in requests), upload.get(which))
                  for queries, requests, which in direct_lists]
        return self._metadata(cam, direct, [self._sent_chunk(c, cam, upload) for c in chunks], (upload,))

    def _metadata(self, cam: CommonAttentionMetadata, direct: List[Direct], chunks: List[Chunk], kept: Tuple[Any, ...]) -> TierkvMetadata:
        k, v = self.slices if chunks and self.slices is not None else (None, None)
        return TierkvMetadata(cam.num_actual_tokens, direct, chunks, k, v, self.faults, kept)

    def _direct(self, cam: CommonAttentionMetadata, which: int, count: int, queries: int, sequences: Optional[torch.Tensor]) -> Direct:
        cache, table = self.layers[0].kv_cache, cam.block_table_tensor
        batch = engine.EngineBatchStruct(
            block_table=table.data_ptr(), table_stride=table.stride(0), table_columns=table.shape[1], num_sequences=table.shape[0],
            seq_lens=cam.seq_lens.data_ptr(), sequences=address(sequences), query_start_loc=cam.query_start_loc.data_ptr(), count=count,
            queries=queries, block_stride=cache.stride(0), num_blocks=cache.shape[0], workspace=self.workspaces[which].data_ptr(),
            workspace_bytes=self.workspaces[which].numel())
        direct = Direct(self.engines[which], batch, (table, cam.seq_lens, cam.query_start_loc, sequences))
        direct.attention.plan(batch, stream_of(self.device))
        return direct

    def _chunk(self, run: Tuple[int, int], starts: List[int], lens: List[int], upload: Upload) -> Dict[str, Any]:
        """Numbers of a run; its lists are on their way."""
        first, last = run
        contexts = [(i, lens[i] - (starts[i + 1] - starts[i])) for i in range(first, last)]

        def relative(a: int, b: int) -> int:
            return upload.add([starts[i] - starts[a] for i in range(a, b + 1)])

        def longest(a: int, b: int) -> int:
            return max(starts[i + 1] - starts[i] for i in range(a, b))

        cut = []
        for slices in rounds(contexts, self.slice_tokens):
            a, b = slices[0].request, slices[-1].request + 1
            ends = [0]
            for s in slices:
                ends.append(ends[-1] + s.tokens)
            cut.append({"slices": slices, "tokens": (starts[a], starts[b]), "q": relative(a, b), "k": upload.add(ends),
                        "sequences": upload.add([s.request for s in slices]), "first": upload.add([s.first for s in slices]),
                        "max_q": longest(a, b), "max_k": max(s.tokens for s in slices), "rows": ends[-1]})
        return {"tokens": (starts[first], starts[last]), "cu": relative(first, last), "max_q": longest(first, last), "rounds": cut}

    def _sent_chunk(self, c: Dict[str, Any], cam: CommonAttentionMetadata, upload: Upload) -> Chunk:
        table = cam.block_table_tensor
        chunk = Chunk(c["tokens"], upload.get(c["cu"]), c["max_q"])
        for r in c["rounds"]:
            assert self.slices is not None
            ranges = engine.EngineRangesStruct(
                block_table=table.data_ptr(), table_stride=table.stride(0), num_sequences=table.shape[0], count=len(r["slices"]),
                sequences=upload.get(r["sequences"]).data_ptr(), first=upload.get(r["first"]).data_ptr(),
                starts=upload.get(r["k"]).data_ptr(), max_tokens=r["max_k"], num_rows=r["rows"], k=self.slices[0].data_ptr(),
                v=self.slices[1].data_ptr(), errors=self.faults.counts.data_ptr())
            chunk.rounds.append(Round(r["slices"], ranges, r["tokens"], upload.get(r["q"]), upload.get(r["k"]), r["max_q"], r["max_k"]))
        return chunk


_slices: "weakref.WeakValueDictionary[Any, torch.Tensor]" = weakref.WeakValueDictionary()  # the builders of an engine keep them


def slice_buffers(shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Shared by all layers: they run one after another."""
    buffers = _slices.get((shape, dtype, device))
    if buffers is None:
        _slices[shape, dtype, device] = buffers = torch.empty(shape, dtype=dtype, device=device)
    return buffers


BUILDERS: Dict[str, "type[TierkvMetadataBuilder]"] = {
    name: type(f"TierkvMetadataBuilder_{name}", (TierkvMetadataBuilder,), {"format": name, "__module__": __name__}) for name in FORMATS}


# ---- attention of a layer ----

class TierkvImpl(AttentionImpl[TierkvMetadata]):
    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: Optional[int] = None,
                 alibi_slopes: Optional[List[float]] = None, sliding_window: Optional[int] = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: Optional[float] = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: Optional[str] = None, **others: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        known = ("sinks",)
        refuse(refused_layer(LayerShape(
            head_dim=head_size, num_q_heads=num_heads, num_kv_heads=self.num_kv_heads,
            dtype=str(torch.get_default_dtype()).replace("torch.", ""), attn_type=getattr(attn_type, "value", attn_type),
            kv_cache_dtype=kv_cache_dtype, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
            has_alibi=alibi_slopes is not None, has_sinks=others.get("sinks") is not None,
            shares_cache=kv_sharing_target_layer_name is not None,
            other_arguments=tuple(sorted(n for n, x in others.items() if n not in known and x is not None)))), "a layer of this model")
        self.flash_version: Optional[int] = get_flash_attn_version(head_size=head_size)  # as the engine's config, which is current here, says
        if self.flash_version is None and torch.cuda.is_available():
            refuse([f"head_dim {head_size} without FlashAttention, which this GPU and vLLM do not have for it"], "a layer of this model")
        self.engine: Optional[engine.Engine] = None
        self.key_reflection: Optional[torch.Tensor] = None
        self.faults: Optional[Faults] = None  # of the layers of one builder, which sets it

    def bind(self, of_layer: engine.Engine, key_reflection: Optional[torch.Tensor]) -> None:
        """of_layer encodes and decodes, which needs no plan."""
        self.engine, self.key_reflection = of_layer, key_reflection

    def _layer(self, kv_cache: torch.Tensor) -> engine.EngineLayerStruct:
        return engine.EngineLayerStruct(blocks=kv_cache.data_ptr(), block_stride=kv_cache.stride(0), num_blocks=kv_cache.shape[0],
                                        key_reflection=address(self.key_reflection))

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        count = slot_mapping.shape[0]
        if count == 0 or kv_cache.numel() == 0:
            return
        assert self.engine is not None and self.faults is not None and key.stride(2) == 1 and value.stride(2) == 1 and slot_mapping.dtype == torch.int64
        tokens = engine.EngineTokensStruct(k=key.data_ptr(), v=value.data_ptr(), k_token_stride=key.stride(0), k_head_stride=key.stride(1),
                                           v_token_stride=value.stride(0), v_head_stride=value.stride(1), slots=slot_mapping.data_ptr(),
                                           count=min(count, key.shape[0]), errors=self.faults.counts.data_ptr())
        self.engine.encode(self._layer(kv_cache), tokens, stream_of(key.device), on_host=key.device.type != "cuda")

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Any, output: torch.Tensor, output_scale: Optional[torch.Tensor] = None,
                output_block_scale: Optional[torch.Tensor] = None) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tierkv: outputs are not quantised")
        if attn_metadata is None:  # a profile run
            return output.fill_(0)
        n = attn_metadata.num_actual_tokens
        q, out = query[:n].view(n, self.num_heads, self.head_size), output[:n].view(n, self.num_heads, self.head_size)
        of_layer = self._layer(kv_cache)
        for direct in attn_metadata.direct:
            queries = engine.EngineQueriesStruct(q=q.data_ptr(), out=out.data_ptr(), q_token_stride=q.stride(0), q_head_stride=q.stride(1),
                                                 out_token_stride=out.stride(0), out_head_stride=out.stride(1), num_tokens=n,
                                                 errors=attn_metadata.faults.counts.data_ptr())
            direct.attention.attend(direct.batch, of_layer, queries, stream_of(q.device))
        for chunk in attn_metadata.chunks:
            self._attend_chunk(chunk, attn_metadata, of_layer, (q, key[:n], value[:n], out))
        return output

    def _attend_chunk(self, chunk: Chunk, m: TierkvMetadata, of_layer: engine.EngineLayerStruct, qkvo: Tuple[torch.Tensor, ...]) -> None:
        first, last = chunk.tokens
        q, k, v, out = (x[first:last] for x in qkvo)
        lse = self.attend_raw(q, k, v, out, (chunk.cu, chunk.cu), (chunk.max_q, chunk.max_q), causal=True)
        for r in chunk.rounds:
            assert self.engine is not None and m.slice_k is not None and m.slice_v is not None
            self.engine.decode(of_layer, r.ranges, stream_of(q.device), on_host=q.device.type != "cuda")
            rows = sum(s.tokens for s in r.slices)
            a, b = r.tokens[0] - first, r.tokens[1] - first
            part = torch.empty_like(out[a:b])
            part_lse = self.attend_raw(q[a:b], m.slice_k[:rows], m.slice_v[:rows], part, (r.cu_q, r.cu_k), (r.max_q, r.max_k), causal=False)
            joined = torch.empty_like(part_lse)
            self.join(out[a:b], part, part_lse, lse[:, a:b].contiguous(), joined)
            lse[:, a:b] = joined

    def attend_raw(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, cu: Tuple[torch.Tensor, torch.Tensor],
                   longest: Tuple[int, int], causal: bool) -> torch.Tensor:
        """FlashAttention into `out`; the lse [num_heads, tokens]."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        _, lse = flash_attn_varlen_func(q=q, k=k, v=v, out=out, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=longest[0],
                                        max_seqlen_k=longest[1], softmax_scale=self.scale, causal=causal, return_softmax_lse=True,
                                        fa_version=self.flash_version)
        return lse

    def join(self, out: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, lse: torch.Tensor, joined: torch.Tensor) -> None:
        """Adds a part to `out` in place: elements are read and written by one thread, lses are not and have an array of their own."""
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

        merge_attn_states(out, part, part_lse, out, lse, joined)
