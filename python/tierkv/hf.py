# SPDX-License-Identifier: Apache-2.0
"""transformers: generation over a compressed cache.

    from tierkv.hf import TierCache
    model.set_attn_implementation("tierkv")
    cache = TierCache("small", profile="model.h5", max_tokens=8192)
    model.generate(**inputs, past_key_values=cache)
    print(cache.bytes_held, cache.raw_bytes)

A prompt is attended to by torch's own attention and compressed layer by layer; tokens that follow are attended to in compressed form. A
later turn of more than 8 tokens decodes what the cache holds, one layer at a time, and is then compressed itself. Models: the types
that _hf_models.py names, without sliding windows, in transformers 5.17 or later. Batches are padded on the left.

A model on a GPU is served on one GPU and stream, those of the first token since reset(); a model on the CPU is served slowly.
"""
from __future__ import annotations

import copy
import ctypes
import importlib
import operator
import warnings
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple, Union

import numpy as np

from . import _library as lib
from ._hf_batch import Batch, Moves, groups
from ._hf_models import check_model, profile_rope
from ._hf_step import Step, dense, in_dtype_of, store_tokens
from .errors import ArgumentTypeError, InvalidArgumentError, OutOfRangeError, StaleSequenceError, TierkvError, UnsupportedError
from .kv_store import ChannelFormat, CodedFormat, KvStore, StoreConfig, TiersFormat, preset
from .profile import ProfileData, read_profile
from .prompt import MAX_QUERY_STRIDE, significance

# Types are checked where neither is installed.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
cache_utils: Any = importlib.import_module("transformers.cache_utils")
masking: Any = importlib.import_module("transformers.masking_utils")
causal_lower_right: Any = importlib.import_module("torch.nn.attention.bias").causal_lower_right

NAME = "tierkv"
STEP_TOKENS = 8  # so many tokens attend to the compressed cache; more decode it first
STEPS_BETWEEN_LOOKS = 16  # the cache asks for failures of kernels so seldom because it waits for the GPU then

Tensor = Any


@dataclass
class _Pass:
    """A forward pass: what all of its layers share."""

    new: List[int]  # tokens of each sequence, padding left out
    seen: List[int]  # tokens before them
    opened: bool  # this pass has added the sequences
    batch: Batch  # replaces the cache's when the last layer has run
    step: Optional[Step] = None
    layer: int = 0  # that comes next


