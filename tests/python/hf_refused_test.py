# SPDX-License-Identifier: Apache-2.0
"""tierkv.hf: what is refused by name, and that a refused pass leaves a good cache."""
import types
import unittest
import warnings

from hf_model import SEED, SHAPE, model_of  # first: it finds the package, or ends the process

import numpy as np
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig

import tierkv
from tierkv._hf_models import check_model
from tierkv.hf import TierCache, attention


class Refused(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = model_of(LlamaForCausalLM, LlamaConfig)

    def run_model(self, cache, ids, implementation="tierkv", **given):
        self.model.set_attn_implementation(implementation)
        with torch.inference_mode():
            return self.model(ids, past_key_values=cache, **given)

    def test_another_attention(self):
        cache, ids = TierCache(max_tokens=64), torch.ones(1, 4, dtype=torch.long)
        with self.assertRaisesRegex(tierkv.UnsupportedError, "set_attn_implementation"):
            self.run_model(cache, ids, "sdpa")
        self.run_model(cache, ids)
        self.assertEqual(cache.get_seq_length(), 4)

    def test_arguments(self):
        with self.assertRaisesRegex(TypeError, "format"):
            TierCache(3)
        with self.assertRaisesRegex(ValueError, "significance_stride"):
            TierCache(significance_stride=-1)
        self.assertRaisesRegex(ValueError, "significance_stride", TierCache, significance_stride=4097)
        self.assertRaisesRegex(ValueError, "memory_bytes", TierCache, memory_bytes=-1)
        for most in (0, -5):
            self.assertRaisesRegex(ValueError, "max_sequences", TierCache, max_sequences=most)
        self.assertRaisesRegex(TypeError, "max_tokens", TierCache, max_tokens="x")
        self.assertRaisesRegex(TypeError, "path", TierCache, profile=3)
        means, ones = np.zeros((2, 2, 64), np.float32), np.ones((2, 2))
        cache = TierCache("k4v4", max_tokens=64, profile=tierkv.ProfileData("made", 2, 4, 2, 64, 0.125, means, means, ones, ones))
        self.assertEqual((cache.bytes_held, cache.raw_bytes), (0, 0))
        self.run_model(cache, torch.ones(1, 5, dtype=torch.long))
        self.assertRegex(repr(cache), r"k_bits=4.*tokens=\[5\]")

    def test_dropout_and_gradients_are_refused(self):
        layer = torch.nn.Module()
        layer.layer_idx = 0
        q, k, v = (torch.randn(1, 4, 3, 64) for _ in range(3))
        with self.assertRaisesRegex(tierkv.UnsupportedError, "dropout"):
            attention(layer, q, k, v, None, dropout=0.5)
        for trained in range(3):
            cache = TierCache(max_tokens=64)
            x = [t.clone().requires_grad_(i == trained) for i, t in enumerate((q, k, v))]
            cache.update(x[1], x[2], 0)
            with self.assertRaisesRegex(tierkv.UnsupportedError, "gradients"):
                attention(layer, *x, None)

    def test_attention_weights_are_refused(self):
        for cache in (TierCache(max_tokens=64), DynamicCache()):
            with self.assertRaisesRegex(tierkv.UnsupportedError, "output_attentions"):
                self.run_model(cache, torch.ones(1, 4, dtype=torch.long), output_attentions=True)

    def test_a_refused_pass_leaves_a_good_cache(self):
        cache, ids = TierCache(max_tokens=64, max_sequences=2), torch.ones(1, 4, dtype=torch.long)
        with self.assertRaisesRegex(tierkv.UnsupportedError, "4 dimensions"):
            self.run_model(cache, ids, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
        self.run_model(cache, ids)
        cache.reset()
        weight = self.model.model.layers[1].self_attn.v_proj.weight
        kept = weight.detach().clone()
        weight.data.mul_(1e8)
        try:
            with self.assertRaises(tierkv.OutOfRangeError):
                self.run_model(cache, ids)
        finally:
            weight.data.copy_(kept)
        self.assertEqual((cache.get_seq_length(), cache.batch_size, cache.store.usage().sequences), (0, -1, 0))
        self.run_model(cache, ids.repeat(2, 1))

    def test_static_caches(self):
        for mask in (None, torch.ones(1, 4, dtype=torch.long)):
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=16)
            with self.assertRaisesRegex(tierkv.UnsupportedError, "static cache"):
                self.run_model(cache, torch.ones(1, 4, dtype=torch.long), attention_mask=mask)

    def test_padding_on_the_right(self):
        with self.assertRaisesRegex(ValueError, "padded on the left"):
            self.run_model(TierCache(max_tokens=64), torch.ones(1, 4, dtype=torch.long), attention_mask=torch.tensor([[1, 1, 1, 0]]))

    def test_too_many_tokens_change_nothing(self):
        cache = TierCache(max_tokens=100)
        self.run_model(cache, torch.ones(1, 90, dtype=torch.long))
        with self.assertRaises(tierkv.OutOfRangeError):
            self.run_model(cache, torch.ones(1, 11, dtype=torch.long))
        self.assertEqual(cache.get_seq_length(), 90)
        self.run_model(cache, torch.ones(1, 10, dtype=torch.long))

    def test_a_row_that_is_too_long_leaves_the_others_as_they_were(self):
        cache = TierCache(max_tokens=30)
        mask = torch.tensor([[0] * 10 + [1] * 25, [1] * 35])
        for _ in range(2):
            with self.assertRaises(tierkv.OutOfRangeError):
                self.run_model(cache, torch.ones(2, 35, dtype=torch.long), attention_mask=mask)
            self.assertEqual((cache.get_seq_length(), cache.store.usage().sequences), (0, 0))
        self.run_model(cache, torch.ones(2, 30, dtype=torch.long), attention_mask=mask[:, :30])

    def test_rows_that_there_is_no_room_for(self):
        cache = TierCache(max_tokens=64, max_sequences=3)
        self.run_model(cache, torch.ones(2, 4, dtype=torch.long))
        with self.assertRaises(tierkv.OutOfRangeError):
            cache.batch_repeat_interleave(2)
        self.assertEqual((len(cache._ids), cache.store.usage().sequences), (2, 2))
        cache.reorder_cache(torch.tensor([1, 1]))
        self.assertEqual(cache.store.usage().sequences, 2)
        self.run_model(cache, torch.ones(2, 1, dtype=torch.long))
        cache.reset()
        self.assertEqual(cache.store.usage().sequences, 0)

    def test_keys_beyond_fp16(self):
        cache = TierCache(max_tokens=64)
        weight = self.model.model.layers[0].self_attn.v_proj.weight
        kept = weight.detach().clone()
        try:
            weight.data.mul_(1e8)
            with self.assertRaisesRegex(tierkv.OutOfRangeError, "fp16"):
                self.run_model(cache, torch.ones(1, 4, dtype=torch.long))
        finally:
            weight.data.copy_(kept)

    def test_another_batch(self):
        cache = TierCache(max_tokens=64)
        self.run_model(cache, torch.ones(2, 4, dtype=torch.long))
        with self.assertRaises(ValueError):
            self.run_model(cache, torch.ones(3, 1, dtype=torch.long))

    def test_a_layer_unlike_the_first_token(self):
        first, second = (layer.self_attn for layer in self.model.model.layers)

        def step(cache, layer, heads=2, head_dim=64, device="cpu"):
            q, k = (torch.ones(1, n, 1, head_dim, dtype=torch.half, device=device) for n in (4, heads))
            attention(layer, q, *cache.update(k, k, layer.layer_idx), None)

        for given, reason in (({"heads": 4}, "other heads"), ({"head_dim": 32}, "scales its scores"), ({"device": "meta"}, "was on cpu|not on cpu")):
            for layers in ((first,), (first, second)):
                cache = TierCache(max_tokens=64)
                self.run_model(cache, torch.ones(1, 4, dtype=torch.long))
                for layer in layers[:-1]:
                    step(cache, layer)
                with self.assertRaisesRegex(tierkv.TierkvError, reason):
                    step(cache, layers[-1], **given)

    def test_a_model_without_its_last_layer(self):
        """No pass of it ends. That its tokens are missed, positions tell, or a mask of them all."""
        model, cache, ids = model_of(LlamaForCausalLM, LlamaConfig), TierCache(max_tokens=64), torch.ones(1, 4, dtype=torch.long)
        model.model.layers = model.model.layers[:1]
        model.set_attn_implementation("tierkv")
        lost, one = "behind layer 1 of 2; its tokens are forgotten", ids[:, :1]
        with self.assertRaisesRegex(tierkv.InvalidArgumentError, lost):
            model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3)
        self.assertEqual((cache.get_seq_length(), cache.store.usage().sequences), (0, 0))
        with torch.inference_mode(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            model(ids, past_key_values=cache)
            self.assertEqual(told, [])
            model(ids, past_key_values=cache)
            self.assertRegex(str(told.pop().message), lost)
            with self.assertRaisesRegex(ValueError, r"attention_mask: has shape \(1, 5\)"):
                model(one, past_key_values=cache, attention_mask=torch.ones(1, 5, dtype=torch.long))
            self.assertRegex(str(told.pop().message), lost)

    def test_masks_of_other_lengths(self):
        for cache in (TierCache(max_tokens=64), DynamicCache()):
            self.run_model(cache, torch.ones(1, 4, dtype=torch.long))
            for positions in (2, 7):
                with self.assertRaisesRegex(ValueError, "attention_mask"):
                    self.run_model(cache, torch.ones(1, 2, dtype=torch.long), attention_mask=torch.ones(1, positions, dtype=torch.long))

    def test_a_pass_that_begins_at_another_layer(self):
        k, cache = torch.ones(1, 2, 1, 64), TierCache(max_tokens=64)
        cache.update(k, k, 1)
        with self.assertRaisesRegex(tierkv.InvalidArgumentError, "layer 1 does not follow"):
            attention(self.model.model.layers[1].self_attn, k, k, k, None)

    def test_float32_on_a_gpu(self):
        q = types.SimpleNamespace(shape=(1, 4, 1, 64), is_cuda=True, dtype=torch.float32)
        with self.assertRaisesRegex(tierkv.UnsupportedError, "float32 on a GPU"):
            TierCache()._fit(self.model.config, q, q, 0.125)

    def test_models(self):
        dynamic = LlamaConfig(**SHAPE)
        dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        for config, head_dim, reason in ((transformers.GPT2Config(), 64, "gpt2"), (MistralConfig(sliding_window=128), 64, "sliding"),
                                         (LlamaConfig(**SHAPE), 80, "head_dim 80"), (dynamic, 64, "dynamic")):
            with self.assertRaisesRegex(tierkv.UnsupportedError, reason):
                check_model(config, head_dim)

    def test_formats(self):
        with self.assertRaisesRegex(ValueError, "tiny"):
            TierCache("tiny")


if __name__ == "__main__":
    print(f"seed {SEED}")
    unittest.main()
