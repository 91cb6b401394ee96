# SPDX-License-Identifier: Apache-2.0
"""Calibration by a model, on tiny random models in NumPy: statistics, sensitivities, what is refused, and going on after a stop.

calibration_test.py PACKAGE_DIR SOURCE_DIR"""
import contextlib
import importlib.util
import io
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import numpy as np

PACKAGE, SOURCE = sys.argv[1:3]
del sys.argv[1:]
sys.path[:0] = [PACKAGE, str(pathlib.Path(SOURCE) / "bench" / "answers")]
import tierkv  # noqa: E402
from model import LayerCache, Model, byte_symbols  # noqa: E402
from numpy_calibration import NumpyModel  # noqa: E402
from tierkv import _calibration as core  # noqa: E402

COMMAND = pathlib.Path(SOURCE) / "bench" / "answers" / "numpy_calibration.py"
PLAN = core.Plan(prompt_tokens=180, suffix_tokens=12, window=16)
LAYERS, Q_HEADS, KV_HEADS, DIM, HIDDEN, VOCABULARY = 3, 4, 2, 8, 32, 256


def write_model(folder, rng):
    """A Llama of random weights whose tokens are bytes; in the last layer kv head 1 leads nowhere and head 0 counts twice."""
    config = dict(model_type="llama", num_hidden_layers=LAYERS, num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
                  hidden_size=HIDDEN, rms_norm_eps=1e-5, rope_theta=100.0, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0)
    weights = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        weights |= {p + "input_layernorm.weight": (HIDDEN,), p + "post_attention_layernorm.weight": (HIDDEN,),
                    p + "self_attn.q_proj.weight": (Q_HEADS * DIM, HIDDEN), p + "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
                    p + "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN), p + "self_attn.o_proj.weight": (HIDDEN, Q_HEADS * DIM),
                    p + "mlp.gate_proj.weight": (2 * HIDDEN, HIDDEN), p + "mlp.up_proj.weight": (2 * HIDDEN, HIDDEN),
                    p + "mlp.down_proj.weight": (HIDDEN, 2 * HIDDEN)}
    arrays = {n: rng.normal(0, 1.5 * s[-1]**-0.5, s).astype("<f4") if len(s) == 2 else rng.uniform(0.5, 1.5, s).astype("<f4")
              for n, s in weights.items()}
    last = arrays[f"model.layers.{LAYERS - 1}.self_attn.o_proj.weight"]
    last[:, :2 * DIM] *= 2
    last[:, 2 * DIM:] = 0
    header, at = {}, 0
    for name, a in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(np.uint64(len(text)).tobytes() + text + b"".join(a.tobytes() for a in arrays.values()))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    vocabulary = {symbol: byte for byte, symbol in byte_symbols().items()}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary, "merges": []}, "added_tokens": []}))


class CalibrationTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.seed = random.SystemRandom().randrange(2**32)
        cls.rng = np.random.default_rng(cls.seed)
        cls.temporary = tempfile.TemporaryDirectory()
        cls.dir = pathlib.Path(cls.temporary.name)
        cls.folder = cls.dir / "tiny"
        cls.folder.mkdir()
        write_model(cls.folder, cls.rng)
        cls.bare = Model(cls.folder)
        cls.model = NumpyModel(cls.bare, "tiny")
        size = PLAN.prompt_tokens + PLAN.suffix_tokens
        cls.prompts = [cls.rng.integers(0, VOCABULARY, size) for _ in range(2)]
        cls.profile = core.calibrate(cls.model, cls.prompts, PLAN)[0]

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def setUp(self):
        self.message = f"seed {self.seed}"


