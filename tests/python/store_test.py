"""tierkv.Store on the host: what arrays it takes and makes, attention beside NumPy's, what is refused."""
import sys
import unittest

import numpy as np
from store_case import HEAD_DIM, KV_HEADS, LAYERS, MAX_TOKENS, Q_HEADS, StoreTest, attention, config, tierkv


class Arrays(StoreTest):
    def test_results_are_made_where_none_are_given(self):
        with tierkv.Store(config()) as store:
            a, b = self.live(store, 9), self.live(store, 20)
            q = np.concatenate([self.query(), self.query()])
            seen = store.attend([a, b], 1, q, probabilities=True)
            self.assertEqual((seen.out.shape, seen.out.dtype), ((2, Q_HEADS, HEAD_DIM), np.float16))
            self.assertEqual((seen.lse.shape, seen.lse.dtype), ((2, Q_HEADS), np.float32))
            self.assertEqual(seen.probabilities.shape, (2, KV_HEADS, 20))
            self.assertTrue((seen.probabilities[0, :, 9:] == 0).all())
            self.assertTrue((seen.probabilities.max(-1) > 0).all(), f"seed {self.seed}")
            self.assertIsNone(store.attend(a, 1, q[:1]).probabilities)
            # One sequence at a time gives the same.
            for i, id in enumerate((a, b)):
                alone = store.attend([id], 1, q[i:i + 1])
                np.testing.assert_array_equal(alone.out[0], seen.out[i])
                np.testing.assert_array_equal(alone.lse[0], seen.lse[i])

    def test_attention_is_that_of_numpy(self):
        with tierkv.Store(config(window_format=tierkv.TierFormat(16, 16), page_bytes=0)) as store:
            id = store.add_sequence()
            store.begin_prompt(id, 7)
            k, v = self.values(7), self.values(7)
            for layer in range(LAYERS):
                store.append(id, layer, k, v)
            q = self.query()
            seen = store.attend(id, 0, q)
            group = Q_HEADS // KV_HEADS
            for h in range(Q_HEADS):
                want, lse = attention(k[0, :, h // group], v[0, :, h // group], q[0, h])
                # Half an ulp of fp16, by way of float32; subnormal steps.
                np.testing.assert_allclose(seen.out[0, h], want, rtol=1.001 * 2**-11, atol=2**-25, err_msg=f"seed {self.seed}")
                self.assertAlmostEqual(seen.lse[0, h], lse, places=4)

    def test_several_queries_see_the_tokens_up_to_theirs(self):
        with tierkv.Store(config(window_format=tierkv.TierFormat(16, 16), page_bytes=0)) as store:
            id = store.add_sequence()
            k, v, q = self.values(7), self.values(7), self.queries(3)
            store.begin_prompt(id, 7)
            store.append(id, 0, k, v)
            seen = store.attend(id, 0, q, probabilities=True)
            self.assertEqual((seen.out.shape, seen.lse.shape, seen.probabilities.shape),
                             ((1, 3, Q_HEADS, HEAD_DIM), (1, 3, Q_HEADS), (3, 1, KV_HEADS, 7)))
            for j in range(3):
                for h in range(KV_HEADS):
                    weights = []
                    for g in range(2 * h, 2 * h + 2):
                        logits = k[0, :5 + j, h].astype(np.float64) @ q[0, j, g].astype(np.float64) / 8
                        weights.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
                        want = weights[-1] @ v[0, :5 + j, h].astype(np.float64)
                        np.testing.assert_allclose(seen.out[0, j, g], want, rtol=1.001 * 2**-11, atol=2**-25, err_msg=f"seed {self.seed}")
                    np.testing.assert_allclose(seen.probabilities[j, 0, h, :5 + j], np.max(weights, 0), rtol=1e-6, atol=1e-38,
                                               err_msg=f"seed {self.seed}")
                    self.assertTrue((seen.probabilities[j, 0, h, 5 + j:] == 0).all())

    def test_learned_sinks_take_their_share(self):
        with tierkv.Store(config(window_format=tierkv.TierFormat(16, 16), page_bytes=0)) as store:
            id = store.add_sequence()
            q, sinks = self.query(), np.array([-1, 30, -np.inf, 1e4], np.float32)
            empty = store.attend(id, 0, q, sinks=sinks)
            np.testing.assert_array_equal(empty.lse[0], sinks)
            self.assertFalse(empty.out.any())
            store.begin_prompt(id, 7)
            store.append(id, 0, self.values(7), self.values(7))
            bare, seen = store.attend(id, 0, q), store.attend(id, 0, q, sinks=sinks)
            lse = np.logaddexp(bare.lse[0].astype(np.float64), sinks)
            np.testing.assert_allclose(seen.lse[0], lse, rtol=1e-6, atol=1e-6, err_msg=f"seed {self.seed}")
            # Both outputs are rounded to fp16, the LSE to fp32, which moves the share.
            want = bare.out[0] * np.exp(bare.lse[0] - lse)[:, None]
            np.testing.assert_allclose(seen.out[0], want, rtol=2**-10 + 1e-6 * np.abs(lse).max(), atol=2**-24, err_msg=f"seed {self.seed}")
            with self.assertRaisesRegex(ValueError, "sinks: shape"):
                store.attend(id, 0, q, sinks=sinks[:3])
            with self.assertRaisesRegex(tierkv.NonFiniteError, "sinks"):
                store.attend(id, 0, q, sinks=np.full(Q_HEADS, np.nan, np.float32))

    def test_scores_of_a_prompt_decide_its_tiers(self):
        for significance, tier in ((0.0, "pruned_tokens"), (1.0, "high_tokens")):
            with tierkv.Store(config()) as store:
                id = store.add_sequence()
                store.begin_prompt(id, 40)
                for layer in range(LAYERS):
                    store.append(id, layer, self.values(40), self.values(40))
                    store.score_prompt(id, layer, np.full((1, KV_HEADS, 40), significance, np.float32))
                store.end_prompt(id)
                # All but the window of 8 and 2 sinks.
                self.assertEqual(getattr(store.stats(), tier), 30 * LAYERS * KV_HEADS)

    def test_dtypes(self):
        for dtype in ("float32", "bfloat16"):
            with tierkv.Store(config(dtype=dtype)) as store:
                id = store.add_sequence()
                store.begin_prompt(id, 3)
                x = self.values(3).astype(np.float32)
                if dtype == "float32":
                    store.append(id, 0, x, x)
                with self.assertRaises(TypeError):
                    store.append(id, 0, x.astype(np.float16), x.astype(np.float16))

    def test_what_is_refused(self):
        store = tierkv.Store(config())
        id = self.live(store, 12)
        with self.assertRaisesRegex(tierkv.UnsupportedError, "q_len 9"):
            store.attend(id, 0, self.queries(9))
        with self.assertRaisesRegex(tierkv.InvalidArgumentError, "q_len"):
            store.attend(self.live(store, 3), 0, self.queries(4))
        store.begin_step(id)
        x, q = self.values(1), self.query()
        read_only = np.empty((1, Q_HEADS, HEAD_DIM), np.float16)
        read_only.flags.writeable = False
        for call, error, words in (
                (lambda: store.append(id, 0, x[0], x), ValueError, "k: shape"),
                (lambda: store.append(id, 0, x, x[:, :, :1]), ValueError, "v: shape"),
                (lambda: store.append([id, id], 0, x, x), ValueError, "k: shape"),
                (lambda: store.append(id, 7, x, x), tierkv.InvalidArgumentError, "layer"),
                (lambda: store.append(id, 0, x * np.float16(np.nan), x), tierkv.NonFiniteError, "k"),
                (lambda: store.attend(id, 0, q), tierkv.InvalidArgumentError, "lacks"),
                (lambda: store.attend(id, 0, q[:, :1]), ValueError, "q: shape"),
                (lambda: store.attend(id, 0, self.queries(2)[:, :, :1]), ValueError, "q: shape"),
                (lambda: store.attend(id, 0, self.queries(2)[:, :0]), ValueError, "q: no queries"),
                (lambda: store.score_prompt(id, 0, np.zeros((1, KV_HEADS, 13), np.float32)), tierkv.InvalidArgumentError, "prompt"),
                (lambda: store.update_scores(id, 0, np.zeros((1, 1, 13), np.float32)), ValueError, "probabilities: shape"),
                (lambda: store.update_scores(id, 0, np.zeros((1, KV_HEADS, 13), np.float64)), TypeError, "probabilities: dtype"),
                (lambda: store.attend(id, 0, q.astype(np.float32)), TypeError, "q: dtype"),
                (lambda: store.attend(store.add_sequence(), 0, q, count_query=True), tierkv.InvalidArgumentError, "prompt"),
                (lambda: store.attend(id, 0, q, into=tierkv.Attention(read_only)), TypeError, "out: not a writable"),
                (lambda: store.attend(id, 0, q, into=tierkv.Attention(q.astype(np.float32))), TypeError, "out: dtype"),
                (lambda: store.begin_step(id), tierkv.InvalidArgumentError, "lacks"),
                (lambda: store.begin_step([], 1), tierkv.InvalidArgumentError, "count"),
                (lambda: store.begin_step(id, 9), tierkv.InvalidArgumentError, "tokens"),
                (lambda: store.begin_step([id, id]), tierkv.InvalidArgumentError, "twice"),
                (lambda: store.num_tokens(-1), tierkv.StaleSequenceError, "not open"),
                (lambda: store.num_tokens(1 << 64), tierkv.StaleSequenceError, "not open"),
                (lambda: store.num_tokens(0), LookupError, "not open"),
                (lambda: store.note_replay(id), tierkv.UnsupportedError, "host"),
                (lambda: store.import_sequence(b"x" * 200), tierkv.CorruptError, ""),
                (lambda: tierkv.Store(config(num_pages=0)), tierkv.InvalidArgumentError, "num_pages"),
                (lambda: tierkv.Store(config(dtype="int8")), ValueError, "int8"),
                (lambda: tierkv.Store(config(low_format=tierkv.TierFormat(1, 1))), tierkv.UnsupportedError, "low_format"),
                (lambda: tierkv.Store(config(key_basis=tierkv.Basis("pca"))), ValueError, "pca"),
                (lambda: tierkv.Store(config(key_basis=tierkv.Basis("mean"))), tierkv.InvalidArgumentError, "key_basis: means"),
                (lambda: tierkv.Store(config(value_basis=tierkv.Basis("mean", np.zeros((1, 2, 64), np.float32)))), ValueError, "means: shape"),
                (lambda: tierkv.Store.on_device(config(num_pages=0), 0), tierkv.InvalidArgumentError, "num_pages")):
            with self.assertRaises(error) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        store.take_status()
        store.close()
        store.close()
        self.assertRaisesRegex(ValueError, "closed", store.num_tokens, id)

    def test_integers_do_not_wrap(self):
        store = tierkv.Store(config())
        id = self.live(store, 12)
        saved = store.save_sequence(id)
        p = np.zeros((1, KV_HEADS, 13), np.float32)
        x, q = self.values(1), self.query()
        before = store.stats()
        calls = {"tokens": (lambda n: store.truncate(id, n), lambda n: store.begin_prompt(id, n), lambda n: store.begin_step(id, n),
                            lambda n: store.note_replay(id, n)),
                 "layer": (lambda n: store.append(id, n, x, x), lambda n: store.attend(id, n, q), lambda n: store.score_prompt(id, n, p),
                           lambda n: store.update_scores(id, n, p)),
                 "back": (lambda n: store.update_scores(id, 0, p, back=n),),
                 "threads": (lambda n: store.save_sequence(id, threads=n), lambda n: store.load_sequence(saved, threads=n))}
        for name in ("num_layers", "num_q_heads", "num_kv_heads", "head_dim", "num_pages", "max_sequences", "max_tokens", "score_interval"):
            calls[name] = (lambda n, name=name: tierkv.Store(config(**{name: n})),)
        for name in ("k_bits", "v_bits", "k_group", "v_group"):
            calls[name] = (lambda n, name=name: tierkv.Store(config(low_format=tierkv.TierFormat(**{"k_bits": 4, "v_bits": 2, name: n}))),)
        for name in ("window_tokens", "sink_tokens"):
            calls[name] = (lambda n, name=name: tierkv.Store(config(policy=tierkv.TierPolicy(**{name: n}))),)
        for name in ("max_length", "streams_per_lane"):
            calls[name] = (lambda n, name=name: tierkv.Store(config(coded=tierkv.CodedConfig(**{name: n}))),)
        calls["block_tokens"] = (lambda n: tierkv.Store(config(channel=tierkv.ChannelConfig(block_tokens=n))),)
        for name, functions in calls.items():
            for call in functions:
                for wrong in (2**31, 2**32 + 2, -2**31 - 1, -2**32 + 2, np.int64(2**32 + 2), 2**70):
                    with self.assertRaisesRegex(tierkv.InvalidArgumentError, f"{name}: {wrong} is not in"):
                        call(wrong)
                with self.assertRaisesRegex(TypeError, f"{name}: 1.5 is not an integer"):
                    call(1.5)
        for wrong in (2**64, -1):
            with self.assertRaisesRegex(tierkv.InvalidArgumentError, "stream"):
                tierkv.Store.on_device(config(), wrong)
        self.assertRaisesRegex(tierkv.InvalidArgumentError, "page_bytes", tierkv.Store, config(page_bytes=2**63))
        self.assertEqual((store.stats(), store.num_tokens(id)), (before, 12))
        store.truncate(id, np.int64(3))
        self.assertEqual(store.num_tokens(id), 3)

    def test_ids_may_come_from_a_generator(self):
        with tierkv.Store(config()) as store:
            ids = [self.live(store, n) for n in (9, 20)]
            q = np.concatenate([self.query(), self.query()])
            want = store.attend(ids, 1, q, probabilities=True)
            got = store.attend((id for id in ids), 1, q, probabilities=True)
            for a, b in zip(want, got):
                np.testing.assert_array_equal(a, b)
            store.begin_step(id for id in ids)
            for layer in range(LAYERS):
                store.append(np.array(ids, np.uint64), layer, *[np.concatenate([self.values(1), self.values(1)])] * 2)
            store.release(np.uint64(ids[0]))
            self.assertEqual(store.num_tokens(ids[1]), 21)

    def test_pages_run_out(self):
        with tierkv.Store(config()) as store:
            ids = [store.add_sequence() for _ in range(4)]
            with self.assertRaises(tierkv.OutOfPagesError):
                for id in ids:
                    store.begin_prompt(id, MAX_TOKENS)
            with self.assertRaises(tierkv.OutOfRangeError):
                store.add_sequence()

    def test_a_machine_without_a_gpu(self):
        try:
            store = tierkv.Store.on_device(config(), 0)
        except (tierkv.UnsupportedError, tierkv.CudaError):
            return
        store.close()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
