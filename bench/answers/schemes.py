# SPDX-License-Identifier: Apache-2.0
"""Schemes in NumPy, to check the library against: a layer's keys and values as a scheme leaves them, and its bytes.

A scheme is a function of (LayerCache, Rope, LayerProfile or None) that returns Left. All keep SINKS first and WINDOW newest tokens raw.
Entropy-coded schemes count the entropy of a layer's codes of one component and OVERHEAD bits a code."""
import dataclasses
import math

import numpy as np

SINKS, WINDOW = 4, 64
RAW_BITS, SCALE_BITS = 16, 32  # of an element; of a scale and a zero point
OVERHEAD = 0.15  # bits a code: headers, starts and padding of blocks
KEY_EXPONENT_BITS, VALUE_EXPONENT_BITS = 4, 8  # of a token
IMPORTANCE_POWER, IMPORTANCE_RANGE = -0.15, (0.5, 1.4)
CLIPPED_SCALE = 0.9957  # rms of 2-bit codes: the least error of a Gaussian


@dataclasses.dataclass
class LayerProfile:
    """What a profile says of a layer, by kv head. key_mean and weights [heads, head_dim] are of keys before RoPE, the mean square of weights is 1."""
    key_mean: np.ndarray
    weights: np.ndarray
    energy: np.ndarray  # [heads], of queries: the mean of |q|^2
    key_mean_after: np.ndarray  # of keys after RoPE
    key_scale: np.ndarray  # [heads]
    value_scale: np.ndarray  # [heads]
    head_class: np.ndarray  # [heads], 0: the most sensitive


@dataclasses.dataclass
class Left:
    """What a scheme leaves of a layer. k, v: [kv_heads, tokens, head_dim]."""
    k: np.ndarray
    v: np.ndarray
    bytes: float
    entropy: tuple = ()  # bits a code of keys, of values


def read_profile(path):
    """[LayerProfile] of a kv-profile that was calibrated with the model."""
    import h5py
    with h5py.File(path) as f:
        heads = int(f.attrs["num_kv_heads"])
        layers = {name: f[name][()].reshape(-1, heads, *f[name].shape[1:]) for name in f if name != "rope_inv_freq"}
    energy = np.maximum(layers["query_energy"], 1e-9)
    weights = energy**0.25
    weights /= rms(weights, -1)
    classes = head_classes(layers["joint_sensitivity"])
    return [LayerProfile(layers["key_mean_before_rope"][i], weights[i].astype(np.float32), energy[i].sum(1), layers["key_mean"][i],
                         layers["key_scale"][i].astype(np.float32), layers["value_scale"][i].astype(np.float32), classes[i])
            for i in range(len(energy))]


def head_classes(sensitivity):
    """The class of each head, of the shape of sensitivity."""
    order = np.argsort(-sensitivity, axis=None)
    bounds = np.rint(np.cumsum(CLASS_SHARES) * len(order))
    out = np.empty(len(order), np.int32)
    out[order] = np.searchsorted(bounds, np.arange(len(order)), "right")
    return out.reshape(sensitivity.shape)


def as_float16(x):
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def rms(x, axis):
    return np.sqrt((x * x).mean(axis, keepdims=True))


def entropy(codes):
    codes = codes.astype(np.int64).ravel()
    counts = np.bincount(codes - codes.min())
    p = counts[counts > 0] / codes.size
    return float(-(p * np.log2(p)).sum())


def body(layer, sinks=SINKS, window=WINDOW):
    return slice(sinks, layer.k.shape[1] - window)


def left(layer, at, k, v, bits, entropy=()):
    """k and v: the body, tokens `at`, as it is decoded; bits: of the body."""
    out = []
    for whole, part in ((layer.k, k), (layer.v, v)):
        whole = whole.copy()
        whole[:, at] = part
        out.append(whole)
    raw = 2 * (layer.k.size - k.size) * RAW_BITS
    return Left(*out, (bits + raw) / 8, entropy)


# ---- Weighted steps: keys before RoPE, a step for each token ----


def importance_exponents(layer, at):
    """G [heads, body tokens], eighths of an octave, -8 .. 4."""
    u = layer.significance[:, at] * np.arange(at.start + 1, at.stop + 1)
    g = np.clip(np.maximum(u, 1e-30)**IMPORTANCE_POWER, *IMPORTANCE_RANGE)
    return np.rint(8 * np.log2(g)).astype(np.int32)


def stepped(y, step):
    """(decoded, entropy of the codes)"""
    codes = np.rint(y / step)
    return codes * step, entropy(codes)


def stepped_values(v, scale, importance):
    """Values in steps scale * rms of the token * 2^(importance / 8), the rms in eighths of an octave."""
    octaves = np.rint(4 * np.log2(np.maximum((v * v).mean(-1), 1e-38)))
    exponent = np.clip(octaves + importance, -128, 127)
    return stepped(v, (scale * np.exp2(exponent / 8)[..., None]).astype(np.float32))


