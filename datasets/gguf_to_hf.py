#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a Llama-architecture GGUF file as a Hugging Face folder: config.json, tokenizer.json, model.safetensors in float16.

    python3 datasets/gguf_to_hf.py MODEL.gguf FOLDER

Needs numpy and the package gguf. Exit code 3 where the file cannot be converted; FOLDER exists whole or not at all. Supported: plain
RoPE, byte-level BPE whose digits stand alone (SmolLM), tied or untied embeddings, every quantisation that the package can decode.
"""
import argparse
import json
import pathlib
import shutil
import struct
import sys
import tempfile

import numpy as np

LAYER_TENSORS = {  # GGUF name -> Hugging Face name, of layer i
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # token type of GGUF: a control token
DIGITS_ALONE = ("smollm",)  # values of tokenizer.ggml.pre


class GgufError(Exception):
    """What keeps a file from being converted; the message names the file."""


class Source:
    """A GGUF file: its fields and float tensors, checked where they are asked for."""

    def __init__(self, path):
        import gguf
        self.path, self.dequantize = path, gguf.dequantize
        try:
            reader = gguf.GGUFReader(path)
            self.fields = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as e:
            raise GgufError(f"{path}: {e.strerror or e}") from e
        except Exception as e:  # the package does not say what it raises for a broken file
            raise GgufError(f"{path}: not a readable GGUF file ({e})") from e
        self.tensors = {t.name: t for t in reader.tensors}

    def refuse(self, what):
        raise GgufError(f"{self.path}: {what}")

    def field(self, name, kind, default=None):
        value = self.fields.get(name, default)
        if value is None:
            self.refuse(f"the field {name} is missing")
        if not isinstance(value, kind):
            self.refuse(f"the field {name} has the type {type(value).__name__}")
        return value

    def count(self, name, default=None):
        value = self.field(name, int, default)
        if not 0 < value < 1 << 24:
            self.refuse(f"the field {name} is {value}")
        return value

    def tensor(self, name, shape):
        """Float16, of the shape that the fields say."""
        if name not in self.tensors:
            self.refuse(f"the tensor {name} is missing")
        t = self.tensors.pop(name)
        found = tuple(int(n) for n in reversed(t.shape))
        if found != shape:
            self.refuse(f"the tensor {name} has the shape {found}; the fields say {shape}")
        try:
            with np.errstate(over="ignore"):
                values = self.dequantize(t.data, t.tensor_type).astype(np.float16).reshape(shape)
        except (ValueError, NotImplementedError) as e:
            self.refuse(f"the tensor {name} cannot be decoded ({e})")
        if not np.isfinite(values).all():
            self.refuse(f"the tensor {name} does not fit into float16")
        return values


def in_halves(w, heads):
    """Rows of a projection with the two halves of a rotation apart; GGUF interleaves them."""
    return w.reshape(heads, len(w) // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def read_config(source):
    architecture = source.field("general.architecture", str)
    if architecture != "llama":
        source.refuse(f"the architecture is {architecture!r}; only llama is supported")
    if source.fields.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in source.tensors:
        source.refuse("scaled RoPE is not supported")
    heads, hidden = source.count("llama.attention.head_count"), source.count("llama.embedding_length")
    head_dim = source.count("llama.attention.key_length", hidden // heads)
    if source.count("llama.attention.value_length", head_dim) != head_dim:
        source.refuse("keys and values differ in width")
    if head_dim % 2 or source.count("llama.rope.dimension_count", head_dim) != head_dim:
        source.refuse(f"RoPE turns {source.fields.get('llama.rope.dimension_count')} of {head_dim} dims; only all of them are supported")
    kv_heads = source.count("llama.attention.head_count_kv", heads)
    if heads % kv_heads:
        source.refuse(f"{heads} query heads do not divide into {kv_heads} kv heads")
    theta = float(source.field("llama.rope.freq_base", (float, int), 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float16",
        "num_hidden_layers": source.count("llama.block_count"), "hidden_size": hidden,
        "intermediate_size": source.count("llama.feed_forward_length"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "max_position_embeddings": source.count("llama.context_length"), "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        # float32 in the file; the shortest decimal that means the same is what the model was made with
        "rms_norm_eps": float(str(np.float32(source.field("llama.attention.layer_norm_rms_epsilon", float)))),
        "vocab_size": len(source.field("tokenizer.ggml.tokens", list)), "tie_word_embeddings": "output.weight" not in source.tensors,
        "bos_token_id": source.field("tokenizer.ggml.bos_token_id", int), "eos_token_id": source.field("tokenizer.ggml.eos_token_id", int),
        "attention_bias": False, "mlp_bias": False,
    }


def read_weights(source, config):
    """{Hugging Face name: float16 array}; every tensor of the file has its place."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"attn_norm": (hidden,), "attn_q": (heads * head_dim, hidden), "attn_k": (kv_heads * head_dim, hidden),
              "attn_v": (kv_heads * head_dim, hidden), "attn_output": (hidden, heads * head_dim), "ffn_norm": (hidden,),
              "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    table = (config["vocab_size"], hidden)
    weights = {"model.embed_tokens.weight": source.tensor("token_embd.weight", table)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            w = source.tensor(f"blk.{layer}.{name}.weight", shape)
            if name in ("attn_q", "attn_k"):
                w = in_halves(w, shape[0] // head_dim)
            weights[f"model.layers.{layer}.{LAYER_TENSORS[name]}.weight"] = w
    weights["model.norm.weight"] = source.tensor("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = source.tensor("output.weight", table)
    if source.tensors:
        source.refuse(f"the tensor {next(iter(source.tensors))} has no place in a llama")
    return weights


def read_tokenizer(source):
    kind, pre = source.field("tokenizer.ggml.model", str), source.field("tokenizer.ggml.pre", str)
    if kind != "gpt2" or pre not in DIGITS_ALONE:
        source.refuse(f"the tokenizer is {kind!r} / {pre!r}; supported: 'gpt2' / {', '.join(map(repr, DIGITS_ALONE))}")
    tokens, types = source.field("tokenizer.ggml.tokens", list), source.field("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        source.refuse("the field tokenizer.ggml.tokens repeats a token, or has other entries than token_type")
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, (t, kind) in enumerate(zip(tokens, types)) if kind == SPECIAL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": dict(byte_level, add_prefix_space=True),
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": {t: i for i, t in enumerate(tokens)},
                  "merges": source.field("tokenizer.ggml.merges", list)},
    }


def read_tokenizer_config(source, config):
    tokens = source.field("tokenizer.ggml.tokens", list)
    out = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"],
           "clean_up_tokenization_spaces": False, "add_bos_token": source.field("tokenizer.ggml.add_bos_token", bool, False)}
    for name, field in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        i = source.fields.get(f"tokenizer.ggml.{field}_token_id")
        if i is not None and not 0 <= i < len(tokens):
            source.refuse(f"the field tokenizer.ggml.{field}_token_id is {i}; there are {len(tokens)} tokens")
        if i is not None:
            out[name] = tokens[i]
    if "tokenizer.chat_template" in source.fields:
        out["chat_template"] = source.field("tokenizer.chat_template", str)
    return out


def write_safetensors(path, weights):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, w in weights.items():
        header[name] = {"dtype": "F16", "shape": list(w.shape), "data_offsets": [at, at + w.nbytes]}
        at += w.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for w in weights.values():
            f.write(np.ascontiguousarray(w).tobytes())


def convert(path, folder):
    """Raises GgufError, or OSError where the folder cannot be written."""
    path, folder = pathlib.Path(path), pathlib.Path(folder)
    if folder.exists():
        raise GgufError(f"{folder}: exists already")
    source = Source(path)
    config = read_config(source)
    texts = {"config.json": config, "tokenizer.json": read_tokenizer(source), "tokenizer_config.json": read_tokenizer_config(source, config)}
    weights = read_weights(source, config)
    part = pathlib.Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    try:
        part.chmod(0o755)
        for name, content in texts.items():
            (part / name).write_text(json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer.json" else 1), encoding="utf-8")
        write_safetensors(part / "model.safetensors", weights)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=pathlib.Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    args = parser.parse_args()
    try:
        convert(args.gguf, args.folder)
    except (GgufError, OSError, ImportError) as e:
        print(f"gguf_to_hf: {e}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
