# SPDX-License-Identifier: Apache-2.0
"""What the vLLM plugin decides without tensors: settings, refusals, classes of requests, slices of prefixes, registration."""
import enum
import random
import sys
import types
import unittest
from unittest import mock

sys.path.insert(0, sys.argv.pop(1))
from tierkv import _engine  # noqa: E402
from tierkv.vllm import BACKEND, _versions, batches, refusals, register, settings  # noqa: E402


class SettingsTest(unittest.TestCase):
    def refused(self, given, word):
        with self.assertRaises(ValueError) as e:
            settings.read_settings({"tierkv": given})
        self.assertIn(word, str(e.exception))

    def test_defaults(self):
        for additional in ({}, {"tierkv": {}}, {"other": 1}, None):
            s = settings.read_settings(additional)
            self.assertEqual((s.format, s.layers, s.profile, s.rotate), ("k4v4", (), None, True))

    def test_layers(self):
        s = settings.read_settings({"tierkv": {"format": "k4v2", "layers": {"0": "raw", "2-5": "k8v4", 7: "k4v4"}}})
        self.assertEqual([s.format_of(i) for i in range(9)], ["raw", "k4v2"] + 4 * ["k8v4"] + ["k4v2", "k4v4", "k4v2"])
        s.check_layers(8)
        with self.assertRaisesRegex(ValueError, "layer 7 of a model with 7"):
            s.check_layers(7)

    def test_layers_by_name(self):
        self.assertEqual(settings.layer_index("model.layers.13.self_attn.attn"), 13)
        for name in ("mtp.layers.0.self_attn.attn", "draft_model.model.layers.1.self_attn.attn", "language_model.mtp_block.layers.0.attn"):
            self.assertIsNone(settings.layer_index(name))
        self.assertEqual(settings.read_settings({"tierkv": {"layers": {"0": "k8v4"}}}).format_of(None), "k4v4")
        for name in ("model.attn", "model.layers.3.experts.4.attn"):
            with self.assertRaisesRegex(ValueError, name):
                settings.layer_index(name)

    def test_mistakes_are_named(self):
        self.refused({"fromat": "k4v4"}, "fromat")
        self.refused({"format": "k3v3"}, "k3v3")
        self.refused({"layers": {"first": "k4v4"}}, "first")
        self.refused({"layers": {"5-2": "k4v4"}}, "5-2")
        self.refused({"layers": {"0-3": "k4v4", "3": "k8v4"}}, "layer 3")
        self.refused({"layers": {"0": "k5"}}, "k5")
        self.refused({"layers": "0"}, "layers")
        self.refused({"slice_tokens": 10}, "slice_tokens")
        self.refused({"slice_tokens": True}, "slice_tokens")
        self.refused({"profile": 3}, "profile")
        self.refused({"rotate": 1}, "rotate")
        self.refused("k4v4", "tierkv")

    def test_slots_are_those_of_the_library(self):
        """64 of them are a page, whose bytes the library says."""
        for format, (k, v) in settings.FORMATS.items():
            for head_dim in refusals.HEAD_DIMS:
                config = _engine.EngineConfigStruct(head_dim=head_dim, k_bits=k, v_bits=v)
                self.assertEqual(64 * settings.slot_bytes(format, head_dim), _engine.page_bytes(config), (format, head_dim))
        self.assertEqual([settings.slot_bytes(f, 128) for f in ("k8v4", "k4v4", "k4v2")], [200, 136, 104])