class Statistics(CalibrationTest):
    def projections(self, ids):
        """q, k, v of each layer before any rotation, in float32 without the cache's rounding."""
        m, x = self.bare, self.bare.embedding[ids]
        for layer, cached in enumerate(m.prefill(ids)):
            w = m.weights[layer]
            h = m.norm(x, w["input_layernorm"])
            yield [(h @ w[f"{c}_proj"].T).reshape(len(ids), -1, DIM).transpose(1, 0, 2) for c in "qkv"], cached
            x = m.after_attention(layer, x, m.attention(cached.q, cached.k, cached.v))

    def test_they_are_those_of_the_bodies(self):
        """Keys and values are rounded to float16 where they enter the cache, at most 2^-11 of the largest; energies are of float32."""
        body = slice(4, PLAN.prompt_tokens - PLAN.window)
        found = [list(self.projections(ids[:PLAN.prompt_tokens])) for ids in self.prompts]
        for layer in range(LAYERS):
            q, k, v = (np.concatenate([f[layer][0][c][:, body] for f in found], 1).astype(np.float64) for c in range(3))
            after = np.concatenate([f[layer][1].k[:, body] for f in found], 1).astype(np.float64)
            p = self.profile
            rounding = 2.0**-10 * max(np.abs(k).max(), np.abs(v).max())
            np.testing.assert_allclose(p.key_mean_before_rope[layer], k.mean(1), atol=rounding, err_msg=self.message)
            np.testing.assert_allclose(p.key_mean[layer], after.mean(1), atol=1e-5, err_msg=self.message)
            np.testing.assert_allclose(p.value_mean[layer], v.mean(1), atol=rounding, err_msg=self.message)
            np.testing.assert_allclose(p.value_signal[layer], (v * v).sum(-1).mean(1), rtol=2e-3, err_msg=self.message)
            energy = (q * q).reshape(KV_HEADS, -1, q.shape[1], DIM).mean((1, 2))
            pairs = (energy[:, :DIM // 2] + energy[:, DIM // 2:]) / 2  # a turn keeps the sum of a pair
            np.testing.assert_allclose(p.query_energy[layer], np.concatenate([pairs, pairs], -1), rtol=1e-4, err_msg=self.message)
            np.testing.assert_allclose(p.query_trace[layer], energy.sum(-1), rtol=1e-4, err_msg=self.message)

    def test_turning_is_a_rotation_of_pairs(self):
        x = self.rng.normal(size=(2, 5, 8)).astype(np.float32)
        positions = np.array([0, 1, 7, 100, 2000])
        for pairing, dims, first in (("halves", 8, lambda i: (i, i + 4)), ("halves", 4, lambda i: (i, i + 2)),
                                     ("neighbours", 6, lambda i: (2 * i, 2 * i + 1))):
            inv_freq = self.rng.uniform(0, 1, dims // 2).astype(np.float32)
            rope = tierkv.Rope(pairing, dims, inv_freq)
            expected = x.astype(np.float64)
            for i, f in enumerate(inv_freq.astype(np.float64)):
                a, b = first(i)
                z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * f * positions)
                expected[..., a], expected[..., b] = z.real, z.imag
            got = core.turned(x, rope, inv_freq, positions)
            np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=self.message)
            np.testing.assert_allclose(core.turned(got, rope, inv_freq, -positions), x, atol=1e-5, err_msg=self.message)

    def test_layers_may_turn_differently(self):
        """A layer without rotation has frequencies of zero: its keys are their own before RoPE, and its energies are not paired."""
        facts = self.model.facts()
        table = np.stack([facts.rope.inv_freq, np.zeros(DIM // 2, np.float32), facts.rope.inv_freq])
        facts = core.Facts("x", LAYERS, Q_HEADS, KV_HEADS, DIM, facts.sm_scale, tierkv.Rope("halves", DIM, table))
        moments = core.Moments(facts)
        for layer, cached in enumerate(self.bare.prefill(self.prompts[0][:PLAN.prompt_tokens])):
            moments.add(layer, cached, PLAN.body)
        profile = moments.profile()
        np.testing.assert_array_equal(profile.key_mean_before_rope[1], profile.key_mean[1])
        self.assertFalse(np.array_equal(profile.key_mean_before_rope[0], profile.key_mean[0]))
        half = DIM // 2
        np.testing.assert_array_equal(profile.query_energy[0][:, :half], profile.query_energy[0][:, half:])
        self.assertFalse(np.allclose(profile.query_energy[1][:, :half], profile.query_energy[1][:, half:]))


class Sensitivities(CalibrationTest):
    def coarse(self, layer, cached, head, component):
        """The layer with one coarse head, written token by token in float64."""
        k, v = cached.k.astype(np.float64), cached.v.astype(np.float64)
        f = self.bare.rope.inv_freq.astype(np.float64)
        p, half = self.profile, DIM // 2
        step = 0.4 * np.sqrt(12 / p.query_trace[layer, head]) / self.bare.sm_scale
        mean = p.key_mean_before_rope[layer, head].astype(np.float64)
        for t in range(4, PLAN.prompt_tokens - PLAN.window):
            if component != "value":
                z = (k[head, t, :half] + 1j * k[head, t, half:]) * np.exp(-1j * f * t)
                y = np.concatenate([z.real, z.imag]) - mean
                y = np.rint(y / step) * step + mean
                z = (y[:half] + 1j * y[half:]) * np.exp(1j * f * t)
                k[head, t] = np.concatenate([z.real, z.imag])
            if component != "key":
                rms = 2 ** (np.rint(8 * np.log2(np.sqrt((v[head, t]**2).mean()))) / 8)
                s = 0.35 * np.sqrt(12) * rms
                v[head, t] = np.rint(v[head, t] / s) * s
        return LayerCache(k.astype(np.float32), v.astype(np.float32))

    def divergence(self, ids, layer, head, component):
        prompt, end = ids[:PLAN.prompt_tokens], ids[PLAN.prompt_tokens:]
        cache = self.bare.prefill(prompt)
        changed = list(cache)
        changed[layer] = self.coarse(layer, cache[layer], head, component)
        out = []
        for follows in (prompt[PLAN.window:PLAN.window + PLAN.suffix_tokens], end):
            logits = [self.bare.continued(follows, c).astype(np.float64) for c in (cache, changed)]
            exact, coarse = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in logits)
            out.append((np.exp(exact) * (exact - coarse)).sum(-1).mean())
        return np.mean(out)

    def test_they_are_the_divergence_of_one_coarse_head(self):
        """Roundings to steps can flip where float32 and float64 differ, one code in thousands: 5 %."""
        for layer, head, component in ((0, 1, "key"), (1, 0, "value"), (1, 1, "joint"), (LAYERS - 1, 0, "joint")):
            expected = np.mean([self.divergence(ids, layer, head, component) for ids in self.prompts])
            got = getattr(self.profile, f"{component}_sensitivity")[layer, head]
            self.assertAlmostEqual(got, max(expected, core.LEAST_KL), delta=0.05 * expected + 1e-7, msg=f"{self.message} {layer} {head} {component}")

    def test_a_head_that_leads_nowhere_is_at_the_floor(self):
        for name in ("key", "value", "joint"):
            kl = getattr(self.profile, f"{name}_sensitivity")
            self.assertEqual(kl[LAYERS - 1, 1], core.LEAST_KL, self.message)
            self.assertGreater(kl[LAYERS - 1, 0], 10 * core.LEAST_KL, self.message)
        self.assertEqual(self.profile.key_scale[LAYERS - 1, 1], self.profile.key_scale.max(), self.message)
        np.testing.assert_array_equal(self.profile.value_scale, tierkv.head_scales(self.profile.value_sensitivity))

    def test_sinks_window_and_other_heads_stay(self):
        cached = self.bare.prefill(self.prompts[0][:PLAN.prompt_tokens])[1]
        changes = core.variants(cached, 1, self.model.facts(), self.profile, PLAN)
        self.assertEqual(len(changes), 1 + 3 * KV_HEADS)
        np.testing.assert_allclose(changes[0][0], cached.k, atol=1e-5)
        body = PLAN.body
        for i, (k, v) in enumerate(changes[1:]):
            head, component = divmod(i, 3)
            for name, got, was, touched in (("k", k, cached.k, component != 1), ("v", v, cached.v, component != 0)):
                differs = (got != was).any(-1)
                self.assertFalse(differs[1 - head].any())
                self.assertFalse(differs[head, :body.start].any() or differs[head, body.stop:].any(), f"{self.message} {name}")
                self.assertEqual(differs[head, body].mean() > 0.9, touched, f"{self.message} {name}")

    def test_noise_is_a_floor(self):
        kl = np.full((1, 1, 2, 3), 1e-4)
        for noise, floor in ((1e-6, 1e-4), (3e-4, 3e-4)):
            for s in core.sensitivities(kl, noise):
                np.testing.assert_array_equal(s, np.full((1, 2), floor))


class Stop(Exception):
    pass


class Resuming(CalibrationTest):
    def test_a_run_goes_on_where_it_was_stopped(self):
        path = self.dir / "resume.npz"

        def stop(prompt, layer):
            if (prompt, layer) == (1, 0):
                raise Stop
        with self.assertRaises(Stop):
            core.calibrate(self.model, self.prompts, PLAN, path, stop)
        self.assertEqual([p.name for p in self.dir.glob("resume*")], ["resume.npz"])
        again = []
        profile, resume = core.calibrate(self.model, self.prompts, PLAN, path, lambda *done: again.append(done))
        self.assertEqual(again, [(1, layer) for layer in range(1, LAYERS)])
        for name in ("key_mean_before_rope", "query_energy", "key_sensitivity", "value_sensitivity", "joint_sensitivity"):
            np.testing.assert_array_equal(getattr(profile, name), getattr(self.profile, name), err_msg=name)
        with self.assertRaisesRegex(core.CalibrationError, "resume.npz: begun with another model"):
            core.calibrate(self.model, self.prompts[:1], PLAN, path)
        path.write_bytes(path.read_bytes()[:100])
        with self.assertRaisesRegex(core.CalibrationError, "resume.npz: not a file to resume from"):
            core.calibrate(self.model, self.prompts, PLAN, path)
        resume.remove()
        self.assertFalse(path.exists())


class Prompts(CalibrationTest):
    def test_texts_take_turns(self):
        size = PLAN.prompt_tokens + PLAN.suffix_tokens
        texts = [("a", "a" * (2 * size)), ("b", "b" * size)]
        prompts = core.make_prompts(self.model, texts, PLAN, 3)
        self.assertEqual([bytes([p[1]]).decode() for p in prompts], ["a", "b", "a"])
        for p in prompts:
            self.assertEqual((len(p), p[0]), (size, 0))  # the token that opens every text is one of them
        with self.assertRaisesRegex(core.CalibrationError, "b: too short, 190 tokens; a prompt and what follows take 191"):
            core.make_prompts(self.model, [texts[0], ("b", "b" * 190)], PLAN, 3)

    def test_short_prompts_are_refused(self):
        with self.assertRaisesRegex(core.CalibrationError, "prompts of 100 tokens are too short"):
            core.calibrate(self.model, self.prompts, core.Plan(prompt_tokens=100))


class Command(CalibrationTest):
    def run_command(self, *arguments):
        return subprocess.run([sys.executable, "-B", COMMAND, *map(str, arguments)], capture_output=True, text=True,
                              env={"PYTHONPATH": PACKAGE, "PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1"})

    def refused(self, result, text):
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn(text, result.stderr)
        self.assertNotIn("Traceback", result.stderr)

    def test_a_profile_is_written(self):
        out, text = self.dir / "p.h5", self.dir / "text.txt"
        text.write_text("".join(map(chr, self.rng.integers(32, 127, 600))))
        options = ("--model", self.folder, "--model-id", "a/tiny", "--text", text, "-o", out, "--prompts", 1, "--prompt-tokens", 256,
                   "--suffix-tokens", 16)
        result = self.run_command(*options)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("joint sensitivity: KL", result.stdout)
        self.assertIn("prompt 1/1, layer 3/3", result.stderr)
        self.assertEqual([p.name for p in self.dir.glob("p.h5*")], ["p.h5"])
        profile = tierkv.read_profile(out)
        self.assertEqual((profile.model_id, profile.num_layers, profile.num_q_heads, profile.head_dim), ("a/tiny", LAYERS, Q_HEADS, DIM))
        np.testing.assert_array_equal(profile.rope.inv_freq, self.bare.rope.inv_freq)
        self.assertEqual(profile.classes([0.5]).sum(), LAYERS * KV_HEADS // 2)
        self.refused(self.run_command(*options), "p.h5: exists; give --force")
        before = out.read_bytes()
        self.refused(self.run_command(*options, "--force", "--prompt-tokens", 2048), "text.txt: too short")
        self.assertEqual(out.read_bytes(), before)

    def test_what_is_refused(self):
        text, out = self.dir / "some.txt", self.dir / "none.h5"
        text.write_text("x" * 400)
        for arguments, message in ((("--model", self.dir / "nothing", "--text", text), "nothing: not a model"),
                                   (("--model", self.folder, "--text", self.dir / "no.txt"), "no.txt: cannot be read"),
                                   (("--model", self.folder, "--text", text, "--prompts", 0), "--prompts"),
                                   (("--model", self.folder, "--text", text, "--prompt-tokens", 64), "too short")):
            self.refused(self.run_command("-o", out, *arguments), message)
        other = self.dir / "other"
        other.mkdir()
        (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        self.refused(self.run_command("-o", out, "--model", other, "--text", text), "'gpt2'")
        self.assertFalse(out.exists())

    def test_missing_torch_is_named(self):
        code = "import sys; sys.modules['torch'] = None; from tierkv.calibrate_model import main; sys.exit(main(sys.argv[1:]))"
        text = self.dir / "t.txt"
        text.write_text("x")
        result = subprocess.run([sys.executable, "-B", "-c", code, "--model", self.folder, "--text", text, "-o", self.dir / "t.h5"],
                                capture_output=True, text=True, env={"PYTHONPATH": PACKAGE})
        self.refused(result, "torch is missing: run pip install '.[calibrate]'")


BYTES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2)


@unittest.skipIf(any(importlib.util.find_spec(m) is None for m in ("torch", "transformers", "tokenizers")), "needs torch and transformers")
class Torch(unittest.TestCase):
    """The command on random models of transformers whose tokens are bytes."""

    @classmethod
    def setUpClass(cls):
        import torch
        import transformers
        from tierkv import _calibration_torch
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        cls.torch, cls.transformers, cls.ours = torch, transformers, _calibration_torch
        cls.command = importlib.import_module("tierkv.calibrate_model")
        cls.seed = random.SystemRandom().randrange(2**32)

    def setUp(self):
        self.torch.manual_seed(self.seed)
        self.rng = np.random.default_rng(self.seed)
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.dir = pathlib.Path(self.temporary.name)
        self.text, self.out = self.dir / "text.txt", self.dir / "profile.h5"
        self.text.write_text("".join(map(chr, self.rng.integers(32, 127, 600))))

    def save(self, name, kind, **options):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        config = self.transformers.AutoConfig.for_model(kind, **{**BYTES, **options})
        self.transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(self.dir / name)
        tokens = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
        tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        self.transformers.PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(self.dir / name)
        return self.dir / name

    def model(self, folder):
        return self.ours.TorchModel(str(folder), "tiny", "cpu", 4)

    def run_command(self, folder, *options):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            rc = self.command.main(["--model", str(folder), "--text", str(self.text), "-o", str(self.out), "--prompts", "1", "--prompt-tokens", "200",
                                    "--suffix-tokens", "16", *({} if "--device" in options else ("--device", "cpu")), *map(str, options)])
        return rc, said.getvalue()

    def refused(self, message, folder, *options):
        rc, said = self.run_command(folder, *options)
        self.assertEqual(rc, 3, said)
        self.assertIn(message, said)
        self.assertEqual(list(self.dir.glob("profile.h5*")), [])

    def test_readings_are_the_models_own(self):
        """Layers with a window, without one, and both in turn: EXAONE 4 keeps its window on layers that do not use it."""
        window = dict(sliding_window=48, head_dim=16)
        ids = self.rng.integers(3, VOCABULARY, 180)
        for kind, options in (("llama", {}), ("mistral", window), ("exaone4", dict(window, sliding_window_pattern=2)), ("cohere2", window)):
            with self.subTest(kind=kind, seed=self.seed):
                folder = self.save(kind, kind, **options)
                model = self.model(folder)
                reading = model.read(ids[130:], model.prefill(ids[:130]))
                own = self.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self.torch.float32, attn_implementation="eager").eval()
                with self.torch.inference_mode():
                    expected = own(input_ids=self.torch.from_numpy(ids)[None], use_cache=False).logits[0, 130:].log_softmax(-1)
                np.testing.assert_allclose(reading.exact.numpy(), expected.numpy(), atol=1e-4)

    def test_a_model_that_attends_otherwise_is_refused(self):
        model = self.model(self.save("exaone4", "exaone4", head_dim=16, sliding_window=48, sliding_window_pattern=2))
        for layer in model.base.layers:
            layer.self_attn.sliding_window = 8  # what the attention function is told, not what the model's masks are
        with self.torch.no_grad():
            model.model.get_output_embeddings().weight.mul_(8)  # for predictions that are not near uniform
        ids = self.rng.integers(3, VOCABULARY, 180)
        cache = model.prefill(ids[:130])
        with self.assertRaisesRegex(core.CalibrationError, "'exaone4': its own attention predicts something else"):
            model.read(ids[130:], cache)

    def test_rope_that_changes_with_the_length_is_refused(self):
        dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
        long = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=1024,
                    factor=4.0)
        for kind, rope in (("llama", dynamic), ("phi3", long)):
            folder = self.save(kind, kind, rope_parameters=rope, original_max_position_embeddings=1024)
            with self.assertRaisesRegex(tierkv.UnsupportedError, rope["rope_type"]):
                self.model(folder)
            self.refused(f"'{rope['rope_type']}'", folder)

    def test_measurements_of_other_weights_are_not_taken(self):
        class Stop(Exception):
            pass

        def stop(prompt, layer):
            raise Stop
        first, second = (self.model(self.save(name, "llama")) for name in ("first", "second"))
        self.assertEqual(first.facts().weights, self.model(self.dir / "first").facts().weights)
        path, prompts = self.dir / "resume.npz", [self.rng.integers(3, VOCABULARY, PLAN.prompt_tokens + PLAN.suffix_tokens)]
        with self.assertRaises(Stop):
            core.calibrate(first, prompts, PLAN, path, stop)
        before = path.read_bytes()
        with self.assertRaisesRegex(core.CalibrationError, "begun with another model"):
            core.calibrate(second, prompts, PLAN, path)
        self.assertEqual(path.read_bytes(), before)
        core.calibrate(first, prompts, PLAN, path)

    def test_bad_input_is_named(self):
        folder = self.save("llama", "llama")
        for batch in (0, -1):
            self.refused("--batch: must be positive", folder, "--batch", batch)
        for device in ("foo", "cuda:99", "meta"):
            self.refused(f"--device {device}: ", folder, "--device", device)
        self.refused("its attention does not go through transformers' attention interface",
                     self.save("falcon", "falcon", new_decoder_architecture=True, num_kv_heads=2))
        self.refused("the model knows 64", self.save("small", "llama", vocab_size=64))
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        for damaged in (whole[:1000], b"x" * len(whole), b""):
            weights.write_bytes(damaged)
            self.refused("llama: transformers cannot load it", folder)
        weights.write_bytes(whole)
        tokenizer = folder / "tokenizer.json"
        text = tokenizer.read_text()
        tokenizer.write_text(text[:100])
        self.refused("llama: transformers cannot load it", folder)
        tokenizer.write_text(text)
        rc, said = self.run_command(folder)
        self.assertEqual(rc, 0, said)
        self.assertEqual(tierkv.read_profile(self.out).num_layers, 4)


if __name__ == "__main__":
    unittest.main()