def key_unit(energy, head_dim):
    """[heads, 1, 1]: the step that makes logits err by a standard deviation of 1 (times sm_scale^-1 / sqrt(head_dim))."""
    return np.sqrt(12 * head_dim / energy)[:, None, None]


@dataclasses.dataclass(frozen=True)
class WeightedSteps:
    """Preset `small`; each of the later fields leaves out one of its ideas."""
    k: float  # keys: deviation of a logit's error; own: in units of the row's rms
    v: float  # values: share of the token's rms
    own: bool = False  # no profile: means and rms of the row's own keys
    before_rope: bool = True
    weights: bool = True
    head_scales: bool = True
    importance: bool = True
    token_values: bool = True  # False: one step for all values of a row, their means removed
    sinks: int = SINKS
    window: int = WINDOW

    def times(self, factor):
        return dataclasses.replace(self, k=self.k * factor, v=self.v * factor)

    def __call__(self, layer, rope, profile):
        at = body(layer, self.sinks, self.window)
        heads, tokens, head_dim = layer.k[:, at].shape
        importance = importance_exponents(layer, at) if self.importance else np.zeros((heads, tokens), np.int32)
        keys, key_entropy = self.keys(layer, at, rope, profile, importance)
        values, value_entropy = self.values(layer.v[:, at], profile, importance)
        bits = (key_entropy + value_entropy + 2 * OVERHEAD) * keys.size
        bits += heads * tokens * (KEY_EXPONENT_BITS * self.importance + VALUE_EXPONENT_BITS * self.token_values)
        bits += heads * head_dim * RAW_BITS * (self.own + (not self.token_values))  # means
        return left(layer, at, keys, values, bits, (key_entropy, value_entropy))

    def keys(self, layer, at, rope, profile, importance):
        places = np.arange(at.start, at.stop)
        keys = rope.turned(layer.k[:, at], -places) if self.before_rope else layer.k[:, at]
        if self.own:
            mean, weights = as_float16(keys.mean(1, keepdims=True)), np.float32(1)
            scale = self.k * rms(keys - mean, (1, 2))
        else:
            mean = as_float16(profile.key_mean if self.before_rope else profile.key_mean_after)[:, None]
            weights = profile.weights[:, None] if self.weights else np.float32(1)
            scale = self.k * key_unit(profile.energy, keys.shape[2]) * (profile.key_scale[:, None, None] if self.head_scales else 1)
        step = (scale * np.exp2(importance / 8)[..., None]).astype(np.float32)
        decoded, bits = stepped(weights * (keys - mean), step)
        decoded = decoded / weights + mean
        return (rope.turned(decoded, places) if self.before_rope else decoded), bits

    def values(self, v, profile, importance):
        scale = self.v * math.sqrt(12) * (profile.value_scale[:, None, None] if self.head_scales and not self.own else 1)
        if self.token_values:
            return stepped_values(v, scale, importance)
        mean = as_float16(v.mean(1, keepdims=True))
        step = (scale * rms(v, (1, 2)) * np.exp2(importance / 8)[..., None]).astype(np.float32)
        decoded, bits = stepped(v - mean, step)
        return decoded + mean, bits


# ---- Fixed widths ----


def min_max(x, bits, axis=-1):
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = np.maximum(as_float16((high - low) / (2**bits - 1)), 1e-8), as_float16(low)
    return scale * np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1) + zero


def clipped(x):
    """2 bits around 0."""
    scale = np.maximum(as_float16(CLIPPED_SCALE * rms(x, -1)), 1e-8)
    return (np.clip(np.rint(x / scale - 0.5), -2, 1) + np.float32(0.5)) * scale


def rotation(head_dim):
    """Orthogonal [head_dim, head_dim]: Hadamard with random signs, the same for all."""
    h = np.ones((1, 1), np.float32)
    while len(h) < head_dim:
        h = np.block([[h, h], [h, -h]])
    signs = np.random.default_rng(7).integers(0, 2, head_dim) * 2 - 1
    return (h / math.sqrt(head_dim) * signs).astype(np.float32)


def by_token(key_bits, value_bits, rotated=False, means=False):
    def run(layer, rope, profile):
        at, turn = body(layer), rotation(layer.k.shape[2]) if rotated else np.eye(layer.k.shape[2], dtype=np.float32)
        mean = as_float16(profile.key_mean_after)[:, None] if means else np.float32(0)
        k = min_max((layer.k[:, at] - mean) @ turn.T, key_bits) @ turn + mean
        v = min_max(layer.v[:, at] @ turn.T, value_bits) @ turn
        return left(layer, at, k, v, (key_bits + value_bits) * k.size + 2 * SCALE_BITS * k.shape[0] * k.shape[1])
    return run


