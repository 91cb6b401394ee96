# SPDX-License-Identifier: Apache-2.0
"""tierkv.hf on a small random model: generation over a TierCache beside transformers' own cache."""
import copy
import unittest
import warnings
from unittest import mock

from hf_model import RAW, SEED, SHAPE, VOCABULARY, interrupt, model_of  # first: it finds the package, or ends the process

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM

import tierkv
from tierkv import NonFiniteError
from tierkv._hf_models import HALVES, NEIGHBOURS, check_model
from tierkv.hf import TierCache, attention
from tierkv.kv_store import CodedFormat


class Generation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.set_num_threads(2)
        cls.model = model_of(LlamaForCausalLM, LlamaConfig)

    def ids(self, rows, tokens):
        return torch.randint(1, VOCABULARY, (rows, tokens))

    def logits(self, cache, passes, mask=None, model=None):
        """Logits of the last position of each pass, over a cache that grows."""
        model = model or self.model
        model.set_attn_implementation("tierkv" if isinstance(cache, TierCache) else "sdpa")
        out, seen = [], 0
        with torch.inference_mode():
            for ids in passes:
                seen += ids.shape[1]
                given = {} if mask is None else {"attention_mask": mask[:, :seen], "position_ids": self.positions(mask, seen, ids.shape[1])}
                out.append(model(ids, past_key_values=cache, logits_to_keep=1, **given).logits[:, -1])
        return torch.stack(out)

    @staticmethod
    def positions(mask, seen, tokens):
        return (mask.cumsum(1) - 1).clamp(min=0)[:, seen - tokens:seen]

    def assert_near(self, a, b, bound=RAW):
        self.assertLess(float((a - b).abs().max()), bound, f"seed {SEED}")

    def test_turns_of_all_lengths(self):
        passes = [self.ids(2, n) for n in (11, 1, 5, 8, 9, 30, 1)]
        self.assert_near(self.logits(TierCache(max_tokens=256), passes), self.logits(DynamicCache(), passes))

    def test_long_contexts_are_compressed(self):
        passes = [self.ids(1, n) for n in (700, 1, 300, 1)]
        cache = TierCache(CodedFormat(k=0.05, v=0.02), max_tokens=1200)
        # Steps of a tenth and a twentieth of the defaults: errors of a few percent of what attention adds.
        self.assert_near(self.logits(cache, passes), self.logits(DynamicCache(), passes), 0.15)
        self.assertEqual(cache.store.usage().body_tokens > 0, True)
        usage = cache.store.usage()
        self.assertLess(usage.nominal_bytes, 0.6 * usage.raw_bytes)
        self.assertEqual(cache.raw_bytes, usage.raw_bytes)
        cache.close()

    def test_left_padding(self):
        pads = torch.tensor([0, 3, 7])
        passes = [self.ids(3, 12), self.ids(3, 1), self.ids(3, 10)]
        mask = (torch.arange(23)[None] >= pads[:, None]).long()
        ours, theirs = (self.logits(c, passes, mask) for c in (TierCache(max_tokens=64), DynamicCache()))
        self.assert_near(ours, theirs)
        alone = self.logits(TierCache(max_tokens=64), [passes[0][2:, 7:], passes[1][2:], passes[2][2:]])
        self.assert_near(ours[:, 2], alone[:, 0], 1e-4)

    def test_generate(self):
        self.model.set_attn_implementation("sdpa")
        ids = self.ids(2, 9)
        for options in ({}, {"num_beams": 3}):
            self.model.set_attn_implementation("sdpa")
            want = self.model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=12, do_sample=False, **options)
            self.model.set_attn_implementation("tierkv")
            cache = TierCache(max_tokens=64, max_sequences=12)
            got = self.model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **options)
            # A tie within the rounding may be decided otherwise; random models have few.
            self.assertGreater(float((got == want).double().mean()), 0.7, f"seed {SEED}, {options}")
            cache.close()

    def test_generate_with_drafts(self):
        ids = self.ids(1, 20).repeat(1, 3)
        for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": self.model}):
            lengths, tokens = [], []
            for cache in (DynamicCache(), TierCache(max_tokens=128)):
                self.model.set_attn_implementation("tierkv" if isinstance(cache, TierCache) else "sdpa")
                tokens.append(self.model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, **options))
                lengths.append(cache.get_seq_length())
            self.assertGreater(float((tokens[0] == tokens[1]).double().mean()), 0.7, f"seed {SEED}, {options}")
            self.assertLessEqual(abs(lengths[0] - lengths[1]), 5)  # drafts that are told apart by a tie

    def test_generate_turn_by_turn(self):
        """Only what the cache does not hold is read, in batches with padding too, and in chunks."""
        mask = (torch.arange(9)[None] >= torch.tensor([0, 4])[:, None]).long()
        version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        # Transformers 5.17 reads later turns from their beginning if they come in chunks, whatever the cache.
        for chunks in ({}, {"prefill_chunk_size": 4})[:1 + (version >= (5, 24))]:
            cache, ids, seen = TierCache(max_tokens=128), self.ids(2, 9), mask
            self.model.set_attn_implementation("tierkv")
            for turn in range(3):
                ids = self.model.generate(ids, attention_mask=seen, past_key_values=cache, max_new_tokens=5, do_sample=False, **chunks)
                self.assertEqual(cache.get_seq_length(), ids.shape[1] - 1, f"turn {turn}, {chunks}")
                new = self.ids(2, 7)
                ids = torch.cat([ids, new], 1)
                seen = torch.cat([seen, torch.ones(2, ids.shape[1] - seen.shape[1], dtype=seen.dtype)], 1)
            # The last token of an answer is read with the next turn.
            held = ids[:, :cache.get_seq_length()]
            more = self.ids(2, 1)
            whole, padding = torch.cat([held, more], 1), seen[:, :1].new_ones(2, 1)
            padded = torch.cat([seen[:, :held.shape[1]], padding], 1)
            exact = self.logits(DynamicCache(), [whole], padded)[0]
            with torch.inference_mode():
                self.model.set_attn_implementation("tierkv")
                found = self.model(more, past_key_values=cache, attention_mask=padded,
                                   position_ids=self.positions(padded, whole.shape[1], 1)).logits[:, -1]
            self.assert_near(found, exact)

    def test_a_copy_is_a_cache_of_its_own(self):
        first, more, other = self.ids(2, 100), self.ids(2, 3), self.ids(2, 11)
        cache = TierCache(max_tokens=256)
        empty = copy.deepcopy(cache)
        self.logits(cache, [first])
        twin = copy.deepcopy(cache)
        self.logits(cache, [other])
        fresh = TierCache(max_tokens=256)
        self.logits(fresh, [first])
        self.assertTrue(torch.equal(self.logits(twin, [more]), self.logits(fresh, [more])))
        self.assert_near(self.logits(empty, [first, more])[1], self.logits(DynamicCache(), [first, more])[1])
        self.assertEqual([c.get_seq_length() for c in (cache, twin, empty)], [111, 103, 103])

    def test_a_larger_batch_after_reset(self):
        cache, passes = TierCache(max_tokens=64), [self.ids(3, 12), self.ids(3, 1)]
        self.logits(cache, [self.ids(1, 12)])
        cache.reset()
        self.assert_near(self.logits(cache, passes), self.logits(DynamicCache(), passes))

    def test_compiled_models(self):
        passes = [self.ids(2, 12), self.ids(2, 1), self.ids(2, 1)]
        plain = self.logits(TierCache(max_tokens=64), passes)
        forward = self.model.forward
        try:
            self.model.forward = torch.compile(forward, backend="eager")
            self.assertTrue(torch.equal(self.logits(TierCache(max_tokens=64), passes), plain))
        finally:
            self.model.forward = forward

    def test_crop_and_reset(self):
        first, more = self.ids(1, 40), self.ids(1, 6)
        cache = TierCache(max_tokens=64)
        self.logits(cache, [first, more])
        cache.crop(torch.tensor(-6))
        self.assertEqual((cache.get_seq_length(), cache.store.num_tokens(cache._ids[0])), (40, 40))
        again = self.logits(cache, [more])
        self.assert_near(again[0], self.logits(DynamicCache(), [first, more])[1])
        cache.crop(-100)
        self.assertEqual((cache.get_seq_length(), cache.store.num_tokens(cache._ids[0])), (0, 0))
        self.assert_near(self.logits(cache, [more]), self.logits(DynamicCache(), [more]))
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        self.assert_near(self.logits(cache, [first])[0], self.logits(DynamicCache(), [first])[0])

    def test_a_crop_that_fails_is_repeated(self):
        first, one = self.ids(3, 40), self.ids(3, 1)
        cache = TierCache(max_tokens=64, max_sequences=3)
        self.logits(cache, [first])
        truncate, left = cache.store.truncate, [1]

        def fails_once(id, tokens):
            if tokens == 30 and not left:
                raise tierkv.OutOfPagesError("as if")
            left.clear()
            truncate(id, tokens)

        with mock.patch.object(cache.store, "truncate", fails_once), self.assertRaises(tierkv.OutOfPagesError):
            cache.crop(-10)
        with self.assertRaisesRegex(tierkv.InvalidArgumentError, "crop to 30"):
            self.logits(cache, [one])
        cache.batch_select_indices(torch.tensor([True, True, False]))
        with self.assertRaisesRegex(tierkv.InvalidArgumentError, "crop to 30"):
            self.logits(copy.deepcopy(cache), [one[:2]])
        cache.crop(-1)  # no less than before
        self.assertEqual((cache.get_seq_length(), [cache.store.num_tokens(id) for id in cache._ids]), (30, [30, 30]))
        self.assert_near(self.logits(cache, [one[:2]]), self.logits(DynamicCache(), [first[:2, :30], one[:2]])[1:])

    def test_rows_that_are_not_there(self):
        cache = TierCache(max_tokens=64)
        self.logits(cache, [self.ids(2, 10)])
        for choose in (lambda: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), lambda: cache.batch_repeat_interleave(0),
                       lambda: cache.batch_select_indices(torch.tensor([True])), lambda: cache.batch_select_indices(torch.tensor([False, False]))):
            with self.assertRaises(tierkv.InvalidArgumentError):
                choose()
        self.assertEqual(len(cache._ids), 2)
        self.logits(cache, [self.ids(2, 1)])

    def test_what_kernels_report(self):
        """A store in host memory tells such values at once; here it tells them late, as one on a GPU."""
        cache = TierCache(max_tokens=64)
        cache.check()
        for tells in (cache.check, cache.reset):
            self.logits(cache, [self.ids(1, 12)])
            with mock.patch.object(cache.store, "take_status", side_effect=NonFiniteError("layer 1")), warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if tells == cache.reset:
                    cache.reset()
                else:
                    self.assertRaisesRegex(NonFiniteError, "layer 1.*reset", tells)
            self.assertEqual([w.category for w in told], [RuntimeWarning] if tells == cache.reset else [])
            if tells == cache.check:  # until reset(), which then has nothing new to tell
                self.assertRaisesRegex(NonFiniteError, "layer 1", self.logits, cache, [self.ids(1, 1)])
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    cache.reset()
        cache.check()
        more = self.ids(1, 3)
        self.assert_near(self.logits(cache, [more]), self.logits(DynamicCache(), [more]))

    def test_another_model_after_reset(self):
        shallow = model_of(LlamaForCausalLM, lambda **shape: LlamaConfig(**{**shape, "num_hidden_layers": 1}))
        scaled = model_of(GraniteForCausalLM, lambda **shape: GraniteConfig(**shape, attention_multiplier=1.0))
        passes = [self.ids(1, 20), self.ids(1, 1)]
        cache = TierCache(max_tokens=64)
        for model in (self.model, shallow, scaled, self.model):
            exact = self.logits(DynamicCache(), passes, model=model)
            self.assert_near(self.logits(cache, passes, model=model), exact, RAW * max(1.0, float(exact.abs().max())))
            other = scaled if model is not scaled else shallow
            with self.assertRaisesRegex(ValueError, "another model"):
                self.logits(cache, [self.ids(1, 1)], model=other)
            cache.reset()

    def test_a_pass_that_is_interrupted(self):
        """Between layers, where no call of the cache can tell."""
        layer = self.model.model.layers[0].mlp
        for more in (1, 20):
            passes = [self.ids(1, 30), self.ids(1, more)]
            cache, first = TierCache(max_tokens=128), TierCache(max_tokens=128)
            self.logits(cache, passes[:1])
            for interrupted, ids, length in ((cache, passes[1], 30), (first, passes[0], 0)):
                hook = layer.register_forward_hook(interrupt)
                for _ in range(2):
                    with self.assertRaises(KeyboardInterrupt):
                        self.logits(interrupted, [ids])
                    self.assertEqual(interrupted.get_seq_length(), length)
                hook.remove()
            want = self.logits(DynamicCache(), passes)
            self.assert_near(self.logits(cache, passes[1:]), want[1:])
            self.assert_near(self.logits(first, passes), want)
            hook = layer.register_forward_hook(interrupt)
            with self.assertRaises(KeyboardInterrupt):
                self.logits(cache, [self.ids(1, 1)])
            hook.remove()
            cache.crop(-more)
            self.assertEqual((cache.get_seq_length(), cache.store.num_tokens(cache._ids[0])), (30, 30))

    def test_rows_are_chosen(self):
        first, more = self.ids(2, 20), self.ids(3, 1)
        ours, theirs = TierCache(max_tokens=64, max_sequences=4), DynamicCache()
        for cache in (ours, theirs):
            self.logits(cache, [first])
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
            cache.batch_select_indices(torch.tensor([0, 2, 3]))
        self.assert_near(self.logits(ours, [more]), self.logits(theirs, [more]))

    def test_a_step_is_few_operations(self):
        """The host's time for them is what a token of a small model takes on a GPU. In fp16 the CPU's path is the GPU's."""
        ran = []

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                ran.append(str(function))
                return function(*args, **(kwargs or {}))

        layers = [layer.self_attn for layer in self.model.model.layers]
        cache = TierCache("k4v4", max_tokens=512)
        for tokens in (300, 1, 1):
            ran.clear()
            for layer in layers:
                q, k, v = (torch.randn(1, tokens, heads, 64).half().transpose(1, 2) for heads in (4, 2, 2))
                with Count():
                    out, _ = attention(layer, q, *cache.update(k, v, layer.layer_idx), None)
                self.assertEqual((out.shape, out.dtype, out.is_contiguous()), ((1, tokens, 4, 64), torch.half, True))
        # What the store writes to, and its output in the order that the model takes.
        self.assertEqual(len(ran), 2 * len(layers), ran)

    def test_norms_of_keys(self):
        model = model_of(Qwen3ForCausalLM, Qwen3Config)
        passes = [self.ids(1, 30), self.ids(1, 1)]
        self.assert_near(self.logits(TierCache(max_tokens=64), passes, model=model), self.logits(DynamicCache(), passes, model=model))

    def test_beams_at_the_smallest_number_of_sequences(self):
        cache = TierCache(max_tokens=64)
        self.logits(cache, [self.ids(4, 10)])
        cache.reorder_cache(torch.tensor([1, 1, 1, 2]))
        self.assertEqual(cache.store.usage().sequences, 4)
        self.logits(cache, [self.ids(4, 1)])

    def test_a_pass_that_fails_can_be_repeated(self):
        for first in (20, 1):
            ids, more = self.ids(2, 30), self.ids(2, first)
            cache, other = TierCache(max_tokens=128), TierCache(max_tokens=128)
            self.logits(cache, [ids])
            attend, fails = TierCache._attend_raw, [True]

            def failing(*args):
                if fails and args[1] == 1:
                    raise tierkv.OutOfPagesError("as if")
                return attend(*args)
            step = tierkv.hf.Step.run
            TierCache._attend_raw, tierkv.hf.Step.run = failing, lambda now, layer, *x: failing(now, layer, *x) if fails and layer == 1 else step(now, layer, *x)
            try:
                with self.assertRaises(tierkv.OutOfPagesError):
                    self.logits(cache, [more])
                self.assertEqual(cache.get_seq_length(), 30)
                fails.clear()
                self.assert_near(self.logits(cache, [more]), self.logits(other, [ids, more])[1:], 1e-5)
            finally:
                TierCache._attend_raw, tierkv.hf.Step.run = attend, step

    def assert_undone(self, keys, rope):
        """keys [tokens, head_dim] of one token at all positions are equal before RoPE."""
        angle = torch.arange(len(keys), dtype=torch.float64)[:, None] * torch.tensor(rope.inv_freq).double()
        halves, n = rope.pairing == "halves", rope.dims // 2
        first, second = (slice(0, n), slice(n, 2 * n)) if halves else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        a, b = keys[:, first].double(), keys[:, second].double()
        before = keys.double().clone()
        before[:, first], before[:, second] = a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()
        self.assertGreater(float((keys - keys[0]).abs().max()), 1e-2)
        self.assertLess(float((before - before[0]).abs().max()), 1e-4)

    def test_types_of_models(self):
        passes = [self.ids(1, n) for n in (250, 1, 30, 1)]
        for kind in HALVES + NEIGHBOURS:
            with self.subTest(kind):
                torch.manual_seed(SEED)
                config = AutoConfig.for_model(kind, **{**SHAPE, "hidden_size": 256})
                for name, count in (("num_experts", 4), ("num_local_experts", 4), ("num_experts_per_tok", 4), ("head_dim", 64), ("sliding_window", None)):
                    if getattr(config, name, None):
                        setattr(config, name, count)
                model = AutoModelForCausalLM.from_config(config).eval()
                cache = DynamicCache()
                self.logits(cache, [torch.full((1, 60), 5)], model=model)
                self.assert_undone(cache.layers[0].keys[0, 0], check_model(config, 64))
                cache = TierCache(CodedFormat(k=0.05, v=0.02), max_tokens=300)
                exact = self.logits(DynamicCache(), passes, model=model)
                self.assert_near(self.logits(cache, passes, model=model), exact, 0.05 * max(1.0, float(exact.abs().max())))


if __name__ == "__main__":
    print(f"seed {SEED}")
    unittest.main()
