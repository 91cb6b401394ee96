#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of a token of generate() in transformers over a TierCache, beside DynamicCache with torch's attention: a model of SmolLM2-135M's shape
with random weights, on a GPU.

    PYTHONPATH=build-gpu/python bench/answers/generate_speed.py [--batch 1] [--context 512] [--out FILE]"""
import argparse
import json
import pathlib
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tierkv.hf import TierCache

SHAPE = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
             head_dim=64, max_position_embeddings=8192, pad_token_id=0, eos_token_id=None, bos_token_id=None)
SHORT, LONG = 8, 72


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", default="DynamicCache,k4v4,small,channel")
    parser.add_argument("--out")
    options = parser.parse_args()
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().to("cuda", torch.bfloat16)
    ids = torch.randint(1, 49152, (options.batch, options.context), device="cuda")
    results = []

    def run(name, tokens):
        model.set_attn_implementation("sdpa" if name == "DynamicCache" else "tierkv")
        cache = DynamicCache() if name == "DynamicCache" else TierCache(name, max_tokens=options.context + 128, max_sequences=options.batch)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if name != "DynamicCache":
            cache.close()
        return seconds

    times = {name: [] for name in options.formats.split(",")}
    for name in times:
        run(name, SHORT)
    for _ in range(options.repeats):  # in turn: the host's clock moves
        for name, of in times.items():
            of.append(1e3 * (run(name, LONG) - run(name, SHORT)) / (LONG - SHORT))
    for name, of in times.items():
        of.sort()
        results.append({"cache": name, "ms_per_token": of[len(of) // 2], "least_ms": of[0], "most_ms": of[-1]})
        print(json.dumps(results[-1]), flush=True)
    if options.out:
        text = json.dumps({"schema": "tierkv.bench.generate/1", "gpu": torch.cuda.get_device_name(), "batch": options.batch,
                           "context": options.context, "results": results}, indent=1)
        pathlib.Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
