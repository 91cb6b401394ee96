"""What the tests of tierkv.Store share: a small store, random values of a size that differs from token to token, attention in float64."""
import random
import sys
import unittest

import numpy as np

sys.path.insert(0, sys.argv[1])
import tierkv  # noqa: E402

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, MAX_TOKENS = 2, 4, 2, 64, 150


def config(**changes):
    fields = dict(num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_pages=90, max_sequences=4,
                  max_tokens=MAX_TOKENS, page_bytes=1920, policy=tierkv.TierPolicy(alpha_low=0.3, window_tokens=8, sink_tokens=2))
    return tierkv.StoreConfig(**{**fields, **changes})


class StoreTest(unittest.TestCase):
    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        self.rng = np.random.default_rng(self.seed)

    def values(self, tokens):
        scale = 2.0 ** self.rng.uniform(-4, 4, (1, tokens, KV_HEADS, 1))
        return (scale * self.rng.normal(size=(1, tokens, KV_HEADS, HEAD_DIM))).astype(np.float16)

    def scores(self, tokens):
        return (2.0 ** self.rng.uniform(-4, 2, (1, KV_HEADS, MAX_TOKENS)) / (tokens + 1)).astype(np.float32)

    def query(self):
        return self.rng.normal(size=(1, Q_HEADS, HEAD_DIM)).astype(np.float16)

    def queries(self, q_len):
        return self.rng.normal(size=(1, q_len, Q_HEADS, HEAD_DIM)).astype(np.float16)

    def live(self, store, tokens):
        id = store.add_sequence()
        store.begin_prompt(id, tokens)
        for layer in range(LAYERS):
            store.append(id, layer, self.values(tokens), self.values(tokens))
        store.end_prompt(id)
        return id


def attention(k, v, q):
    """Attention of q [head_dim] over k and v [tokens, head_dim] in float64: the output and the lse."""
    logits = k.astype(np.float64) @ q.astype(np.float64) / np.sqrt(q.size)
    p = np.exp(logits - logits.max())
    return p @ v.astype(np.float64) / p.sum(), np.log(p.sum()) + logits.max()
