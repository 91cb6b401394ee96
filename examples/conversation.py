# SPDX-License-Identifier: Apache-2.0
"""A compressed KV cache in NumPy: a prompt of any length, then tokens one by one, each attending to all before it.

  conversation.py

The model is a stand-in: random keys, values and queries."""
import numpy as np
from tierkv.kv_store import KvStore, StoreConfig, preset

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT, ANSWER = 2, 6, 2, 64, 600, 20
rng = np.random.default_rng(7)


def random(*shape):
    return rng.normal(size=shape).astype(np.float16)


def forward(store, id, tokens):
    """A forward pass over so many new tokens of a sequence."""
    store.begin(id, tokens)
    for layer in range(LAYERS):
        k, v = random(1, tokens, KV_HEADS, HEAD_DIM), random(1, tokens, KV_HEADS, HEAD_DIM)
        store.append(id, layer, k, v)
        out = store.attend(id, layer, random(1, 1, Q_HEADS, HEAD_DIM)).out
    return out


def main():
    config = StoreConfig(num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                         max_sequences=4, max_tokens=PROMPT + ANSWER, format=preset("k4v4"))
    with KvStore(config) as store:
        id = store.add_sequence()
        forward(store, id, PROMPT)
        for _ in range(ANSWER):
            forward(store, id, 1)
        copy = store.fork(id)            # shares full pages
        store.truncate(copy, PROMPT)     # and forgets the answer
        usage = store.usage()
        print(f"{store.num_tokens(id)} tokens in {store.bytes_held(id)} bytes; {usage.pages_shared} pages are shared")
        assert store.num_tokens(copy) == PROMPT
        assert store.bytes_held(id) < 0.6 * usage.raw_bytes / 2


if __name__ == "__main__":
    main()
