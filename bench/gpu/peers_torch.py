#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decode attention of PyTorch's back ends on fp16 caches, and ours on the same caches in a store.

  peers_torch.py [--out FILE] [--commit HASH] [--replays N] [--only TEXT]

Needs PyTorch, a GPU, and the tierkv package of a build with CUDA (PYTHONPATH=build-gpu/python). One query token per sequence, 32 query
heads over 8 kv heads. Each contender is captured in a CUDA graph over enough disjoint caches that none is still in L2 when its turn comes
again; medians of graph replays, in microseconds of one call. Ours is tierkv.kv_store.KvStore on PyTorch's stream, a layer for each cache:
KvStore.attend() with everything that it does in a step but the plan, which a graph makes once for all its layers. Of each sequence the
first 4 tokens and the newest 64 are raw.

Outputs are checked against attention in float64: the peers' over the cache, ours over what decode_range() gives."""
import argparse
import json
import statistics
import sys
from typing import NamedTuple

import torch
from tierkv.kv_store import BodyFormat, KvStore, StoreConfig, TierClass, TierFormat, TiersFormat
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUP = Q_HEADS // KV_HEADS
SHAPES = [(1, 4096), (1, 32768), (1, 131072), (32, 4096), (64, 4096), (8, 32768)]
COLD_BYTES = 192 << 20
MIN_LAUNCHES = 12  # of a graph
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TOLERANCE = 2e-3


class Scheme(NamedTuple):
    format: BodyFormat
    token_bytes: float  # of a kv head, about
    is_raw: bool = False


def uniform(k_bits, v_bits):
    tier = TierFormat(k_bits, v_bits)
    return Scheme(TiersFormat((TierClass(tier, tier),)), HEAD_DIM * (k_bits + v_bits) / 8 + 8)


# mixed: 30 % high, 50 % low, 20 % pruned, each row its own.
SCHEMES = {"fp16": Scheme(TiersFormat(), 4 * HEAD_DIM, True), "k8v4": uniform(8, 4), "k4v4": uniform(4, 4), "k4v2": uniform(4, 2),
           "mixed": Scheme(TiersFormat((TierClass(TierFormat(8, 4), TierFormat(4, 2), alpha_high=1.0, alpha_low=0.5),)), 0.3 * 200 + 0.5 * 104)}


def sets_for(set_bytes):
    return max(3, int(-(-COLD_BYTES // set_bytes)))


def make_caches(batch, tokens):
    count = sets_for(4 * batch * KV_HEADS * tokens * HEAD_DIM)

    def cache():
        return torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, dtype=torch.float16, device="cuda")
    return [(cache(), cache()) for _ in range(count)]


def exact_attention(q, k, v, pruned=None):
    """In float64, of one sequence: q [Q_HEADS, HEAD_DIM], k and v [KV_HEADS, tokens, HEAD_DIM], pruned [KV_HEADS, tokens]."""
    logits = torch.einsum("hgd,htd->hgt", q.double().view(KV_HEADS, GROUP, HEAD_DIM), k.double()) / HEAD_DIM**0.5
    if pruned is not None:
        logits.masked_fill_(pruned[:, None], float("-inf"))
    out = torch.einsum("hgt,htd->hgd", torch.softmax(logits, -1), v.double())
    return out.reshape(Q_HEADS, HEAD_DIM)


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
    expected = exact_attention(q[0], caches[0][0][0], caches[0][1][0])
    row = {"sets": len(caches), "relative_error": relative_error(attend(0)[0, :, 0], expected)}
    row["us"] = time_graph(attend, len(caches), options.replays, stream)
    return row


def fill_store(store, caches, has_tiers):
    """Every layer a cache."""
    batch, _, tokens, _ = caches[0][0].shape
    ids = [store.add_sequence() for _ in range(batch)]
    store.begin(ids, tokens)
    for layer in range(store.config.num_layers):
        significance = None
        if has_tiers:
            # Of token i, from 1: at least 1 / i is high, below 0.5 / i is pruned.
            draw = torch.rand(batch, KV_HEADS, tokens, device="cuda")
            i = torch.arange(1, tokens + 1, device="cuda")
            significance = torch.where(draw < 0.3, 1.0, torch.where(draw < 0.8, 0.75 / i, 0.0))
        k, v = (x.transpose(1, 2).contiguous() for x in caches[layer % len(caches)])
        store.append(ids, layer, k, v, significance=significance)
    store.take_status()
    return ids


def run_ours(name, q, caches, options, stream):
    scheme = SCHEMES[name]
    batch, _, tokens, _ = caches[0][0].shape
    layers = sets_for(scheme.token_bytes * batch * KV_HEADS * tokens)
    config = StoreConfig(layers, Q_HEADS, KV_HEADS, HEAD_DIM, batch, tokens, format=scheme.format, raw_layers=tuple(range(layers)) if scheme.is_raw else ())
    with KvStore(config, stream) as store:
        ids = fill_store(store, caches, name == "mixed")
        row = {"sets": layers, "bytes": store.usage().nominal_bytes // layers}
        k, v = (x.transpose(0, 1) for x in store.decode_range(ids[0], 0, 0, tokens))
        pruned = (k == 0).all(-1) & (v == 0).all(-1)
        row["pruned"] = pruned.double().mean().item()
        row["relative_error"] = relative_error(store.attend(ids, 0, q[:, None]).out[0, 0], exact_attention(q[0], k, v, pruned))
        row["us"] = time_graph(lambda i: store.attend(ids, i, q[:, None]), layers, options.replays, stream)
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
    report = {"schema": "tierkv.bench.peers/4", "gpu": torch.cuda.get_device_name(0), "commit": options.commit,
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "replays": options.replays,
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
