#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts a small kv-dump from a model's cache: the dump that the repository bundles.

    python3 datasets/make_sample.py --model FOLDER --text FILE --layers 0 4 8 12 16 20 24 29 -o datasets/smollm2_1k.h5

FOLDER: SmolLM2-135M-Instruct as datasets/gguf_to_hf.py writes it. The dump holds these layers, renumbered from 0: keys and values in
float16, significance from all queries, queries at some positions, how keys were rotated. Needs numpy and h5py.

    python3 datasets/make_sample.py --cut-profile datasets/smollm2_profile.h5 --layers 0 4 8 ... -o datasets/smollm2_1k_profile.h5

cuts the same layers out of the model's profile.
"""
import argparse
import os
import pathlib
import sys

import h5py
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench" / "answers"))
from dump import write_dump
from model import Model

MOST_BYTES = 8 << 20
NEWEST_QUERIES, SPREAD_QUERIES = 64, 64


def query_positions(tokens):
    """Some spread from an eighth of the tokens on, and the newest."""
    spread = np.linspace(tokens // 8, tokens - NEWEST_QUERIES - 1, SPREAD_QUERIES).astype(np.int32)
    return np.unique(np.concatenate([spread, np.arange(tokens - NEWEST_QUERIES, tokens, dtype=np.int32)]))


def cut_profile(source, layers, output):
    """The profile of these layers alone."""
    with h5py.File(source) as f, h5py.File(output, "w") as out:
        heads = int(f.attrs["num_kv_heads"])
        rows = [layer * heads + head for layer in layers for head in range(heads)]
        out.attrs.update(f.attrs)
        out.attrs["num_layers"] = np.int32(len(layers))
        for name, data in f.items():
            values = data[()]
            # Frequencies are of all layers together, or by layer.
            kept = rows if name != "rope_inv_freq" else layers if values.ndim == 2 else slice(None)
            out.create_dataset(name, data=values[kept])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--model-id", default="SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    parser.add_argument("--cut-profile", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    if args.cut_profile:
        cut_profile(args.cut_profile, args.layers, args.output)
        return 0
    if not (args.model and args.text):
        parser.error("--model and --text are needed")
    model = Model(args.model)
    ids = [*model.opening, *model.tokenizer.encode(args.text.read_text())][:args.tokens]
    if len(ids) < args.tokens or not all(0 <= i < model.layers for i in args.layers):
        print(f"make_sample: {args.text} has {len(ids)} tokens, the model {model.layers} layers", file=sys.stderr)
        return 3
    cache = model.prefill(ids)
    part = args.output.with_name(args.output.name + ".part")
    write_dump(part, model, ids, [cache[i] for i in args.layers], query_positions(len(ids)), "notes", gzip=9)
    with h5py.File(part, "r+") as f:
        f.attrs["model_id"] = np.bytes_(args.model_id)
        f.attrs["created_by"] = np.bytes_(f"make_sample.py, layers {' '.join(map(str, args.layers))} of {model.layers}")
    if part.stat().st_size > MOST_BYTES:
        print(f"make_sample: {part.stat().st_size} bytes, more than {MOST_BYTES}: name fewer layers", file=sys.stderr)
        part.unlink()
        return 3
    os.replace(part, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
