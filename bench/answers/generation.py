#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality through the store, in transformers: how much the predictions of the next 128 tokens change when a cache is made in one prompt, in
chunks, or token by token. bench/results/store_quality.json.

    PYTHONPATH=build/python bench/answers/generation.py --model FOLDER --items FILE [--profile FILE] [--format small fast small:k=0.36,v=0.4]

FILE is of items.py. Needs torch and transformers. The tokens behind a prompt are read eight at a time by attention to the compressed cache,
which then compresses those that leave its window, or with --read 128 at once, behind a decoded cache.
KL is against the same model over its exact cache (fp16 keys and values on a GPU, fp32 on the CPU), in nats: the mean over the tokens of texts
and over the answers of lookups. Memory is what the store holds, and what codes and raw tokens take, of 16 bits a value."""
import argparse
import json
import pathlib
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import tierkv
from items import read_items
from predictions import kl_by_position, log_probabilities, right_answers
from quality import PROFILE
from tierkv.hf import STEP_TOKENS, TierCache

# The share of the prompt's tokens in the first pass, and the tokens of each later pass.
WAYS = {"one prompt": (1.0, 0), "chunks of 512": (0.0, 512), "a third token by token": (2 / 3, 1)}


def lengths(tokens, way):
    """Tokens of each pass that makes the cache."""
    share, step = WAYS[way]
    first = round(tokens * share) if share else step
    return [first] + [min(step, tokens - at) for at in range(first, tokens, step or tokens)]


def format_of(name):
    """What TierCache takes of a name, or of `small` with steps of its own."""
    name, _, steps = name.partition(":")
    if not steps:
        return name
    if name != "small":
        raise SystemExit(f"generation.py: only small takes steps, not {name}")
    return tierkv.CodedFormat(**{key: float(x) for key, x in (part.split("=") for part in steps.split(","))})


@torch.inference_mode()
def fill(model, cache, ids, passes):
    at = 0
    for n in passes:
        model(ids[:, at:at + n], past_key_values=cache, logits_to_keep=1)
        at += n


@torch.inference_mode()
def predictions(model, cache, item, step):
    ids = torch.tensor(item.continuation[:-1], device=model.device)[None]
    logits = [model(x, past_key_values=cache).logits[0] for x in ids.split(step, 1)]
    return log_probabilities(torch.cat(logits).float().cpu().numpy())


def measured(item, exact, log_p):
    kl = kl_by_position(exact, log_p)
    at = np.concatenate([np.arange(a - 1, b - 1) for a, b in item.answers]) if item.answers else np.arange(len(kl))
    out = {"kl": kl[at].mean(), "same_top": float((exact.argmax(-1) == log_p.argmax(-1)).mean())}
    return out | ({"right": right_answers(item, log_p) / len(item.answers)} if item.answers else {})


def means(rows):
    return {"prompts": len(rows), **{key: float(np.mean([r[key] for r in rows])) for key in rows[0]}}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", required=True, type=pathlib.Path)
    p.add_argument("--items", required=True, type=pathlib.Path)
    p.add_argument("--profile", default=PROFILE, help="of the model; 'none' for none")
    p.add_argument("--format", nargs="+", default=["small"])
    p.add_argument("--way", nargs="+", default=list(WAYS), choices=list(WAYS))
    p.add_argument("--read", type=int, default=STEP_TOKENS, help="tokens at a time")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("-o", "--out", type=pathlib.Path, default=pathlib.Path("bench/results/store_quality.json"))
    a = p.parse_args()
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float16 if a.device == "cuda" else torch.float32).to(a.device).eval()
    profile = None if a.profile == "none" else tierkv.read_profile(a.profile)
    found = {}
    for item in read_items(a.items):
        tokens = len(item.prompt)
        ids = torch.tensor(item.prompt, device=a.device)[None]
        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config)
        fill(model, cache, ids, [tokens])
        exact = predictions(model, cache, item, len(item.continuation))
        model.set_attn_implementation("tierkv")
        for name in a.format:
            for way in a.way:
                started = time.time()
                cache = TierCache(format_of(name), profile=profile, max_tokens=tokens + 256)
                fill(model, cache, ids, lengths(tokens, way))
                usage = cache.store.usage()
                row = {"held": usage.held_bytes / usage.raw_bytes, "nominal": usage.nominal_bytes / usage.raw_bytes,
                       **measured(item, exact, predictions(model, cache, item, a.read)), "seconds": time.time() - started}
                cache.close()
                key = {"task": item.task, "format": name, "profile": profile is not None, "way": way, "tokens": tokens, "read": a.read, "device": a.device}
                print(json.dumps(key | row), flush=True)
                found.setdefault(tuple(key.items()), []).append(row)
    kept = json.loads(a.out.read_text())["rows"] if a.out.exists() else []
    rows = {tuple((k, r[k]) for k in dict(next(iter(found)))): r for r in kept}
    rows |= {key: dict(key) | means(of) for key, of in found.items()}
    a.out.write_text(json.dumps({"model": model.config.name_or_path.split("/")[-1], "rows": list(rows.values())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
