"""A profile from a model: means and weights of keys before RoPE, and how sensitive the model is to each head.

A head's sensitivity is the KL of the model's predictions where only this head's keys (or values) are coarse, when a prompt is followed by
its own beginning: copying needs the heads that look things up."""
import dataclasses
import multiprocessing

import numpy as np

from predictions import kl_by_position, log_probabilities
from schemes import (CLASS_SHARES, SINKS, LayerProfile, body, key_unit, left, stepped_keys, stepped_values)

COARSE_KEYS, COARSE_VALUES = 0.4, 0.35
COPY_FROM, COPIED = 64, 128  # tokens of the prompt that follow it
LEAST_KL = 2e-5  # what differs by less than this is rounding
SCALE_RANGE = (1 / 8, 8)


@dataclasses.dataclass
class Statistics:
    """Sums over tokens of calibration prompts, of a layer."""
    key_mean: np.ndarray
    key_mean_after: np.ndarray
    pair_energy: np.ndarray  # [heads, head_dim]


def statistics(layer, rope):
    heads, tokens, head_dim = layer.k.shape
    at = np.arange(SINKS, tokens)
    q = layer.q[:, tokens // 8:].astype(np.float32).reshape(heads, -1, head_dim)
    energy = (q * q).mean(1)
    half = rope.dims // 2
    pairs = energy.copy()
    pairs[:, :half] = pairs[:, half:2 * half] = (energy[:, :half] + energy[:, half:2 * half]) / 2
    return Statistics(rope.turned(layer.k[:, at], -at).mean(1), layer.k[:, at].mean(1), pairs)


def unscaled_profile(prompts, rope):
    """[LayerProfile] with head scales of 1; prompts: a list of caches."""
    out = []
    for layers in zip(*prompts):
        s = [statistics(layer, rope) for layer in layers]
        energy = np.maximum(sum(x.pair_energy for x in s) / len(s), 1e-9)
        weights = energy**0.25
        weights /= rms_of_rows(weights)
        ones = np.ones(len(energy), np.float32)
        out.append(LayerProfile(sum(x.key_mean for x in s) / len(s), weights.astype(np.float32), energy.sum(1),
                                sum(x.key_mean_after for x in s) / len(s), ones, ones, np.zeros(len(energy), np.int32)))
    return out


def rms_of_rows(x):
    return np.sqrt((x * x).mean(-1, keepdims=True))


def coarse(layer, rope, profile):
    """The layer with all keys and values coarse: Left."""
    none = np.zeros((len(layer.k), body(layer).stop - SINKS), np.int32)
    scale = COARSE_KEYS * key_unit(profile.energy, layer.k.shape[2])
    k, _ = stepped_keys(layer, rope, scale, none, profile.key_mean[:, None], np.float32(1))
    v, _ = stepped_values(layer, COARSE_VALUES * np.sqrt(12), none)
    return left(layer, k, v, 0)


class Sensitivity:
    """What a process keeps while heads are tried."""
    model = cache = states = exact = profile = None

    @classmethod
    def start(cls, model, ids, cache, profile):
        copied = ids[COPY_FROM:COPY_FROM + COPIED]
        cls.model, cls.cache, cls.profile = model, cache, profile
        cls.states = model.hidden_states(copied, cache)
        cls.exact = log_probabilities(model.logits(cls.states[-1]))

    @classmethod
    def of_layer(cls, i):
        """KL [2, heads]: keys, values."""
        layer, changed = cls.cache[i], coarse(cls.cache[i], cls.model.rope, cls.profile[i])
        out = np.zeros((2, len(layer.k)))
        for component, name in enumerate("kv"):
            for h in range(len(layer.k)):
                parts = {"k": layer.k, "v": layer.v}
                parts[name] = parts[name].copy()
                parts[name][h] = getattr(changed, name)[h]
                cache = [*cls.cache[:i], type(layer)(parts["k"], parts["v"]), *cls.cache[i + 1:]]
                log_p = log_probabilities(cls.model.continued_from(i, cls.states[i], cache))
                out[component, h] = kl_by_position(cls.exact, log_p).mean()
        return out


def sensitivities(model, prompts, caches, profile, processes):
    """KL [2, layers, heads], the mean of the prompts."""
    total = 0
    for ids, cache in zip(prompts, caches):
        Sensitivity.start(model, ids, cache, profile)
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            total = total + np.stack(pool.map(Sensitivity.of_layer, range(model.layers), 1), 1)
    return total / len(prompts)


def head_scales(kl):
    """KL^(-1/4), of geometric mean 1, clamped."""
    scale = np.maximum(kl, LEAST_KL)**-0.25
    return np.clip(scale / np.exp(np.log(scale).mean()), *SCALE_RANGE).astype(np.float32)


def head_classes(kl):
    """[layers, heads]; kl [2, layers, heads]: errors of both components add up."""
    order = np.argsort(-kl.sum(0), axis=None)
    bounds = np.rint(np.cumsum(CLASS_SHARES) * len(order))
    out = np.empty(len(order), np.int32)
    out[order] = np.searchsorted(bounds, np.arange(len(order)), "right")
    return out.reshape(kl.shape[1:])


def with_sensitivities(profile, kl):
    key_scale, value_scale, classes = head_scales(kl[0]), head_scales(kl[1]), head_classes(kl)
    return [dataclasses.replace(p, key_scale=key_scale[i], value_scale=value_scale[i], head_class=classes[i])
            for i, p in enumerate(profile)]


def read_profile(path):
    """[LayerProfile] of a kv-profile that was calibrated with the model."""
    import h5py
    with h5py.File(path) as f:
        heads = int(f.attrs["num_kv_heads"])
        layers = {name: f[name][()].reshape(-1, heads, *f[name].shape[1:]) for name in f if name != "rope_inv_freq"}
    energy = np.maximum(layers["query_energy"], 1e-9)
    weights = energy**0.25
    weights /= rms_of_rows(weights)
    classes = head_classes(np.stack([layers["joint_sensitivity"], np.zeros_like(layers["joint_sensitivity"])]))
    return [LayerProfile(layers["key_mean_before_rope"][i], weights[i].astype(np.float32), energy[i].sum(1), layers["key_mean"][i],
                         layers["key_scale"][i].astype(np.float32), layers["value_scale"][i].astype(np.float32), classes[i])
            for i in range(len(energy))]
