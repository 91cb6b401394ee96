"""tierkv.Store of entropy-coded pages, on the host: attention beside NumPy's, transfers, what is refused."""
import sys
import unittest

import numpy as np
from store_case import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, StoreTest, attention, config, tierkv


class Coded(StoreTest):
    """Entropy-coded pages."""

    def coded(self, **changes):
        # Of values with deviation 1: an error of 1%.
        steps = np.full((LAYERS, KV_HEADS), 0.03, np.float32)
        sinks = 4 if "fixed_format" in changes else 0
        return config(policy=tierkv.TierPolicy(window_tokens=16, sink_tokens=sinks), page_bytes=0, num_pages=200, max_tokens=400,
                      coded=tierkv.CodedConfig(**{"key_steps": steps, "value_steps": steps, **changes}))

    def fill(self, store, k, v):
        id = store.add_sequence()
        store.begin_prompt(id, k.shape[1])
        for layer in range(LAYERS):
            store.append(id, layer, k, v)
        store.end_prompt(id)
        return id

    def test_attention_is_that_of_numpy(self):
        k, v = (self.rng.normal(size=(1, 300, KV_HEADS, HEAD_DIM)).astype(np.float16) for _ in range(2))
        codes = np.rint(self.rng.normal(size=(640, HEAD_DIM)) / 0.03).astype(np.int16)
        books = [tierkv.Codebook.build(codes, part, max_length=11) for part in ("key", "value")]
        means = self.rng.normal(size=(LAYERS, KV_HEADS, HEAD_DIM)).astype(np.float32)
        q = self.query()
        for changes in ({}, {"means": "none"}, {"means": "given", "key_means": means, "value_means": means},
                        {"codebooks": "device"}, {"codebooks": books}, {"fixed_format": tierkv.TierFormat(8, 4)},
                        # The range of 19,200 values of deviation 1 is about 8.
                        {"key_steps": None, "value_steps": None, "key_relative": 0.004, "value_relative": 0.004}):
            with tierkv.Store(self.coded(**changes)) as store:
                id = self.fill(store, k, v)
                seen = store.attend(id, 1, q)
                for h in range(Q_HEADS):
                    want, _ = attention(k[0, :, h // 2], v[0, :, h // 2], q[0, h])
                    # Logits are off by 0.03 / sqrt(12) |q| / 8, values by 0.03 / sqrt(12) each.
                    self.assertLess(np.linalg.norm(seen.out[0, h] - want) / np.linalg.norm(want), 0.1, f"{changes}, seed {self.seed}")
                if "fixed_format" in changes:  # the block of the sinks
                    self.assertEqual(store.stats().high_tokens, LAYERS * KV_HEADS * 64)
                if not changes:  # short rows pay for their codebooks
                    self.assertGreater(store.stats().nominal_ratio, 1.1)
                with self.assertRaises(tierkv.UnsupportedError):
                    store.update_scores(id, 0, np.zeros((1, KV_HEADS, 300), np.float32))
                data = store.export_sequence(id)
                for back in (store.load_sequence(store.save_sequence(id)),
                             store.load_sequence(store.save_sequence(id, entropy_coded=True, threads=1), threads=2)):
                    self.assertEqual(store.export_sequence(back), data, f"seed {self.seed}")
                    store.release(back)
                cold = bytearray(store.save_sequence(id))
                cold[len(cold) // 2] ^= 1
                with self.assertRaises(tierkv.CorruptError):
                    store.load_sequence(bytes(cold))
                with tierkv.Store(self.coded(**changes)) as other:
                    if changes.get("codebooks") is books:
                        self.assertEqual(other.num_tokens(other.import_sequence(data)), 300)

    def test_probabilities_and_sinks(self):
        k, v = (self.rng.normal(size=(1, 300, KV_HEADS, HEAD_DIM)).astype(np.float16) for _ in range(2))
        q = self.query()
        with tierkv.Store(self.coded(fixed_format=tierkv.TierFormat(8, 4))) as store:
            id = self.fill(store, k, v)
            seen = store.attend(id, 1, q, probabilities=True)
            most = np.zeros((KV_HEADS, 300))
            for h in range(Q_HEADS):
                logits = k[0, :, h // 2].astype(np.float64) @ q[0, h].astype(np.float64) / np.sqrt(HEAD_DIM)
                _, lse = attention(k[0, :, h // 2], v[0, :, h // 2], q[0, h])
                most[h // 2] = np.maximum(most[h // 2], np.exp(logits - lse))
            p = seen.probabilities.reshape(KV_HEADS, -1)[:, :300]
            # As above: logits are off by about 0.01.
            self.assertLess(np.abs(p / most - 1).max(), 0.15, f"seed {self.seed}")
            # A sink of three times all tokens leaves a quarter.
            with_sinks = store.attend(id, 1, q, probabilities=True, sinks=(seen.lse.reshape(-1) + np.log(3)).astype(np.float32))
            np.testing.assert_allclose(4 * with_sinks.probabilities.reshape(KV_HEADS, -1)[:, :300], p, rtol=1e-5)
            np.testing.assert_allclose(4 * with_sinks.out.astype(np.float64), seen.out.astype(np.float64), rtol=2e-3, atol=1e-6)
            np.testing.assert_allclose(with_sinks.lse, seen.lse + np.log(4), rtol=1e-5)

    def test_what_is_refused(self):
        for changes, error, words in (({"means": "some"}, ValueError, "means"), ({"codebooks": "none"}, ValueError, "codebooks"),
                                      ({"means": "given"}, tierkv.InvalidArgumentError, "key_means"),
                                      ({"codebooks": []}, tierkv.InvalidArgumentError, "given"),
                                      ({"fixed_format": tierkv.TierFormat(16, 16)}, tierkv.UnsupportedError, "fixed_format"),
                                      ({"key_relative": 0.1}, tierkv.InvalidArgumentError, "key_relative"),
                                      ({"key_steps": None, "value_steps": None}, tierkv.InvalidArgumentError, "key_relative"),
                                      ({"key_steps": np.zeros((LAYERS, KV_HEADS), np.float32)}, tierkv.InvalidArgumentError, "key_steps"),
                                      ({"value_steps": np.ones(4, np.float32)}, ValueError, "value_steps: shape")):
            with self.assertRaises(error) as caught:
                tierkv.Store(self.coded(**changes))
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