def kivi(bits, group):
    """Keys by channel in groups of tokens, values by token in groups of channels. Groups of tokens begin at multiples of their size, the
    first without the sinks; the last one stays raw where it is incomplete."""
    def run(layer, rope, profile):
        at = body(layer)
        k, v = layer.k[:, at].copy(), layer.v[:, at]
        heads, tokens, head_dim = k.shape
        whole = at.stop // group * group - SINKS
        groups = np.split(k[:, :whole], range(group - SINKS, whole, group), 1)
        k[:, :whole] = np.concatenate([min_max(x, bits, 1) for x in groups], 1)
        channels = min(group, head_dim)
        values = min_max(v.reshape(heads, tokens, -1, channels), bits).reshape(v.shape)
        scales = SCALE_BITS * heads * (len(groups) * head_dim + tokens * head_dim // channels)
        return left(layer, at, k, values, scales + heads * head_dim * (bits * (whole + tokens) + RAW_BITS * (tokens - whole)))
    return run


CLASS_SHARES = (0.1, 0.4)  # of all heads, by sensitivity; the rest is the last class
CLASS_FORMATS = (((8, 4), (8, 4)), ((4, 4), (4, 2)), ((4, 2), (2, 2)))  # (key, value) bits of important tokens, of the others


HIGH, LOW, MOVED = range(3)  # tiers of tokens; MOVED: high once, then coded again from what was decoded


def at_widths(y, widths):
    """y [heads, tokens, channels] as codes of widths [heads, tokens] leave it."""
    y = y.copy()
    for width in np.unique(widths):
        mask = widths == width
        y[mask] = clipped(y[mask]) if width == 2 else min_max(y[mask], int(width))
    return y


def tiers_left(layer, at, profile, tiers, formats=CLASS_FORMATS):
    """Tokens `at` in tiers [heads, tokens]; formats: by class of the head."""
    turn, mean = rotation(layer.k.shape[2]), as_float16(profile.key_mean_after)[:, None]
    widths = np.array([[[f[j] for f in formats[c]] for c in profile.head_class] for j in range(2)])  # [component, head, tier]
    bits, decoded = 0, []
    for y, (high, low) in zip(((layer.k[:, at] - mean) @ turn.T, layer.v[:, at] @ turn.T), np.moveaxis(widths, 2, 1)):
        y = np.where((tiers == MOVED)[..., None], at_widths(y, np.broadcast_to(high[:, None], tiers.shape)), y)
        of_token = np.where(tiers == HIGH, high[:, None], low[:, None])
        bits += of_token.sum() * y.shape[2] + of_token.size * SCALE_BITS
        decoded.append(at_widths(y, of_token) @ turn)
    return left(layer, at, decoded[0] + mean, decoded[1], bits)


def class_tiers(alpha=1.0):
    """Formats by class of heads, in each two tiers: a token is important where its significance is alpha / its place or more."""
    def run(layer, rope, profile):
        at = body(layer)
        important = layer.significance[:, at] >= alpha / np.arange(at.start + 1, at.stop + 1)
        return tiers_left(layer, at, profile, np.where(important, HIGH, LOW))
    return run


SCHEMES = {
    "weighted steps 0.5 / 0.45": WeightedSteps(0.5, 0.45),
    "weighted steps 0.4 / 0.35": WeightedSteps(0.4, 0.35),
    "weighted steps 0.3 / 0.25": WeightedSteps(0.3, 0.25),
    "weighted steps without a profile, 0.3 / 0.25": WeightedSteps(0.3, 0.25, own=True),
    "tiers by class of heads": class_tiers(),
    "KIVI 4 bit, groups of 64": kivi(4, 64),
    "K4V4 rotated": by_token(4, 4, rotated=True),
    "K4V4 rotated, key means removed": by_token(4, 4, rotated=True, means=True),
    "K8V4": by_token(8, 4),
}

# What each idea brings: one after the other, then all but one. Steps are made as large as gives each the memory of the whole.
WHOLE = WeightedSteps(0.5, 0.45)
IDEAS = {
    "the 4 first tokens raw": {"sinks": 0},
    "values in steps of their own token": {"token_values": False},
    "keys before RoPE": {"before_rope": False, "weights": False},
    "weights by pair of dims": {"weights": False},
    "head scales": {"head_scales": False},
    "importance": {"importance": False},
}


def ladder():
    """{name: WeightedSteps} beside WHOLE."""
    names, out = list(IDEAS), {}
    for i in range(len(names)):
        without = {field: value for name in names[i:] for field, value in IDEAS[name].items()}
        out[f"+ {names[i - 1]}" if i else "one step a row and component"] = dataclasses.replace(WHOLE, **without)
    for name in names[:-1]:
        out[f"all but {name}"] = dataclasses.replace(WHOLE, **IDEAS[name])
    return out | {"1 first token raw": dataclasses.replace(WHOLE, sinks=1), "no newest tokens raw": dataclasses.replace(WHOLE, window=0)}
