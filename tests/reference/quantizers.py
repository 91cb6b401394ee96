# SPDX-License-Identifier: Apache-2.0
"""Quantisers and bases, from docs/internals/architecture.md and docs/reference/format.md. x is float32 [kv_heads, tokens, head_dim]."""
import numpy as np

from presets import RAW


def fp16(x):
    return np.asarray(x).astype(np.float16).astype(np.float32)


def bf16(x):
    """Round to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def units(fmt, tokens, head_dim, first):
    """(tokens, channels, axis): the slices whose values share a step along `axis`. Token groups start at token `first`."""
    if fmt.unit == "token":
        for c in range(0, head_dim, fmt.group or head_dim):
            yield slice(0, tokens), slice(c, c + (fmt.group or head_dim)), 2
    else:
        for t in range(first, tokens, fmt.group):
            yield slice(t, min(t + fmt.group, tokens)), slice(0, head_dim), 1 if fmt.unit == "channel" else (1, 2)


def quantize(x, fmt, raw, first=0, step=None):
    """(codes, reconstruction) of every token; codes is None for raw. `step`: float32 [kv_heads] of the absolute rule."""
    if fmt is RAW:
        return None, raw(x)
    if fmt.rule == "absolute":
        scale = step[:, None, None]
        codes = np.rint(x / scale)
        return codes.astype(np.int16), codes * scale
    codes, out = np.zeros(x.shape, np.int16), np.zeros_like(x)
    for tokens, channels, axis in units(fmt, x.shape[1], x.shape[2], first):
        part = x[:, tokens, channels]
        low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
        if fmt.rule == "norm":  # the root mean square in double: at a tie of fp16 the library may differ
            rms = np.sqrt((part.astype(np.float64) ** 2).mean(axis, keepdims=True))
            scale = fp16(np.float32(0.9957) * rms.astype(np.float32))
            low = np.float32(-1.5) * scale
        elif fmt.rule == "minmax":
            scale = fp16((high - low) / np.float32(2 ** fmt.bits - 1))
        else:
            scale = fp16((high - low) * np.float32(fmt.step))
        zero_point = fp16(low)
        code = np.where(scale > 0, np.rint((part - zero_point) / np.where(scale > 0, scale, 1)), 0)
        if fmt.rule in ("minmax", "norm"):
            code = np.clip(code, 0, 2 ** fmt.bits - 1)
        elif np.abs(code).max() > 255:
            raise ValueError("a unit falls back to raw: not computed here")
        codes[:, tokens, channels] = code
        out[:, tokens, channels] = scale * code.astype(np.float32) + zero_point
    return codes, out


def metadata_bits(fmt, head_dim):
    """Scales and zero points per token, of tokens whose unit is complete."""
    if fmt.rule in ("raw", "absolute"):
        return 0
    if fmt.unit == "token":
        return 32 * -(-head_dim // (fmt.group or head_dim))
    return 32 * (head_dim if fmt.unit == "channel" else 1) / fmt.group


def global_steps(scheme, q, v, sm_scale, kv_heads):
    """float32 [2][kv_heads]: the logit error has standard deviation k, the output the relative error v."""
    head_dim = v.shape[2]
    queries = q.reshape(kv_heads, -1, head_dim).astype(np.float64)  # the heads of a group are neighbours
    trace = 1.01 * (queries ** 2).sum(2).mean(1)
    power = (v.astype(np.float64) ** 2).sum(2).mean(1)
    keys = scheme.high[0].step * np.sqrt(12 / trace) / sm_scale
    values = scheme.high[1].step * np.sqrt(12 * power / head_dim)
    return keys.astype(np.float32), values.astype(np.float32)


def hadamard_signs(n):
    state, mask, signs = 0x7469657264, 2 ** 64 - 1, np.ones(n)
    for i in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        signs[i] = -1 if (z ^ (z >> 31)) >> 63 else 1
    return signs


def hadamard_matrix(n):
    """Orthonormal [n, n], x @ matrix: seeded signs, then Sylvester's matrix of each descending power of two."""
    out, at = np.zeros((n, n)), 0
    while at < n:
        part = 1 << ((n - at).bit_length() - 1)
        h = np.ones((1, 1))
        while len(h) < part:
            h = np.block([[h, h], [h, -h]])
        out[at:at + part, at:at + part] = h / np.sqrt(part)
        at += part
    return hadamard_signs(n)[:, None] * out


class Basis:
    """Coordinates in which a component is quantised: y = forward(x), x' = backward(y')."""

    def __init__(self, kind, x, means=None):
        """kind: none, mean, hadamard or hadamard+mean. means: of the rows [kv_heads, head_dim], from a profile; x's own without them."""
        self.matrix = hadamard_matrix(x.shape[2]) if kind.startswith("hadamard") else None
        self.mean = 0
        if kind.endswith("mean"):
            self.mean = fp16(x.astype(np.float64).mean(1, keepdims=True) if means is None else means[:, None])

    def forward(self, x):
        x = x - self.mean
        return x if self.matrix is None else (x @ self.matrix).astype(np.float32)

    def backward(self, y):
        return (y if self.matrix is None else y @ self.matrix.T) + self.mean
