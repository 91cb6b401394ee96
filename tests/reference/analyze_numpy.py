"""Every metric of `tierkv analyze` in NumPy: python3 analyze_numpy.py DUMP PRESET...  (JSON on stdout)."""
import json
import sys

import h5py
import numpy as np

import coded_size
from schemes import Component, Format, parse

BLOCK = 64


class Row:
    """One (sequence, layer, kv_head) under a scheme."""

    def __init__(self, scheme, k, v, sig, q, sm_scale):
        t, d = k.shape
        self.scheme, self.tokens = scheme, t
        step_k = step_v = None
        if scheme.high[0].rule == "absolute":
            trace = 1.01 * (q.astype(np.float64) ** 2).sum(-1).mean()
            step_k = scheme.high[0].step * np.sqrt(12 / trace) / sm_scale
            step_v = scheme.high[1].step * np.sqrt(12 * (v.astype(np.float64) ** 2).sum(-1).mean() / d)
        self.k, self.v = Component(k, step_k), Component(v, step_v)
        self.plan(sig)
        self.codes = {}      # (component, tier) -> codes of the body
        self.stored = 0      # bytes without entropy coded codes
        self.compress()

    def plan(self, sig):
        s, t = self.scheme, self.tokens
        i = np.arange(t)
        body_end = max(0, t - s.window)
        begin = min(s.sinks, body_end)
        self.window = np.flatnonzero((i < begin) | (i >= body_end))
        body = i[begin:body_end]
        self.body, self.gap = body, body[:0]
        self.high, self.low, self.pruned = body, body[:0], body[:0]
        if s.tiered:
            rel = sig[body].astype(np.float64)
            high = rel >= s.alpha_h / (body + 1)
            low = ~high & (rel >= s.alpha_l / (body + 1))
            self.high, self.low, self.pruned = body[high], body[low], body[~high & ~low]
        elif s.high[0].unit in ("channel", "block") and not s.high[0].raw:
            whole = len(body) // s.high[0].group * s.high[0].group
            self.gap = body[whole:]

    def compress(self):
        s, t, d = self.scheme, self.tokens, self.k.dim
        self.plain = {}      # component -> [T, D] as stored
        self.far = {}        # component -> [T, D] compressed form, for the moving window
        self.near = {}       # component -> [T, D] window form of every token
        for name, c, side in (("k", self.k, 0), ("v", self.v, 1)):
            plain = np.full((t, d), np.nan, np.float32)
            near, *_ = c.compress(np.arange(t), s.window_format[side])
            plain[self.window], _, code_bytes, params = c.compress(self.window, s.window_format[side])
            self.stored += code_bytes + params
            for tier, tokens, f in (("high", self.high, s.high[side]), ("low", self.low, s.low[side] if s.tiered else None)):
                if f is None:
                    continue
                if name == "k":
                    tokens = np.setdiff1d(tokens, self.gap)
                if len(tokens) == 0:
                    continue
                plain[tokens], codes, code_bytes, params = c.compress(tokens, f)
                self.stored += params
                if s.coder == "none" or codes is None:
                    self.stored += code_bytes
                else:
                    self.codes[name, tier] = codes
            far = plain.copy()
            if name == "k" and len(self.gap):
                plain[self.gap], _, code_bytes, params = c.compress(self.gap, Format())
                self.stored += code_bytes + params
                group = np.arange(self.gap[0], min(self.gap[0] + s.high[0].group, t))
                far[group], *_ = c.compress(group, s.high[0])
            f = s.high[side]
            if f.rule == "absolute":
                self.stored += 4
            if f.basis == "mean":
                self.stored += 2 * d
            self.plain[name], self.far[name], self.near[name] = plain, far, near
        if s.tiered:
            self.stored += 8 * (t - len(self.pruned))

    def attend(self, q, positions, sm_scale):
        """Exact, plain and online outputs [heads, Tq, D] in double."""
        i, p = np.arange(self.tokens)[None, :], positions[:, None]
        kept = np.ones(self.tokens, bool)
        kept[self.pruned] = False
        protected = np.zeros(self.tokens, bool)
        protected[self.window[self.window < self.scheme.sinks]] = True
        q = q.astype(np.float64) * sm_scale
        near = (i > p - self.scheme.window) | protected[None, :]
        exact = softmax_attend(logits(q, self.k.x), i <= p, self.v.x)
        plain = softmax_attend(logits(q, fill(self.plain["k"])), (i <= p) & kept, fill(self.plain["v"]))
        s_far, s_near = logits(q, fill(self.far["k"])), logits(q, self.near["k"])
        s = np.where(near, s_near, s_far)
        w = softmax(s, (i <= p) & (near | kept))
        online = np.where(near, w, 0) @ self.near["v"].astype(np.float64) + np.where(near, 0, w) @ fill(self.far["v"]).astype(np.float64)
        return exact, plain, online


