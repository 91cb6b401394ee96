# SPDX-License-Identifier: Apache-2.0
"""bench/answers on a small random model: the forward pass, schemes in NumPy, and what quality.py writes.

quality_test.py SOURCE_DIR"""
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, f"{sys.argv.pop(1)}/bench/answers")
import quality
import schemes
import tasks
import tiny
from model import LayerCache, Model
from predictions import log_probabilities

SEED = random.SystemRandom().getrandbits(32)
# float32 against float64 leaves errors of about 1e-5, but for elements of the cache that round to the other neighbour in float16: 2^-11 of
# an element, of a score of up to 100 about 0.05, and so much of a value. Logits have a deviation of 1: a wrong place shows.
LOGIT_ERROR = 0.1


class TinyModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rng = np.random.default_rng(SEED)
        cls.folder = tempfile.TemporaryDirectory()
        cls.weights = tiny.write_model(cls.folder.name, cls.rng)
        cls.model = Model(cls.folder.name)
        cls.ids = cls.rng.integers(0, 256, 120).tolist()
        cls.cache = cls.model.prefill(cls.ids)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def cut(self, n):
        return [LayerCache(c.k[:, :n], c.v[:, :n]) for c in self.cache]


class Forward(TinyModel):
    def test_continuation_is_the_definition(self):
        want = tiny.reference_logits(self.weights, self.ids[:60])
        got = self.model.continued(self.ids[20:60], self.cut(20))
        np.testing.assert_allclose(got, want[20:], atol=LOGIT_ERROR, err_msg=f"seed {SEED}")

    def test_continued_from_any_layer(self):
        cache = self.cut(100)
        states = self.model.hidden_states(self.ids[100:], cache)
        want = self.model.continued(self.ids[100:], cache)
        for layer in range(self.model.layers + 1):
            np.testing.assert_array_equal(self.model.continued_from(layer, states[layer], cache), want)

    def test_change_of_a_later_layer_needs_only_the_later_layers(self):
        cache = self.cut(100)
        states = self.model.hidden_states(self.ids[100:], cache)
        cache[2] = LayerCache(cache[2].k, -cache[2].v)
        got = self.model.continued_from(2, states[2], cache)
        np.testing.assert_array_equal(got, self.model.continued(self.ids[100:], cache))
        self.assertGreater(np.abs(got - self.model.continued(self.ids[100:], self.cut(100))).max(), 0.1)

    def test_blocks_of_queries_do_not_change_the_cache(self):
        import model
        before, model.SCORES = model.SCORES, 7 * 2 * len(self.ids)
        try:
            again = self.model.prefill(self.ids)
        finally:
            model.SCORES = before
        for a, b in zip(again, self.cache):
            # as above: sums in another order round a few elements of the cache the other way
            np.testing.assert_allclose(a.k, b.k, atol=LOGIT_ERROR * np.abs(b.k).max())
            np.testing.assert_allclose(a.significance, b.significance, atol=LOGIT_ERROR)

    def test_keys_turn_back(self):
        key = self.cache[0].k
        h = self.model.norm(self.model.embedding[self.ids], self.model.weights[0]["input_layernorm"])
        plain = (h @ self.model.weights[0]["k_proj"].T).reshape(len(self.ids), tiny.KV_HEADS, -1).transpose(1, 0, 2)
        back = self.model.rope.turned(key, -np.arange(len(self.ids)))
        np.testing.assert_allclose(back, plain, atol=2**-10 * np.abs(plain).max())  # float16 of keys
        self.assertEqual((self.model.rope.dims, self.model.rope.pairing), (tiny.HEAD_DIM, "halves"))

    def test_tokenizer(self):
        t = self.model.tokenizer
        self.assertEqual(t.encode("the 42"), [257, ord(" "), ord("4"), ord("2")])
        text = "".join(chr(c) for c in self.rng.integers(32, 0x2000, 300)) + "then 1234\r\n\t"
        self.assertEqual(t.decode(t.encode(text)), text)

    def test_other_models_are_refused(self):
        for change in ({"model_type": "gpt2"}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}):
            with tempfile.TemporaryDirectory() as folder:
                tiny.write_model(folder, self.rng, **change)
                self.assertRaisesRegex(ValueError, "supported", Model, folder)