class RefusalsTest(unittest.TestCase):
    fits = dict(head_dim=128, num_q_heads=32, num_kv_heads=8)

    def test_what_fits_fits(self):
        self.assertEqual(refusals.refused_layer(refusals.LayerShape(**self.fits)), [])
        self.assertEqual(refusals.refused_engine(refusals.EngineShape()), [])
        self.assertEqual(refusals.refused_engine(refusals.EngineShape(128, 7)), [])
        refusals.refuse([], "anything")

    def test_layers_by_name(self):
        for change, word in ((dict(head_dim=80), "head_dim 80"), (dict(num_q_heads=136), "136"),
                             (dict(num_q_heads=30), "30"), (dict(dtype="float32"), "float32"), (dict(attn_type="encoder"), "encoder"),
                             (dict(kv_cache_dtype="fp8"), "fp8"), (dict(sliding_window=4096), "4096"),
                             (dict(logits_soft_cap=30.0), "30.0"), (dict(has_alibi=True), "ALiBi"), (dict(has_sinks=True), "sinks"),
                             (dict(shares_cache=True), "share"), (dict(other_arguments=("sparse",)), "sparse")):
            found = refusals.refused_layer(refusals.LayerShape(**{**self.fits, **change}))
            self.assertEqual(len(found), 1, change)
            self.assertIn(word, found[0])

    def test_engines_by_name(self):
        for change, word in ((dict(block_tokens=16), "16"), (dict(draft_tokens=8), "8 draft"), (dict(decode_context_parallel=2), "decode"),
                             (dict(prefill_context_parallel=2), "prefill"), (dict(sleep_mode=True), "sleep")):
            found = refusals.refused_engine(refusals.EngineShape(**change))
            self.assertEqual(len(found), 1, change)
            self.assertIn(word, found[0])
        with self.assertRaisesRegex(ValueError, "this engine: a; b"):
            refusals.refuse(["a", "b"], "this engine")


class BatchesTest(unittest.TestCase):
    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        self.random = random.Random(self.seed)

    def test_each_request_goes_one_way(self):
        # Decode, drafts, padding, tail, prompt behind a prefix, fresh prompts of 100, of 3 and of 1 token.
        queries, lens = [1, 4, 0, 7, 100, 100, 3, 1], [50, 60, 0, 80, 164, 100, 3, 1]
        c = batches.classify(queries, lens, 4)
        self.assertEqual((c.decodes, c.tails, c.chunks), ([0, 1, 7], [3], [4, 5, 6]))
        c = batches.classify(queries, lens, 1)
        self.assertEqual((c.decodes, c.tails, c.chunks), ([0, 7], [1, 3], [4, 5, 6]))

    def test_prefixes_are_found_in_mixed_batches(self):
        """A decode with a long context does not hide that a shorter prompt has a prefix."""
        c = batches.classify([1, 200, 200], [5000, 200, 264], 1)
        self.assertEqual((c.decodes, c.tails, c.chunks), ([0], [], [1, 2]))

    def test_every_request_is_in_one_class(self):
        for _ in range(200):
            n, decode = self.random.randrange(1, 20), self.random.randrange(1, 9)
            queries = [self.random.choice([0, 1, 2, 8, 9, 300]) for _ in range(n)]
            lens = [q + self.random.choice([0, 1, 70]) if q else 0 for q in queries]
            c = batches.classify(queries, lens, decode)
            self.assertEqual(sorted(c.decodes + c.tails + c.chunks), [i for i in range(n) if queries[i]], self.seed)
            for i in c.decodes:
                self.assertLessEqual(queries[i], decode)
            for i in c.tails:
                self.assertTrue(queries[i] <= 8 and lens[i] > queries[i], self.seed)
            for i in c.chunks:
                self.assertTrue(queries[i] > 8 or lens[i] == queries[i], self.seed)

    def test_runs(self):
        self.assertEqual(batches.runs([]), [])
        self.assertEqual(batches.runs([2, 3, 4, 7, 9, 10]), [(2, 5), (7, 8), (9, 11)])

    def test_rounds_cover_every_cached_token_once(self):
        for _ in range(200):
            contexts, request = [], 0
            for _ in range(self.random.randrange(1, 8)):
                request += self.random.choice([1, 1, 1, 2])
                contexts.append((request, self.random.choice([0, 1, 63, 64, 100, 1000])))
            most = self.random.choice([64, 100, 257, 5000])
            done = dict.fromkeys(dict(contexts), 0)
            for r in batches.rounds(contexts, most):
                self.assertLessEqual(sum(s.tokens for s in r), most, self.seed)
                self.assertEqual([s.request for s in r], list(range(r[0].request, r[0].request + len(r))), self.seed)
                for s in r:
                    self.assertEqual(s.first, done[s.request], self.seed)
                    self.assertGreater(s.tokens, 0)
                    done[s.request] += s.tokens
            self.assertEqual(done, dict(contexts), self.seed)

    def test_rounds_hold_short_prefixes_together(self):
        self.assertEqual([len(r) for r in batches.rounds([(0, 50), (1, 40), (2, 20), (3, 100)], 128)], [3, 1])

    def test_heads_of_a_rank(self):
        self.assertEqual(batches.head_range(8, 8, 0, 1), (0, 8))
        self.assertEqual(batches.head_range(8, 2, 3, 4), (6, 8))
        self.assertEqual(batches.head_range(2, 1, 5, 8), (1, 2))
        with self.assertRaises(ValueError):
            batches.head_range(8, 3, 0, 2)


