"""tierkv.Store with a ChannelConfig, on the host: attention beside NumPy's, transfers, what is refused."""
import sys
import unittest

import numpy as np
import store_case
from store_case import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, StoreTest, attention, tierkv

TOKENS = 300


def config(**changes):
    return store_case.config(**{"num_pages": 200, "max_tokens": 400, "policy": tierkv.TierPolicy(window_tokens=16), "page_bytes": 0,
                                "channel": tierkv.ChannelConfig(), **changes})


class ChannelStore(StoreTest):
    def test_attention_is_that_of_numpy(self):
        # Channels of very different size, as keys have them: a scale per token would lose the small ones.
        size = 2.0 ** self.rng.uniform(-3, 3, HEAD_DIM)
        k = (self.rng.normal(size=(1, TOKENS, KV_HEADS, HEAD_DIM)) * size).astype(np.float16)
        v = self.rng.normal(size=(1, TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float16)
        q = (self.rng.normal(size=(1, Q_HEADS, HEAD_DIM)) / size).astype(np.float16)
        for channel, limit in ((tierkv.ChannelConfig(), 0.3), (tierkv.ChannelConfig(block_tokens=128), 0.3),
                               (tierkv.ChannelConfig(k_bits=4, v_bits=2), 0.7)):
            with tierkv.Store(config(channel=channel)) as store:
                id = store.add_sequence()
                store.begin_prompt(id, TOKENS)
                for layer in range(LAYERS):
                    store.append(id, layer, k, v)
                store.end_prompt(id)
                seen = store.attend(id, 1, q)
                for h in range(Q_HEADS):
                    want, _ = attention(k[0, :, h // 2], v[0, :, h // 2], q[0, h])
                    error = np.linalg.norm(seen.out[0, h] - want) / np.linalg.norm(want)
                    self.assertLess(error, limit, f"{channel}, seed {self.seed}")
                self.assertGreater(store.stats().nominal_ratio, 1.5)
                with self.assertRaises(tierkv.UnsupportedError):
                    store.update_scores(id, 0, np.zeros((1, KV_HEADS, TOKENS), np.float32))
                data = store.export_sequence(id)
                self.assertEqual(store.export_sequence(store.import_sequence(data)), data)
                with self.assertRaises(tierkv.UnsupportedError):
                    store.save_sequence(id)

    def test_queries_of_several_tokens(self):
        # The newest token's query sees all tokens, that of the one before all but one: as if asked before it came.
        tokens = TOKENS + 1
        k = self.rng.normal(size=(1, tokens, KV_HEADS, HEAD_DIM)).astype(np.float16)
        v = self.rng.normal(size=(1, tokens, KV_HEADS, HEAD_DIM)).astype(np.float16)
        q = self.rng.normal(size=(1, 2, Q_HEADS, HEAD_DIM)).astype(np.float16)
        sinks = self.rng.normal(size=Q_HEADS).astype(np.float32)
        with tierkv.Store(config()) as store:
            id = store.add_sequence()
            store.begin_prompt(id, TOKENS)
            for layer in range(LAYERS):
                store.append(id, layer, k[:, :TOKENS], v[:, :TOKENS])
            store.end_prompt(id)
            before = store.attend(id, 1, q[:, 0], sinks=sinks)
            store.begin_step(id, 1)
            for layer in range(LAYERS):
                store.append(id, layer, k[:, TOKENS:], v[:, TOKENS:])
            both = store.attend(id, 1, q, sinks=sinks)
            newest = store.attend(id, 1, q[:, 1], sinks=sinks)
        for i, one in enumerate((before, newest)):
            np.testing.assert_array_equal(both.out[:, i], one.out, f"seed {self.seed}")
            np.testing.assert_array_equal(both.lse[:, i], one.lse)

    def test_what_is_refused(self):
        for changes, words in ((dict(channel=tierkv.ChannelConfig(k_bits=8)), "keys"), (dict(head_dim=80), "head_dim"),
                               (dict(channel=tierkv.ChannelConfig(block_tokens=32)), "group"), (dict(score_interval=2), "score_interval")):
            with self.assertRaises(tierkv.UnsupportedError) as caught:
                tierkv.Store(config(**changes))
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
