# SPDX-License-Identifier: Apache-2.0
"""tierkv.significance and tierkv.lse against their definition in float64; of tensors in GPU memory, what needs no GPU."""
import contextlib
import sys
import types
import unittest
from unittest import mock

import numpy as np
from random_case import RandomTest

import tierkv
from tierkv import _library


def definition(q, k, starts, stride):
    """(significance, lse) in float64; lse is NaN where a query is not counted."""
    (tokens, heads, d), kv_heads = q.shape, k.shape[1]
    seen, lse = np.zeros((kv_heads, tokens)), np.full((heads, tokens), np.nan)
    for a, b in zip(starts, starts[1:]):
        for t in range(a, b - 1):
            for g in range(kv_heads):
                counted = range(b - 1, t, -stride)
                seen[g, t] = sum(max(probability(q[j, h], k[a:j + 1, g])[0][t - a] for h in range(g * heads // kv_heads, (g + 1) * heads // kv_heads))
                                 for j in counted) / len(counted)
        for j in range(b - 1, a - 1, -stride):
            for h in range(heads):
                lse[h, j] = probability(q[j, h], k[a:j + 1, h * kv_heads // heads])[1]
    return seen, lse


def probability(q, k):
    e = np.exp(k.astype(np.float64) @ q.astype(np.float64) / np.sqrt(q.size))
    return e / e.sum(), np.log(e.sum())


class Significance(RandomTest):
    def prompts(self, tokens, dtype=np.float16):
        return self.rng.normal(size=(tokens, 6, 64)).astype(dtype), self.rng.normal(size=(tokens, 2, 64)).astype(dtype)

    def test_is_its_definition(self):
        for stride, starts, dtype in ((1, [0, 9], np.float32), (2, [0, 7, 7, 20], np.float16), (16, [0, 1, 3, 18, 34, 51], np.float16)):
            q, k = self.prompts(starts[-1], dtype)
            seen, lse = definition(q, k, starts, stride)
            options = {} if len(starts) == 2 else {"starts": starts}
            np.testing.assert_allclose(tierkv.significance(q, k, stride=stride, **options), seen, 1e-6, err_msg=f"seed {self.seed}")
            np.testing.assert_allclose(tierkv.lse(q, k, stride=stride, **options), lse, 1e-6, 1e-6, err_msg=f"seed {self.seed}")
        q, k = self.prompts(40)
        np.testing.assert_array_equal(tierkv.significance(q, k), tierkv.significance(q, k, stride=16))
        np.testing.assert_array_equal(tierkv.lse(q, k), tierkv.lse(q, k, stride=1))
        np.testing.assert_array_equal(tierkv.significance(q, k), tierkv.significance(q.transpose(1, 0, 2).copy().transpose(1, 0, 2), k))
        self.assertEqual(tierkv.significance(q[:0], k[:0]).shape, (2, 0))

    def test_what_is_refused(self):
        q, k = self.prompts(12)
        bad = q.copy()
        bad[3, 1, 5] = np.inf
        for call, error, words in (
                (lambda f: f(q, k[:11]), ValueError, "11 tokens"), (lambda f: f(q[0], k), ValueError, "q: shape"),
                (lambda f: f(q, k.astype(np.float32)), TypeError, "k is float32"), (lambda f: f(q[:, :5], k), ValueError, "num_q_heads"),
                (lambda f: f(q, k, stride=0), tierkv.InvalidArgumentError, "stride: 0"),
                (lambda f: f(q, k, stride=4097), tierkv.InvalidArgumentError, "stride: 4097"),
                (lambda f: f(q, k, starts=[0, 8, 7, 12]), tierkv.InvalidArgumentError, "starts"),
                (lambda f: f(q, k, starts=[0, 11]), tierkv.InvalidArgumentError, "starts"),
                (lambda f: f(q, k, starts=[0.0, 12.0]), TypeError, "starts"),
                (lambda f: f(q, k, sm_scale=-1.0), tierkv.InvalidArgumentError, "sm_scale"),
                (lambda f: f(bad, k, stride=1), tierkv.NonFiniteError, "not finite")):
            for function in (tierkv.significance, tierkv.lse):
                with self.assertRaises(error) as caught:
                    call(function)
                self.assertIn(words, str(caught.exception))
        with self.assertRaisesRegex(ValueError, "lse"):
            tierkv.significance(q, k, lse=np.zeros((6, 12), np.float32))


class Tensor:
    """What a torch tensor in GPU memory is to us, in memory of the host; read through DLPack."""
    device = "cuda:0"
    is_cuda = False

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def new_empty(self, shape, dtype):
        return Tensor(np.empty(shape, dtype))

    def new_tensor(self, data, dtype):
        return Tensor(np.array(data, dtype))

    def fill_(self, x):
        self.array.fill(x)


class OnADevice(RandomTest):
    def setUp(self):
        super().setUp()
        stream = types.SimpleNamespace(cuda_stream=77)
        cuda = types.SimpleNamespace(current_stream=lambda device: stream, device=lambda device: contextlib.nullcontext())
        torch = types.SimpleNamespace(Tensor=Tensor, cuda=cuda, float32=np.float32, int32=np.int32)
        self.calls = []

        def call(function, struct, stream):
            self.calls.append((function, stream, {name: getattr(struct, name) for name, *_ in struct._fields_}))
        for patch in (mock.patch.dict(sys.modules, torch=torch), mock.patch.object(_library.core(), "call", call)):
            patch.start()
            self.addCleanup(patch.stop)

    def heads_first(self, tokens):
        """Views [tokens, heads, head_dim] of arrays [heads, tokens, head_dim]."""
        return [Tensor(self.rng.normal(size=(n, tokens, 64)).astype(np.float16).transpose(1, 0, 2)) for n in (6, 2)]

    def test_tensors_are_taken_with_their_strides(self):
        q, k = self.heads_first(20)
        out = tierkv.significance(q, k, starts=[0, 5, 20])
        self.assertEqual([(name, stream) for name, stream, _ in self.calls], [("tkv_prompt_lse", 77), ("tkv_prompt_significance", 77)])
        got = self.calls[1][2]
        expected = dict(q=q.array.ctypes.data, k=k.array.ctypes.data, q_token_stride=64, q_head_stride=64 * 20, k_token_stride=64,
                        k_head_stride=64 * 20, num_sequences=2, max_tokens=15, total_tokens=20, num_q_heads=6, num_kv_heads=2, head_dim=64,
                        dtype=0, query_stride=16, sm_scale=0.0, significance=out.array.ctypes.data)
        self.assertEqual({name: got[name] for name in expected}, expected)
        self.assertEqual(out.array.shape, (2, 20))

    def test_lse_and_starts_that_lie_there_are_taken(self):
        q, k = self.heads_first(20)
        given, starts = Tensor(np.zeros((6, 20), np.float32)), Tensor(np.array([0, 5, 20], np.int32))
        tierkv.significance(q, k, lse=given, starts=starts, max_tokens=16, stride=1)
        (function, _, got), = self.calls
        self.assertEqual((function, got["lse"], got["starts"], got["max_tokens"], got["num_sequences"], got["query_stride"]),
                         ("tkv_prompt_significance", given.array.ctypes.data, starts.array.ctypes.data, 16, 2, 1))
        self.assertTrue(np.isnan(tierkv.lse(q, k).array).all())

    def test_what_is_refused(self):
        q, k = self.heads_first(20)
        odd = Tensor(np.zeros((20, 2, 128), np.float16)[:, :, ::2])
        starts, host = Tensor(np.array([0, 20], np.int32)), k.array
        elsewhere = Tensor(k.array)
        elsewhere.__class__ = type("Elsewhere", (Tensor,), {"__dlpack_device__": lambda self: (2, 1)})
        for call, error, words in ((lambda: tierkv.lse(q, odd), ValueError, "k: the last dim"), (lambda: tierkv.lse(q, host), TypeError, "k: not in"),
                                   (lambda: tierkv.lse(q, elsewhere), TypeError, "k: on GPU 1"),
                                   (lambda: tierkv.lse(q, k, starts=starts), ValueError, "max_tokens"),
                                   (lambda: tierkv.lse(Tensor(q.array.astype(np.float32)), k), TypeError, "q: dtype float32"),
                                   (lambda: tierkv.significance(q, k, lse=Tensor(np.zeros((2, 20), np.float32))), ValueError, "lse: shape")):
            with self.assertRaises(error) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        self.assertEqual(self.calls, [])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
