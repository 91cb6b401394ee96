# SPDX-License-Identifier: Apache-2.0
"""Tensors in, tensors out: every call that takes arrays gives with tensors in CPU memory what it gives with NumPy's arrays."""
import sys
import unittest

import numpy as np
from random_case import RandomTest
import tierkv

try:
    import torch
except ImportError:
    print("torch is missing: skipped")
    sys.exit(77)


class Tensors(RandomTest):
    def normal(self, *shape):
        return self.rng.normal(size=shape).astype(np.float16)

    def same(self, tensor, array):
        self.assertIsInstance(tensor, torch.Tensor)
        self.assertIsInstance(array, np.ndarray)
        np.testing.assert_array_equal(tensor.numpy(), array, f"seed {self.seed}")

    def test_rows(self):
        x = self.normal(7, 64)
        arrays, tensors = tierkv.quantize(x, 4, 16), tierkv.quantize(torch.from_numpy(x), 4, 16)
        for name in ("codes", "scale", "zero_point"):
            self.same(getattr(tensors, name), getattr(arrays, name))
        self.same(tierkv.dequantize(tensors), tierkv.dequantize(arrays))

    def test_pages(self):
        k, v, format = self.normal(9, 128), self.normal(9, 128), tierkv.PageFormat(128)
        arrays = tierkv.encode(format, k, v)
        tensors = tierkv.encode(format, torch.from_numpy(k), torch.from_numpy(v))
        self.same(tensors.data, arrays.data)
        for name in ("k", "v", "scores", "positions"):
            self.same(getattr(tierkv.decode(tensors), name), getattr(tierkv.decode(arrays), name))

    def test_codebooks(self):
        codes = self.rng.integers(-4, 5, size=(32, 64)).astype(np.int16)
        book = tierkv.Codebook.build(torch.from_numpy(codes))
        self.assertEqual(bytes(book), bytes(tierkv.Codebook.build(codes)))
        self.assertEqual(book.encode(torch.from_numpy(codes)), book.encode(codes))

    def test_significance(self):
        q, k = self.normal(40, 4, 64), self.normal(40, 2, 64)
        given = [torch.from_numpy(a) for a in (q, k)]
        starts = torch.tensor([0, 25, 40], dtype=torch.int32)
        self.same(tierkv.significance(*given, starts=starts, stride=1), tierkv.significance(q, k, starts=[0, 25, 40], stride=1))
        self.same(tierkv.lse(*given), tierkv.lse(q, k))

    def test_head_scales_and_classes(self):
        kl = self.rng.uniform(0.1, 1, size=(3, 4))
        self.same(tierkv.head_scales(torch.from_numpy(kl)), tierkv.head_scales(kl))
        self.same(tierkv.assign_classes([0.25], torch.from_numpy(kl)), tierkv.assign_classes([0.25], kl))

    def test_a_store(self):
        config = tierkv.StoreConfig(num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=64, max_sequences=2, max_tokens=256)
        k, v, q = self.normal(1, 100, 2, 64), self.normal(1, 100, 2, 64), self.normal(1, 3, 4, 64)
        seen = []
        for kind in (np.asarray, torch.from_numpy):
            with tierkv.KvStore(config) as store:
                id = store.add_sequence()
                store.begin(id, 100)
                store.append(id, 0, kind(k), kind(v))
                seen.append(store.attend(id, 0, kind(q), probabilities=True))
        for array, tensor in zip(*seen):
            self.same(tensor, array)

    def test_bfloat16_stays_bfloat16(self):
        config = tierkv.StoreConfig(num_layers=1, num_q_heads=2, num_kv_heads=2, head_dim=64, max_sequences=1, max_tokens=64,
                                    dtype="bfloat16")
        k, v, q = (torch.from_numpy(self.normal(1, 5, 2, 64)).bfloat16() for _ in range(3))
        with tierkv.KvStore(config) as store:
            id = store.add_sequence()
            store.begin(id, 5)
            store.append(id, 0, k, v)
            out = store.attend(id, 0, q[:, -1:]).out
        self.assertEqual(out.dtype, torch.bfloat16)
        scores = torch.einsum("nhd,hd->hn", k[0].float(), q[0, -1].float()) / 8
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[0].float())
        # The window is raw. The output is rounded to 8 bits of mantissa, half a step of which is 2^-9 of values that stay below 4.
        self.assertLess((out[0, 0].float() - expected).abs().max().item(), 2 ** -7 + 1e-3)

    def test_a_gradient_is_no_obstacle_and_another_device_is(self):
        x = torch.from_numpy(self.normal(4, 64)).float()
        self.same(tierkv.dequantize(tierkv.quantize(x.clone().requires_grad_(), 8)), tierkv.dequantize(tierkv.quantize(x.numpy(), 8)))
        with self.assertRaisesRegex(tierkv.ArgumentTypeError, "x: a tensor on meta"):
            tierkv.quantize(x.to("meta"), 8)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
