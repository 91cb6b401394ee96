# SPDX-License-Identifier: Apache-2.0
"""A Llama-architecture model in NumPy: its tokenizer, a prefill that gives the cache, a continuation over any cache.

Read from a folder in Hugging Face layout: config.json, tokenizer.json (byte-level BPE, digits one by one), *.safetensors in bfloat16,
float16 or float32. Everything is computed in float32; keys and values are rounded to float16 where they enter the cache, as a
server's cache would hold them."""
import dataclasses
import functools
import hashlib
import json
import pathlib
import re

import numpy as np

WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
SCORES = 1 << 20  # of a kv head at a time: what stays in a core's cache


def byte_symbols():
    """The printable character that byte-level BPE writes for each byte."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    symbols = {b: chr(b) for b in plain}
    others = (b for b in range(256) if b not in symbols)
    return symbols | {b: chr(256 + i) for i, b in enumerate(others)}


class Tokenizer:
    def __init__(self, path):
        spec = json.loads(pathlib.Path(path).read_text())
        self.vocabulary = spec["model"]["vocab"]
        pairs = (m.split(" ") if isinstance(m, str) else m for m in spec["model"]["merges"])
        self.rank = {tuple(pair): i for i, pair in enumerate(pairs)}
        self.symbol = byte_symbols()
        self.byte = {c: b for b, c in self.symbol.items()}
        self.special = {t["id"] for t in spec["added_tokens"]}
        self.text_of = {i: t for t, i in self.vocabulary.items()}
        self.word_ids = functools.lru_cache(1 << 16)(self.merged)

    def merged(self, word):
        """Ids of a word: the pair that was learned first is joined first."""
        parts = [self.symbol[b] for b in word.encode()]
        while len(parts) > 1:
            best = min(zip(parts, parts[1:]), key=lambda pair: self.rank.get(pair, len(self.rank)))
            if best not in self.rank:
                break
            joined, i = [], 0
            while i < len(parts):
                width = 2 if tuple(parts[i:i + 2]) == best else 1
                joined.append("".join(parts[i:i + width]))
                i += width
            parts = joined
        return [self.vocabulary[p] for p in parts]

    def encode(self, text):
        pieces = (piece for piece in re.split(r"(\d)", text) if piece)
        return [i for piece in pieces for word in WORDS.findall(piece) for i in self.word_ids(word)]

    def decode(self, ids):
        symbols = "".join(self.text_of[i] for i in ids if i not in self.special)
        return bytes(self.byte[c] for c in symbols).decode(errors="replace")


def read_safetensors(path):
    """{name: float32 array}"""
    raw = np.fromfile(path, np.uint8)
    start = 8 + int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8:start].tobytes())
    header.pop("__metadata__", None)
    out = {}
    for name, t in header.items():
        data = raw[start + t["data_offsets"][0]:start + t["data_offsets"][1]].tobytes()
        if t["dtype"] == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[t["dtype"]]).astype(np.float32)
        out[name] = values.reshape(t["shape"])
    return out


def as_cached(x):
    return x.astype(np.float16).astype(np.float32)


def softmax_in_place(x):
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


class LayerCache:
    """What a prompt leaves in a layer. k, v: [kv_heads, tokens, head_dim]; q: [q_heads, tokens, head_dim]; significance:
    [kv_heads, tokens], as in docs/internals/policies.md. q and significance of a prefill only."""

    def __init__(self, k, v, q=None, significance=None):
        self.k, self.v, self.q, self.significance = k, v, q, significance


@dataclasses.dataclass(frozen=True)
class Rope:
    """How queries and keys turn with their position: the first 2 * len(inv_freq) dims, dim i with dim i + len(inv_freq)."""
    inv_freq: np.ndarray  # float32, radians a position
    pairing: str = "halves"

    @property
    def dims(self):
        return 2 * len(self.inv_freq)

    def turned(self, x, positions):
        """x [..., tokens, head_dim] turned by its positions [tokens]; negative positions turn back."""
        half = len(self.inv_freq)
        angle = np.asarray(positions, np.float64)[:, None] * self.inv_freq.astype(np.float64)
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        a, b = x[..., :half], x[..., half:2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]], -1)


def read_rope(config, head_dim):
    parameters = config.get("rope_parameters") or {}
    kind = (config.get("rope_scaling") or parameters).get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r}; only plain RoPE is supported")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    half = head_dim // 2
    return theta, Rope((theta**(-np.arange(half) / half)).astype(np.float32))


class Model:
    """layers, q_heads, kv_heads, head_dim, sm_scale, rope, theta, opening (ids that every text begins with), tokenizer."""

    def __init__(self, folder):
        folder = pathlib.Path(folder)
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] != "llama":
            raise ValueError(f"{folder}: model_type is {config['model_type']!r}; only llama is supported")
        self.layers, self.q_heads, self.kv_heads = (config[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads"))
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.q_heads
        self.eps, self.context = config["rms_norm_eps"], config["max_position_embeddings"]
        self.theta, self.rope = read_rope(config, self.head_dim)
        self.sm_scale = self.head_dim**-0.5
        weights = {}
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for shard in sorted(folder.glob("*.safetensors")):
            weights.update(read_safetensors(shard))
            digest.update(f"{shard.name} {shard.stat().st_size}".encode())
        self.embedding, self.last_norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        digest.update(self.last_norm.tobytes())
        self.identity = digest.hexdigest()[:16]  # by the configuration, the files' sizes and the last layer's norm
        self.head = self.embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
        names = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        self.weights = [{n.split(".")[-1]: weights[f"model.layers.{i}.{n}.weight"] for n in names} for i in range(self.layers)]
        self.tokenizer = Tokenizer(folder / "tokenizer.json")
        options = json.loads((folder / "tokenizer_config.json").read_text())
        self.opening = [config["bos_token_id"]] if options.get("add_bos_token", True) else []

    def norm(self, x, weight):
        return x * (1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)) * weight

    def projected(self, layer, x, first):
        """q, k, v of hidden states [tokens, hidden]; k and v as the cache holds them."""
        w = self.weights[layer]
        h = self.norm(x, w["input_layernorm"])
        q, k, v = ((h @ w[f"{c}_proj"].T).reshape(len(x), -1, self.head_dim).transpose(1, 0, 2) for c in "qkv")
        positions = np.arange(first, first + len(x))
        return self.rope.turned(q, positions), as_cached(self.rope.turned(k, positions)), as_cached(v)

    def attention(self, q, k, v, received=None):
        """Causal: q [q_heads, n, head_dim] are the last n of the tokens of k and v. received [kv_heads, tokens] gathers, over the
        queries, the largest probability of a group's heads; a query's own token left out."""
        heads, n, d = q.shape
        group, before = heads // self.kv_heads, k.shape[1] - n
        out, rows = np.empty((heads, n, d), np.float32), max(1, SCORES // (group * k.shape[1]))
        for begin in range(0, n, rows):
            end = min(n, begin + rows)
            seen, count = before + end, end - begin
            later = np.triu(np.full((count, count), -np.inf, np.float32), 1)  # of the block's own tokens
            for h in range(self.kv_heads):
                mine = slice(h * group, (h + 1) * group)
                block = q[mine, begin:end].reshape(-1, d) * np.float32(self.sm_scale)
                p = block @ k[h, :seen].T
                by_head = p.reshape(group, count, seen)
                by_head[:, :, -count:] += later
                softmax_in_place(p)
                out[mine, begin:end] = (p @ v[h, :seen]).reshape(group, count, d)
                if received is not None:
                    most = by_head.max(0)
                    most[np.arange(count), np.arange(before + begin, seen)] = 0
                    received[h, :seen] += most.sum(0)
        return out.transpose(1, 0, 2).reshape(n, heads * d)

    def after_attention(self, layer, x, out):
        w = self.weights[layer]
        x = x + out @ w["o_proj"].T
        h = self.norm(x, w["post_attention_layernorm"])
        gate = h @ w["gate_proj"].T
        return x + (gate / (1 + np.exp(-gate)) * (h @ w["up_proj"].T)) @ w["down_proj"].T

    def prefill(self, ids):
        """The cache of a prompt: a LayerCache per layer."""
        x, cache, n = self.embedding[ids], [], len(ids)
        later_queries = np.maximum(np.arange(n - 1, -1, -1), 1)
        for layer in range(self.layers):
            q, k, v = self.projected(layer, x, 0)
            received = np.zeros((self.kv_heads, n), np.float64)
            x = self.after_attention(layer, x, self.attention(q, k, v, received))
            cache.append(LayerCache(k, v, q, (received / later_queries).astype(np.float32)))
        return cache

    def hidden_states(self, ids, cache):
        """[layers + 1] arrays [tokens, hidden]: what enters each layer, and what leaves the last, for ids that follow the cache."""
        states = [self.embedding[ids]]
        for layer, old in enumerate(cache):
            states.append(self.after_layer(layer, states[-1], old))
        return states

    def after_layer(self, layer, x, old):
        """x [tokens, hidden] behind a layer whose cache before these tokens is `old`; their own keys and values stay raw."""
        q, k, v = self.projected(layer, x, old.k.shape[1])
        out = self.attention(q, np.concatenate([old.k, k], 1), np.concatenate([old.v, v], 1))
        return self.after_attention(layer, x, out)

    def logits(self, x):
        return self.norm(x, self.last_norm) @ self.head.T

    def continued(self, ids, cache):
        """Logits [tokens, vocabulary] after each of ids, which follow the tokens of the cache."""
        return self.continued_from(0, self.embedding[ids], cache)

    def continued_from(self, layer, x, cache):
        """Logits of tokens that enter `layer` as x: hidden_states()[layer] where only the cache from that layer on has changed."""
        for i in range(layer, self.layers):
            x = self.after_layer(i, x, cache[i])
        return self.logits(x)
