# SPDX-License-Identifier: Apache-2.0
"""tierkv.KvStore on the host: arrays in and out, attention beside NumPy's, turns, forks, bytes, what is refused."""
import ctypes
import os
import pickle
import re
import sys
import unittest
from copy import copy as shallow
from copy import deepcopy
from unittest import mock

import numpy as np

sys.path.insert(0, sys.argv.pop(1))
import tierkv  # noqa: E402
from tierkv import _library as lib  # noqa: E402
from tierkv.kv_store import ChannelFormat, CodedFormat, KvStore, StoreConfig, TierClass, TierFormat, TiersFormat, preset  # noqa: E402

SEED = int.from_bytes(os.urandom(4), "little")
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 64
ROPE = tierkv.Rope("halves", HEAD_DIM, 10000.0 ** -(np.arange(HEAD_DIM // 2, dtype=np.float32) / (HEAD_DIM // 2)))
FORMATS = {"small": (CodedFormat(), 0.02), "finer": (CodedFormat(k=0.1, v=0.05), 0.004)}


def config(**changes):
    values = dict(num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rope=ROPE, max_sequences=4,
                  max_tokens=2048)
    return StoreConfig(**{**values, **changes})


def attention(q, k, v):
    """One query [q_heads, head_dim] over k, v [tokens, kv_heads, head_dim]."""
    k, v = (np.repeat(x.astype(np.float64), Q_HEADS // KV_HEADS, axis=1) for x in (k, v))
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), k) / np.sqrt(HEAD_DIM)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", p / p.sum(axis=1, keepdims=True), v), p / p.sum(axis=1, keepdims=True)


class KvStoreTest(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(SEED)

    def normal(self, *shape):
        return self.rng.normal(size=shape).astype(np.float16)

    def fill(self, store, id, tokens):
        """Keys and values [LAYERS, tokens, ...] that were appended."""
        k, v = self.normal(LAYERS, tokens, KV_HEADS, HEAD_DIM), self.normal(LAYERS, tokens, KV_HEADS, HEAD_DIM)
        store.begin(id, tokens)
        for layer in range(LAYERS):
            store.append(id, layer, k[layer][None], v[layer][None])
        return k, v


class Attention(KvStoreTest):
    def test_short_sequences_are_exact(self):
        with KvStore(config()) as store:
            id = store.add_sequence()
            k, v = self.fill(store, id, 40)
            q = self.normal(1, 1, Q_HEADS, HEAD_DIM)
            seen = store.attend(id, 1, q, probabilities=True)
            want, p = attention(q[0, 0], k[1], v[1])
            # Half an ulp of fp16.
            np.testing.assert_allclose(seen.out[0, 0], want, rtol=1.01 * 2**-11, atol=2**-24, err_msg=f"seed {SEED}")
            self.assertEqual(seen.lse.shape, (1, 1, Q_HEADS))
            heads = p.reshape(KV_HEADS, -1, 40).max(axis=1)
            np.testing.assert_allclose(seen.probabilities[0, 0], heads, rtol=1e-5, atol=1e-7, err_msg=f"seed {SEED}")

    def test_long_ones_are_near(self):
        for name, (format, bound) in FORMATS.items():
            with KvStore(config(format=format)) as store:
                id = store.add_sequence()
                k, v = self.fill(store, id, 1500)
                q = self.normal(1, 3, Q_HEADS, HEAD_DIM)
                out = store.attend(id, 0, q).out
                for j in range(3):
                    n = 1500 - 2 + j
                    want, _ = attention(q[0, j], k[0][:n], v[0][:n])
                    error = np.linalg.norm(out[0, j] - want) / np.linalg.norm(want)
                    self.assertLess(error, 20 * bound, f"{name}, seed {SEED}")
                self.assertLess(store.bytes_held(id), 0.6 * 2 * k.nbytes, name)

    def test_turns_and_one_prompt_agree_to_the_byte(self):
        with KvStore(config()) as store:
            k, v = self.normal(LAYERS, 700, KV_HEADS, HEAD_DIM), self.normal(LAYERS, 700, KV_HEADS, HEAD_DIM)
            exports = []
            for parts in ((700,), (300, 1, 1, 5, 393), (9, 691)):
                id, at = store.add_sequence(), 0
                for n in parts:
                    store.begin(id, n)
                    for layer in range(LAYERS):
                        store.append(id, layer, k[layer][None, at:at + n], v[layer][None, at:at + n])
                    at += n
                exports.append(store.export_sequence(id))
                store.release(id)
            self.assertEqual(len(set(exports)), 1, f"seed {SEED}")

    def test_a_range_is_what_attention_sees(self):
        with KvStore(config()) as store:
            id = store.add_sequence()
            k, v = self.fill(store, id, 600)
            got_k, got_v = store.decode_range(id, 1, 0, 600)
            q = self.normal(1, 1, Q_HEADS, HEAD_DIM)
            want, _ = attention(q[0, 0], got_k, got_v)
            # The range is rounded to fp16: keys move logits by up to 2^-11 |q||k| / 8 and outputs as much; values by half an ulp.
            np.testing.assert_allclose(store.attend(id, 1, q).out[0, 0], want, rtol=0.02, atol=0.004, err_msg=f"seed {SEED}")
            np.testing.assert_array_equal(got_k[:4], k[1][:4])
            np.testing.assert_array_equal(got_v[-64:], v[1][-64:])
            part_k, _ = store.decode_range(id, 1, 77, 300)
            np.testing.assert_array_equal(part_k, got_k[77:300])
            self.assertEqual(store.decode_range(id, 1, 5, 5)[0].shape, (0, KV_HEADS, HEAD_DIM))


class Sequences(KvStoreTest):
    def test_bfloat16_comes_back_as_it_went(self):
        with KvStore(config(dtype="bfloat16")) as store:
            id = store.add_sequence()
            floats = self.rng.uniform(0.01, 4, (2, 1, 20, KV_HEADS, HEAD_DIM)).astype(np.float32)  # fp16 holds all of their bits
            k, v = (floats.view(np.uint32) >> 16).astype(np.uint16)
            store.begin(id, 20)
            store.append(id, 0, k, v)
            for given, held in zip((k, v), store.decode_range(id, 0, 0, 20, dtype="bfloat16")):
                np.testing.assert_array_equal(held, given[0])
        with KvStore(config()) as store:
            store.begin(store.add_sequence(), 20)
            with self.assertRaisesRegex(TypeError, "uint16 instead of float16"):
                store.append(1, 0, k, v)

    def test_fork_truncate_export_import(self):
        with KvStore(config()) as store:
            id = store.add_sequence()
            self.fill(store, id, 500)
            copy = store.fork(id)
            self.assertEqual(store.export_sequence(copy), store.export_sequence(id))
            store.truncate(copy, 200)
            self.fill(store, copy, 3)
            self.assertEqual((store.num_tokens(copy), store.num_tokens(id)), (203, 500))
            data = store.export_sequence(id)
            with KvStore(config(max_sequences=1, max_tokens=512)) as other:
                there = other.import_sequence(data)
                self.assertEqual(other.export_sequence(there), data)
                q = self.normal(1, 1, Q_HEADS, HEAD_DIM)
                np.testing.assert_array_equal(other.attend(there, 0, q).out, store.attend(id, 0, q).out)
                with self.assertRaises(tierkv.CorruptError):
                    other.import_sequence(data[:-1])
            for changes, what in ((dict(sink_tokens=5), "sink_tokens"), (dict(window_tokens=80), "window_tokens"), (dict(raw_layers=(1,)), "raw_layers"),
                                  (dict(format=preset("k4v4")), "in format$"), (dict(format=CodedFormat(k=0.2)), "settings of the format")):
                with KvStore(config(max_tokens=512, **changes)) as other, self.assertRaisesRegex(ValueError, what):
                    other.import_sequence(data)
            room = np.full(len(data) + 5, 0xa5, np.uint8)
            self.assertEqual(store.export_sequence(id, out=room), len(data))
            self.assertEqual(room.tobytes(), data + 5 * b"\xa5")
            again = store.import_sequence(room[:-5])
            self.assertEqual(store.export_sequence(again), data)
            store.release(again)
            with self.assertRaises(tierkv.BufferTooSmallError):
                store.export_sequence(id, out=room[:100])
            with self.assertRaises(tierkv.InvalidArgumentError):
                store.export_sequence(id, out=data)
            with self.assertRaises(tierkv.ArgumentTypeError):
                store.import_sequence(np.zeros(8, np.float32))
            usage = store.usage()
            self.assertEqual((usage.sequences, usage.pages_shared > 0), (2, True))
            self.assertLess(usage.nominal_bytes, usage.raw_bytes)
            with self.assertRaisesRegex(ValueError, "no query"):
                store.attend(id, 0, np.zeros((1, 0, Q_HEADS, HEAD_DIM), np.float16))
            for make in (shallow, deepcopy, pickle.dumps):
                with self.assertRaises(tierkv.UnsupportedError):
                    make(store)
            store.release(copy)
            store.release(id)
            with self.assertRaises(tierkv.StaleSequenceError):
                store.num_tokens(id)
            self.assertEqual((store.usage().pages_free, store.free_pages()), (store.usage().pages,) * 2)

    def test_a_profiles_rotation_belongs_to_the_sequence(self):
        rows = (LAYERS, KV_HEADS)

        def profile(theta):
            rope = tierkv.Rope("halves", HEAD_DIM, theta ** -(np.arange(HEAD_DIM // 2, dtype=np.float32) / (HEAD_DIM // 2)))
            zeros = np.zeros((*rows, HEAD_DIM), np.float32)
            return tierkv.ProfileData("model", LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, 0.125, zeros, zeros, np.ones(rows), np.ones(rows), rope=rope)

        with KvStore(config(rope=None, sm_scale=0.125, profile=profile(1e4))) as store:
            id = store.add_sequence()
            self.fill(store, id, 400)
            data = store.export_sequence(id)
            with KvStore(config(rope=None, sm_scale=0.125, profile=profile(5e5))) as other:
                with self.assertRaises(tierkv.InvalidArgumentError):
                    other.import_sequence(data)
            with KvStore(config(rope=profile(1e4).rope, sm_scale=0.125, profile=profile(1e4))) as same:
                self.assertEqual(same.export_sequence(same.import_sequence(bytearray(data))), data)

    def test_a_batch(self):
        with KvStore(config()) as store:
            ids = [store.add_sequence() for _ in range(3)]
            k, v = self.normal(3, 100, KV_HEADS, HEAD_DIM), self.normal(3, 100, KV_HEADS, HEAD_DIM)
            store.begin(ids, 100)
            for layer in range(LAYERS):
                store.append(ids, layer, k, v, q=self.normal(3, 100, Q_HEADS, HEAD_DIM))
            q = self.normal(3, 2, Q_HEADS, HEAD_DIM)
            together = store.attend(ids, 0, q)
            for i, id in enumerate(ids):
                np.testing.assert_array_equal(store.attend(id, 0, q[i:i + 1]).out[0], together.out[i])


class Refused(KvStoreTest):
    def test_configs(self):
        for changes, error in ((dict(head_dim=63), tierkv.TierkvError), (dict(num_q_heads=5), tierkv.TierkvError),
                               (dict(dtype="float64"), ValueError), (dict(dtype="float32"), ValueError), (dict(rope="halves"), TypeError), (dict(raw_layers=1), TypeError),
                               (dict(raw_layers=(0.7,)), TypeError), (dict(raw_layers=(2**32,)), tierkv.InvalidArgumentError),
                               (dict(format=CodedFormat(max_length=0)), ValueError), (dict(format="small"), TypeError), (dict(sink_tokens=-1), ValueError),
                               (dict(format=TiersFormat(())), ValueError), (dict(format=TiersFormat((TierClass(alpha_high=0),))), ValueError), (dict(format=TiersFormat((1,))), tierkv.ArgumentTypeError),
                               (dict(sm_scale="1"), tierkv.ArgumentTypeError), (dict(format=TiersFormat(None)), tierkv.ArgumentTypeError), (dict(memory_bytes=1), tierkv.OutOfRangeError),
                               (dict(format=ChannelFormat(v_bits=0)), ValueError), (dict(format=ChannelFormat(block_tokens=0)), ValueError),
                               (dict(format=ChannelFormat(k_bits=3)), tierkv.TierkvError), (dict(max_tokens=2**40), tierkv.InvalidArgumentError),
                               (dict(format=TiersFormat((TierClass(TierFormat(3, 4)),))), tierkv.TierkvError)):
            with self.assertRaises(error, msg=str(changes)):
                KvStore(config(**changes))
        with self.assertRaisesRegex(ValueError, "tiny"):
            preset("tiny")
        # A build without CUDA says so; where kernels are but no GPU is, CUDA's own error arrives, behind the name of the call.
        try:
            KvStore(config(), stream=0).close()
        except tierkv.UnsupportedError as e:
            self.assertRegex(str(e), "without CUDA")
        except tierkv.CudaError as e:
            self.assertRegex(str(e), "^create_device: ")

    def test_a_zeroed_class_of_c_is_the_default(self):
        given = config(format=TiersFormat()).with_memory()
        zeroed = given._struct()
        zeroed.tiers.contents.classes[0] = ctypes.pointer(lib.TierClassStruct())
        with mock.patch.object(StoreConfig, "_struct", lambda self: zeroed):
            other = KvStore(given)
        with other, KvStore(given) as store:
            id = store.add_sequence()
            self.fill(store, id, 5)
            other.import_sequence(store.export_sequence(id))  # refused where a setting differs

    def test_values_beyond_a_format_name_their_positions(self):
        for name, longest in (("k8v4", 1), ("small", 64)):
            with self.subTest(name), KvStore(config(format=preset(name))) as store:
                id, bad = store.add_sequence(), int(self.rng.integers(400, 500))
                self.fill(store, id, 400)  # which fix the steps of rows
                k = self.normal(1, 200, KV_HEADS, HEAD_DIM)
                k[0, bad - 400] = 60000
                k[0, bad - 400, :, 0] = -60000
                store.begin(id, 200)
                with self.assertRaises(tierkv.OutOfRangeError) as refused:
                    store.append(id, 0, k, self.normal(1, 200, KV_HEADS, HEAD_DIM))
                places = [int(p) for p in re.search(r"positions? (\d+)(?: to (\d+))?", str(refused.exception)).groups() if p]
                self.assertTrue(places[0] <= bad <= places[-1] < places[0] + longest, str(refused.exception))
                store.truncate(id, 0)
                self.fill(store, id, 100)

    def test_calls(self):
        with KvStore(config()) as store:
            id = store.add_sequence()
            self.fill(store, id, 10)
            k = self.normal(1, 1, KV_HEADS, HEAD_DIM)
            for call, error in ((lambda: store.begin(id, 0), tierkv.InvalidArgumentError), (lambda: store.begin(id, 2**31), tierkv.InvalidArgumentError),
                                (lambda: store.begin(id, 2048), tierkv.OutOfRangeError), (lambda: store.begin([id, id], 1), tierkv.InvalidArgumentError),
                                (lambda: store.append(id, 0, k, k), tierkv.InvalidArgumentError),
                                (lambda: store.append(id, 0, k, k.astype(np.float64)), TypeError), (lambda: store.append(id, 0, None, k), TypeError),
                                (lambda: store.append(id, 0, k, None), TypeError), (lambda: store.attend(id, 0, None), TypeError),
                                (lambda: store.append(id, 0, k, k[:, :, :1]), ValueError),
                                (lambda: store.attend(id, 9, self.normal(1, 1, Q_HEADS, HEAD_DIM)), tierkv.InvalidArgumentError),
                                (lambda: store.attend(id, 0, self.normal(1, 11, Q_HEADS, HEAD_DIM)), tierkv.TierkvError),
                                (lambda: store.decode_range(id, 0, 3, 11), tierkv.OutOfRangeError),
                                (lambda: store.decode_range(id, 0, None, 3), tierkv.ArgumentTypeError),
                                (lambda: store.decode_range(id, 0, 0.5, 3), tierkv.ArgumentTypeError),
                                (lambda: store.decode_range(id, 0, 0, 2**31 - 1), tierkv.OutOfRangeError),
                                (lambda: store.append(id, 0, k.astype(">f2"), k), TypeError), (lambda: store.truncate(id, 11), tierkv.TierkvError),
                                (lambda: store.import_sequence(b"no"), tierkv.InvalidArgumentError)):
                with self.assertRaises(error):
                    call()
            store.begin(id, 1)
            k[0, 0, 0, 0] = np.nan
            with self.assertRaises(tierkv.NonFiniteError):
                store.append(id, 0, k, k)
            self.assertEqual(store.num_tokens(id), 11)


if __name__ == "__main__":
    unittest.main()
