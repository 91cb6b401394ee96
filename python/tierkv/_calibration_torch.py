# SPDX-License-Identifier: Apache-2.0
"""Calibration with PyTorch and transformers: a causal language model whose attention goes through transformers' attention interface."""
from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ._calibration import CachedLayer, CalibrationError, Change, Facts, Ids, turned
from .errors import UnsupportedError
from .profile import PAIRINGS, Rope

# Types are checked where neither is installed.
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
masking: Any = importlib.import_module("transformers.masking_utils")

NAME = "tierkv_calibration"
PROBE_TOKENS = 16
CHANGING_ROPE = ("dynamic", "longrope")
SAME_KEYS = 1e-3  # relative: keys of one token at all positions, turned back, differ by less where the rotation is understood
SAME_LOGITS = 1e-2  # where a pass from a layer on agrees with a whole one
SAME_READING = 1e-3  # nats: what a reading of a cache may differ by from the model's own pass over all tokens

Tensor = Any


@dataclass
class Layer:
    """A layer of one prompt, on the host."""

    k: Any
    v: Any
    q: Any
    scaling: float


@dataclass
class Reading:
    ids: Tensor
    prompt: List[Tuple[Tensor, Tensor]]  # keys and values of each layer [kv_heads, tokens, head_dim], on the device
    states: List[Tensor]  # what enters each layer [1, tokens, hidden]
    exact: Tensor  # log-probabilities [tokens, vocabulary]


class Attention:
    """The attention function: exact attention over a prompt's cache, which a call may replace, and the tokens themselves."""

    def __init__(self) -> None:
        self.recorded: Optional[List[Layer]] = None  # gathers the layers of a prompt
        self.prompt: Optional[List[Tuple[Tensor, Tensor]]] = None  # per layer [1 or batch, kv_heads, tokens, head_dim]

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor],
                 scaling: Optional[float] = None, **kwargs: Any) -> Tuple[Tensor, None]:
        name = type(module).__name__
        for extra in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(extra) is not None:
                raise CalibrationError(f"{name}: attention with {extra} is not supported")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise CalibrationError(f"{name}: keys {tuple(key.shape[1:])} and values {tuple(value.shape[1:])} differ in shape")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))  # None for a layer that attends to all tokens
        if self.recorded is not None:
            k, v, q = (x[0].float().cpu().numpy() for x in (key, value, query))
            self.recorded.append(Layer(k, v, q, scale))
        if self.prompt is not None:
            pk, pv = self.prompt[module.layer_idx]
            key, value = (torch.cat([p.expand(x.shape[0], -1, -1, -1), x], 2) for p, x in ((pk, key), (pv, value)))
        tokens, seen = query.shape[2], key.shape[2]
        at = torch.arange(seen - tokens, seen, device=query.device)[:, None]
        behind = at - torch.arange(seen, device=query.device)[None]
        mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None


ATTENTION = Attention()