def drawn_profile(cache, rope, rng):
    """[schemes.LayerProfile]: means of the cache, everything else drawn."""
    out = []
    for layer in cache:
        heads, tokens, dims = layer.k.shape
        weights = np.exp(rng.uniform(-1, 1, (heads, dims))).astype(np.float32)
        scales = np.exp(rng.uniform(-1, 1, (2, heads))).astype(np.float32)
        before = rope.turned(layer.k, -np.arange(tokens)).mean(1)
        out.append(schemes.LayerProfile(before, weights / schemes.rms(weights, -1), dims * np.exp(rng.uniform(-1, 1, heads)), layer.k.mean(1),
                                        *scales, rng.integers(0, 3, heads)))
    return out


class Schemes(TinyModel):
    def setUp(self):
        self.profile = drawn_profile(self.cache, self.model.rope, self.rng)
        self.layer = self.cache[1]
        self.at = schemes.body(self.layer)

    def run_scheme(self, name):
        return schemes.SCHEMES[name](self.layer, self.model.rope, self.profile[1])

    def test_sinks_and_window_are_raw(self):
        for name in schemes.SCHEMES:
            left = self.run_scheme(name)
            for got, want in ((left.k, self.layer.k), (left.v, self.layer.v)):
                np.testing.assert_array_equal(got[:, :schemes.SINKS], want[:, :schemes.SINKS], name)
                np.testing.assert_array_equal(got[:, -schemes.WINDOW:], want[:, -schemes.WINDOW:], name)
                self.assertGreater(np.abs(got - want).max(), 0, name)
            self.assertLess(left.bytes, 2 * 2 * self.layer.k.size)

    def test_weighted_steps_err_by_half_a_step(self):
        k, v = 0.5, 0.45
        left, p = schemes.WeightedSteps(k, v)(self.layer, self.model.rope, self.profile[1]), self.profile[1]
        places = np.arange(self.at.start, self.at.stop)
        factor = np.exp2(schemes.importance_exponents(self.layer, self.at) / 8)[..., None]
        error = self.model.rope.turned((left.k - self.layer.k)[:, self.at], -places) * p.weights[:, None]
        step = k * np.sqrt(12 * tiny.HEAD_DIM / p.energy)[:, None, None] * p.key_scale[:, None, None] * factor
        self.assertLess((np.abs(error) / step).max(), 0.501, f"seed {SEED}")  # and float32's rounding
        self.assertGreater((np.abs(error) / step).max(), 0.3)
        value = self.layer.v[:, self.at]
        step = v * np.sqrt(12) * p.value_scale[:, None, None] * schemes.rms(value, -1) * factor
        self.assertLess((np.abs(left.v[:, self.at] - value) / step).max(), 0.501 * 2**(1 / 16))  # rms in eighths of an octave

    def test_importance(self):
        layer = LayerCache(self.layer.k, self.layer.v, None, np.zeros_like(self.layer.significance))
        self.assertTrue((schemes.importance_exponents(layer, self.at) == 4).all())  # nobody looked: the largest step
        layer.significance[:] = 1
        g = schemes.importance_exponents(layer, self.at)
        place = self.at.start + 1
        self.assertEqual(g[0, 0], round(8 * np.log2(max(0.5, place**-0.15))))

    def test_fixed_widths_count_their_bits(self):
        tokens, raw = self.at.stop - self.at.start, schemes.SINKS + schemes.WINDOW
        want = tiny.KV_HEADS * (tokens * ((8 + 4) * tiny.HEAD_DIM + 2 * 32) + raw * 2 * 16 * tiny.HEAD_DIM) / 8
        self.assertEqual(self.run_scheme("K8V4").bytes, want)

    def test_min_max_errs_by_half_a_step(self):
        x = self.rng.standard_normal((5, 64)).astype(np.float32)
        for bits in (2, 4, 8):
            step = (x.max(-1) - x.min(-1)) / (2**bits - 1)
            # scale and zero point in float16: 2^-11 of the range
            bound = step / 2 + 2**-10 * np.abs(x).max(-1) * 2
            self.assertTrue((np.abs(schemes.min_max(x, bits) - x).max(-1) <= bound).all(), f"seed {SEED}")

    def test_kivi_leaves_an_incomplete_group_raw(self):
        """Groups begin at multiples of 8; the first lacks the sinks."""
        tokens = self.layer.k.shape[1] - 3
        layer = LayerCache(self.layer.k[:, :tokens], self.layer.v[:, :tokens])
        left = schemes.kivi(4, 8)(layer, self.model.rope, None)
        stop = tokens - schemes.WINDOW
        whole = stop // 8 * 8
        self.assertLess(whole, stop)
        np.testing.assert_array_equal(left.k[:, whole:], layer.k[:, whole:])
        groups = [(schemes.SINKS, 8), *((i, i + 8) for i in range(8, whole, 8))]
        for a, b in groups:
            for h in range(tiny.KV_HEADS):
                self.assertLessEqual(max(len(np.unique(left.k[h, a:b, c])) for c in range(tiny.HEAD_DIM)), 16)
                low, high = left.k[h, a:b].min(0), layer.k[h, a:b].min(0)
                np.testing.assert_allclose(low, high, atol=2**-10 * np.abs(layer.k).max())  # the zero point, in float16
        scales = 32 * tiny.KV_HEADS * (len(groups) * tiny.HEAD_DIM + stop - schemes.SINKS)
        rows = tiny.KV_HEADS * tiny.HEAD_DIM
        coded, raw = whole + stop - 2 * schemes.SINKS, stop - whole + 2 * (schemes.SINKS + schemes.WINDOW)
        self.assertEqual(left.bytes, (scales + rows * (4 * coded + 16 * raw)) / 8)

    def test_an_idea_left_out_leaves_the_rest(self):
        """What every variant of the ladder keeps raw, and which component errs as in the whole."""
        def run(steps):
            return steps(self.layer, self.model.rope, self.profile[1])
        whole = run(schemes.WHOLE)
        for name, steps in schemes.ladder().items():
            if steps.window >= self.layer.k.shape[1] - schemes.WINDOW:
                continue
            left = run(steps)
            raw = np.r_[:steps.sinks, self.layer.k.shape[1] - steps.window:self.layer.k.shape[1]]
            np.testing.assert_array_equal(left.k[:, raw], self.layer.k[:, raw], name)
            self.assertTrue((left.k != whole.k).any() or (left.v != whole.v).any(), f"{name}, seed {SEED}")
            self.assertEqual(run(steps.times(1)).bytes, left.bytes)
            self.assertLess(run(steps.times(2)).bytes, left.bytes)
        same_values = schemes.ladder()["all but weights by pair of dims"]
        np.testing.assert_array_equal(run(same_values).v, whole.v)

    def test_classes_of_heads(self):
        sensitivity = 10.0**self.rng.uniform(-4, -1, (10, 3))
        classes = schemes.head_classes(sensitivity)
        self.assertEqual(np.bincount(classes.ravel()).tolist(), [3, 12, 15])
        self.assertGreater(sensitivity[classes == 0].min(), sensitivity[classes == 1].max())
        self.assertGreater(sensitivity[classes == 1].min(), sensitivity[classes == 2].max())

    def test_equal_memory(self):
        steps = dataclasses.replace(schemes.WHOLE, head_scales=False, sinks=1)
        prompt = type("Prompt", (), {"layers": self.cache, "whole_memory": None, "ids": self.ids})
        whole = quality.by_layer(schemes.WHOLE, self.model, self.profile, prompt)[1]["memory"]
        facts = quality.at_equal_memory(steps, self.model, self.profile)(prompt)[1]
        self.assertLess(abs(facts["memory"] - whole), 0.01, f"seed {SEED}")

    def test_entropy(self):
        self.assertAlmostEqual(schemes.entropy(np.array([0, 0, 1, 2.])), 1.5)


