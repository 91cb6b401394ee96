#!/usr/bin/env python3
"""Times fp16 decode attention of PyTorch's back ends at the shapes of bench_attention.

  peers_torch.py [--out FILE] [--replays N]

One query token per sequence, 32 query heads over 8 kv heads (enable_gqa), contiguous caches. Every back end is captured
in a CUDA graph over enough disjoint caches that none is still in L2 when its turn comes again; medians of graph replays,
in microseconds of one call. Outputs are checked against float64 first.
"""
import argparse
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPES = [(1, 4096), (1, 32768), (1, 131072), (32, 4096), (64, 4096), (8, 32768)]
COLD_BYTES = 192 << 20
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
TOLERANCE = 2e-3


def make_sets(batch, tokens):
    set_bytes = 4 * batch * KV_HEADS * tokens * HEAD_DIM
    count = max(3, -(-COLD_BYTES // set_bytes))
    def cache():
        return torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, dtype=torch.float16, device="cuda")
    q = torch.randn(batch, Q_HEADS, 1, HEAD_DIM, dtype=torch.float16, device="cuda")
    return q, [(cache(), cache()) for _ in range(count)]


def relative_error(out, q, k, v):
    """Against float64, for the first sequence."""
    group = Q_HEADS // KV_HEADS
    q64, k64, v64 = (x[0].double() for x in (q, k, v))
    k64, v64 = k64.repeat_interleave(group, 0), v64.repeat_interleave(group, 0)
    p = torch.softmax(q64 @ k64.transpose(1, 2) / HEAD_DIM**0.5, -1)
    expected = p @ v64
    return ((out[0].double() - expected).norm() / expected.norm()).item()


def attend(backend, q, k, v):
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def time_graph(backend, q, sets, replays):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for k, v in sets[:3]:
            attend(backend, q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k, v in sets:
            attend(backend, q, k, v)
    times = []
    for i in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(1e3 * begin.elapsed_time(end) / len(sets))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--replays", type=int, default=31)
    options = parser.parse_args()
    results = []
    for batch, tokens in SHAPES:
        q, sets = make_sets(batch, tokens)
        for name, backend in BACKENDS.items():
            row = {"name": name, "shape": f"{batch}x{tokens}", "sets": len(sets)}
            try:
                row["relative_error"] = relative_error(attend(backend, q, *sets[0]), q, *sets[0])
                row["us"] = time_graph(backend, q, sets, options.replays)
                passed = row["relative_error"] < TOLERANCE
                print(f"{name:8s} {row['shape']:9s} {row['us']:8.2f} us  error {row['relative_error']:.1e}"
                      f"{'' if passed else '  WRONG'}", flush=True)
            except RuntimeError as error:
                row["failure"] = str(error).splitlines()[0]
                print(f"{name:8s} {row['shape']:9s} failed: {row['failure']}", flush=True)
            results.append(row)
        del sets
        torch.cuda.empty_cache()
    report = {"schema": "tierkv.bench.peers/1", "gpu": torch.cuda.get_device_name(0),
              "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "results": results}
    if options.out:
        with open(options.out, "w", encoding="utf-8") as f:
            json.dump(report, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
