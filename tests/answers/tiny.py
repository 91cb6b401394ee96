# SPDX-License-Identifier: Apache-2.0
"""A random Llama in a Hugging Face folder, small enough to compute by hand."""
import json
import pathlib
import struct

import numpy as np

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, INNER, THETA, EPS = 3, 4, 2, 8, 24, 1000.0, 1e-5
HIDDEN, VOCABULARY = Q_HEADS * HEAD_DIM, 259
OPENING = 258


def byte_tokens():
    from model import byte_symbols
    symbols = byte_symbols()
    return [symbols[b] for b in range(256)] + [symbols[ord("t")] + symbols[ord("h")], symbols[ord("t")] + symbols[ord("h")] + symbols[ord("e")],
                                               "<|begin|>"]


def random_weights(rng):
    """{name: float16 array}"""
    def matrix(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)
    out = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float16)}
    for i in range(LAYERS):
        shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                  "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN),
                  "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        out |= {f"model.layers.{i}.{name}.weight": 3 * matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{name}.weight"] = (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float16)
    return out


def write_model(folder, rng, **changes):
    """Returns the weights. The configuration names no head_dim and embeddings are tied, as SmolLM2's are."""
    folder = pathlib.Path(folder)
    weights, header, at = random_weights(rng), {}, 0
    for name, w in weights.items():
        header[name] = {"dtype": "F16", "shape": list(w.shape), "data_offsets": [at, at + w.nbytes]}
        at += w.nbytes
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(w.tobytes() for w in weights.values()))
    config = {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": Q_HEADS,
              "num_key_value_heads": KV_HEADS, "rms_norm_eps": EPS, "max_position_embeddings": 8192, "tie_word_embeddings": True,
              "bos_token_id": OPENING, "rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    tokens = byte_tokens()
    spec = {"added_tokens": [{"id": OPENING}], "model": {"vocab": {t: i for i, t in enumerate(tokens)}, "merges": ["t h", "th e"]}}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return weights


def reference_logits(weights, ids):
    """The definition in float64, a token and head at a time; keys and values are rounded to float16 as a cache holds them."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[name]
    def turned(x, position):
        angle = position * THETA**(-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        z = (x[:HEAD_DIM // 2] + 1j * x[HEAD_DIM // 2:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag])
    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = ((h @ w[p + f"self_attn.{c}_proj.weight"].T).reshape(len(ids), -1, HEAD_DIM) for c in "qkv")
        keys = np.array([[turned(k[t, of], t) for of in range(KV_HEADS)] for t in range(len(ids))]).astype(np.float16).astype(np.float64)
        v, out = v.astype(np.float16).astype(np.float64), np.zeros_like(h)
        for t in range(len(ids)):
            for head in range(Q_HEADS):
                of = head // (Q_HEADS // KV_HEADS)
                scores = np.array([turned(q[t, head], t) @ keys[s, of] for s in range(t + 1)]) / np.sqrt(HEAD_DIM)
                weight = np.exp(scores - scores.max())
                out[t, head * HEAD_DIM:(head + 1) * HEAD_DIM] = weight / weight.sum() @ v[:t + 1, of]
        x = x + out @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        gate = h @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T