class Prompts(TinyModel):
    def setUp(self):
        r = random.Random(SEED)
        self.texts = [" ".join(tasks.syllables(r, 3) for _ in range(9000)) for _ in range(2)]

    def test_text_goes_on(self):
        item = tasks.going_on(random.Random(SEED), self.model, self.texts[0], 500)
        self.assertEqual((len(item.prompt), len(item.continuation)), (500, tasks.CONTINUED))
        self.assertIn(self.model.tokenizer.decode(item.prompt + item.continuation), self.texts[0])

    def test_lookups_ask_for_what_the_prompt_says(self):
        model = self.model
        tasks_continued, tasks.CONTINUED = tasks.CONTINUED, 400  # tokens are bytes here
        try:
            item = tasks.lookup(random.Random(SEED), model, self.texts, 3000)
        finally:
            tasks.CONTINUED = tasks_continued
        prompt, rest = model.tokenizer.decode(item.prompt), model.tokenizer.decode(item.continuation)
        self.assertEqual(len(item.prompt), 3000)
        self.assertEqual(sum(tasks.LOOKUP_SENTENCE.format(n) in prompt for n in tasks.LOOKUP_NAMES), tasks.LOOKUP_ENTRIES, f"seed {SEED}")
        asked = [line for line in rest.split("\n") if line]
        self.assertEqual(len(asked), tasks.LOOKUPS)
        for line, (a, b) in zip(asked, item.answers):
            self.assertIn(line, prompt)
            self.assertTrue(line.endswith(model.tokenizer.decode(item.continuation[a:b]) + "."))

    def test_prefilled_prompts_come_back(self):
        with tempfile.TemporaryDirectory() as work:
            item = tasks.going_on(random.Random(SEED), self.model, self.texts[0], 200)
            for _ in range(2):
                prompt = quality.Prefilled(self.model, pathlib.Path(work), item.prompt, item.continuation)
                exact = log_probabilities(self.model.continued(item.continuation, prompt.layers))
                np.testing.assert_allclose(prompt.exact, exact, atol=1e-5)
            self.assertEqual(len(list(pathlib.Path(work, "prefilled").iterdir())), 1)
            raw = quality.measured(self.model, item, prompt, lambda p: (p.layers, {"memory": 1.0}))
            self.assertLess(abs(raw["kl"]), 1e-6)
            self.assertEqual((raw["same_top"], raw["memory"]), (1, 1))


