# SPDX-License-Identifier: Apache-2.0
"""Every metric of `tierkv analyze`, computed a second time: NumPy, plain, in double, from the text of the design.

Usage: analyze_numpy.py --dump FILE --preset NAME [--preset NAME]... [--profile FILE] [--json]
"""
import argparse
import json
from dataclasses import dataclass, replace

import h5py
import numpy as np

import weighted
from coded_blocks import coded_size, entropy_bits
from pages import paged_bytes, slab_bytes
from presets import RAW, has_tiers, parse
from quantizers import Basis, bf16, fp16, global_steps, metadata_bits, quantize

WINDOW, HIGH, LOW, PRUNED = range(4)
TIER_NAMES = ["window", "high", "low", "pruned"]


@dataclass
class Layer:
    """One layer of one sequence. kv: (keys, values), float32 [kv_heads, T, D]; q: float32 [q_heads, Tq, D] or None."""
    kv: tuple
    q: np.ndarray
    positions: np.ndarray
    significance: np.ndarray
    sm_scale: float
    raw: object  # rounds to the 16 bits of a raw token
    rope: tuple = None  # (pairing, inv_freq), None: not rotated
    key_means: np.ndarray = None    # [kv_heads, D] of a profile
    sensitivity: np.ndarray = None  # its order: rank of each row, 0 the most sensitive, and how many there are
    all_rows: int = 0

    def __post_init__(self):
        self.rows, self.tokens, self.head_dim = self.kv[0].shape
        self.exact = None  # attention outputs, made once


def read_profile(path):
    """(key means [layers, kv_heads, D], ranks [layers, kv_heads])."""
    with h5py.File(path) as f:
        shape = int(f.attrs["num_layers"]), int(f.attrs["num_kv_heads"])
        sensitivity = f["joint_sensitivity"][()]
        ranks = np.empty(len(sensitivity), int)
        ranks[np.argsort(-sensitivity, kind="stable")] = np.arange(len(ranks))
        return f["key_mean"][()].reshape(*shape, -1), ranks.reshape(shape)