class VersionsTest(unittest.TestCase):
    N = types.SimpleNamespace
    OLD = N(get_kv_cache_shape=None), N(TQFullAttentionSpec=N(__dataclass_fields__={"tq_slot_size": 0}), FullAttentionSpec=N(__dataclass_fields__={}))
    NEW = N(supported_kv_cache_layouts=None), N(FullAttentionSpec=N(__dataclass_fields__={"state_content_bytes": 0}))

    def test_caches_of_both(self):
        self.assertEqual(_versions.cache_spec(*self.OLD), (self.OLD[1].TQFullAttentionSpec, "tq_slot_size"))
        self.assertEqual(_versions.cache_spec(*self.NEW), (self.NEW[1].FullAttentionSpec, "state_content_bytes"))

    def test_others_are_refused_by_name(self):
        for backend, specs in ((self.OLD[0], self.NEW[1]), (self.NEW[0], self.OLD[1]), (self.N(), self.N())):
            with mock.patch.dict(sys.modules, vllm=self.N(__version__="0.99.1")):
                with self.assertRaisesRegex(ValueError, "0.26 and 0.33.*vLLM 0.99.1"):
                    _versions.cache_spec(backend, specs)

    def test_a_vllm_that_is_not_served_still_starts(self):
        with mock.patch.dict(sys.modules, {"vllm": self.N(__version__="0.9"), "vllm.v1": None}):
            with self.assertLogs("tierkv.vllm", "WARNING") as logs:
                register()
        self.assertRegex(logs.output[0], "0.26 and 0.33.*vLLM 0.9: ")

    def test_draft_tokens(self):
        for drafts, wanted in ((None, 0), (self.N(num_speculative_tokens=None), 0), (self.N(num_speculative_tokens=3), 3),
                               (self.N(num_speculative_tokens=3, parallel_drafting=True), 6)):
            config = self.N(speculative_config=drafts)
            self.assertEqual(_versions.draft_tokens(self.N(), config), wanted)
            self.assertEqual(_versions.draft_tokens(self.N(max_decode_query_len=lambda config: 5), config), 4)


class RegisterTest(unittest.TestCase):
    def test_once_or_many_times(self):
        class Enum(enum.Enum):
            CUSTOM = None

            def is_overridden(self):
                return self in overrides

            def get_path(self):
                return overrides[self]

        overrides = {}
        registry = types.ModuleType("registry")
        registry.AttentionBackendEnum = Enum
        registry.register_backend = overrides.__setitem__
        names = ["vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
        fakes = {**{n: types.ModuleType(n) for n in names}, "vllm.v1.attention.backends.registry": registry}
        before = {n: sys.modules.get(n) for n in fakes}
        sys.modules.update(fakes)
        try:
            with self.assertNoLogs("tierkv.vllm"):
                register()
                register()
            self.assertEqual(overrides, {Enum.CUSTOM: BACKEND})
            overrides[Enum.CUSTOM] = "somebody.else"
            with self.assertLogs("tierkv.vllm", "WARNING") as logs:
                register()
            self.assertIn("somebody.else", logs.output[0])
            self.assertEqual(overrides, {Enum.CUSTOM: "somebody.else"})
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