class Written(unittest.TestCase):
    ROW = {"memory": 0.25, "kl": 0.0041234567, "same_top": 0.5, "right": 3}

    def test_results(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            results = quality.Results(path, {"schema": "s", "texts": []})
            for i in range(2):
                results.add(2048, i, {"task": "text", "nll": i}, {"a": self.ROW, "b": self.ROW})
            size = json.loads(path.read_text())["sizes"][0]
            self.assertEqual(size["schemes"][1], {"name": "b", "memory": [0.25] * 2, "kl": [0.0041235] * 2, "same_top": [0.5] * 2, "right": [3] * 2})
            self.assertEqual([p["nll"] for p in size["prompts"]], [0, 1])

    def test_a_second_run_measures_what_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            path, head = pathlib.Path(folder) / "out.json", {"schema": "s", "seed": 1}
            results = quality.Results(path, head)
            for i in range(2):
                results.add(2048, i, {"nll": i}, {"a": self.ROW})
            again = quality.Results(path, head)
            self.assertEqual(again.text(), path.read_text())
            self.assertEqual(again.missing(2048, ["a", "b"], 3), [["b"], ["b"], ["a", "b"]])
            self.assertEqual(again.missing(64, ["a"], 1), [["a"]])
            again.add(2048, 0, {"nll": 0}, {"b": self.ROW})
            again.add(2048, 2, {"nll": 2}, {"a": self.ROW})
            size = json.loads(path.read_text())["sizes"][0]
            self.assertEqual([(s["name"], len(s["kl"])) for s in size["schemes"]], [("a", 3), ("b", 1)])
            self.assertEqual([p["nll"] for p in size["prompts"]], [0, 1, 2])
            self.assertRaises(SystemExit, quality.Results, path, head | {"seed": 2})


if __name__ == "__main__":
    unittest.main()
