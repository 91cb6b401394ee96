#!/usr/bin/env python3
"""Times decode attention of PyTorch's back ends on fp16 caches, and ours on the same caches compressed, at the shapes of
bench_attention.

  peers_torch.py [--out FILE] [--commit HASH] [--replays N] [--only TEXT]

Needs PyTorch, a GPU, and the tierkv package of a build with CUDA (PYTHONPATH=build/python). One query token per sequence, 32
query heads over 8 kv heads. Each contender is captured in a CUDA graph over enough disjoint caches that none is still in L2
when its turn comes again; medians of graph replays, in microseconds of one call. Ours is tierkv.Store on PyTorch's stream, one
layer per cache: random keys and values go in as a prompt, of which the newest 64 tokens of each sequence stay in the window.

Outputs are checked against attention in float64: the peers' over the cache, ours over the cache as its codec leaves it, which is
computed here from the definition of the formats (and compared with tierkv.quantize)."""
import argparse
import json
import statistics
import sys
from typing import NamedTuple

import numpy as np
import tierkv
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Q_HEADS, KV_HEADS, HEAD_DIM, WINDOW = 32, 8, 128, 64
GROUP = Q_HEADS // KV_HEADS
SHAPES = [(1, 4096), (1, 32768), (1, 131072), (32, 4096), (64, 4096), (8, 32768)]
COLD_BYTES = 192 << 20
MIN_LAUNCHES = 12  # of a graph
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TOLERANCE = 2e-3


class Scheme(NamedTuple):
    """The window is in the high format."""

    high: tierkv.TierFormat
    low: tierkv.TierFormat
    alphas: tuple  # high, low
    token_bytes: float  # of a kv head, about


def uniform(k_bits, v_bits):
    tier = tierkv.TierFormat(k_bits, v_bits)
    metadata = 4 * (k_bits < 16) + 4 * (v_bits < 16)
    return Scheme(tier, tier, (0.0, 0.0), HEAD_DIM * (k_bits + v_bits) / 8 + metadata)


# mixed: 30% high, 50% low, 20% pruned, each row its own.
SCHEMES = {"fp16": uniform(16, 16), "k8v4": uniform(8, 4), "k4v4": uniform(4, 4), "k4v2": uniform(4, 2),
           "mixed": Scheme(tierkv.TierFormat(8, 4), tierkv.TierFormat(4, 2), (1.0, 0.5), 0.3 * 200 + 0.5 * 104)}


class Tiers(NamedTuple):
    """Of the tokens of one cache, [batch, KV_HEADS, tokens]; what is neither is high or in the window."""

    low: torch.Tensor
    pruned: torch.Tensor


