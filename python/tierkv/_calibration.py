# SPDX-License-Identifier: Apache-2.0
"""Calibration by the model itself: statistics of its cache, and how far its predictions move when one head alone is coarse.

The core, in NumPy. A model is anything with the methods of CalibrationModel.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import zipfile
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from ._arrays import FloatArray
from .errors import TierkvError
from .profile import ProfileData, Rope, Scalars, head_scales

Ids = npt.NDArray[np.int64]
COMPONENTS = ("key", "value", "joint")
CHARACTERS_A_TOKEN = 10  # more than texts have: encoding a whole book takes long
LEAST_KL = 2e-5  # nats; smaller ones are taken for noise


class CalibrationError(TierkvError):
    """What keeps a model from being calibrated."""


@dataclass(frozen=True)
class Plan:
    """What is read, and how coarse a head is made."""

    prompt_tokens: int = 2048
    suffix_tokens: int = 128
    sinks: int = 4  # first tokens, left out of statistics and never coarse
    window: int = 64  # newest tokens of the prompt, likewise
    key_error: float = 0.4  # standard deviation of the logits' error
    value_error: float = 0.35  # relative to the token's values

    @property
    def body(self) -> slice:
        return slice(self.sinks, self.prompt_tokens - self.window)

    def validate(self) -> None:
        if self.suffix_tokens < 1 or self.prompt_tokens < self.sinks + 2 * self.window + self.suffix_tokens:
            raise CalibrationError(f"prompts of {self.prompt_tokens} tokens are too short: at least "
                                   f"{self.sinks + 2 * self.window + self.suffix_tokens} are needed")


@dataclass(frozen=True)
class Facts:
    model_id: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    rope: Rope
    weights: str = ""  # a digest; empty: unknown

    def inv_freq(self, layer: int) -> FloatArray:
        """[rope.dims / 2] of a layer."""
        table = np.atleast_2d(self.rope.inv_freq)
        row: FloatArray = table[layer if len(table) > 1 else 0]
        return row


class CachedLayer(Protocol):
    """A layer's cache as attention reads it, float32."""

    k: FloatArray  # [kv_heads, tokens, head_dim]
    v: FloatArray
    q: Any  # [q_heads, tokens, head_dim]


Change = Tuple[FloatArray, FloatArray]  # keys and values of one layer's prompt, in place of what the cache holds


class CalibrationModel(Protocol):
    def facts(self) -> Facts: ...

    def encode(self, text: str) -> List[int]:
        """Tokens, without any that open every text."""

    def opening(self) -> List[int]:
        """Tokens that open every text."""

    def prefill(self, ids: Ids) -> Sequence[CachedLayer]:
        """The cache of a prompt."""

    def read(self, ids: Ids, cache: Sequence[CachedLayer]) -> Any:
        """What the model predicts behind each of ids, which follow the cache: for divergences()."""

    def divergences(self, reading: Any, layer: int, changes: Sequence[Change]) -> List[float]:
        """For each change of the layer's prompt: the mean KL divergence of the predictions from read()'s, in nats."""


