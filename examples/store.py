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
    return rng.normal(size=(1, Q_HEADS, HEAD_DIM)).astype(np.float16)


def fill_prompt(store, id):
    store.begin_prompt(id, PROMPT)
    for layer in range(LAYERS):
        store.append(id, layer, tokens(PROMPT), tokens(PROMPT))
        # What a prompt's attention would have found: a few tokens matter.
        store.score_prompt(id, layer, rng.exponential(2 / PROMPT, (1, KV_HEADS, PROMPT)).astype(np.float32))
    store.end_prompt(id)


def generate(store, id):
    store.begin_step(id)  # compacts all layers, makes room
    for layer in range(LAYERS):
        store.append(id, layer, tokens(1), tokens(1))
        seen = store.attend(id, layer, query(), probabilities=True)
        store.update_scores(id, layer, seen.probabilities)


def main():
    config = tierkv.StoreConfig(LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, num_pages=200, max_sequences=2, max_tokens=PROMPT + STEPS,
                                policy=tierkv.TierPolicy(alpha_low=0.02))  # prunes; 0 keeps every token
    with tierkv.Store(config) as store, tierkv.Store(config) as other:
        id = store.add_sequence()
        fill_prompt(store, id)
        for _ in range(STEPS):
            generate(store, id)
        stats = store.stats()
        data = store.export_sequence(id)
        moved = other.import_sequence(data)
        print(f"{stats.nominal_ratio:.2f} times smaller, {stats.pruned_tokens} tokens of {LAYERS * KV_HEADS} rows pruned; "
              f"{other.num_tokens(moved)} tokens moved as {len(data)} bytes")
        assert stats.nominal_ratio > 2 and other.num_tokens(moved) == PROMPT + STEPS


if __name__ == "__main__":
    main()
