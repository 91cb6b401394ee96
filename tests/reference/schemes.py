"""The compression schemes of docs/DESIGN.md in NumPy, for one row component [T, D]: reconstruction and size.

Written from the text of the design alone, as a check on the C++ code: plain, slow, float32 where the design says so.
"""
import dataclasses
import functools

import numpy as np


@dataclasses.dataclass
class Format:
    """bits: 16 raw, 0 where a step decides. rule: minmax, relative, absolute. unit: token, channel, block, global."""
    bits: int = 16
    rule: str = "minmax"
    unit: str = "token"
    group: int = 0
    step: float = 0.0
    basis: str = "none"

    @property
    def raw(self):
        return self.bits == 16


@dataclasses.dataclass
class Scheme:
    high: tuple
    low: tuple = None
    window_format: tuple = (Format(), Format())
    window: int = 0
    sinks: int = 0
    alpha_h: float = 1.0
    alpha_l: float = 0.0
    coder: str = "none"

    @property
    def tiered(self):
        return self.low is not None


def pair(name):
    k, v = name[1:].split("v")
    return Format(int(k)), Format(int(v))


def parse(text):
    """NAME[:key=value,...][+huffman][+rot] -> Scheme."""
    base, *suffixes = text.split("+")
    name, _, rest = base.partition(":")
    keys = dict(item.split("=", 1) for item in rest.split(",")) if rest else {}
    get = lambda key, default: type(default)(keys.pop(key, default))
    if name == "fp16" or name == "zstd-fp16":
        s = Scheme(pair("k16v16"), coder="zstd" if name[0] == "z" else "none")
        keys.pop("level", None)
    elif name == "zstd-codes":
        s = parse(keys.pop("of", "k8v4"))
        s.coder = "zstd"
        keys.pop("level", None)
    elif name == "diffkv":
        s = Scheme(pair(get("high", "k8v4")), pair(get("low", "k4v2")), window=64)
        s.alpha_h, s.alpha_l = get("alpha_h", 1.0), get("alpha_l", 0.0)
        s.window_format = s.high if get("window_format", "high") == "high" else s.window_format
    elif name in ("kivi4", "kivi2"):
        bits = int(name[4])
        group = get("group", 128 if bits == 4 else 32)
        s = Scheme((Format(bits, unit="channel", group=group), Format(bits, group=group)), window=get("residual", 128))
    elif name == "kvcomp":
        unit, block = get("unit", "block"), get("block", 64)
        s = Scheme((Format(0, "relative", unit, block, get("rel_k", 0.05)), Format(0, "relative", "token", 0, get("rel_v", 0.15))),
                   window=64, coder="huffman")
    elif name == "step":
        basis = get("basis", "mean")
        s = Scheme((Format(0, "absolute", "global", 0, get("k", 0.3), basis), Format(0, "absolute", "global", 0, get("v", 0.25), basis)),
                   window=64, coder="huffman")
    else:
        s = Scheme(pair(name))
        s.high[0].group, s.high[1].group = get("group_k", 0), get("group_v", 0)
    s.window, s.sinks = get("window", s.window), get("sinks", s.sinks)
    assert not keys, keys
    if "rot" in suffixes:
        for formats in (s.high, s.low or (), s.window_format if s.tiered else ()):
            for f in formats:
                f.basis = "hadamard"
    if "huffman" in suffixes:
        s.coder = "huffman"
    return s


def splitmix64(n, state=0x7469657264):
    mask, out = (1 << 64) - 1, []
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


@functools.lru_cache(None)
def hadamard(d):
    """Orthonormal D x D: seeded signs, then Sylvester blocks of descending powers of two."""
    m, done = np.zeros((d, d)), 0
    for bit in reversed(range(d.bit_length())):
        n = 1 << bit
        if d & n:
            h = np.ones((1, 1))
            while len(h) < n:
                h = np.block([[h, h], [h, -h]])
            m[done:done + n, done:done + n] = h / np.sqrt(n)
            done += n
    signs = np.array([-1.0 if z >> 63 else 1.0 for z in splitmix64(d)])
    return signs[:, None] * m


def half(x):
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


class Component:
    """K or V of one row: statistics of the whole row, and quantisation of any of its tokens."""

    def __init__(self, x, step=None):
        self.x = x.astype(np.float32)
        self.dim = x.shape[1]
        self.mean = half(x.astype(np.float64).mean(0))
        self.step = None if step is None else np.float32(step)

    def forward(self, y, f):
        if f.basis == "mean":
            return (y - self.mean).astype(np.float32)
        if f.basis == "hadamard":
            return (y.astype(np.float64) @ hadamard(self.dim)).astype(np.float32)
        return y

    def inverse(self, y, f):
        if f.basis == "mean":
            return (y + self.mean).astype(np.float32)
        if f.basis == "hadamard":
            return (y.astype(np.float64) @ hadamard(self.dim).T).astype(np.float32)
        return y

    def compress(self, tokens, f):
        """-> (reconstruction [n, D], integer codes [n, D] or None, bytes of codes at fixed width, bytes of parameters)."""
        x, n, d = self.x[tokens], len(tokens), self.dim
        if f.raw:
            return half(x), None, 2 * n * d, 0
        y = self.forward(x, f)
        if f.rule == "absolute":
            codes = np.rint(y / self.step)
            return self.inverse((codes.astype(np.float32) * self.step), f), codes.astype(int), 0, 0
        group = min(f.group or d, d) if f.unit == "token" else f.group
        out, codes, params = np.empty_like(y), np.empty(y.shape, int), 0
        units = [slice(t, min(t + group, n)) for t in range(0, n, group)] if f.unit != "token" else [slice(0, n)]
        for u in units:
            block = y[u]
            shaped = block.reshape(len(block), -1, group) if f.unit == "token" else block
            axis = {"token": 2, "channel": 0, "block": (0, 1)}[f.unit]
            lo, hi = shaped.min(axis, keepdims=True), shaped.max(axis, keepdims=True)
            top = 2 ** f.bits - 1
            scale = half((hi - lo) / np.float32(top) if f.rule == "minmax" else np.float32(f.step) * (hi - lo))
            zero = half(lo)
            with np.errstate(divide="ignore", invalid="ignore"):
                c = np.where(scale > 0, np.rint((shaped - zero) / scale), 0)
            if f.rule == "minmax":
                c = np.clip(c, 0, top)
            out[u] = (scale * c.astype(np.float32) + zero).reshape(block.shape)
            codes[u] = c.reshape(block.shape)
            params += 4 * scale.size
        return self.inverse(out, f), codes, (n * d * f.bits + 7) // 8, params
