#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Codes of a dump's caches with the global step and the mean basis, as bench_coded reads them; or the caches, for bench_matvec.

coded_codes.py DUMP OUT [--layers 0,3,5] [--key-step 0.3] [--value-step 0.25] [--kvcomp | --halves]

OUT, little-endian: i32 layers, kv heads, tokens, head_dim; then for every layer i16 codes [kv heads, tokens, head_dim] of the keys
and of the values (with --halves the fp16 values themselves). Steps as in docs/internals/architecture.md, "Quantisation", from the dump itself."""
import argparse

import h5py
import numpy as np


def as_float(data):
    if data.dtype.kind == "f" and data.dtype.itemsize == 2 and data.dtype != np.float16:
        raise SystemExit("bfloat16 dumps are not read here")
    return np.asarray(data, np.float32)


def codes_of(x, step):
    codes = np.rint((x - x.mean(axis=0, keepdims=True)) / np.float32(step))
    return np.clip(codes, -32768, 32767).astype("<i2")


def layer_codes(layer, args):
    k, v, q = (as_float(layer[name][()]) for name in ("k", "v", "q"))
    heads, _, dims = k.shape
    group = q.shape[0] // heads
    keys, values = [], []
    for h in range(heads):
        queries = q[h * group:(h + 1) * group].reshape(-1, dims).astype(np.float64)
        trace = 1.01 * (queries ** 2).sum(axis=1).mean()
        keys.append(codes_of(k[h], args.key_step * np.sqrt(12 * dims / trace)))
        signal = (v[h].astype(np.float64) ** 2).sum(axis=1).mean()
        values.append(codes_of(v[h], args.value_step * np.sqrt(12 * signal / dims)))
    return np.stack(keys), np.stack(values)


def relative_codes(x, step, axis):
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    return np.rint((x - low) / np.maximum(step * (high - low), 1e-12)).astype("<i2")


def kvcomp_codes(layer, args):
    """Keys by channel in blocks of 64 tokens, values by token; a last block of fewer tokens takes part."""
    k, v = (as_float(layer[name][()]) for name in ("k", "v"))
    blocks = [relative_codes(k[:, i:i + 64], 0.05, 1) for i in range(0, k.shape[1], 64)]
    return np.concatenate(blocks, axis=1), relative_codes(v, 0.15, 2)


def halves(layer, _):
    return [np.asarray(layer[name][()], np.float16) for name in ("k", "v")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump")
    parser.add_argument("out")
    parser.add_argument("--layers", default="0,3,5")
    parser.add_argument("--key-step", type=float, default=0.3)
    parser.add_argument("--value-step", type=float, default=0.25)
    parser.add_argument("--kvcomp", action="store_true", help="relative steps 0.05 and 0.15 instead, as KVComp")
    parser.add_argument("--halves", action="store_true", help="the values instead of codes")
    args = parser.parse_args()
    make = halves if args.halves else kvcomp_codes if args.kvcomp else layer_codes
    with h5py.File(args.dump) as f, open(args.out, "wb") as out:
        seq = next(iter(f["seq"].values()))
        layers = [seq["layer"][name] for name in args.layers.split(",")]
        out.write(np.array([len(layers), *layers[0]["k"].shape], "<i4").tobytes())
        for layer in layers:
            for codes in make(layer, args):
                out.write(codes.tobytes())


if __name__ == "__main__":
    main()
