#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A conversation whose cache stays compressed from turn to turn, with transformers.

    python examples/chat.py --model SmolLM2-135M-Instruct --profile datasets/smollm2_profile.h5
    python examples/chat.py --model ... --say "What is a cache?" "And a compressed one?"

The folder or name is one that transformers can load: Llama, Mistral, Qwen or another type that TierCache serves. Without a profile the cache takes about
half as much again. On a CPU an answer can take minutes: attention is a plain loop there."""
import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tierkv.hf import TierCache


def reply(model, tokenizer, messages, cache, read, max_new_tokens):
    """The model reads what is new of the conversation; the rest is in the cache. read: the tokens that the model has read or written."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(model.device)
    tokens = inputs["input_ids"][0].tolist()
    # A template may write earlier turns otherwise than they were said: from there on the model reads them again.
    same = next((i for i, (a, b) in enumerate(zip(tokens[:-1], read)) if a != b), min(len(tokens) - 1, len(read)))
    if same < cache.get_seq_length():
        cache.crop(same - cache.get_seq_length())
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    read[:] = out[0].tolist()
    return tokenizer.decode(out[0, len(tokens):], skip_special_tokens=True).strip()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--profile", help="of the model, made by python -m tierkv.calibrate_model")
    p.add_argument("--format", default="small", help="small, fast, k8v4, k4v4 or channel (default: small)")
    p.add_argument("--say", nargs="+", help="what to say, turn by turn; otherwise it is read from the terminal")
    p.add_argument("--max-tokens", type=int, default=4096, help="of the conversation (default: 4096)")
    p.add_argument("--reply-tokens", type=int, default=200, help="at most, of a reply (default: 200)")
    a = p.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float16 if device == "cuda" else torch.float32,
                                                 attn_implementation="tierkv").to(device).eval()
    cache = TierCache(a.format, profile=a.profile, max_tokens=a.max_tokens)
    messages, read = [], []
    turns = iter(a.say) if a.say else iter(lambda: input("> "), "")
    for text in turns:
        if a.say:
            print(">", text)
        messages.append({"role": "user", "content": text})
        answer = reply(model, tokenizer, messages, cache, read, a.reply_tokens)
        messages.append({"role": "assistant", "content": answer})
        print(answer)
        print(f"[{cache.get_seq_length()} tokens: {cache.bytes_held / 2**20:.2f} MiB held, {cache.raw_bytes / 2**20:.2f} MiB in 16 bits]")


if __name__ == "__main__":
    main()
