#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What codebooks per class of channels would save: entropies of the global step's codes, as JSON on stdout.

Channels of every (layer, kv_head) are sorted by the spread of their codes and cut into classes of equal size; a codebook of a layer
then serves one class of all its heads. One class is what coded blocks have now, head_dim classes are a codebook per channel. Plug-in
entropies with the correction of Miller and Madow, mean bits per code of keys and of values; no headers, no code inefficiency.
"own means": one class, with the sequence's own channel means in place of the profile's.

channel_classes.py PROFILE DUMP K V      PROFILE: of `tierkv calibrate` on other dumps; steps as in step:k=K,v=V"""
import json
import sys

import h5py
import numpy as np

CLASSES = [1, 2, 4, 8]


def entropy(codes):
    counts = np.unique(codes, return_counts=True)[1]
    shares = counts / counts.sum()
    return -(shares * np.log2(shares)).sum() + (len(counts) - 1) / (2 * np.log(2) * counts.sum())


def steps_of(profile, row, k, v, sm_scale, head_dim):
    """Global steps (docs/internals/architecture.md, "Quantisation")."""
    metric_trace = 1.01 * profile["query_trace"][row]  # with the ridge of codec/format/global_step.h
    return (k * profile["key_scale"][row] * np.sqrt(12 / metric_trace) / sm_scale,
            v * profile["value_scale"][row] * np.sqrt(12 * profile["value_signal"][row] / head_dim))


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    k, v = map(float, sys.argv[3:])
    bits = {}
    with h5py.File(sys.argv[1]) as profile, h5py.File(sys.argv[2]) as dump:
        heads, d = int(dump.attrs["num_kv_heads"]), int(dump.attrs["head_dim"])
        for seq in dump["seq"].values():
            for name, layer in seq["layer"].items():
                for c, component in enumerate("kv"):
                    codes, own = [], []
                    for h in range(heads):
                        row = int(name) * heads + h
                        step = steps_of(profile, row, k, v, float(dump.attrs["sm_scale"]), d)[c]
                        mean = profile[("key_mean", "value_mean")[c]][row]
                        x = layer[component][h].astype(np.float64)
                        own.append(np.rint((x - x.mean(0)) / step).astype(np.int32))
                        x = np.rint((x - mean) / step).astype(np.int32)
                        codes.append(x[:, np.argsort(x.std(0))])
                    codes = np.concatenate(codes)
                    found = {n: np.mean([entropy(part) for part in np.array_split(codes, n, axis=1)]) for n in [*CLASSES, d]}
                    found["own means"] = entropy(np.concatenate(own))
                    for n, b in found.items():
                        bits.setdefault(component, {}).setdefault(n, []).append((b, codes.size))
    mean = {c: {n: sum(b * w for b, w in rows) / sum(w for _, w in rows) for n, rows in by.items()} for c, by in bits.items()}
    print(json.dumps({"k": k, "v": v, "bits_by_classes": mean}, indent=1))


if __name__ == "__main__":
    main()