def sets_for(set_bytes):
    return max(3, int(-(-COLD_BYTES // set_bytes)))


def make_caches(batch, tokens):
    count = sets_for(4 * batch * KV_HEADS * tokens * HEAD_DIM)

    def cache():
        return torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, dtype=torch.float16, device="cuda")
    return [(cache(), cache()) for _ in range(count)]


def exact_attention(q, k, v, pruned=None):
    """In float64, of one sequence: q [Q_HEADS, HEAD_DIM], k and v [KV_HEADS, tokens, HEAD_DIM]."""
    logits = torch.einsum("hgd,htd->hgt", q.double().view(KV_HEADS, GROUP, HEAD_DIM), k.double()) / HEAD_DIM**0.5
    if pruned is not None:
        logits.masked_fill_(pruned[:, None], float("-inf"))
    out = torch.einsum("hgt,htd->hgd", torch.softmax(logits, -1), v.double())
    return out.reshape(Q_HEADS, HEAD_DIM), torch.logsumexp(logits, -1).reshape(Q_HEADS)


def relative_error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def time_graph(launch, count, replays, stream):
    """launch(i) for i in range(count), all of it several times."""
    launches = max(count, MIN_LAUNCHES)
    for i in range(count):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            launch(i % count)
    times = []
    for i in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(1e3 * begin.elapsed_time(end) / launches)
    return statistics.median(times)


def run_peer(name, q, caches, options, stream):
    def attend(i):
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q[:, :, None], *caches[i], enable_gqa=True)
    expected, _ = exact_attention(q[0], caches[0][0][0], caches[0][1][0])
    row = {"sets": len(caches), "relative_error": relative_error(attend(0)[0, :, 0], expected)}
    row["us"] = time_graph(attend, len(caches), options.replays, stream)
    return row


def through(x, bits):
    """x as `bits` token-wise min-max codes leave it (docs/reference/format.md), in float32."""
    x = x.float()
    if bits == 16:
        return x
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    # Not by a number: PyTorch would multiply by its reciprocal.
    scale = ((high - low) / torch.full_like(low, 2**bits - 1)).half().float()
    zero = low.half().float()
    codes = torch.where(scale == 0, 0.0, torch.round((x - zero) / scale)).clamp(0, 2**bits - 1)
    return scale * codes + zero


def check_codec():
    x = torch.randn(256, HEAD_DIM, device="cuda").half()
    for bits in (8, 4, 2):
        library = tierkv.dequantize(tierkv.quantize(x.cpu().numpy(), bits))
        if not np.array_equal(library, through(x, bits).cpu().numpy()):
            sys.exit(f"{bits} bits: not what tierkv.quantize makes of them")


def decoded(x, low, high_bits, low_bits):
    """x [KV_HEADS, tokens, HEAD_DIM] as the store holds it: a prompt is in the window's format before low tokens are made."""
    kept = through(x, high_bits)
    return kept if low_bits == high_bits else torch.where(low[..., None], through(kept, low_bits), kept)


def draw_tiers(scheme, batch, tokens):
    """Tiers, and the significances that lead to them."""
    shape = (batch, KV_HEADS, tokens)
    if scheme.high == scheme.low:
        none = torch.zeros(shape, dtype=torch.bool, device="cuda")
        return Tiers(none, none), torch.rand(shape, device="cuda")
    draw = torch.rand(shape, device="cuda")
    low, pruned = (draw >= 0.3) & (draw < 0.8), draw >= 0.8
    # Thresholds are alphas / i, i from 1: 1 / i and 0.5 / i.
    i = torch.arange(1, tokens + 1, device="cuda")
    significance = torch.where(pruned, 0.0, torch.where(low, 0.75 / i, 1.0))
    older = torch.arange(tokens, device="cuda") < tokens - WINDOW
    return Tiers(low & older, pruned & older), significance


def make_store(scheme, batch, tokens, layers, stream):
    formats = [tierkv.PageFormat(HEAD_DIM, f.k_bits, f.v_bits) for f in (scheme.high, scheme.low)]
    page_bytes = tierkv.choose_page_bytes(formats).page_bytes
    high, low = (tierkv.PageFormat(f.head_dim, f.k_bits, f.v_bits, page_bytes=page_bytes).tokens for f in formats)
    # The prompt in the window's format, and the most that its tiers can need beside it.
    row_pages = -(-tokens // high) + -(-tokens // min(high, low)) + 1
    policy = tierkv.TierPolicy(*scheme.alphas, window_tokens=WINDOW)
    return tierkv.Store.on_device(tierkv.StoreConfig(
        layers, Q_HEADS, KV_HEADS, HEAD_DIM, num_pages=layers * batch * KV_HEADS * row_pages, max_sequences=batch, max_tokens=tokens,
        window_format=scheme.high, high_format=scheme.high, low_format=scheme.low, policy=policy, page_bytes=page_bytes), stream)


def fill_store(store, caches, significance):
    """Every layer a cache, all layers the same tiers."""
    batch, _, tokens, _ = caches[0][0].shape
    ids = [store.add_sequence() for _ in range(batch)]
    store.begin_prompt(ids, tokens)
    for layer in range(store.config.num_layers):
        k, v = (x.transpose(1, 2).contiguous() for x in caches[layer % len(caches)])
        store.append(ids, layer, k, v)
        store.score_prompt(ids, layer, significance)
    store.end_prompt(ids)
    store.take_status()
    return ids


def check_tiers(store, tiers):
    stats, layers = store.stats(), store.config.num_layers
    for name, told, drawn in (("low", stats.low_tokens, tiers.low), ("pruned", stats.pruned_tokens, tiers.pruned)):
        if told != layers * drawn.sum().item():
            raise RuntimeError(f"{told} tokens are {name}, not {layers * drawn.sum().item()}")
    return stats.nominal_bytes // layers


def run_ours(name, q, caches, options, stream):
    scheme = SCHEMES[name]
    batch, _, tokens, _ = caches[0][0].shape
    layers = sets_for(scheme.token_bytes * batch * KV_HEADS * tokens)
    tiers, significance = draw_tiers(scheme, batch, tokens)
    with make_store(scheme, batch, tokens, layers, stream) as store:
        ids = fill_store(store, caches, significance)
        row = {"sets": layers, "bytes": check_tiers(store, tiers)}
        into = tierkv.Attention(torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"), device="cuda"))
        store.attend(ids, 0, q, into=into)
        k, v = (decoded(x[0], tiers.low[0], high, low)
                for x, high, low in zip(caches[0], (scheme.high.k_bits, scheme.high.v_bits), (scheme.low.k_bits, scheme.low.v_bits)))
        expected, lse = exact_attention(q[0], k, v, tiers.pruned[0])
        row["relative_error"] = relative_error(into.out[0], expected)
        row["lse_error"] = (into.lse[0].double() - lse).abs().max().item()
        row["us"] = time_graph(lambda i: store.attend(ids, i, q, into=into), layers, options.replays, stream)
        store.take_status()
    return row


def run_row(kind, name, shape, measure):
    row = {"kind": kind, "name": name, "shape": shape}
    try:
        row.update(measure())
    except Exception as error:  # the other rows are still worth their time
        row["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{name:8s} {shape:9s} failed: {row['failure']}", flush=True)
        return row
    passed = row["relative_error"] < TOLERANCE
    print(f"{name:8s} {shape:9s} {row['us']:8.2f} us  error {row['relative_error']:.1e}{'' if passed else '  WRONG'}", flush=True)
    return row


def write(options, results):
    report = {"schema": "tierkv.bench.peers/2", "gpu": torch.cuda.get_device_name(0), "commit": options.commit,
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "replays": options.replays, "window": WINDOW,
              "results": results}
    with open(options.out, "w", encoding="utf-8") as f:
        json.dump(report, f, indent=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--replays", type=int, default=31)
    parser.add_argument("--only", default="", help="shapes that contain this")
    options = parser.parse_args()
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    check_codec()
    results = []
    for batch, tokens in SHAPES:
        shape = f"{batch}x{tokens}"
        if options.only not in shape:
            continue
        q = torch.randn(batch, Q_HEADS, HEAD_DIM, dtype=torch.float16, device="cuda")
        caches = make_caches(batch, tokens)
        for name in BACKENDS:
            results.append(run_row("peer", name, shape, lambda: run_peer(name, q, caches, options, stream)))
        for name in SCHEMES:
            results.append(run_row("tierkv", name, shape, lambda: run_ours(name, q, caches, options, stream)))
        del caches
        torch.cuda.empty_cache()
        if options.out:
            write(options, results)
    wrong = [r for r in results if not r.get("relative_error", 1) < TOLERANCE]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