class TierCache(cache_utils.Cache):  # type: ignore[misc]
    """The cache of one batch. `format`: a preset ("small", "fast", ...) or a format of tierkv.StoreConfig. `profile`: of this model, or the
    path of one; without one the cache takes more memory for the same quality. max_sequences: forks count, and a larger first batch is
    given its room. memory_bytes is set aside with the first token; 0: what max_tokens of each sequence need. significance_stride: every
    so many queries of a prompt, and all that follow, are counted to find the important tokens; 0 counts none."""

    def __init__(self, format: Any = "small", *, profile: Union[None, ProfileData, lib.Path] = None, max_tokens: int = 4096,
                 max_sequences: int = 1, memory_bytes: int = 0, significance_stride: int = 1) -> None:
        super().__init__(layers=[])
        self._format = preset(format) if isinstance(format, str) else format
        if not isinstance(self._format, (CodedFormat, TiersFormat, ChannelFormat)):
            raise ArgumentTypeError(f"format: {format!r} is neither a preset nor a format of StoreConfig")
        for name, most in (("max_tokens", max_tokens), ("max_sequences", max_sequences)):
            if lib.integer(most, name) < 1:
                raise InvalidArgumentError(f"{name}: {most} is not positive")
        if not 0 <= lib.integer(significance_stride, "significance_stride") <= MAX_QUERY_STRIDE:
            raise InvalidArgumentError(f"significance_stride: {significance_stride} is not 0 to {MAX_QUERY_STRIDE}")
        if lib.integer(memory_bytes, "memory_bytes", ctypes.c_int64) < 0:
            raise InvalidArgumentError(f"memory_bytes: {memory_bytes} is negative")
        self._profile = profile if profile is None or isinstance(profile, ProfileData) else read_profile(profile)
        self._max_tokens, self._max_sequences, self._memory_bytes = max_tokens, max_sequences, memory_bytes
        self._stride = significance_stride
        self._store: Optional[KvStore] = None
        self._device: Any = None
        self._model: Any = None  # the model configuration that _fit() has last checked
        self._shape: Tuple[Any, ...] = ()  # the parts of it that the store depends on
        self._ids: List[int] = []
        self._batch = Batch()  # of whole passes
        self._pass: Optional[_Pass] = None  # that has begun and not ended
        self._cropping: Optional[int] = None  # the length that a crop() which failed leaves to be made
        self._waits = False  # update() has got tokens that the attention function has not seen
        self._steps = 0  # since the last look for failures
        self._failure: Optional[TierkvError] = None  # that kernels found; every pass is refused because of it

    def __repr__(self) -> str:
        return f"TierCache({self._format}, tokens={self._batch.tokens()})"

    # ---- What users ask ----

    @property
    def store(self) -> KvStore:
        """ValueError before the first token."""
        if self._store is None:
            raise InvalidArgumentError("the cache is empty")
        return self._store

    @property
    def bytes_held(self) -> int:
        """Bytes of the store that the sequences keep from others; what they share counts for each."""
        return sum(self.store.bytes_held(id) for id in self._ids)

    @property
    def raw_bytes(self) -> int:
        """What a cache of 16 bits takes for the same tokens."""
        if self._store is None:
            return 0
        config = self._store.config
        return sum(self._batch.tokens()) * 4 * config.num_layers * config.num_kv_heads * config.head_dim

    def close(self) -> None:
        """Gives the memory back; the cache is then empty."""
        if self._store is not None:
            self._store.close()
        self._store, self._model = None, None
        self._forget()

    def __deepcopy__(self, memo: Any) -> TierCache:
        """A second cache with a store of its own, which takes as much memory."""
        self._drop_pass()
        other = copy.copy(self)
        other._batch, other._ids, other._store = copy.deepcopy(self._batch), [], None
        if self._store is not None:
            with self._store._current():  # a stream as a number is of the GPU that is current
                other._store = KvStore(self._store.config, stream=self._store.stream)
            other._ids = [other._store.import_sequence(self._store.export_sequence(id)) for id in self._ids]
        return other

    def _forget(self) -> None:
        self._ids, self._batch, self._pass, self._waits, self._failure = [], Batch(), None, False, None
        self._cropping = None

    # ---- What transformers asks ----

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """Hands the new tokens on: the attention function puts them into the store."""
        if self._waits:
            self._waits = False
            raise UnsupportedError('TierCache: the model has another attention; call model.set_attn_implementation("tierkv")')
        self._waits = True
        key_states.tierkv_cache = self
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._batch.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._batch.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> Tuple[int, int]:
        return self._batch.length + query_length, 0

    def get_max_length(self, layer_idx: int = 0) -> int:
        return self._max_tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self._max_tokens

    @property
    def is_initialized(self) -> bool:
        return self._store is not None

    @property
    def is_croppable(self) -> bool:
        return True

    # Lists of one: transformers takes an empty one for a cache that reads no tokens again.
    @property
    def is_sliding(self) -> List[bool]:
        return [False]

    @property
    def is_linear(self) -> List[bool]:
        return [False]

    @property
    def is_dummy(self) -> List[bool]:
        return [False]

    @property
    def batch_size(self) -> int:
        return len(self._ids) or -1

    def reset(self) -> None:
        for id in self._ids:
            try:
                self.store.release(id)
            except StaleSequenceError:  # a choice of rows failed behind its release
                pass
        # No failure is told to the next sequences.
        failure = None if self._store is None else self._look()
        is_told = self._failure is not None
        self._forget()
        if failure is not None and not is_told:
            warnings.warn(f"TierCache: a GPU kernel reported before reset(): {failure}", RuntimeWarning, stacklevel=2)

    def check(self) -> None:
        """Raises what GPU kernels have reported of the tokens so far, as a later pass would. Waits for the GPU."""
        if self._store is not None:
            self._failure = self._failure or self._look()
        if self._failure is not None:
            raise type(self._failure)(f"TierCache: a GPU kernel reported: {self._failure}. Tokens of this cache hold zeros in place of values; call reset()")

    def crop(self, tokens_to_remove: int) -> None:
        """A negative number removes so many positions, padding included; a positive one keeps so many, all where there are fewer. OutOfPagesError,
        where sequences share pages: some are then cropped and others not, and passes are refused until the call is repeated, with rows given up
        before it if need be."""
        self._drop_pass()
        tokens_to_remove = operator.index(tokens_to_remove)
        length = min(tokens_to_remove, self._batch.length) if tokens_to_remove > 0 else max(0, self._batch.length + tokens_to_remove)
        length = length if self._cropping is None else min(length, self._cropping)
        self._cropping = length
        for id, tokens in zip(self._ids, self._batch.tokens(length)):
            if self.store.num_tokens(id) > tokens:
                self.store.truncate(id, tokens)
        self._batch.crop(length)
        self._cropping = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool and chosen.numel() != len(self._ids):
            raise InvalidArgumentError(f"TierCache: a mask of {chosen.numel()} rows for {len(self._ids)}")
        self._select((chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(len(self._ids)) for _ in range(repeats)])

    def _select(self, chosen: List[int]) -> None:
        self._drop_pass()
        if self._ids and not chosen:
            raise InvalidArgumentError("TierCache: no row is chosen; reset() empties the cache")
        if chosen:
            self._choose(chosen)

    def _choose(self, chosen: List[int]) -> None:
        """Rows that stay keep their sequence; the others are forks, which share its pages. OutOfRangeError: nothing changed. OutOfPagesError: nor
        did anything, unless all max_sequences were open; reset() then."""
        moves = Moves(chosen, len(self._ids))
        room = self.store.config.max_sequences - len(self._ids) + len(moves.dropped)
        if sum(moves.forked) > room:
            raise OutOfRangeError(f"TierCache: {len(chosen)} rows, but max_sequences is {self.store.config.max_sequences}")
        ids: List[int] = []
        made: List[int] = []
        dropped = list(moves.dropped)
        opened = len(self._ids)
        try:
            for old, forked in zip(chosen, moves.forked):
                # Copies come before rows are given up as long as there is room, so that a failure changes nothing.
                if forked and opened == self.store.config.max_sequences:
                    self.store.release(self._ids[dropped.pop()])
                    opened -= 1
                opened += forked
                ids.append(self.store.fork(self._ids[old]) if forked else self._ids[old])
                if forked:
                    made.append(ids[-1])
        except TierkvError:
            for id in made:
                self.store.release(id)
            raise
        for row in dropped:
            self.store.release(self._ids[row])
        self._ids = ids
        self._batch.select(chosen)

    # ---- A forward pass ----

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], scaling: float) -> Tensor:
        """q [batch, heads, tokens, head_dim], k and v likewise; the output is [batch, tokens, heads, head_dim]."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise UnsupportedError("TierCache: gradients; use torch.no_grad() or torch.inference_mode()")
        layer = module.layer_idx
        if layer == 0:
            self._begin(module, q, k, mask, scaling)
        now = self._pass
        if now is None or now.layer != layer:
            raise InvalidArgumentError(f"TierCache: layer {layer} does not follow on the layers before it")
        config = self.store.config
        if scaling != config.sm_scale:
            raise UnsupportedError(f"TierCache: layer {layer} scales its scores by {scaling}, the first by {config.sm_scale}")
        is_last = layer == config.num_layers - 1
        try:
            if now.step is not None:
                out = now.step.run(layer, q, k, v)
            else:
                out = self._attend_raw(layer, q, k, v, scaling)
                self._append(layer, k, v, q, scaling)
                if is_last:
                    self.store.take_status()  # a GPU tells of values beyond fp16 here alone
        except BaseException:
            self._drop_pass()
            raise
        now.layer += 1
        if is_last:
            self._batch, self._pass = now.batch, None
            self._steps += now.step is not None
        return out

    def _begin(self, module: Any, q: Tensor, k: Tensor, mask: Optional[Tensor], scaling: float) -> None:
        if self._cropping is not None:
            raise InvalidArgumentError(f"TierCache: a crop to {self._cropping} positions has failed; repeat it or call reset()")
        if module.config is not self._model or not self._ids:
            self._fit(module.config, q, k, scaling)
        if q.device != self._device:
            raise ArgumentTypeError(f"TierCache: the model is on {q.device}, but the first token was on {self._device}")
        if q.is_cuda and torch.cuda.current_stream(q.device).cuda_stream != self.store.stream:
            raise InvalidArgumentError("TierCache: the current CUDA stream is not that of the first token")
        rows, tokens = q.shape[0], q.shape[2]
        seen = self._batch.tokens() or [0] * rows
        # Rows that hold tokens get no padding.
        is_step = tokens <= STEP_TOKENS and min(seen) > 0
        if self._failure is not None or self._ids and (not is_step or self._steps >= STEPS_BETWEEN_LOOKS):
            self.check()
        batch = copy.deepcopy(self._batch)
        new = batch.extend(rows, tokens, None if mask is None else mask.cpu().numpy())
        self._pass = _Pass(new, seen, not self._ids, batch)
        try:
            while len(self._ids) < rows:
                self._ids.append(self.store.add_sequence())
            for row in groups(new):
                self.store.begin([self._ids[i] for i in row], new[row[0]])
        except BaseException:
            self._drop_pass()
            raise
        if is_step:
            self._pass.step = Step(self.store, self._ids, tokens, self._stride > 0, self._device)

    def _give_up_pass(self, tokens: int, positions: Optional[Tensor]) -> None:
        """Drops a pass that did not end, before a pass of `tokens` positions. A caller who repeats an interrupted pass begins where that one
        began, and gets a warning. A caller whose positions follow on it expects its tokens, and gets an error."""
        if self._pass is None:
            return
        told = f"TierCache: the last pass ended behind layer {self._pass.layer} of {self.store.config.num_layers}; its tokens are forgotten"
        self._drop_pass()
        if positions is not None and int(positions.max()) >= self._batch.length + tokens:
            raise InvalidArgumentError(told)
        warnings.warn(told, RuntimeWarning, stacklevel=3)

    def _drop_pass(self) -> None:
        """Takes back what a pass that did not end has done to the store."""
        now = self._pass
        if now is None:
            return
        for id, tokens in zip(self._ids, now.seen):
            self.store.truncate(id, tokens)
            if now.opened:
                self.store.release(id)
        if now.opened:
            self._ids = []
        self._pass = None

    def _look(self) -> Optional[TierkvError]:
        """The first failure that kernels have found since the last look. Waits for the GPU."""
        self._steps = 0
        try:
            self.store.take_status()
        except TierkvError as failure:
            return failure
        return None

    def _append(self, layer: int, k: Tensor, v: Tensor, q: Tensor, scaling: float) -> None:
        """Many tokens, and which of them are important."""
        assert self._pass is not None
        for rows in groups(self._pass.new):
            n = self._pass.new[rows[0]]
            at = slice(None) if len(rows) == len(self._ids) else rows
            scores = None
            if self._stride and n > 1:
                found = [significance(store_tokens(q[i, :, -n:]), store_tokens(k[i, :, -n:]), stride=self._stride, sm_scale=scaling) for i in rows]
                scores = torch.stack(found) if q.is_cuda else np.stack(found)
            self.store.append([self._ids[i] for i in rows], layer, dense(k[at, :, -n:]), dense(v[at, :, -n:]), significance=scores)

    def _attend_raw(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Many tokens over what the store holds, decoded, and over themselves."""
        assert self._pass is not None
        new, seen = self._pass.new, self._pass.seen
        if not any(seen) and min(new) == q.shape[2]:
            return _sdpa(q, k, v, scaling, None)
        out = torch.zeros_like(q.transpose(1, 2))
        for i, (n, past) in enumerate(zip(new, seen)):
            if n == 0:
                continue
            queries, keys, values = (x[i:i + 1, :, -n:] for x in (q, k, v))
            if past:
                stored = self.store.decode_range(self._ids[i], layer, 0, past)
                keys, values = (torch.cat([in_dtype_of(new, old).transpose(0, 1)[None], new], 2) for old, new in zip(stored, (keys, values)))
            out[i, -n:] = _sdpa(queries, keys, values, scaling, None)[0]
        return out

    def _fit(self, config: Any, q: Tensor, k: Tensor, scaling: float) -> None:
        """Makes the store of a model, unless there is one. InvalidArgumentError where the cache holds tokens of another."""
        rope = check_model(config, q.shape[3])
        if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(f"TierCache: a model of {q.dtype} on a GPU; load it in float16 or bfloat16")
        stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
        dtype = "bfloat16" if k.is_cuda and k.dtype == torch.bfloat16 else "float16"
        shape = (config.num_hidden_layers, q.shape[1], k.shape[1], q.shape[3], scaling, rope.pairing, rope.dims, rope.inv_freq.tobytes(),
                 dtype, q.device, stream and stream.cuda_stream)
        if self._store is not None and (shape != self._shape or q.shape[0] > self._store.config.max_sequences):
            if self._ids:
                raise InvalidArgumentError("TierCache: the cache holds tokens of another model, dtype, GPU or stream; reset() empties it")
            self.close()
        if self._store is None:
            if self._profile is not None and self._profile.rope is not None:
                rope = profile_rope(self._profile.rope, rope)
            self._store = KvStore(StoreConfig(
                num_layers=config.num_hidden_layers, num_q_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[3], sm_scale=scaling,
                dtype=dtype, rope=rope, format=self._format, profile=self._profile,
                max_tokens=self._max_tokens, max_sequences=max(self._max_sequences, q.shape[0]), memory_bytes=self._memory_bytes), stream=stream)
            self._device = q.device
        self._model, self._shape = config, shape


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], scaling: Optional[float] = None,
              dropout: float = 0.0, **kwargs: Any) -> Tuple[Tensor, None]:
    """The attention function: through the TierCache that the keys came from, without one by torch. Causal, but for modules without a cache
    that say otherwise."""
    cache: Optional[TierCache] = getattr(key, "tierkv_cache", None)
    if cache is not None:
        cache._waits = False
    for extra in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if kwargs.get(extra) is not None:
            raise UnsupportedError(f"{type(module).__name__}: attention with {extra}")
    if kwargs.get("output_attentions"):
        raise UnsupportedError(f"{type(module).__name__}: output_attentions: nothing here makes attention weights")
    if dropout:
        raise UnsupportedError(f"{type(module).__name__}: dropout of attention; use eval()")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if isinstance(attention_mask, _OtherMask):
        raise UnsupportedError(f"{type(module).__name__}: a mask that is more than causal and padding, or a static cache")
    given = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(f"{type(module).__name__}: a mask of {attention_mask.dim()} dimensions; only padding [batch, positions] is taken")
    if cache is not None:
        if not causal:
            raise UnsupportedError(f"TierCache: {type(module).__name__} is not causal")
        if module.layer_idx == 0:
            cache._give_up_pass(query.shape[2], kwargs.get("position_ids"))
        return cache._attend(module, query, key, value, attention_mask, scale), None
    tokens, seen = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.shape[1] != seen:
        raise InvalidArgumentError(f"{type(module).__name__}: an attention_mask of {attention_mask.shape[1]} positions, needed are {seen}")
    if causal and attention_mask is None:
        return _sdpa(query, key, value, scale, None), None
    visible = torch.ones(tokens, seen, dtype=torch.bool, device=query.device)
    if causal:
        visible = visible.tril(seen - tokens)
    if attention_mask is not None:
        visible = visible[None, None] & attention_mask[:, None, None, :].bool()
    return _sdpa(query, key, value, scale, visible), None


