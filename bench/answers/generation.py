#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality through the store, in transformers: how much the predictions of the next 128 tokens change when a cache is made in one prompt, in
chunks, or token by token. bench/results/store_quality.json.

    PYTHONPATH=build/python bench/answers/generation.py --model FOLDER [--profile FILE] [--format small...] [--texts 2] [--lookups 1]

Needs torch and transformers. KL is against the same model over its exact cache (fp16 keys and values on a GPU, fp32 on the CPU), in nats:
the mean over the tokens of texts and over the answers of lookups. Memory is what the store holds, and what codes and raw tokens take, of
16 bits a value."""
import argparse
import json
import pathlib
import random
import time
import types

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import tierkv
from model import Tokenizer
from predictions import kl_by_position, log_probabilities, right_answers
from quality import PROFILE, TEXTS, make_items
from tierkv.hf import TierCache

# Tokens of the prompt, of each later pass, and how many those are together.
WAYS = {"one prompt": (1.0, 0), "chunks of 512": (0.0, 512), "a third token by token": (2 / 3, 1)}


def lengths(tokens, way):
    """Of the passes that make the cache."""
    share, step = WAYS[way]
    first = round(tokens * share) if share else step
    return [first] + [min(step, tokens - at) for at in range(first, tokens, step or tokens)]


@torch.inference_mode()
def fill(model, cache, ids, passes):
    at = 0
    for n in passes:
        model(ids[:, at:at + n], past_key_values=cache, logits_to_keep=1)
        at += n


@torch.inference_mode()
def predictions(model, cache, item):
    ids = torch.tensor(item.continuation[:-1], device=model.device)[None]
    return log_probabilities(model(ids, past_key_values=cache).logits[0].float().cpu().numpy())


def measured(item, exact, log_p):
    kl = kl_by_position(exact, log_p)
    at = np.concatenate([np.arange(a - 1, b - 1) for a, b in item.answers]) if item.answers else np.arange(len(kl))
    out = {"kl": kl[at].mean(), "same_top": float((exact.argmax(-1) == log_p.argmax(-1)).mean())}
    return out | ({"right": right_answers(item, log_p) / len(item.answers)} if item.answers else {})


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", required=True, type=pathlib.Path)
    p.add_argument("--profile", default=PROFILE, help="of the model; 'none' for none")
    p.add_argument("--format", nargs="+", default=["small"])
    p.add_argument("--way", nargs="+", default=list(WAYS), choices=list(WAYS))
    p.add_argument("--texts", type=int, default=2)
    p.add_argument("--lookups", type=int, default=1)
    p.add_argument("--tokens", type=int, default=3072)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("-o", "--out", type=pathlib.Path, default=pathlib.Path("bench/results/store_quality.json"))
    a = p.parse_args()
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float16 if a.device == "cuda" else torch.float32).to(a.device).eval()
    options = json.loads((a.model / "tokenizer_config.json").read_text())
    reader = types.SimpleNamespace(tokenizer=Tokenizer(a.model / "tokenizer.json"),
                                   opening=[model.config.bos_token_id] if options.get("add_bos_token", True) else [])
    texts = [pathlib.Path(t).read_text(errors="replace") for t in TEXTS]
    profile = None if a.profile == "none" else tierkv.read_profile(a.profile)
    rows = []
    for item in make_items(reader, texts, a.seed, a.tokens, (a.texts, a.lookups)):
        ids = torch.tensor(item.prompt, device=a.device)[None]
        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config)
        fill(model, cache, ids, [a.tokens])
        exact = predictions(model, cache, item)
        model.set_attn_implementation("tierkv")
        for name in a.format:
            for way in a.way:
                started = time.time()
                cache = TierCache(name, profile=profile, max_tokens=a.tokens + 256)
                fill(model, cache, ids, lengths(a.tokens, way))
                usage = cache.store.usage()
                row = {"task": item.task, "format": name, "profile": profile is not None, "way": way, "tokens": a.tokens,
                       "held": usage.held_bytes / usage.raw_bytes, "nominal": usage.nominal_bytes / usage.raw_bytes,
                       **measured(item, exact, predictions(model, cache, item)), "seconds": time.time() - started}
                cache.close()
                print(json.dumps(row), flush=True)
                rows.append(row)
    kept = json.loads(a.out.read_text())["rows"] if a.out.exists() else []
    key = ("format", "profile", "way", "tokens")
    made = {tuple(r[k] for k in key) for r in rows}
    kept = [r for r in kept if tuple(r[k] for k in key) not in made]
    a.out.write_text(json.dumps({"model": model.config.name_or_path.split("/")[-1], "rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