def read_layers(dump, profile=None):
    """(sequence id, [Layer]) of every sequence."""
    with h5py.File(dump) as f:
        raw = bf16 if f.attrs["dtype"] in ("bfloat16", b"bfloat16") else fp16
        rope = None
        if f.attrs["rope_applied"] and f.attrs["rope_theta"] > 0:
            d = int(f.attrs["head_dim"])
            rope = 1, (float(f.attrs["rope_theta"]) ** (-2 * np.arange(d // 2) / d)).astype(np.float32)
        for seq in f["seq"]:
            groups = f["seq"][seq]["layer"]
            layers = []
            for i in range(int(f.attrs["num_layers"])):
                g = groups[str(i)]
                get = lambda name, dtype: g[name][()].astype(dtype) if name in g else None
                layers.append(Layer((get("k", np.float32), get("v", np.float32)), get("q", np.float32),
                                    get("q_positions", np.int64), get("significance", np.float32), float(f.attrs["sm_scale"]), raw,
                                    rope))
                if profile is not None:
                    layers[-1].key_means, layers[-1].sensitivity, layers[-1].all_rows = profile[0][i], profile[1][i], profile[1].size
            yield seq, layers


# ---- attention ----

def softmax(scores):
    """Rows without any allowed token give zeros."""
    top = scores.max(1, keepdims=True)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = e.sum(1, keepdims=True)
    return e / np.where(total > 0, total, 1)


def queries_of(layer, row):
    """The group's queries of a kv head as float64 [heads * Tq, D], scaled, and their positions."""
    heads = layer.q.shape[0] // layer.rows
    q = layer.q[row * heads:(row + 1) * heads].astype(np.float64).reshape(-1, layer.head_dim)
    return q * layer.sm_scale, np.tile(layer.positions, heads)


def attend(q, seen, k, v):
    return softmax(np.where(seen, q @ k.T, -np.inf)) @ v


def attend_two_forms(q, seen, first, k, v):
    """Tokens in `first` use k[0], v[0], the others k[1], v[1]."""
    p = softmax(np.where(seen, np.where(first, q @ k[0].T, q @ k[1].T), -np.inf))
    return np.where(first, p, 0) @ v[0] + np.where(first, 0, p) @ v[1]


def exact_outputs(layer):
    if layer.exact is None:
        layer.exact = []
        for row in range(layer.rows):
            q, at = queries_of(layer, row)
            k, v = (x[row].astype(np.float64) for x in layer.kv)
            layer.exact.append(attend(q, np.arange(layer.tokens) <= at[:, None], k, v))
    return layer.exact


def significance_of(layer):
    """sig_i = mean over later queries of the group's largest probability; exact only when q covers every token."""
    if layer.significance is not None:
        return layer.significance.astype(np.float64)
    if layer.q is None or len(layer.positions) != layer.tokens:
        raise ValueError("tiers need significance, or q for all positions")
    out = np.zeros((layer.rows, layer.tokens))
    index = np.arange(layer.tokens)
    for row in range(layer.rows):
        q, at = queries_of(layer, row)
        p = softmax(np.where(index <= at[:, None], q @ layer.kv[0][row].T.astype(np.float64), -np.inf))
        p = p.reshape(-1, layer.tokens, layer.tokens).max(0)
        out[row] = np.tril(p, -1).sum(0) / np.maximum(layer.tokens - 1 - index, 1)
    return out.astype(np.float32).astype(np.float64)


# ---- one preset on one layer ----

def recent_tokens(layer, scheme):
    """Length of the window."""
    kept = tokens_kept(layer, scheme)
    return {"none": scheme.window, "snapkv": min(scheme.window, kept), "h2o": kept // 2}[scheme.eviction]


def tokens_kept(layer, scheme):
    return max(1, int(np.floor(scheme.keep * layer.tokens + 0.5)))


def votes(layer, scheme):
    """SnapKV: softmax weights of the newest `window` queries, summed, then the mean over 7 neighbours outside the window."""
    recent, index = recent_tokens(layer, scheme), np.arange(layer.tokens)
    out = np.zeros((layer.rows, layer.tokens - recent))
    for row in range(layer.rows):
        q, at = queries_of(layer, row)
        voting = at >= layer.tokens - scheme.window
        p = softmax(np.where(index <= at[voting, None], q[voting] @ layer.kv[0][row].T.astype(np.float64), -np.inf))
        if layer.tokens > recent:
            out[row] = np.convolve(p.sum(0)[:layer.tokens - recent], np.full(7, 1 / 7))[3:3 + layer.tokens - recent]
    return out


def evicted_tiers(layer, scheme):
    kept, recent = tokens_kept(layer, scheme), recent_tokens(layer, scheme)
    old = layer.tokens - recent
    scores = votes(layer, scheme) if scheme.eviction == "snapkv" else \
        significance_of(layer)[:, :old] * np.arange(layer.tokens - 1, -1, -1)[:old]
    tiers = np.full((layer.rows, layer.tokens), WINDOW)
    tiers[:, :old] = PRUNED
    np.put_along_axis(tiers, np.argsort(-scores, 1, kind="stable")[:, :kept - recent], HIGH, 1)
    return tiers


def tiers_of(layer, scheme):
    """[rows, T] of WINDOW, HIGH, LOW, PRUNED."""
    if scheme.eviction != "none":
        return evicted_tiers(layer, scheme)
    index = np.arange(layer.tokens)
    tiers = np.full((layer.rows, layer.tokens), HIGH)
    if scheme.tiered:
        significance = significance_of(layer)
        tiers = np.where(significance >= scheme.alpha_high / (index + 1), HIGH,
                         np.where(significance >= scheme.alpha_low / (index + 1), LOW, PRUNED))
    tiers[:, (index >= layer.tokens - scheme.window) | (index < scheme.sinks)] = WINDOW
    return tiers


@dataclass
class Stored:
    """One component: codes and reconstructions of every token in each form; `raw_tail`: outside the window, yet stored raw."""
    forms: dict          # (HIGH or LOW) -> Format
    codes: dict          # the same -> int16 [rows, T, D] or None
    compressed: np.ndarray
    window: np.ndarray
    raw_tail: np.ndarray  # bool [T]
    exponents: np.ndarray = None  # weighted steps: [rows, T]

    def as_stored(self, tiers):
        return np.where(((tiers == WINDOW) | self.raw_tail)[..., None], self.window, self.compressed)


def known_significance(layer):
    try:
        return significance_of(layer)
    except ValueError:
        return None


def store_weighted(layer, scheme, c):
    """Without a profile: means and steps of keys are those of the row's first 256 tokens between sinks and window."""
    x, k = layer.kv[c], scheme.high[c].step
    positions = np.arange(layer.tokens)
    significance = known_significance(layer) if scheme.importance else None
    g = np.zeros((layer.rows, layer.tokens), np.int64)
    if significance is not None:
        g = weighted.importance_exponents((positions + 1) * significance)
    codes, exponents, values = [], [], []
    end = max(0, layer.tokens - scheme.window)
    begin = min(scheme.sinks, end)
    for row in range(layer.rows):
        if c == 0:
            y = weighted.turn(x[row], layer.rope, positions, back=True)
            mean, step = weighted.fit_keys(y[begin:end][:256], k) if end > begin else (np.float32(0), np.float32(1))
            e = g[row]
        else:
            y, mean, step = x[row], np.float32(0), np.float32(k * np.sqrt(12.0))
            e = weighted.value_exponents(y, g[row])
        codes.append(weighted.quantize(y, e, step, mean, np.float32(1)))
        back = weighted.dequantize(codes[-1], e, step, mean, np.float32(1))
        values.append(weighted.turn(back, layer.rope, positions, back=False) if c == 0 else back)
        exponents.append(e)
    return Stored({HIGH: scheme.high[c]}, {HIGH: np.array(codes).astype(np.int16)}, np.array(values), layer.raw(x),
                  np.zeros(layer.tokens, bool), np.array(exponents))


def basis_kind(scheme, c):
    return scheme.basis if isinstance(scheme.basis, str) else scheme.basis[c]


def store_component(layer, scheme, tiers, c):
    x = layer.kv[c]
    if scheme.high[c].rule == "weighted":
        return store_weighted(layer, scheme, c)
    basis = Basis("none" if scheme.high[c] is RAW else basis_kind(scheme, c), x, layer.key_means if scheme.classes and c == 0 else None)
    y = basis.forward(x)
    step = None
    if scheme.high[c].rule == "absolute":
        step = global_steps(scheme, layer.q, layer.kv[1], layer.sm_scale, layer.rows)[c]
    forms = {HIGH: scheme.high[c], **({LOW: scheme.low[c]} if scheme.tiered else {})}
    codes, values = {}, {}
    for tier, fmt in forms.items():
        codes[tier], values[tier] = quantize(y, fmt, layer.raw, min(scheme.sinks, layer.tokens), step)
    compressed = values[HIGH] if LOW not in values else np.where((tiers == LOW)[..., None], values[LOW], values[HIGH])
    window = values[HIGH] if scheme.window_form[c] == scheme.high[c] else quantize(y, scheme.window_form[c], layer.raw)[1]
    raw_tail = np.zeros(layer.tokens, bool)
    if scheme.high[c].unit != "token":  # the newest incomplete group of tokens outside the window
        group = scheme.high[c].group
        body = max(0, layer.tokens - scheme.window - scheme.sinks)
        raw_tail[scheme.sinks + body // group * group:max(scheme.sinks, layer.tokens - scheme.window)] = True
    return Stored(forms, codes, basis.backward(compressed), basis.backward(window), raw_tail)


def predicted(codes, kind, fmt):
    """Codes of a row minus what a Lorenzo predictor says, block by block of 64 tokens."""
    if kind == "none":
        return codes
    out, n = [], 2 ** {"minmax": fmt.bits, "relative": 8, "absolute": 16}[fmt.rule]
    for t in range(0, len(codes), 64):
        block = codes[t:t + 64].astype(np.int64)
        for axis in {"token": (0,), "channel": (1,), "plane": (0, 1)}[kind]:
            block = np.diff(block, axis=axis, prepend=0)
        out.append((block + n // 2) % n - n // 2)
    return np.concatenate(out).astype(np.int16)


def fixed_size(codes):
    """Bytes of a row with one width per token: two bytes of header each."""
    spans = codes.max(1).astype(np.int64) - codes.min(1)
    widths = np.ceil(np.log2(spans + 1)).astype(np.int64)
    raw = (widths >= 15) | (codes.min(1) < -2048) | (codes.min(1) > 2047)
    return int((2 + -(-np.where(raw, 16, widths) * codes.shape[1] // 8)).sum())


def token_bits(fmt, head_dim):
    return head_dim * fmt.bits + metadata_bits(fmt, head_dim)


def add_size(tally, layer, scheme, tiers, stored, c):
    """Stored bits of one component: codes or blocks, metadata, raw values, steps and means."""
    d, bits = layer.head_dim, 0
    if not stored.raw_tail.any():
        window_bits = token_bits(scheme.window_form[c], d)
    else:
        window_bits = 16 * d
    bits += (tiers == WINDOW).sum() * window_bits
    bits += ((tiers != WINDOW) & stored.raw_tail).sum() * 16 * d
    for tier, fmt in stored.forms.items():
        mask = (tiers == tier) & ~stored.raw_tail
        count = int(mask.sum())
        coded = stored.codes[tier] is not None and count
        rows = [predicted(stored.codes[tier][r][mask[r]], scheme.predict, fmt) for r in range(layer.rows) if mask[r].any()] if coded else []
        if coded and (scheme.huffman or scheme.zstd or scheme.stage != "none"):
            tally[f"entropy_bits{c}"] += entropy_bits(np.concatenate(rows))
            tally[f"codes{c}"] += count * d
        if coded and scheme.stage == "fixed":
            size = sum(map(fixed_size, rows))
            tally[f"coded_bits{c}"] += 8 * size
            bits += 8 * (size + 4 * sum(-(-len(r) // 64) for r in rows)) + count * metadata_bits(fmt, d)
        elif coded and stored.exponents is not None:
            of = [stored.exponents[r][mask[r]] for r in range(layer.rows) if mask[r].any()]
            size, blocks, codebook = coded_size(rows, c, of, min(scheme.sinks, layer.tokens))
            tally[f"coded_bits{c}"] += 8 * size
            bits += 8 * (size + 4 * blocks + codebook)
        elif coded and scheme.huffman:
            size, blocks, codebook = coded_size(rows, c)
            tally[f"coded_bits{c}"] += 8 * size
            bits += 8 * (size + 4 * blocks + codebook) + count * metadata_bits(fmt, d)
        else:
            bits += count * token_bits(fmt, d)
    if scheme.high[c].rule == "absolute":
        bits += layer.rows * 32
    if scheme.high[c].rule == "weighted":
        bits += layer.rows * (32 + (16 * d if c == 0 else 0))
    if basis_kind(scheme, c).endswith("mean") and scheme.high[c] is not RAW and layer.key_means is None:
        bits += layer.rows * 16 * d
    tally["stored_bits"] += bits


def add_attention(tally, layer, scheme, tiers, stored):
    index = np.arange(layer.tokens)
    plain_kv = [s.as_stored(tiers) for s in stored]
    for row, o in enumerate(exact_outputs(layer)):
        q, at = queries_of(layer, row)
        past = index <= at[:, None]
        kept = tiers[row] != PRUNED
        k, v = (x[row].astype(np.float64) for x in plain_kv)
        plain = attend(q, past & kept, k, v)
        in_window = (index > at[:, None] - recent_tokens(layer, scheme)) | (index < scheme.sinks)
        k, v = ([x[row].astype(np.float64) for x in (s.window, s.compressed)] for s in stored)
        online = attend_two_forms(q, past & (kept | in_window), in_window, k, v)
        norm = np.linalg.norm(o, axis=1)
        o, plain, online, norm = (x[norm > 0] for x in (o, plain, online, norm))
        size = np.linalg.norm(plain, axis=1)
        tally["attention"] += (np.linalg.norm(o - plain, axis=1) / norm).sum()
        tally["online"] += (np.linalg.norm(o - online, axis=1) / norm).sum()
        tally["cosine"] += ((o * plain).sum(1) / (norm * np.where(size > 0, size, 1))).sum()
        tally["queries"] += len(o)
        tally["pooled_error"] += ((o - online) ** 2).sum()
        tally["pooled_norm"] += (o ** 2).sum()


def page_counts(scheme, tiers):
    """{tier format: tokens of each row}: formats that are the same share pages."""
    counts = {}
    for tier, form in ((WINDOW, scheme.window_form), (HIGH, scheme.high), (LOW, scheme.low)):
        if (tier == WINDOW and (scheme.classes or not (tiers == WINDOW).any())) or (tier == LOW and not scheme.tiered):
            continue
        rows = (tiers == tier).sum(1)
        counts[form] = counts[form] + rows if form in counts else rows
    return counts


def classes_of(layer, scheme):
    """The class of each row: the first round(share * rows) of all rows by sensitivity, halves up, and so on."""
    classes, ends = scheme.classes, []
    if all(replace(c, share=0) == replace(classes[0], share=0) for c in classes):
        return np.zeros(layer.rows, int)
    for c in classes[:-1]:
        ends.append(int(np.floor(c.share * layer.all_rows + 0.5)) + (ends[-1] if ends else 0))
    return np.searchsorted(ends, layer.sensitivity, side="right")


def rows_of(layer, rows):
    """The layer without its other rows."""
    heads = 0 if layer.q is None else layer.q.shape[0] // layer.rows
    cut = lambda x: None if x is None else x[rows]
    q = None if layer.q is None else layer.q.reshape(layer.rows, heads, *layer.q.shape[1:])[rows].reshape(-1, *layer.q.shape[1:])
    return replace(layer, kv=tuple(map(cut, layer.kv)), q=q, significance=cut(layer.significance), key_means=cut(layer.key_means),
                   sensitivity=cut(layer.sensitivity))


def measure(layer, scheme):
    if not scheme.classes:
        return measure_alike(layer, scheme)
    total, classes = None, classes_of(layer, scheme)
    for number, c in enumerate(scheme.classes):
        rows = np.flatnonzero(classes == number)
        if not len(rows):
            continue
        own = replace(scheme, high=c.high, low=c.low, alpha_high=c.alpha_high, alpha_low=c.alpha_low, tiered=has_tiers(c))
        one = measure_alike(rows_of(layer, rows), own)
        total = one if total is None else {n: total[n] + one[n] for n in one}
    return total


def measure_alike(layer, scheme):
    """The sums of one layer from which finish() makes the metrics of any number of layers."""
    names = ["stored_bits", "page_bytes", "attention", "online", "cosine", "queries", "pooled_error", "pooled_norm"]
    names += [f"{n}{c}" for n in ("coded_bits", "entropy_bits", "codes", "error", "norm") for c in (0, 1)]
    tally = dict.fromkeys(names, 0.0)
    tiers = tiers_of(layer, scheme)
    tally["values"] = 2 * layer.kv[0].size
    tally.update({name: int((tiers == t).sum()) for t, name in enumerate(TIER_NAMES)})
    kept = tiers != PRUNED
    stored = [store_component(layer, scheme, tiers, c) for c in (0, 1)]
    for c, s in enumerate(stored):
        x = layer.kv[c][kept].astype(np.float64)
        tally[f"error{c}"] = ((x - s.as_stored(tiers)[kept]) ** 2).sum()
        tally[f"norm{c}"] = (x ** 2).sum()
        add_size(tally, layer, scheme, tiers, s, c)
    if scheme.tiered:  # scores and positions, or the row map
        tally["stored_bits"] += layer.rows * 8 * -(-layer.tokens // 4) if scheme.classes else 64 * kept.sum()
    counts = page_counts(scheme, tiers)
    for c in scheme.classes:  # all of them share one page size
        counts.setdefault(c.high, [])
        counts.setdefault(c.low, [])
    pages = paged_bytes(counts, layer.head_dim, not scheme.classes) if scheme.pages else None
    if pages is not None and scheme.classes:
        pages += slab_bytes((tiers == WINDOW).sum(1), layer.head_dim)
    tally["page_bytes"] = np.nan if pages is None else pages
    if layer.q is not None:
        add_attention(tally, layer, scheme, tiers, stored)
    return tally


def finish(tally):
    ratio = lambda a, b: float(tally[a] / tally[b]) if tally[b] else None
    pairs = sum(tally[n] for n in TIER_NAMES)
    layers = [n.removeprefix("pooled_norm") for n in tally if n.startswith("pooled_norm") and n != "pooled_norm" and tally[n] > 0]
    bits = float(tally["stored_bits"] / tally["values"])
    paged = tally["page_bytes"] > 0
    return {
        "values": int(tally["values"]), "bits_per_value": bits, "ratio": 16 / bits if bits else None,
        "page_ratio": float(2 * tally["values"] / tally["page_bytes"]) if paged else None,
        "tiers": {n: tally[n] / pairs for n in TIER_NAMES}, "pairs": pairs,
        "key_rel_error": np.sqrt(ratio("error0", "norm0") or 0), "value_rel_error": np.sqrt(ratio("error1", "norm1") or 0),
        "attention_rel_error": ratio("attention", "queries"), "attention_rel_error_online": ratio("online", "queries"),
        "attention_pooled_error":
            float(np.mean([np.sqrt(tally["pooled_error" + i] / tally["pooled_norm" + i]) for i in layers])) if layers else None,
        "attention_cosine": ratio("cosine", "queries"),
        "key_entropy_bits": ratio("entropy_bits0", "codes0"), "value_entropy_bits": ratio("entropy_bits1", "codes1"),
        "key_coded_bits": ratio("coded_bits0", "codes0") or None, "value_coded_bits": ratio("coded_bits1", "codes1") or None}


def analyze(dump, presets, profile=None):
    """[{preset, seq, metrics...}]: for each preset the total over the dump, then each sequence."""
    schemes = [parse(p) for p in presets]
    tallies = [{} for _ in schemes]
    if profile is not None and not all(s.classes for s in schemes):
        raise ValueError("a profile serves classes of heads alone here")
    for seq, layers in read_layers(dump, None if profile is None else read_profile(profile)):
        for index, layer in enumerate(layers):
            for scheme, by_seq in zip(schemes, tallies):
                one = measure(layer, scheme)
                one.update({f"{n}{index}": one[n] for n in ("pooled_error", "pooled_norm")})
                for key in ("all", seq):
                    total = by_seq.setdefault(key, {})
                    total.update({n: total.get(n, 0) + x for n, x in one.items()})
    return [{"preset": p, "seq": seq, **finish(t)} for p, by_seq in zip(presets, tallies) for seq, t in by_seq.items()]


def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--dump", required=True)
    args.add_argument("--preset", action="append", required=True)
    args.add_argument("--profile")
    args.add_argument("--json", action="store_true")
    args = args.parse_args()
    results = analyze(args.dump, args.preset, args.profile)
    if args.json:
        print(json.dumps(results, indent=1))
        return
    columns = ["bits_per_value", "page_ratio", "key_rel_error", "value_rel_error", "attention_rel_error",
               "attention_rel_error_online", "attention_pooled_error", "attention_cosine", "key_entropy_bits", "key_coded_bits", "value_entropy_bits",
               "value_coded_bits"]
    print("preset seq memory_% " + " ".join(columns) + " tiers")
    for r in results:
        numbers = ["-" if r[c] is None else f"{r[c]:.5f}" for c in columns]
        print(r["preset"], r["seq"], f"{r['bits_per_value'] / 0.16:.2f}", *numbers, "/".join(f"{x:.4f}" for x in r["tiers"].values()))


if __name__ == "__main__":
    main()
