#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times fp16 causal attention of a prompt by PyTorch's back ends: what bench_prompt's significance is held against.

  peers_prompt_torch.py [--out FILE] [--commit HASH] [--replays N]

One sequence of 8192 tokens, 32 query heads over 8 kv heads (enable_gqa). CUDA graph replays, medians in microseconds.
"""
import argparse
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM = 8192, 32, 8, 128
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def attend(backend, q, k, v):
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def time_graph(backend, q, k, v, replays):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            attend(backend, q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(backend, q, k, v)
    times = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(replays + 3):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(1e3 * begin.elapsed_time(end))
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--replays", type=int, default=21)
    args = parser.parse_args()
    def heads(n):
        return torch.randn(1, n, TOKENS, HEAD_DIM, dtype=torch.float16, device="cuda")
    q, k, v = heads(Q_HEADS), heads(KV_HEADS), heads(KV_HEADS)
    results = []
    for name, backend in BACKENDS.items():
        try:
            times = time_graph(backend, q, k, v, args.replays)
        except RuntimeError as error:
            results.append({"backend": name, "error": str(error).splitlines()[0]})
            print(f"{name}: {error}")
            continue
        us = statistics.median(times)
        tflops = 2 * TOKENS * TOKENS * Q_HEADS * HEAD_DIM / us * 1e-6
        results.append({"backend": name, "median_us": us, "min_us": min(times), "max_us": max(times),
                        "tflop_per_s": tflops})
        print(f"{name} {us:.1f} us [{min(times):.1f}, {max(times):.1f}] {tflops:.1f} TFLOP/s")
    if args.out:
        with open(args.out, "w") as f:
            json.dump({"schema": "tierkv.bench.prompt_peers/1", "gpu": torch.cuda.get_device_name(),
                       "commit": args.commit, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                       "shape": [TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM], "results": results}, f, indent=1)


if __name__ == "__main__":
    main()