def turned(x: FloatArray, rope: Rope, inv_freq: FloatArray, positions: npt.NDArray[np.int64]) -> FloatArray:
    """x [heads, tokens, head_dim] turned by its positions; negative positions turn back."""
    pairs = len(inv_freq)
    if pairs == 0 or not inv_freq.any():
        return x
    angle = positions[:, None] * inv_freq.astype(np.float64)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = pair_dims(rope)
    out = x.copy()
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def pair_dims(rope: Rope) -> Tuple[slice, slice]:
    """First and second dims of the pairs that turn."""
    if rope.pairing == "neighbours":
        return slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    return slice(0, rope.dims // 2), slice(rope.dims // 2, rope.dims)


class Moments:
    """Sums over the tokens of prompts, [layers, kv_heads, ...]."""

    NAMES = ("key", "key_before_rope", "value", "query_square", "value_square", "tokens")

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        rows = (facts.num_layers, facts.num_kv_heads)
        self.key, self.key_before_rope, self.value, self.query_square = np.zeros((4, *rows, facts.head_dim))
        self.value_square = np.zeros(rows)
        self.tokens = np.zeros(facts.num_layers)

    def add(self, layer: int, cache: CachedLayer, body: slice) -> None:
        f = self.facts
        k, v, q = (np.asarray(x, np.float32)[:, body] for x in (cache.k, cache.v, cache.q))
        for name, x in (("keys", k), ("values", v), ("queries", q)):
            if not np.isfinite(x).all():
                raise CalibrationError(f"layer {layer}: {name} are not finite")
        positions = np.arange(body.start, body.stop)
        self.key[layer] += k.sum(1, dtype=np.float64)
        self.key_before_rope[layer] += turned(k, f.rope, f.inv_freq(layer), -positions).sum(1, dtype=np.float64)
        self.value[layer] += v.sum(1, dtype=np.float64)
        self.value_square[layer] += np.square(v, dtype=np.float64).sum((1, 2))
        groups = q.reshape(f.num_kv_heads, -1, *q.shape[1:])
        self.query_square[layer] += np.square(groups, dtype=np.float64).mean(1).sum(1)
        self.tokens[layer] += k.shape[1]

    def profile(self) -> ProfileData:
        """Without sensitivities."""
        f = self.facts
        n = self.tokens[:, None, None]
        energy = self.query_square / n
        first, second = pair_dims(f.rope)
        for layer in range(f.num_layers):
            if f.inv_freq(layer).any():
                both = (energy[layer][:, first] + energy[layer][:, second]) / 2
                energy[layer][:, first] = energy[layer][:, second] = both
        trace = energy.sum(-1)
        if not (trace > 0).all():
            layer, head = np.argwhere(~(trace > 0))[0]
            raise CalibrationError(f"layer {layer}, kv head {head}: its queries are zero")
        means = (self.key / n, self.value / n, self.key_before_rope / n)
        key, value, before = (m.astype(np.float32) for m in means)
        return ProfileData(f.model_id, f.num_layers, f.num_q_heads, f.num_kv_heads, f.head_dim, f.sm_scale, key, value, trace,
                           self.value_square / n[..., 0], key_mean_before_rope=before, query_energy=energy.astype(np.float32), rope=f.rope)


def coarse_keys(k: FloatArray, layer: int, facts: Facts, profile: ProfileData, plan: Plan) -> FloatArray:
    """k [kv_heads, tokens, head_dim], its body rounded before RoPE in steps whose logit errors are plan.key_error each."""
    assert profile.key_mean_before_rope is not None
    positions = np.arange(plan.body.start, plan.body.stop)
    mean = profile.key_mean_before_rope[layer][:, None]
    step = plan.key_error * np.sqrt(12 / profile.query_trace[layer]) / facts.sm_scale
    step = step.astype(np.float32)[:, None, None]
    rope, inv_freq = facts.rope, facts.inv_freq(layer)
    codes = np.rint((turned(k[:, plan.body], rope, inv_freq, -positions) - mean) / step)
    out = k.copy()
    out[:, plan.body] = turned(codes * step + mean, rope, inv_freq, positions)
    return out


def coarse_values(v: FloatArray, plan: Plan) -> FloatArray:
    """v, its body rounded in steps of plan.value_error sqrt(12) times the rms of the token, to an eighth of an octave."""
    body = v[:, plan.body]
    rms = np.sqrt(np.square(body).mean(-1, keepdims=True))
    step = plan.value_error * np.sqrt(12) * np.exp2(np.rint(8 * np.log2(np.maximum(rms, 1e-20))) / 8)
    step = step.astype(np.float32)
    out = v.copy()
    out[:, plan.body] = np.rint(body / step) * step
    return out


def variants(cache: CachedLayer, layer: int, facts: Facts, profile: ProfileData, plan: Plan) -> List[Change]:
    """First the layer itself, its keys turned back and forth, then per head: coarse keys, coarse values, both."""
    k, v = cache.k, cache.v
    positions = np.arange(k.shape[1])
    rope, inv_freq = facts.rope, facts.inv_freq(layer)
    changes = [(turned(turned(k, rope, inv_freq, -positions), rope, inv_freq, positions), v)]
    ck, cv = coarse_keys(k, layer, facts, profile, plan), coarse_values(v, plan)
    for head in range(facts.num_kv_heads):
        hk, hv = k.copy(), v.copy()
        hk[head], hv[head] = ck[head], cv[head]
        changes += [(hk, v), (k, hv), (hk, hv)]
    return changes


class Resume:
    """What was measured so far, in a file that is replaced whole after each layer; for one model, plan and set of prompts."""

    def __init__(self, path: Optional[pathlib.Path], key: str) -> None:
        self.path, self.key = path, key
        self.arrays: Dict[str, npt.NDArray[Any]] = {}
        if path is None or not path.exists():
            return
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as f:
                self.arrays = {name: f[name] for name in f.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
            raise CalibrationError(f"{path}: not a file to resume from; delete it to start anew ({e})") from e
        if str(self.arrays.pop("key", "")) != key:
            raise CalibrationError(f"{path}: begun with another model, other texts or other options; delete it to start anew")

    def save(self, **arrays: npt.NDArray[Any]) -> None:
        self.arrays.update(arrays)
        if self.path is None:
            return
        part = self.path.with_name(self.path.name + ".part")
        try:
            with open(part, "wb") as f:
                np.savez(f, key=np.array(self.key), **self.arrays)
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                part.unlink()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def make_prompts(model: CalibrationModel, texts: Sequence[Tuple[str, str]], plan: Plan, limit: int) -> List[Ids]:
    """Prompts with what follows them, [prompt_tokens + suffix_tokens] each: at most `limit`, from all (name, text) in turn."""
    opening = model.opening()
    size = plan.prompt_tokens + plan.suffix_tokens
    pieces: List[List[Ids]] = []
    enough = CHARACTERS_A_TOKEN * size * -(-limit // len(texts))
    for name, text in texts:
        ids = model.encode(text[:enough])
        count = len(ids) // (size - len(opening))
        if count == 0:
            raise CalibrationError(f"{name}: too short, {len(ids)} tokens; a prompt and what follows take {size - len(opening)}")
        step = size - len(opening)
        pieces.append([np.array(opening + list(ids[i * step:(i + 1) * step]), np.int64) for i in range(count)])
    by_turn = [p[i] for i in range(max(map(len, pieces))) for p in pieces if i < len(p)]
    return by_turn[:limit]


def resume_key(facts: Facts, plan: Plan, prompts: Sequence[Ids]) -> str:
    h = hashlib.sha256(repr((asdict(plan), facts.model_id, facts.num_layers, facts.num_kv_heads, facts.head_dim, facts.sm_scale,
                             facts.rope.pairing, facts.rope.dims, facts.weights)).encode())
    h.update(np.ascontiguousarray(facts.rope.inv_freq).tobytes())
    for ids in prompts:
        h.update(ids.tobytes())
    return h.hexdigest()


Progress = Callable[[int, int], None]  # prompt and layer that are done


def gather(model: CalibrationModel, prompts: Sequence[Ids], plan: Plan, resume: Resume) -> Moments:
    moments = Moments(model.facts())
    saved = resume.arrays
    if "moments.tokens" in saved:
        for name in Moments.NAMES:
            setattr(moments, name, saved[f"moments.{name}"])
        return moments
    for ids in prompts:
        for layer, cache in enumerate(model.prefill(ids[:plan.prompt_tokens])):
            moments.add(layer, cache, plan.body)
    resume.save(**{f"moments.{name}": getattr(moments, name) for name in Moments.NAMES})
    return moments


def measure(model: CalibrationModel, prompts: Sequence[Ids], profile: ProfileData, plan: Plan, resume: Resume,
            progress: Progress) -> Tuple[FloatArray, float]:
    """KL [prompts, layers, kv_heads, 3 of COMPONENTS], means over a prompt's own beginning and its continuation, and the noise."""
    facts = model.facts()
    shape = (len(prompts), facts.num_layers, 1 + 3 * facts.num_kv_heads)
    kl = resume.arrays.get("kl", np.full(shape, np.nan))
    for p, ids in enumerate(prompts):
        if not np.isnan(kl[p]).any():
            continue
        prompt = ids[:plan.prompt_tokens]
        cache = model.prefill(prompt)
        copied = prompt[plan.window:plan.window + plan.suffix_tokens]
        readings = [model.read(follows, cache) for follows in (copied, ids[plan.prompt_tokens:])]
        for layer in range(facts.num_layers):
            if not np.isnan(kl[p, layer]).any():
                continue
            changes = variants(cache[layer], layer, facts, profile, plan)
            kl[p, layer] = np.mean([model.divergences(r, layer, changes) for r in readings], 0)
            if not np.isfinite(kl[p, layer]).all():
                raise CalibrationError(f"layer {layer}: the model's predictions are not finite")
            resume.save(kl=kl)
            progress(p, layer)
    noise = float(np.abs(kl[..., 0]).max())
    return kl[..., 1:].reshape(*shape[:2], facts.num_kv_heads, 3), noise


def sensitivities(kl: FloatArray, noise: float) -> List[Scalars]:
    """Sensitivities of keys, of values and of both, [layers, kv_heads]: means over prompts, not below the noise."""
    floor = max(LEAST_KL, noise)
    return [np.maximum(kl[..., c].mean(0), floor) for c in range(3)]


def calibrate(model: CalibrationModel, prompts: Sequence[Ids], plan: Plan, resume_path: Optional[pathlib.Path] = None,
              progress: Progress = lambda prompt, layer: None) -> Tuple[ProfileData, Resume]:
    """The profile of a model. The caller removes the resume file when the profile is safe."""
    plan.validate()
    if not prompts:
        raise CalibrationError("no prompts")
    facts = model.facts()
    resume = Resume(resume_path, resume_key(facts, plan, prompts))
    profile = gather(model, prompts, plan, resume).profile()
    kl, noise = measure(model, prompts, profile, plan, resume, progress)
    key, value, joint = sensitivities(kl, noise)
    return replace(profile, key_sensitivity=key, value_sensitivity=value, joint_sensitivity=joint, key_scale=head_scales(key),
                   value_scale=head_scales(value)), resume
