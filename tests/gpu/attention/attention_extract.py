#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what tests/gpu/attention/attention_dump_test.cu reads: one layer of one sequence of a kv-dump.

attention_extract.py DUMP.h5 SEQUENCE LAYER OUT.bin [TOKENS]

int32 kv_heads, q_heads, tokens, head_dim, queries; fp16 k and v [kv_heads, tokens, head_dim], the
newest queries [queries, q_heads, head_dim]. SEQUENCE "-": the first. TOKENS: only the first so many,
their last queries."""
import sys

import h5py
import numpy as np

QUERIES = 4


def main(path, sequence, layer, out, tokens=None):
    with h5py.File(path) as f:
        group = f["seq"][next(iter(f["seq"])) if sequence == "-" else sequence]["layer"][layer]
        k, v, q = (np.asarray(group[name], np.float32) for name in "kvq")
        positions = np.asarray(group["q_positions"]) if "q_positions" in group else np.arange(q.shape[1])
    tokens = int(tokens or k.shape[1])
    wanted = np.arange(tokens - QUERIES, tokens)
    at = np.searchsorted(positions, wanted)
    if not np.array_equal(positions[at], wanted):
        sys.exit("the dump lacks the queries of the last tokens")
    q = q[:, at].transpose(1, 0, 2)
    with open(out, "wb") as f:
        np.array([k.shape[0], q.shape[1], tokens, k.shape[2], QUERIES], "<i4").tofile(f)
        for x in (k[:, :tokens], v[:, :tokens], q):
            np.ascontiguousarray(x.astype("<f2")).tofile(f)


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
