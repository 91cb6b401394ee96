#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Codes of a dump's caches in weighted steps, as bench_weighted_attention reads them.

weighted_codes.py DUMP OUT [--layers 0,3,5] [--key-step 0.5] [--value-step 0.45]

OUT, little-endian: i32 layers, kv heads, tokens, head_dim; then for every layer, of the keys and of the values: i16 codes
[kv heads, tokens, head_dim] and i8 exponents [kv heads, tokens]. Keys lie before RoPE (plain, in halves); means, weights and steps come from
the dump itself (docs/reference/format.md, "Weighted steps"). The first 4 tokens, which are raw in a cache, are left out."""
import argparse

import h5py
import numpy as np

SINKS = 4


def turned_back(x, positions, frequencies):
    """x [heads, tokens, head_dim] before RoPE."""
    angles = positions[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)


def layer_codes(layer, frequencies, key_step, value_step):
    k, v, q = (np.asarray(layer[name][()], np.float64) for name in ("k", "v", "q"))
    heads, tokens, dims = k.shape
    positions = np.arange(SINKS, tokens)
    u = np.asarray(layer["significance"][()], np.float64)[:, SINKS:] * (positions + 1)
    importance = np.rint(8 * np.log2(np.clip(np.maximum(u, 1e-30)**-0.15, 0.5, 1.4)))
    q = turned_back(q, np.asarray(layer["q_positions"][()]), frequencies).reshape(heads, -1, dims)
    energy = (q**2).mean(1)
    pairs = energy.reshape(heads, 2, -1).mean(1)
    weights = np.tile(pairs**0.25, 2)
    weights /= np.sqrt((weights**2).mean(1, keepdims=True))
    keys = turned_back(k[:, SINKS:], positions, frequencies)
    y = (keys - keys.mean(1, keepdims=True)) * weights[:, None]
    steps = key_step * np.sqrt(12 * dims / energy.sum(1))[:, None, None]
    values = v[:, SINKS:]
    norm = np.rint(4 * np.log2(np.maximum((values**2).mean(-1), 1e-38)))
    for x, step, e in ((y, steps, importance), (values, value_step * np.sqrt(12), np.clip(norm + importance, -128, 127))):
        codes = np.rint(x / (step * np.exp2(e / 8)[..., None]))
        yield np.clip(codes, -32768, 32767).astype("<i2"), e.astype("i1")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump")
    parser.add_argument("out")
    parser.add_argument("--layers", default="0,3,5")
    parser.add_argument("--key-step", type=float, default=0.5)
    parser.add_argument("--value-step", type=float, default=0.45)
    args = parser.parse_args()
    with h5py.File(args.dump) as f, open(args.out, "wb") as out:
        seq = next(iter(f["seq"].values()))
        layers = [seq["layer"][name] for name in args.layers.split(",")]
        heads, tokens, dims = layers[0]["k"].shape
        frequencies = (f["rope_inv_freq"][()] if "rope_inv_freq" in f
                       else float(f.attrs["rope_theta"])**(-np.arange(0, dims, 2) / dims))
        out.write(np.array([len(layers), heads, tokens - SINKS, dims], "<i4").tobytes())
        for layer in layers:
            for codes, exponents in layer_codes(layer, np.asarray(frequencies, np.float64), args.key_step, args.value_step):
                out.write(codes.tobytes())
                out.write(exponents.tobytes())


if __name__ == "__main__":
    main()
