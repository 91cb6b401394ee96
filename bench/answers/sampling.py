#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What sampled significance costs: bench/results/sampled_significance.json.

    bench/answers/sampling.py --work FOLDER --model FOLDER --profile datasets/smollm2_profile.h5

Prompts, model and measures are those of quality.py, the scheme is weighted steps 0.5 / 0.45. Its importance comes from every query, from
every 4th, 16th and 64th, from every 16th and all that follow a token by at most 64 places, and from none (all tokens alike)."""
import argparse
import json
import os
import pathlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

from calibration import read_profile
from model import LayerCache, Model, softmax_in_place
from quality import ROOT, TEXTS, Prefilled, described, make_items, measured, numpy_scheme, significant
from schemes import SCHEMES, importance_exponents

SCHEME = "weighted steps 0.5 / 0.45"
VARIANTS = ((1, 0), (4, 0), (16, 0), (64, 0), (16, 64), (0, 0))  # (stride, near); stride 0: none
BLOCK = 128  # sampled queries at a time


def sampled_positions(tokens, stride):
    """Every stride-th query, counted from the last."""
    return np.arange((tokens - 1) % stride, tokens, stride)


def counted(tokens, stride, near):
    """float32 weights [queries that count, tokens], and those queries. Each stands for `stride` queries, or, with `near`, for one where the
    token is at most so many tokens behind it."""
    sampled = sampled_positions(tokens, stride)
    at = np.arange(tokens) if near else sampled
    distance = at[:, None] - np.arange(tokens)
    is_far = (distance > near) & np.isin(at, sampled)[:, None]
    is_near = (distance > 0) & (distance <= near)
    far = np.maximum(np.arange(tokens)[::-1] - near, 0) / np.maximum(is_far.sum(0), 1)
    return np.where(is_near, 1, is_far * far).astype(np.float32), at


def sampled_significance(layer, sm_scale, stride, near):
    """[kv_heads, tokens] float32: docs/internals/policies.md."""
    q, k = layer.q, layer.k
    (heads, n, d), (weights, at) = k.shape, counted(k.shape[1], stride, near)
    group, sums = len(q) // heads, np.zeros(k.shape[:2])
    for h in range(heads):
        for begin in range(0, len(at), BLOCK):
            j = at[begin:begin + BLOCK]
            p = (q[h * group:(h + 1) * group, j].reshape(-1, d) * np.float32(sm_scale)) @ k[h].T
            p = p.reshape(group, len(j), n)
            p[:, np.arange(n) > j[:, None]] = -np.inf
            sums[h] += (softmax_in_place(p).max(0) * weights[begin:begin + BLOCK]).sum(0)
    return (sums / np.maximum(np.arange(n)[::-1], 1)).astype(np.float32)


def variants(model, prompt):
    """[[LayerCache]], as VARIANTS"""
    cache = model.prefill(prompt.ids)
    even = np.broadcast_to(1 / np.arange(1, len(prompt.ids) + 1, dtype=np.float32), cache[0].significance.shape)

    def variant(stride, near):
        if stride == 1:
            return prompt.layers
        found = [sampled_significance(c, model.sm_scale, stride, near) if stride else even for c in cache]
        return [LayerCache(c.k, c.v, significance=x) for c, x in zip(cache, found)]
    return [variant(*v) for v in VARIANTS]


def exponent_differences(layers, exact):
    """Of importance, in eighths of an octave: (mean magnitude, share of tokens that differ)."""
    d = np.concatenate([np.abs(importance_exponents(a) - importance_exponents(b)).ravel() for a, b in zip(layers, exact)])
    return d.mean(), (d > 0).mean()


def record(model, item, prompt, scheme):
    rows, all_layers = [], variants(model, prompt)
    for (stride, near), layers in zip(VARIANTS, all_layers):
        prompt.layers = layers
        mean, share = exponent_differences(layers, all_layers[0])
        row = measured(model, item, prompt, scheme) | {"exponent_difference": mean, "exponents_differ": share}
        rows.append({"stride": stride, "near": near} | {key: significant(float(x)) for key, x in row.items()})
    return {"task": item.task, "tokens": len(item.prompt), "answers": len(item.answers), "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, metavar="FOLDER", help="for prefilled prompts")
    parser.add_argument("--model", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--profile", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--lookups", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "bench/results/sampled_significance.json")
    args = parser.parse_args()
    model, texts = Model(args.model), [pathlib.Path(p).read_text(errors="replace") for p in TEXTS]
    scheme = numpy_scheme(SCHEMES[SCHEME], model, read_profile(args.profile))
    head = {"schema": "tierkv.bench.sampled_significance/1", "model": args.model.name, "identity": model.identity, "seed": args.seed,
            "scheme": SCHEME, "profile": args.profile.name, "texts": [described(*x) for x in zip(TEXTS, texts)]}
    records = []
    for item in make_items(model, texts, args.seed, args.tokens, (args.texts, args.lookups)):
        records.append(record(model, item, Prefilled(model, args.work, item.prompt, item.continuation), scheme))
        lines = ",\n".join("  " + json.dumps(r) for r in records)
        args.output.write_text(json.dumps(head, indent=1)[:-2] + f',\n "prompts": [\n{lines}\n ]\n}}\n')
        print(f"{len(records)}: {records[-1]}", flush=True)


if __name__ == "__main__":
    main()
