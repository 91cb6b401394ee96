#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""KL of the next 128 tokens over chunks that the LMCache serde wrote and read (tierkv.lmcache), beside their size: the table of docs/notes/2026-11-22-lmcache.md.

    PYTHONPATH=build/python bench/answers/chunk_quality.py --model FOLDER [--texts 4]

Needs torch and transformers, no LMCache. A prompt of 2048 tokens is prefilled in fp32, its keys and values go through the bytes, and the text's
next tokens are read teacher-forced over them."""
import argparse
import pathlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from model import Tokenizer
from predictions import kl_by_position, log_probabilities
from quality import TEXTS
from tierkv._lmcache_bytes import ChunkFormat, pack_chunk, unpack_chunk

TOKENS, CONTINUED = 2048, 128


@torch.inference_mode()
def predictions(model, ids, chunk):
    """Over a chunk [2, layers, tokens, hidden]."""
    c = model.config
    parts = torch.from_numpy(chunk).unflatten(3, (c.num_key_value_heads, -1)).transpose(2, 3)
    cache = DynamicCache(config=c)
    for layer in range(c.num_hidden_layers):
        cache.update(parts[0, layer][None].contiguous(), parts[1, layer][None].contiguous(), layer)
    return log_probabilities(model(ids, past_key_values=cache).logits[0].numpy())


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", required=True, type=pathlib.Path)
    p.add_argument("--texts", type=int, default=4)
    a = p.parse_args()
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokenizer = Tokenizer(a.model / "tokenizer.json")
    head_dim = model.config.head_dim or model.config.hidden_size // model.config.num_attention_heads
    found = {}
    for path in TEXTS[:a.texts]:
        ids = torch.tensor(tokenizer.encode(pathlib.Path(path).read_text(errors="replace")[:20000])[:TOKENS + CONTINUED])[None]
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(ids[:, :TOKENS], past_key_values=cache, logits_to_keep=1)
        kept = [torch.stack([getattr(layer, part)[0] for layer in cache.layers]) for part in ("keys", "values")]
        x = np.ascontiguousarray(torch.stack(kept).transpose(2, 3).flatten(3).numpy())
        exact = predictions(model, ids[:, TOKENS:], x)
        for widths in ((8, 8), (8, 4), (4, 4), (4, 2)):
            format = ChunkFormat(*widths, head_dim)
            data = np.empty(format.size(x.shape), np.uint8)
            pack_chunk(format, x, data)
            log_p = predictions(model, ids[:, TOKENS:], unpack_chunk(data, x.shape))
            same = (exact.argmax(-1) == log_p.argmax(-1)).mean()
            found.setdefault(widths, []).append((data.size / (2 * x.size), kl_by_position(exact, log_p).mean(), same))
    for (k, v), rows in found.items():
        share, kl, same = np.mean(rows, axis=0)
        print(f"| k{k}v{v} | {100 * share:.1f} % | {kl:.4f} | {100 * same:.1f} % |")


if __name__ == "__main__":
    main()
