# SPDX-License-Identifier: Apache-2.0
"""tierkv.hf on a small random model: generation over a TierCache beside transformers' own cache. Needs torch and transformers 5."""
import copy
import os
import sys
import unittest
import warnings
from unittest import mock

sys.path.insert(0, sys.argv.pop(1))
try:
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers import MistralConfig, Qwen3Config, Qwen3ForCausalLM

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError("transformers is older than 5")
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
import tierkv  # noqa: E402
from tierkv import NonFiniteError  # noqa: E402
from tierkv._hf_models import HALVES, NEIGHBOURS, check_model  # noqa: E402
from tierkv.hf import TierCache, attention  # noqa: E402
from tierkv.kv_store import CodedFormat  # noqa: E402

SEED = int.from_bytes(os.urandom(4), "little")
VOCABULARY = 97
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None, bos_token_id=None)
# A store rounds to fp16 what is float32 here: 2^-11 of keys, values and outputs, over two layers. Logits are of order 1.
RAW = 0.02


def interrupt(*args):
    raise KeyboardInterrupt


def model_of(kind, config):
    torch.manual_seed(SEED)
    return kind(config(**SHAPE)).eval()


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
                for name, count in (("num_experts", 4), ("num_local_experts", 4), ("num_experts_per_tok", 2), ("head_dim", 64), ("sliding_window", None)):
                    if getattr(config, name, None):
                        setattr(config, name, count)
                model = AutoModelForCausalLM.from_config(config).eval()
                cache = DynamicCache()
                self.logits(cache, [torch.full((1, 60), 5)], model=model)
                self.assert_undone(cache.layers[0].keys[0, 0], check_model(config, 64))
                cache = TierCache(CodedFormat(k=0.05, v=0.02), max_tokens=300)
                exact = self.logits(DynamicCache(), passes, model=model)
                self.assert_near(self.logits(cache, passes, model=model), exact, 0.05 * max(1.0, float(exact.abs().max())))


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
        cache = TierCache("k4v4", max_tokens=64)
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
