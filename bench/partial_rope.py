#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention over coded rows where RoPE turns part of the head, through the Python package, on a GPU.

    bench/partial_rope.py PACKAGE DIMS[,DIMS...]      PACKAGE: the folder of the package, BUILD/python

One layer, 64 sequences of 4096 normal tokens, 32 query heads and 8 kv heads of 128 channels. Prints the least, the median and the largest time
of a call in microseconds: nine times, each over ten calls behind one another.
"""
import sys

import numpy as np
import torch

sys.path.insert(0, sys.argv[1])
from tierkv.kv_config import CodedFormat, StoreConfig  # noqa: E402
from tierkv.kv_store import KvStore  # noqa: E402
from tierkv.profile import Rope  # noqa: E402

SEQUENCES, TOKENS, HEADS, DIM, TIMES, CALLS = 64, 4096, 8, 128, 9, 10


def time_of(dims):
    torch.manual_seed(1)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    rope = Rope("halves", dims, (10000.0 ** -(np.arange(0, dims, 2) / dims)).astype(np.float32))
    store = KvStore(StoreConfig(num_layers=1, num_kv_heads=HEADS, num_q_heads=4 * HEADS, head_dim=DIM, rope=rope, format=CodedFormat(),
                                max_sequences=SEQUENCES, max_tokens=4200), stream=stream)
    ids = [store.add_sequence() for _ in range(SEQUENCES)]
    for i in range(0, SEQUENCES, 8):
        k = torch.randn(8, TOKENS, HEADS, DIM, device="cuda", dtype=torch.float16)
        store.begin(ids[i:i + 8], TOKENS)
        store.append(ids[i:i + 8], 0, k, torch.randn_like(k))
    q = torch.randn(SEQUENCES, 1, 4 * HEADS, DIM, device="cuda", dtype=torch.float16)
    store.take_status()
    times = []
    for _ in range(TIMES + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        for _ in range(CALLS):
            store.attend(ids, 0, q)
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    store.close()
    return sorted(times[1:])  # the first warms up


for dims in map(int, sys.argv[2].split(",")):
    found = time_of(dims)
    print(f"{dims} dims: {found[0]:.1f}, {found[len(found) // 2]:.1f}, {found[-1]:.1f} us", flush=True)