class TorchModel:
    def __init__(self, folder: str, model_id: str, device: Optional[str], batch: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            torch.zeros(1, device=self.device).cpu()
        except (AssertionError, ImportError, RuntimeError, ValueError) as e:
            raise CalibrationError(f"--device {self.device}: {first_line(e)}") from e
        transformers.AttentionInterface.register(NAME, ATTENTION)
        masking.AttentionMaskInterface.register(NAME, masking.sdpa_mask)
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
        except Exception as e:  # damaged files raise classes of safetensors, and of tokenizers Exception itself
            why = "its attention does not go through transformers' attention interface" if str(e) == repr(NAME) else e
            raise CalibrationError(f"{folder}: transformers cannot load it: {why}") from e
        with memory_named():
            self.model: Any = model.to(self.device).eval()
        self.base: Any = self.model.base_model
        if not isinstance(getattr(self.base, "layers", None), torch.nn.ModuleList):
            raise CalibrationError(f"{folder}: unknown model type {self.model.config.model_type!r}: it has no list of decoder layers")
        self.batch = batch
        self.from_layer: Optional[List[bool]] = None  # whether a pass may begin at this layer; found out at the first reading
        self.prompt_ids: Ids = np.empty(0, np.int64)  # of the newest prefill
        self._facts = self._find_facts(model_id)

    def facts(self) -> Facts:
        return self._facts

    def encode(self, text: str) -> List[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def opening(self) -> List[int]:
        with_special = self.tokenizer("a")["input_ids"]
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return list(with_special[:1]) if len(with_special) > len(plain) and with_special[0] != plain[0] else []

    def prefill(self, ids: Ids) -> "List[Layer]":
        layers: List[Layer] = []
        self.prompt_ids = ids
        ATTENTION.recorded, ATTENTION.prompt = layers, None
        try:
            with torch.inference_mode(), memory_named():
                self.base(input_ids=self._tokens(ids), use_cache=False)
            return layers
        finally:
            ATTENTION.recorded = None

    def read(self, ids: Ids, cache: Sequence[CachedLayer]) -> Reading:
        with torch.inference_mode(), memory_named():
            return self._read(ids, cache)

    def _read(self, ids: Ids, cache: Sequence[CachedLayer]) -> Reading:
        prompt = [(self._on_device(layer.k), self._on_device(layer.v)) for layer in cache]
        tokens = self._tokens(ids)
        states: List[Tensor] = []
        hooks = [layer.register_forward_pre_hook(lambda _, args, kwargs: states.append(args[0] if args else kwargs["hidden_states"]),
                                                 with_kwargs=True) for layer in self.base.layers]
        try:
            logits = self._logits(0, None, tokens, prompt)
        finally:
            for hook in hooks:
                hook.remove()
        if len(states) != len(self.base.layers):
            raise CalibrationError(f"unknown model type {self.model.config.model_type!r}: {len(states)} of {len(self.base.layers)} layers ran")
        reading = Reading(tokens, prompt, states, torch.log_softmax(logits[0], -1))
        if self.from_layer is None:
            self._compare_with_own(reading)
            self.from_layer = [layer == 0 or self._begins_at(layer, reading, logits) for layer in range(len(states))]
        return reading

    def divergences(self, reading: Reading, layer: int, changes: Sequence[Change]) -> List[float]:
        out: List[float] = []
        while len(out) < len(changes):
            part = changes[len(out):len(out) + self.batch]
            try:
                with torch.inference_mode():
                    out += self._divergences(reading, layer, part)
            except torch.cuda.OutOfMemoryError as e:
                if self.batch == 1:
                    raise CalibrationError("out of GPU memory with one sequence at a time") from e
                self.batch = max(1, len(part) // 2)
                torch.cuda.empty_cache()
        return out

    def _tokens(self, ids: Ids) -> Tensor:
        known = self.model.get_input_embeddings().weight.shape[0]
        if len(ids) and int(np.max(ids)) >= known:
            raise CalibrationError(f"the tokenizer gives token {int(np.max(ids))}, the model knows {known}")
        return torch.from_numpy(np.asarray(ids, np.int64))[None].to(self.device)

    def _on_device(self, x: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x))[None].to(self.device)

    def _divergences(self, reading: Reading, layer: int, changes: Sequence[Change]) -> List[float]:
        changed = tuple(torch.from_numpy(np.stack(x)).to(self.device) for x in zip(*changes))
        prompt = [changed if i == layer else kept for i, kept in enumerate(reading.prompt)]
        assert self.from_layer is not None
        first = layer if self.from_layer[layer] else 0
        ids = reading.ids.expand(len(changes), -1)
        logits = self._logits(first, reading.states[first].expand(len(changes), -1, -1), ids, prompt)
        coarse = torch.log_softmax(logits, -1)
        kl = (reading.exact.exp() * (reading.exact - coarse)).sum(-1)
        return [float(x) for x in kl.double().mean(-1).cpu()]

    def _logits(self, first: int, states: Optional[Tensor], ids: Tensor, prompt: Optional[Sequence[Any]]) -> Tensor:
        """Logits [batch, tokens, vocabulary] behind tokens that follow the prompt and enter layer `first` as states."""
        begin = 0 if prompt is None else prompt[0][0].shape[2]
        positions = torch.arange(begin, begin + ids.shape[1], device=self.device)[None]
        given = {"input_ids": ids} if first == 0 else {"inputs_embeds": states}
        ATTENTION.prompt = list(prompt) if prompt is not None else None
        try:
            with self._layers_from(first):
                return self.model(**given, position_ids=positions, use_cache=False).logits.float()
        finally:
            ATTENTION.prompt = None

    @contextlib.contextmanager
    def _layers_from(self, first: int) -> Iterator[None]:
        layers = self.base.layers
        self.base.layers = layers[first:]
        try:
            yield
        finally:
            self.base.layers = layers

    def _begins_at(self, layer: int, reading: Reading, logits: Tensor) -> bool:
        """Whether a pass that begins at this layer agrees with the whole one: some models scale what enters the first."""
        try:
            again = self._logits(layer, reading.states[layer], reading.ids, reading.prompt)
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
        return bool((again - logits).abs().max() < SAME_LOGITS)

    def _compare_with_own(self, reading: Reading) -> None:
        """Refuses a model whose own attention, over prompt and tokens in one pass, predicts something else than the reading."""
        ids = torch.cat([self._tokens(self.prompt_ids), reading.ids], 1)
        count = reading.ids.shape[1]
        keep = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        try:
            self._set_own_attention()
            logits = self.model(input_ids=ids, use_cache=False, **keep).logits[0, -count:].float()
        finally:
            self.model.set_attn_implementation(NAME)
        own = torch.log_softmax(logits, -1)
        kl = float((own.exp() * (own - reading.exact)).sum(-1).mean())
        if kl > SAME_READING:
            raise CalibrationError(f"model type {self.model.config.model_type!r}: its own attention predicts something else than attention over "
                                   f"a cache, KL {kl:.2g}; it is not supported")

    def _set_own_attention(self) -> None:
        try:
            self.model.set_attn_implementation("sdpa")
        except (ImportError, ValueError):
            self.model.set_attn_implementation("eager")

    # ---- What the model is ----

    def _find_facts(self, model_id: str) -> Facts:
        self._refuse_changing_rope()
        layers = self.prefill(np.full(PROBE_TOKENS, self._probe_token(), np.int64))
        if not layers:
            raise CalibrationError(f"unknown model type {self.model.config.model_type!r}: it does not call the attention interface of transformers")
        shapes = {(l.q.shape[0], *l.k.shape, l.scaling) for l in layers}
        if len(shapes) != 1:
            raise CalibrationError(f"layers differ in shape or scale: {sorted(shapes)}; a profile has one shape")
        q_heads, kv_heads, _, head_dim, scaling = shapes.pop()
        return Facts(model_id, len(layers), q_heads, kv_heads, head_dim, scaling, self._find_rope(layers), weights_digest(self.model))

    def _probe_token(self) -> int:
        return self.encode("the")[0]

    def _refuse_changing_rope(self) -> None:
        parameters = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        for p in (parameters, *parameters.values()):
            if isinstance(p, dict) and p.get("rope_type") in CHANGING_ROPE:
                raise UnsupportedError(f"model type {self.model.config.model_type!r}: its RoPE of type {p['rope_type']!r} has frequencies that "
                                       "change with the length; a profile has one set")

    def _find_rope(self, layers: Sequence[Layer]) -> Rope:
        """The rotation of each layer. One token repeated has the same key everywhere but for its rotation, in every layer, because
        attention over equal values gives the same value: that tells which of the model's frequencies, paired how, are a layer's."""
        frequencies = [b.float().cpu().numpy() for name, b in self.base.named_buffers()
                       if name.endswith("inv_freq") and "original" not in name and b.ndim == 1 and b.numel() > 0]
        if not frequencies and only_turned(layers[0].k):
            raise CalibrationError("how the model rotates keys by position is not understood: it has no frequencies")
        candidates = [Rope(pairing, 2 * len(f), f) for f in frequencies for pairing in PAIRINGS[1:]] + [Rope("none", 0, np.empty(0, np.float32))]
        chosen: List[Rope] = []
        for i, layer in enumerate(layers):
            errors = [rotation_error(layer.k, rope) for rope in candidates]
            best = int(np.argmin(errors))
            if frequencies and errors[best] > SAME_KEYS:
                raise CalibrationError(f"layer {i}: how it rotates keys by position is not understood")
            chosen.append(candidates[best] if frequencies else candidates[-1])
        return common_rope(chosen)


def first_line(e: BaseException) -> str:
    return str(e).split("\n")[0] or type(e).__name__


@contextlib.contextmanager
def memory_named() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as e:
        raise CalibrationError(f"out of GPU memory: {first_line(e)}") from e


def weights_digest(model: Any) -> str:
    """Of the names, shapes and bits of all parameters. Sums of bits are the same on every device."""
    h = hashlib.sha256()
    for name, p in model.named_parameters():
        parts = p.detach().float().reshape(-1).view(torch.int32).split(1 << 24)
        h.update(repr((name, tuple(p.shape), sum(int(part.sum(dtype=torch.int64)) for part in parts))).encode())
    return h.hexdigest()


def only_turned(k: Any) -> bool:
    """Whether keys [heads, tokens, head_dim] of one token differ between positions, but not in length."""
    size = np.linalg.norm(k, axis=-1)
    return bool(np.abs(k - k[:, :1]).max() > SAME_KEYS * np.abs(k).max() and np.ptp(size, axis=1).max() <= SAME_KEYS * size.max())


def rotation_error(k: Any, rope: Rope) -> float:
    """How much keys [heads, tokens, head_dim] of one token differ between positions when they are turned back, relative to their size."""
    if rope.dims > k.shape[2]:
        return float("inf")
    back = turned(k, rope, rope.inv_freq, -np.arange(k.shape[1]))
    return float(np.abs(back - back[:, :1]).max() / max(np.abs(k).max(), 1e-20))


def common_rope(ropes: Sequence[Rope]) -> Rope:
    """The rotations of all layers as one; layers without one have frequencies of zero."""
    kinds = {(r.pairing, r.dims) for r in ropes if r.dims}
    if not kinds:
        return Rope("none", 0, np.empty(0, np.float32))
    if len(kinds) > 1:
        raise CalibrationError(f"layers differ in rotated dims or pairing: {sorted(kinds)}; a profile has one of each")
    pairing, dims = kinds.pop()
    table: Dict[int, Any] = {i: r.inv_freq if r.dims else np.zeros(dims // 2, np.float32) for i, r in enumerate(ropes)}
    rows = np.stack([table[i] for i in range(len(ropes))]).astype(np.float32)
    return Rope(pairing, dims, rows[0] if (rows == rows[0]).all() else rows)
