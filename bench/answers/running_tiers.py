#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Tiers that are decided once against DiffKV's Algorithm 1, which moves tokens down again: bench/results/running_tiers.json.

    bench/answers/running_tiers.py --work FOLDER --model FOLDER [--texts 4 --lookups 4]

A prompt of 2048 tokens is followed by 1024 tokens of generation, then predictions of up to 128 tokens are compared with those over the exact
cache. Model, prompts and measures are those of quality.py. Significances are those of exact attention; no token is pruned.

once          a token's tier is decided by its window's queries, against the geometric mean of its row (docs/internals/policies.md)
once_finer    the same, with half of alpha for generated tokens and twice alpha for those of the prompt
algorithm_1   a token that leaves the window is important from alpha / tokens on. If it is, the least important high token moves down where its mean over all queries so far is less
all_queries   by the queries of all 3072 tokens, as if they were one prompt"""
import argparse
import json
import os
import pathlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

from model import Model, softmax_in_place
from quality import PROFILE, ROOT, TEXTS, Prefilled, described, fetched_model, make_items, measured, significant
from schemes import CLASS_FORMATS, HIGH, LOW, MOVED, WINDOW, body, read_profile, tiers_left
from model import LayerCache

PROMPT, TOKENS = 2048, 3072
FORMATS = {"fast": CLASS_FORMATS, "k8v4/k4v2": (((8, 4), (4, 2)),) * 3}
ALPHAS = (0.25, 0.5, 1.0, 2.0, 4.0)


def received(layer, sm_scale):
    """float32 [kv_heads, queries, tokens]: the largest probability of a group's heads; 0 for a query's own token and those behind it."""
    (heads, n, d), group = layer.k.shape, len(layer.q) // len(layer.k)
    out = np.zeros((heads, n, n), np.float32)
    for h in range(heads):
        for begin in range(0, n, 256):
            at = np.arange(begin, min(n, begin + 256))
            p = (layer.q[h * group:(h + 1) * group, at].reshape(-1, d) * np.float32(sm_scale)) @ layer.k[h].T
            p = p.reshape(group, len(at), n)
            p[:, np.arange(n) > at[:, None]] = -np.inf
            out[h, at] = softmax_in_place(p).max(0)
            out[h, at, at] = 0
    return out


class Significances:
    """Of a layer's row h: mean(i, t) over the queries i + 1 .. t."""

    def __init__(self, probabilities):
        self.sums = probabilities.cumsum(1, dtype=np.float64)
        self.tokens = np.arange(probabilities.shape[2])

    def up_to(self, t, tokens=slice(None)):
        """[heads, tokens] by the queries up to t."""
        at = self.tokens[tokens]
        return self.sums[:, t, tokens] / np.maximum(t - at, 1)


def prompt_tiers(seen, alpha, at):
    """Of those tokens that leave the window with the prompt; the others are LOW."""
    u = seen.up_to(PROMPT - 1) * (seen.tokens + 1)
    important = (u >= alpha) & (seen.tokens < PROMPT - WINDOW)
    return np.where(important, HIGH, LOW)[:, at]


def once(seen, alpha, at, of_generated=1.0):
    tiers = prompt_tiers(seen, alpha / of_generated, at)
    logs = np.zeros(len(tiers))
    for count, i in enumerate(range(PROMPT - WINDOW, at.stop), 1):
        known = np.maximum(seen.up_to(i + WINDOW, slice(i, i + 1))[:, 0], 1e-30)
        logs += np.log(known)
        tiers[:, i - at.start] = np.where(known >= alpha * of_generated * np.exp(logs / count), HIGH, LOW)
    return tiers


def once_finer(seen, alpha, at):
    return once(seen, alpha, at, 0.5)


def algorithm_1(seen, alpha, at):
    tiers = prompt_tiers(seen, alpha, at)
    rows = np.arange(len(tiers))
    for i in range(PROMPT - WINDOW, at.stop):
        t = i + WINDOW
        known, bound, c = seen.up_to(t, at), alpha / (t + 1), i - at.start
        enters = known[:, c] >= bound
        tiers[enters, c] = HIGH
        mine = np.where(tiers == HIGH, known, np.inf)
        victim = mine.argmin(1)
        down = enters & (mine[rows, victim] < bound)
        tiers[rows[down], victim[down]] = MOVED
    return tiers


def all_queries(seen, alpha, at):
    u = seen.up_to(TOKENS - 1) * (seen.tokens + 1)
    return np.where(u >= alpha, HIGH, LOW)[:, at]


POLICIES = (once, once_finer, algorithm_1, all_queries)


def schemes(model, profile, prompt, policies):
    """{name: scheme of quality.measured()}"""
    at = body(prompt.layers[0])
    tiers = {(policy.__name__, alpha): [] for policy in policies for alpha in ALPHAS}
    for layer in model.prefill(prompt.ids):
        seen = Significances(received(layer, model.sm_scale))
        for policy in policies:
            for alpha in ALPHAS:
                tiers[policy.__name__, alpha].append(policy(seen, alpha, at))

    def scheme(formats, of_layers):
        def run(prompt):
            left = [tiers_left(layer, at, p, x, formats) for layer, p, x in zip(prompt.layers, profile, of_layers)]
            raw = sum(2 * layer.k.size * 2 for layer in prompt.layers)
            facts = {"memory": sum(x.bytes for x in left) / raw, "high": float(np.mean([x == HIGH for x in of_layers])),
                     "moved": float(np.mean([x == MOVED for x in of_layers]))}
            return [LayerCache(x.k, x.v) for x in left], facts
        return run
    return {(name, *key): scheme(formats, of_layers) for name, formats in FORMATS.items() for key, of_layers in tiers.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, metavar="FOLDER", help="for prefilled prompts")
    parser.add_argument("--model", type=pathlib.Path, metavar="FOLDER", help="fetched where not given")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--lookups", type=int, default=4)
    parser.add_argument("--policy", nargs="+", choices=[p.__name__ for p in POLICIES], default=[p.__name__ for p in POLICIES])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=pathlib.Path, default=ROOT / "bench/results/running_tiers.json")
    args = parser.parse_args()
    model, texts = Model(args.model or fetched_model(args.work)), [pathlib.Path(p).read_text(errors="replace") for p in TEXTS]
    profile = read_profile(PROFILE)
    records = []
    for item in make_items(model, texts, args.seed, TOKENS, (args.texts, args.lookups)):
        prompt = Prefilled(model, args.work, item.prompt, item.continuation)
        for (formats, policy, alpha), scheme in schemes(model, profile, prompt, [p for p in POLICIES if p.__name__ in args.policy]).items():
            row = {key: significant(float(x)) for key, x in measured(model, item, prompt, scheme).items()}
            records.append({"task": item.task, "prompt": item.prompt[-4:], "answers": len(item.answers), "formats": formats, "policy": policy, "alpha": alpha} | row)
        lines = ",\n".join("  " + json.dumps(r) for r in records)
        head = {"schema": "tierkv.bench.running_tiers/1", "model": model.identity, "seed": args.seed, "tokens": [PROMPT, TOKENS],
                "texts": [described(*x) for x in zip(TEXTS, texts)]}
        args.output.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')
        print(f"{item.task}: {len(records)} rows", flush=True)


if __name__ == "__main__":
    main()
