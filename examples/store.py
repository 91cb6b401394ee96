# SPDX-License-Identifier: Apache-2.0
"""Keeps the compressed cache of a sequence: a prompt, tokens with attention over what is left, and the sequence as bytes.

  store.py

The model is a stand-in: random keys, values and queries; NumPy on the host."""
import numpy as np
import tierkv

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS = 2, 8, 2, 128, 500, 20
rng = np.random.default_rng(7)


def tokens(count):
    return rng.normal(size=(1, count, KV_HEADS, HEAD_DIM)).astype(np.float16)


def query():
    return rng.normal(size=(1, 1, Q_HEADS, HEAD_DIM)).astype(np.float16)


def fill_prompt(store, id):
    store.begin(id, PROMPT)
    for layer in range(LAYERS):
        # What a prompt's attention would have found: a few tokens matter.
        significance = rng.exponential(2 / PROMPT, (1, KV_HEADS, PROMPT)).astype(np.float32)
        store.append(id, layer, tokens(PROMPT), tokens(PROMPT), significance=significance)


def generate(store, id):
    store.begin(id, 1)  # compresses what leaves the window
    for layer in range(LAYERS):
        store.append(id, layer, tokens(1), tokens(1))
        store.attend(id, layer, query(), count_query=True)


def main():
    tiers = tierkv.TiersFormat((tierkv.TierClass(alpha_low=0.02),))  # prunes; 0 keeps every token
    config = tierkv.StoreConfig(LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, max_sequences=2, max_tokens=PROMPT + STEPS, format=tiers)
    with tierkv.KvStore(config) as store, tierkv.KvStore(config) as other:
        id = store.add_sequence()
        fill_prompt(store, id)
        for _ in range(STEPS):
            generate(store, id)
        usage = store.usage()
        data = store.export_sequence(id)
        moved = other.import_sequence(data)
        print(f"{usage.raw_bytes / usage.nominal_bytes:.2f} times smaller; {other.num_tokens(moved)} tokens moved as {len(data)} bytes")
        assert 2 * usage.nominal_bytes < usage.raw_bytes and other.num_tokens(moved) == PROMPT + STEPS


if __name__ == "__main__":
    main()
