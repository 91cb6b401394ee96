# SPDX-License-Identifier: Apache-2.0
"""tierkv.hf on a GPU: generation over a TierCache beside transformers' own cache, on a random model in half precision."""
import copy
import os
import sys
import unittest

sys.path.insert(0, sys.argv.pop(1))
try:
    import torch
    import transformers
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StableLmConfig, StableLmForCausalLM

    if int(transformers.__version__.split(".")[0]) < 5 or not torch.cuda.is_available():
        raise ImportError("needs a GPU and transformers 5")
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)
from tierkv import NonFiniteError  # noqa: E402
from tierkv.hf import STEPS_BETWEEN_LOOKS, TierCache  # noqa: E402

SEED = int.from_bytes(os.urandom(4), "little")
VOCABULARY = 97
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=384, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             head_dim=64, max_position_embeddings=4096, pad_token_id=0, eos_token_id=None, bos_token_id=None)
# Largest differences of logits, which are of order 1: rounding alone; 8 and 4 bits; 4 and 4 bits; entropy-coded steps without a profile.
RAW, BOUNDS = 0.05, {"k8v4": 0.3, "k4v4": 0.5, "small": 0.6, "channel": 0.6}


class Generation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.manual_seed(SEED)
        cls.models = {dtype: LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().to("cuda", dtype) for dtype in (torch.float16, torch.bfloat16)}

    def logits(self, cache, passes, mask=None, dtype=torch.float16):
        model = self.models[dtype]
        model.set_attn_implementation("tierkv" if isinstance(cache, TierCache) else "sdpa")
        out, seen = [], 0
        with torch.inference_mode():
            for ids in passes:
                seen += ids.shape[1]
                given = {}
                if mask is not None:
                    given = {"attention_mask": mask[:, :seen],
                             "position_ids": (mask[:, :seen].cumsum(1) - 1).clamp(min=0)[:, seen - ids.shape[1]:]}
                out.append(model(ids, past_key_values=cache, logits_to_keep=1, **given).logits[:, -1].float())
        return torch.stack(out)

    def compare(self, format, bound, lengths, rows=1, mask=None, dtype=torch.float16):
        passes = [torch.randint(1, VOCABULARY, (rows, n), device="cuda") for n in lengths]
        cache = TierCache(format, max_tokens=2048, max_sequences=rows)
        got = self.logits(cache, passes, mask, dtype)
        exact = self.logits(DynamicCache(), passes, mask, dtype)
        cache.store.take_status()
        difference = float((got - exact).abs().max())
        held = cache.bytes_held / cache.raw_bytes
        cache.close()
        self.assertLess(difference, bound, f"{format}, seed {SEED}")
        return difference, held

    def test_tokens_that_stay_raw(self):
        self.compare("k4v4", RAW, [40, 1, 1, 3, 1])
        self.compare("k4v4", 2 * RAW, [40, 1, 1, 3, 1], dtype=torch.bfloat16)

    def test_prompts_turns_and_steps(self):
        for format, bound in BOUNDS.items():
            difference, held = self.compare(format, bound, [700, 1, 1, 1, 90, 1, 5, 1])
            print(f"{format}: logits differ by {difference:.3f}, {100 * held:.1f} % of memory")

    def test_rope_over_part_of_the_head(self):
        for share in (0.5, 0.25):
            torch.manual_seed(SEED)
            config = StableLmConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share})
            self.models["part"] = StableLmForCausalLM(config).eval().to("cuda", torch.float16)
            self.compare("small", BOUNDS["small"], [700, 1, 1, 90, 1, 5], dtype="part")

    @unittest.skipIf(torch.cuda.device_count() < 2, "one GPU")
    def test_another_gpu_than_the_current_one(self):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().to("cuda:1", torch.float16)
        model.set_attn_implementation("tierkv")
        ids = torch.randint(1, VOCABULARY, (2, 300), device="cuda:1")
        cache = TierCache("small", max_tokens=512, max_sequences=2)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False)
        self.assertEqual((tuple(out.shape), torch.cuda.current_device(), cache.store._index), ((2, 310), 0, 1))
        cache.store.take_status()
        cache.close()

    def test_a_failure_that_kernels_find_late(self):
        one, more = (torch.randint(1, VOCABULARY, (1, n), device="cuda") for n in (1, 40))
        values = self.models[torch.float16].model.layers[1].self_attn.v_proj

        def broken_step(cache):
            hook = values.register_forward_hook(lambda module, given, out: out * float("nan"))
            self.logits(cache, [one])
            hook.remove()
        cache = TierCache("k8v4", max_tokens=512)
        self.logits(cache, [more])
        broken_step(cache)
        for passes in ([one] * (STEPS_BETWEEN_LOOKS + 1), [one], [more]):
            with self.assertRaisesRegex(NonFiniteError, "reset"):
                self.logits(cache, passes)
        cache.reset()
        self.logits(cache, [more])
        broken_step(cache)
        with self.assertRaisesRegex(NonFiniteError, "reset"):
            self.logits(cache, [more])
        cache.reset()
        self.logits(cache, [more])
        broken_step(cache)
        cache.reset()
        self.assertLess(float((self.logits(cache, [more]) - self.logits(DynamicCache(), [more])).abs().max()), RAW, f"seed {SEED}")

    def test_another_type_after_reset(self):
        cache, passes = TierCache("k8v4", max_tokens=512), [torch.randint(1, VOCABULARY, (1, n), device="cuda") for n in (200, 1)]
        for dtype in (torch.float16, torch.bfloat16, torch.float16):
            difference = (self.logits(cache, passes, dtype=dtype) - self.logits(DynamicCache(), passes, dtype=dtype)).abs().max()
            self.assertLess(float(difference), BOUNDS["k8v4"], f"seed {SEED}")
            twin = copy.deepcopy(cache)
            self.assertEqual(twin._store._index, torch.cuda.current_device())
            more = torch.randint(1, VOCABULARY, (1, 1), device="cuda")
            self.assertLess(float((self.logits(twin, [more], dtype=dtype) - self.logits(cache, [more], dtype=dtype)).abs().max()), RAW, f"seed {SEED}")
            twin.close()
            cache.reset()

    def test_left_padding(self):
        mask = torch.ones(3, 330, dtype=torch.long, device="cuda")
        mask[0, :100], mask[2, :7] = 0, 0
        self.compare("k8v4", BOUNDS["k8v4"], [320, 1, 1, 8], rows=3, mask=mask)

    def test_generate_with_beams_and_sampling(self):
        model = self.models[torch.float16]
        model.set_attn_implementation("tierkv")
        ids = torch.randint(1, VOCABULARY, (2, 150), device="cuda")
        cache = TierCache("k8v4", max_tokens=512, max_sequences=16)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=20, num_beams=3, do_sample=False)
        self.assertEqual(tuple(out.shape), (2, 170))
        cache.store.take_status()
        cache.close()


if __name__ == "__main__":
    unittest.main()