def fill(x):
    return np.nan_to_num(x)


def logits(q, k):
    return q @ k.astype(np.float64).T


def softmax(s, mask):
    s = np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True)
    w = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = w.sum(-1, keepdims=True)
    return w / np.where(total > 0, total, 1)


def softmax_attend(s, mask, v):
    return softmax(s, mask) @ v.astype(np.float64)


def analyze(path, texts):
    results = []
    with h5py.File(path) as f:
        for text in texts:
            results += analyze_preset(f, path, text)
    return results


def analyze_preset(f, path, text):
    total, parts = Sums(), []
    for seq in f["seq"]:
        sums = Sums()
        group = f["seq"][seq]
        for layer in range(f.attrs["num_layers"]):
            sums.add_layer(group["layer"][str(layer)], parse(text), f.attrs)
        total.merge(sums)
        parts.append(sums.result(path, text, seq))
    return [total.result(path, text, "all")] + parts


class Sums:
    def __init__(self):
        self.s = {}

    def add(self, **values):
        for name, v in values.items():
            self.s[name] = self.s.get(name, 0) + v

    def merge(self, other):
        self.add(**other.s)

    def add_layer(self, layer, scheme, attrs):
        heads, sm_scale = attrs["num_kv_heads"], attrs["sm_scale"]
        per = attrs["num_q_heads"] // heads
        q, positions = layer["q"][:].astype(np.float32), layer["q_positions"][:]
        codes = {}
        for h in range(heads):
            k, v = layer["k"][h].astype(np.float32), layer["v"][h].astype(np.float32)
            sig = layer["significance"][h] if "significance" in layer else None
            row = Row(scheme, k, v, sig, q[h * per:(h + 1) * per], sm_scale)
            for key, c in row.codes.items():
                codes.setdefault(key, []).append(c)
            self.add(values=2 * k.size, stored=row.stored, window=len(row.window), high=len(row.high), low=len(row.low),
                     pruned=len(row.pruned))
            kept = np.setdiff1d(np.arange(row.tokens), row.pruned)
            for name, x in (("k", k), ("v", v)):
                e = row.plain[name][kept].astype(np.float64) - x[kept]
                self.add(**{name + "_err": (e ** 2).sum(), name + "_norm": (x[kept].astype(np.float64) ** 2).sum()})
            exact, plain, online = row.attend(q[h * per:(h + 1) * per], positions, sm_scale)
            norm = np.linalg.norm(exact, axis=-1)
            ok = norm > 0
            pn = np.linalg.norm(plain, axis=-1)
            cosine = np.where(pn > 0, (exact * plain).sum(-1) / np.where(pn > 0, pn, 1) / np.where(ok, norm, 1), 0)
            self.add(n=ok.sum(), err=(np.linalg.norm(exact - plain, axis=-1)[ok] / norm[ok]).sum(),
                     online=(np.linalg.norm(exact - online, axis=-1)[ok] / norm[ok]).sum(), cosine=cosine[ok].sum())
        for (name, _), parts in codes.items():
            everything = np.concatenate([p.ravel() for p in parts])
            counts = np.unique(everything, return_counts=True)[1]
            p = counts / counts.sum()
            self.add(**{name + "_symbols": everything.size, name + "_entropy": -(p * np.log2(p)).sum() * everything.size})
            if scheme.coder == "huffman":
                blocks, book, count = coded_size.of_component(name, parts)
                self.add(**{name + "_coded": 8 * blocks}, stored=blocks + book + 4 * count)

    def result(self, path, text, seq):
        s = self.s
        ratio = lambda a, b: s[a] / s[b] if s.get(b) and a in s else None
        pairs = s["window"] + s["high"] + s["low"] + s["pruned"]
        bits = 8 * s["stored"] / s["values"]
        return dict(file=str(path), preset=text, seq=seq, values=int(s["values"]), bits_per_value=bits, ratio=16 / bits,
                    tiers={t: s[t] / pairs for t in ("window", "high", "low", "pruned")},
                    key_rel_error=np.sqrt(s["k_err"] / s["k_norm"]), value_rel_error=np.sqrt(s["v_err"] / s["v_norm"]),
                    attention_rel_error=ratio("err", "n"), attention_rel_error_online=ratio("online", "n"),
                    attention_cosine=ratio("cosine", "n"), key_entropy_bits=ratio("k_entropy", "k_symbols"),
                    value_entropy_bits=ratio("v_entropy", "v_symbols"), key_coded_bits=ratio("k_coded", "k_symbols"),
                    value_coded_bits=ratio("v_coded", "v_symbols"), pairs=int(pairs))


if __name__ == "__main__":
    json.dump(analyze(sys.argv[1], sys.argv[2:]), sys.stdout, indent=1, default=float)
    print()
