#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A real model over the plain store: SmolLM2 in transformers, whose attention is the store's. It prints the bytes that the store holds, and
how far compression moves the predictions.

    python examples/smollm2_store.py HuggingFaceTB/SmolLM2-135M-Instruct datasets/smollm2_profile.h5 README.md

The model reads the newest 1000 tokens of the file or fewer, and writes 40 more. tierkv.hf.TierCache does the same, with batches and turns."""
import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

import tierkv
from tierkv.kv_store import KvStore, StoreConfig, preset

PROMPT, ANSWER = 1000, 40


class StoreAttention:
    """The attention of a model over one sequence of a store."""

    def __init__(self, store):
        self.store, self.id = store, store.add_sequence()

    def __call__(self, module, q, k, v, mask, **kwargs):
        queries, keys, values = (x.transpose(1, 2).half().contiguous() for x in (q, k, v))      # [1, tokens, heads, head_dim]
        if q.shape[2] > 1:                                                                      # the prompt: exact, then compressed
            significance = tierkv.significance(queries[0], keys[0])[None]
            self.store.append(self.id, module.layer_idx, keys, values, significance=significance)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).contiguous(), None
        self.store.append(self.id, module.layer_idx, keys, values)
        return self.store.attend(self.id, module.layer_idx, queries, count_query=True).out.to(q.dtype), None


def logits(model, ids, first=0):
    """Of `ids` [1, tokens] at the positions from `first` on. transformers keeps no cache of its own."""
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    return model(ids, position_ids=positions, use_cache=False).logits[0].float()


@torch.inference_mode()
def main(name, profile, file):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16 if device == "cuda" else torch.float32).to(device).eval()
    ids = tokenizer(open(file).read(), return_tensors="pt").input_ids[:, -PROMPT:].to(device)
    prompt, c = ids.shape[1], model.config
    config = StoreConfig(num_layers=c.num_hidden_layers, num_q_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads,
                         head_dim=c.head_dim, max_sequences=1, max_tokens=PROMPT + ANSWER, format=preset("small"),
                         profile=tierkv.read_profile(profile))
    with KvStore(config, stream=torch.cuda.current_stream() if device == "cuda" else None) as store:
        attention = StoreAttention(store)
        AttentionInterface.register("store", attention)
        AttentionMaskInterface.register("store", lambda *args, **kwargs: None)
        model.set_attn_implementation("store")
        new, found = ids, []
        for _ in range(ANSWER):
            store.begin(attention.id, new.shape[1])
            found.append(logits(model, new, ids.shape[1] - new.shape[1])[-1])
            new = found[-1].argmax().reshape(1, 1)
            ids = torch.cat([ids, new], 1)
        store.take_status()                                                                     # raises what kernels found
        tokens, usage = store.num_tokens(attention.id), store.usage()
    model.set_attn_implementation("sdpa")
    exact = logits(model, ids)[prompt - 1:-1].log_softmax(-1)
    kl = (exact.exp() * (exact - torch.stack(found).log_softmax(-1))).sum(-1)[1:].mean().item()  # the first comes from the exact prompt
    print(tokenizer.decode(ids[0, prompt:]))
    print(f"{device}: {tokens} tokens in {usage.held_bytes / 2**20:.2f} MiB, {usage.raw_bytes / 2**20:.2f} MiB in 16 bits; KL {kl:.4f}")
    return kl


if __name__ == "__main__":
    main(*sys.argv[1:])
