"""tierkv.Store on the host: a random trace has the results of the C++ host store, errors and stale ids included; what arrays it
takes; how arrays in GPU memory are read, as far as that needs no GPU."""
import random
import struct
import subprocess
import sys
import unittest

import numpy as np

PACKAGE, TRACE = sys.argv[1:3]
sys.path.insert(0, PACKAGE)
import tierkv  # noqa: E402
from tierkv import _device, errors  # noqa: E402

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, MAX_TOKENS = 2, 4, 2, 64, 150
(ADD, BEGIN_PROMPT, APPEND, SCORE_PROMPT, END_PROMPT, BEGIN_STEP, ATTEND, UPDATE_SCORES, FORK, TRUNCATE, RELEASE, EXPORT, IMPORT,
 NUM_TOKENS, STATS) = range(15)


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


class Trace(StoreTest):
    """Calls are played on a Python store and recorded; the C++ store then plays the record and must answer the same."""

    def setUp(self):
        super().setUp()
        self.store = tierkv.Store(config())
        self.ids, self.record, self.answers = [], [], []

    def tearDown(self):
        self.store.close()

    def play(self, op, which=-1, layer=0, n=0, payload=b"", call=None):
        self.record.append(struct.pack("<5i", op, which, layer, n, len(payload)) + payload)
        try:
            result = call(self.ids[which] if which >= 0 else 0)
            self.answers.append((0, "", op, result))
            if op in (ADD, FORK, IMPORT):
                self.ids.append(result)
            return result
        except tierkv.TierkvError as e:
            code = next(number for number, kind in errors._CLASSES.items() if kind is type(e))
            self.answers.append((code, str(e), op, None))
            return None

    def tokens(self, which, n):
        """A layer's tokens for every layer."""
        for layer in range(LAYERS):
            k, v = self.values(n), self.values(n)
            self.play(APPEND, which, layer, n, k.tobytes() + v.tobytes(), lambda id: self.store.append(id, layer, k, v))
            yield layer

    def prompt(self, which, n):
        self.play(BEGIN_PROMPT, which, 0, n, call=lambda id: self.store.begin_prompt(id, n))
        for layer in self.tokens(which, n):
            x = self.scores(n)
            self.play(SCORE_PROMPT, which, layer, 0, x.tobytes(), lambda id: self.store.score_prompt(id, layer, x))
        self.play(END_PROMPT, which, call=self.store.end_prompt)

    def step(self, which, n):
        self.play(BEGIN_STEP, which, 0, n, call=lambda id: self.store.begin_step(id, n))
        for layer in self.tokens(which, n):
            q_len = int(self.rng.integers(1, n + 1))
            q = self.query() if q_len == 1 else self.queries(q_len)
            into = tierkv.Attention(np.empty(q.shape, np.float16), np.empty(q.shape[:-1], np.float32),
                                    np.zeros((*((q_len,) if q_len > 1 else ()), 1, KV_HEADS, MAX_TOKENS), np.float32))
            count_query = bool(self.rng.random() < 0.5)
            self.play(ATTEND, which, layer, count_query, q.tobytes(),
                      lambda id: self.store.attend(id, layer, q, into=into, count_query=count_query))
            if count_query:
                continue
            back = int(self.rng.integers(n)) if q_len == 1 else 0
            last = into.probabilities[-1] if q_len > 1 else into.probabilities
            self.play(UPDATE_SCORES, which, layer, back, last.tobytes(), lambda id: self.store.update_scores(id, layer, last, back))

    def move(self, which):
        data = self.play(EXPORT, which, call=self.store.export_sequence)
        if data is not None:
            if self.rng.random() < 0.3:
                at = int(self.rng.integers(len(data)))
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
            self.play(IMPORT, -1, 0, 0, data, lambda _: self.store.import_sequence(data))

    def test_a_trace(self):
        for _ in range(80):
            what = self.rng.random()
            which = int(self.rng.integers(-1, len(self.ids)))
            if what < 0.12:
                if self.play(ADD, call=lambda _: self.store.add_sequence()) is not None:
                    self.prompt(len(self.ids) - 1, int(self.rng.integers(1, 60)))
            elif what < 0.2:
                self.play(FORK, which, call=self.store.fork)
            elif what < 0.3:
                n = int(self.rng.integers(40))
                self.play(TRUNCATE, which, 0, n, call=lambda id: self.store.truncate(id, n))
            elif what < 0.38:
                self.play(RELEASE, which, call=self.store.release)
            elif what < 0.48:
                self.move(which)
            else:
                self.step(which, int(self.rng.integers(1, 9)))
            self.play(NUM_TOKENS, which, call=self.store.num_tokens)
            self.play(STATS, call=lambda _: self.store.stats())
        for which in range(len(self.ids)):
            self.play(EXPORT, which, call=self.store.export_sequence)
        told = subprocess.run([TRACE], input=b"".join(self.record), capture_output=True, check=True).stdout
        for i, answer in enumerate(self.answers):
            told = self.compare(answer, told, f"seed {self.seed}, call {i}")
        self.assertEqual(told, b"")
        codes = {code for code, *_ in self.answers}
        self.assertIn(0, codes)
        self.assertIn(8, codes, "stale ids are part of every trace")

    def compare(self, answer, told, where):
        code, message, op, result = answer

        def take(n):
            nonlocal told
            part, told = told[:n], told[n:]
            return part

        self.assertEqual(struct.unpack("<i", take(4))[0], code, f"{where}: {message}")
        self.assertEqual(take(struct.unpack("<i", take(4))[0]).decode(), message, where)
        data = take(struct.unpack("<i", take(4))[0])
        if code != 0 or op in (ADD, FORK, IMPORT):
            return told
        if op == ATTEND:
            self.assertEqual(result.out.tobytes() + result.lse.tobytes() + result.probabilities.tobytes(), data, where)
        elif op == EXPORT:
            self.assertEqual(result, data, where)
        elif op == NUM_TOKENS:
            self.assertEqual(struct.pack("<i", result), data, where)
        elif op == STATS:
            ours = [result.window_tokens, result.high_tokens, result.low_tokens, result.pruned_tokens, result.sequences, result.pages,
                    result.pages_free, result.pages_shared, result.page_bytes, result.raw_bytes, result.nominal_bytes]
            self.assertEqual(struct.pack("<11q", *ours), data, where)
        return told


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
                    logits = k[0, :, h // 2].astype(np.float64) @ q[0, h].astype(np.float64) / 8
                    p = np.exp(logits - logits.max())
                    want = p @ v[0, :, h // 2].astype(np.float64) / p.sum()
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
                logits = k[0, :, h // group].astype(np.float64) @ q[0, h].astype(np.float64) / 8
                p = np.exp(logits - logits.max())
                want = p @ v[0, :, h // group].astype(np.float64) / p.sum()
                # Half an ulp of fp16, by way of float32; subnormal steps.
                np.testing.assert_allclose(seen.out[0, h], want, rtol=1.001 * 2**-11, atol=2**-25, err_msg=f"seed {self.seed}")
                self.assertAlmostEqual(seen.lse[0, h], np.log(p.sum()) + logits.max(), places=4)

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


class FakeTensor:
    """What a torch tensor in GPU memory is to us, in memory of the host."""

    def __init__(self, array, device=2):
        self.array, self.device, self.streams = array, device, []

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__()


class FakeInterface:
    def __init__(self, array):
        self.__cuda_array_interface__ = dict(array.__array_interface__, version=3)


class DeviceArrays(StoreTest):
    def test_they_are_taken_where_they_are(self):
        x = self.rng.normal(size=(3, 4, 5)).astype(np.float16)
        tensor = FakeTensor(x)
        for given in (tensor, FakeInterface(x)):
            a = _device.device_array(given, "x", ("float16",), (3, None, 5), 77)
            self.assertEqual((a.address, a.shape, a.dtype), (x.ctypes.data, (3, 4, 5), "float16"))
        _device.device_array(tensor, "x", ("float16",), (3, None, 5), 0)
        self.assertEqual(tensor.streams, [77, 1])

    def test_what_is_refused(self):
        x = self.rng.normal(size=(4, 6)).astype(np.float32)
        for kind in (FakeTensor, FakeInterface):
            for array, error, words in ((x[:, ::2], ValueError, "contiguous"), (x.T, ValueError, "contiguous"),
                                        (x.astype(np.float16), TypeError, "float16 instead of float32"), (x[0], ValueError, "shape"),
                                        (x.astype(np.int32), TypeError, "dtype"), (x.astype(np.float64), TypeError, "dtype")):
                with self.assertRaises(error) as caught:
                    _device.device_array(kind(array), "x", ("float32",), (4, None), 1)
                self.assertIn(words, str(caught.exception))
            # A slice that is dense all the same.
            self.assertEqual(_device.device_array(kind(x[1:3]), "x", ("float32",), (2, 6), 1).address, x[1:].ctypes.data)
        for array in (x, FakeTensor(x, device=1), [1.0]):
            with self.assertRaisesRegex(TypeError, "not in GPU memory"):
                _device.device_array(array, "x", ("float32",), (4, 6), 1)

    def test_results_beside_what_is_not_torch_must_be_given(self):
        with self.assertRaisesRegex(TypeError, "into"):
            _device.empty(FakeInterface(np.zeros(3, np.float32)), "float16", (3,))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