class _OtherMask:
    """Of sliding windows, packed sequences, prefixes that see each other, caches with room behind the newest token. The attention function
    refuses it: models also make masks that no layer takes."""


def mask(batch_size: int, *args: Any, attention_mask: Optional[Tensor] = None, **kwargs: Any) -> Any:
    """What the attention function gets as a mask: the padding, [batch, positions], or None."""
    function, offset = kwargs.get("mask_function"), kwargs.get("q_offset", 0)
    if function not in (None, masking.causal_mask_function, masking.bidirectional_mask_function):
        return _OtherMask()
    ends_with_query = isinstance(offset, int) and offset + kwargs["q_length"] == kwargs["kv_length"]
    if function is not masking.bidirectional_mask_function and not ends_with_query:
        return _OtherMask()
    if attention_mask is None or attention_mask.shape[-1] == kwargs["kv_length"] and bool(attention_mask.all()):
        return None
    return attention_mask


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Optional[Tensor]) -> Tensor:
    """visible None: causal, the last query at the last key."""
    tokens, seen = q.shape[2], k.shape[2]
    is_causal = visible is None and tokens == seen
    if visible is None and not is_causal:
        # A mask that is a tensor makes torch write out all scores of grouped queries on a GPU.
        visible = causal_lower_right(tokens, seen) if q.is_cuda else torch.ones(tokens, seen, dtype=torch.bool).tril(seen - tokens)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=is_causal, scale=scale,
                                                           enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


# torch.compile leaves them as they are: they call the library.
setattr(TierCache, "update", torch.compiler.disable(TierCache.update))
transformers.AttentionInterface.register(NAME, torch.compiler.disable(attention))
masking.AttentionMaskInterface.register(NAME, torch.compiler.disable(mask))
