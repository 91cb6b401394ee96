# SPDX-License-Identifier: Apache-2.0
"""capture_hf.py on small random models of several architectures, against what transformers itself computes.

K and V are compared with the model's own cache, significance with eager attention weights. Exits with 77 (skipped) without torch.
"""
import contextlib
import importlib.util
import io
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

if any(importlib.util.find_spec(m) is None for m in ("torch", "transformers", "h5py")):
    print("skipped: needs torch, transformers and h5py")
    sys.exit(77)

import h5py  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

ROOT = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
sys.path.insert(0, str(ROOT / "datasets"))
import capture_hf  # noqa: E402
import hf_rope  # noqa: E402

COMMON = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
              head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=0, eos_token_id=0)
MODELS = {
    "llama": {},
    "qwen3": {},
    "phi3": dict(num_key_value_heads=8, head_dim=8),
    "mistral": dict(sliding_window=24),
    "gemma2": dict(sliding_window=24, attn_logit_softcapping=20.0, query_pre_attn_scalar=16),
    "gpt_oss": dict(sliding_window=24, num_local_experts=2, num_experts_per_tok=1),
    "glm": {},
    "gemma3_text": dict(sliding_window=24),
    "gpt2": dict(n_embd=64, n_layer=3, n_head=4, n_positions=512),
}


def make_model(kind, **changes):
    common = {} if kind == "gpt2" else COMMON
    options = dict(common, **MODELS[kind], **changes)
    if kind == "gpt2":
        options.update(vocab_size=97, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():  # so that attention is far from uniform
            if "q_proj" in name or "k_proj" in name or "qkv" in name or "c_attn.weight" in name:
                p.mul_(8)
    return model


def significance_of(weights, kv_heads):
    """The definition, literally: weights [Hq, T, T]."""
    heads, tokens, _ = weights.shape
    best = weights.reshape(kv_heads, heads // kv_heads, tokens, tokens).max(1)
    out = np.zeros((kv_heads, tokens))
    for i in range(tokens - 1):
        out[:, i] = best[:, i + 1:, i].mean(1)
    return out


class Models(unittest.TestCase):
    def setUp(self):
        self.seed = int(np.random.SeedSequence().entropy % 2**32)
        torch.manual_seed(self.seed)
        self.rng = np.random.default_rng(self.seed)
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name) / "dump.h5"

    def tearDown(self):
        self.folder.cleanup()

    def capture(self, model, prompts, queries=-1):
        capture_hf.register()
        model.set_attn_implementation(capture_hf.NAME)
        capture_hf.capture(model, prompts, capture_hf.DumpFile(self.path, queries, 1), "test")

    def prompts(self, *lengths):
        return [capture_hf.Prompt(f"p{i}", "random", self.rng.integers(1, 97, n).astype(np.int32)) for i, n in enumerate(lengths)]

    def expected(self, model, tokens):
        model.set_attn_implementation("eager")
        ids = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0)
        with torch.inference_mode():
            out = model(ids, use_cache=True, output_attentions=True)
        cache = [(layer.keys[0].float().numpy(), layer.values[0].float().numpy()) for layer in out.past_key_values.layers]
        return cache, [a[0].float().numpy() for a in out.attentions]

    def test_architectures(self):
        for kind in MODELS:
            with self.subTest(kind=kind, seed=self.seed):
                model = make_model(kind)
                prompts = self.prompts(61, 1, 130)
                expected = [self.expected(model, p.tokens) for p in prompts]
                # Several blocks of queries, the last one short.
                capture_hf.BLOCK_BYTES = 4 * 8 * 130 * 17
                self.capture(model, prompts)
                with h5py.File(self.path) as f:
                    for prompt, (cache, attentions) in zip(prompts, expected):
                        for i, ((k, v), weights) in enumerate(zip(cache, attentions)):
                            layer = f[f"seq/{prompt.id}/layer/{i}"]
                            kept = k.shape[1]  # a sliding layer's own cache keeps its window
                            # float32 throughout; later layers see the other's rounding of the attention before them.
                            np.testing.assert_allclose(layer["k"][:, -kept:], k, rtol=0, atol=2e-5 * np.abs(k).max())
                            np.testing.assert_allclose(layer["v"][:, -kept:], v, rtol=0, atol=2e-5 * np.abs(v).max())
                            np.testing.assert_allclose(layer["significance"], significance_of(weights, k.shape[0]), rtol=0, atol=2e-5)
                            self.assertEqual(layer["q"].shape[1], prompt.tokens.size)
                    self.check_rope(f, model)
                    attrs = f.attrs
                    self.assertEqual(int(attrs["num_layers"]), 3)
                    self.assertEqual(bool(attrs["rope_applied"]), kind != "gpt2")

    def check_rope(self, f, model):
        """Keys of the first layer, turned back as the dump says, are the projection of its input: they were turned by nothing else."""
        kind = model.config.model_type
        self.assertEqual(f.attrs["rope_pairing"].decode(), {"gpt2": "none", "glm": "neighbours"}.get(kind, "halves"))
        if kind not in ("llama", "mistral", "glm"):
            return
        layer = model.model.layers[0]
        ids = torch.from_numpy(f["seq/p2/tokens"][:].astype(np.int64)).unsqueeze(0)
        with torch.inference_mode():
            hidden = layer.input_layernorm(model.model.embed_tokens(ids))
            plain = layer.self_attn.k_proj(hidden)[0].reshape(ids.shape[1], -1, int(f.attrs["head_dim"])).transpose(0, 1)
        inv_freq = torch.from_numpy(f["rope_inv_freq"][:])
        self.assertEqual(2 * inv_freq.shape[-1], int(f.attrs["rope_dims"]))
        for position in (0, 5, 129):
            for head, key in enumerate(f["seq/p2/layer/0/k"][:, position]):
                back = hf_rope.turned(torch.from_numpy(key), -position * inv_freq, f.attrs["rope_pairing"].decode())
                # float32 angles up to 129 radians err by 129 * 2^-24, keys by as much of their size, and some rounding
                np.testing.assert_allclose(back.numpy(), plain[head, position].numpy(), atol=1e-4 * float(plain.abs().max()))

    def test_scaled_and_partial_rope(self):
        yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
        by_type = {"sliding_attention": dict(rope_type="default", rope_theta=100.0), "full_attention": dict(rope_type="default", rope_theta=5000.0)}
        dynamic = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
        (prompt,) = self.prompts(12)
        for kind, changes, shape in (("llama", dict(rope_parameters=yarn), (8,)), ("llama", dict(rope_parameters=dynamic), None),
                                     ("phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)), (2,)),
                                     ("gemma3_text", dict(rope_parameters=by_type, layer_types=["sliding_attention", "full_attention", "sliding_attention"]), (3, 8))):
            with self.subTest(kind=kind, changes=changes):
                model = make_model(kind, **changes)
                self.capture(model, [prompt])
                with h5py.File(self.path) as f:
                    if shape is None:
                        self.assertNotIn("rope_pairing", f.attrs)
                        self.assertNotIn("rope_theta", f.attrs)
                        continue
                    self.assertEqual(f["rope_inv_freq"].shape, shape)
                    self.assertEqual(f["rope_inv_freq"].dtype, np.float32)
                    if kind == "gemma3_text":
                        want = np.asarray([t ** (-np.arange(8) / 8) for t in (100.0, 5000.0, 100.0)], np.float32)
                        np.testing.assert_allclose(f["rope_inv_freq"], want, rtol=1e-5)

    def test_rotations_are_those_of_the_layers(self):
        """Layers that do not rotate, parts of the head, and models with other names for it; in the type that the keys are in."""
        mixed = dict(sliding_window=24, head_dim=16)
        (prompt,) = self.prompts(12)
        for kind, options, pairing, dims, turning in (
                ("cohere2", dict(mixed, num_hidden_layers=4), "neighbours", 16, [1, 1, 1, 0]),
                ("exaone4", dict(mixed, num_hidden_layers=4, sliding_window_pattern=2), "halves", 16, [1, 0, 1, 0]),
                ("smollm3", dict(no_rope_layer_interval=2), "halves", 8, [1, 0, 1]),
                ("phi", dict(num_key_value_heads=8, partial_rotary_factor=0.5), "halves", 4, [1]),
                ("stablelm", dict(partial_rotary_factor=0.25), "halves", 2, [1]),
                ("persimmon", {}, "halves", 4, [1]),
                ("gptj", dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8), "neighbours", 8, [1])):
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(kind=kind, dtype=dtype, seed=self.seed):
                    common = {name: x for name, x in COMMON.items() if name != "head_dim"}
                    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**common, **options}), dtype=dtype).eval()
                    try:
                        self.capture(model, [prompt])
                    except (KeyError, ValueError, capture_hf.CaptureError) as e:
                        self.assertEqual(kind, "gptj", e)  # uses the interface only in newer versions
                        continue
                    with h5py.File(self.path) as f:
                        self.assertEqual((f.attrs["rope_applied"], f.attrs["rope_pairing"].decode(), f.attrs["rope_dims"]), (1, pairing, dims))
                        rows = np.atleast_2d(f["rope_inv_freq"][:])
                        self.assertEqual(rows.any(1).tolist(), list(map(bool, turning)))
                        np.testing.assert_array_equal(rows[:, 0], turning)

    def test_a_rotation_that_does_not_fit_is_left_out(self):
        model = make_model("llama")
        (prompt,) = self.prompts(12)
        original = model.model.rotary_emb.forward
        model.model.rotary_emb.forward = lambda x, position_ids: original(x, 2 * position_ids)
        capture_hf.register()
        model.set_attn_implementation(capture_hf.NAME)
        said = capture_hf.capture(model, [prompt], capture_hf.DumpFile(self.path, 1, 1), "test")
        self.assertIn("layer 0: its keys are not rotated by frequencies of the model", said)
        with h5py.File(self.path) as f:
            self.assertEqual(int(f.attrs["rope_applied"]), 1)
            self.assertNotIn("rope_pairing", f.attrs)

    def test_queries_are_those_of_the_scores(self):
        model = make_model("llama")
        (prompt,) = self.prompts(40)
        _, attentions = self.expected(model, prompt.tokens)
        self.capture(model, [prompt], queries=5)
        with h5py.File(self.path) as f:
            layer = f["seq/p0/layer/1"]
            np.testing.assert_array_equal(layer["q_positions"], range(35, 40))
            logits = np.einsum("hjd,hid->hji", layer["q"][:], np.repeat(layer["k"][:], 4, 0)) * f.attrs["sm_scale"]
            for row, position in enumerate(range(35, 40)):
                p = np.exp(logits[:, row, :position + 1] - logits[:, row, :position + 1].max(-1, keepdims=True))
                np.testing.assert_allclose(p / p.sum(-1, keepdims=True), attentions[1][:, position, :position + 1], atol=2e-5)

    def test_dtypes_are_kept(self):
        for dtype, name in capture_hf.DTYPES.items():
            model = make_model("llama").to(dtype)
            (prompt,) = self.prompts(20)
            k = self.expected(model, prompt.tokens)[0][0][0]
            self.capture(model, [prompt])
            with h5py.File(self.path) as f:
                self.assertEqual(f.attrs["dtype"].decode(), name)
                stored = f["seq/p0/layer/0/k"]
                self.assertEqual(stored.id.get_type().get_size(), 4 if dtype == torch.float32 else 2)
                out = np.empty(stored.shape, np.float32)
                stored.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, h5py.h5t.NATIVE_FLOAT)
                # The first layer's keys do not depend on how attention rounds: equal bit for bit.
                np.testing.assert_array_equal(out, k)

    def test_what_cannot_be_captured_leaves_no_file(self):
        model = make_model("llama")
        with self.assertRaisesRegex(capture_hf.CaptureError, "no tokens"):
            self.capture(model, self.prompts(4, 0))
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.fill_(float("nan"))
        with self.assertRaisesRegex(capture_hf.CaptureError, "layer 1: k is not finite"):
            self.capture(model, self.prompts(4))
        bloom = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", vocab_size=97, hidden_size=64, n_layer=2, n_head=4))
        dump = capture_hf.DumpFile(self.path, 1, 0)
        with self.assertRaisesRegex(capture_hf.CaptureError, "attention interface"):
            capture_hf.capture(bloom.eval(), self.prompts(4), dump, "bloom")
        self.assertEqual(list(self.path.parent.iterdir()), [])

    def test_an_output_is_not_replaced_without_being_asked(self):
        prompt, model, said = self.path.with_name("prompt.h5"), make_model("llama"), io.StringIO()
        self.capture(model, self.prompts(4))
        os.replace(self.path, prompt)
        self.path.write_bytes(b"precious")
        arguments = ["capture_hf.py", "--model", "makers/none", "--prompt", str(prompt), "--out", str(self.path), "--device", "cpu"]
        with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stderr(said):
            self.assertEqual(capture_hf.main(), 3)
        self.assertIn("--force", said.getvalue())
        self.assertEqual(self.path.read_bytes(), b"precious")
        load = mock.patch.object(capture_hf, "load_model", lambda *_: model)
        model.set_attn_implementation(capture_hf.NAME)
        with mock.patch.object(sys, "argv", [*arguments, "--force"]), load, contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(capture_hf.main(), 0)
        with h5py.File(self.path) as f:
            self.assertEqual(list(f["seq"]), ["p0"])
            self.assertEqual(bytes(f.attrs["model_id"]).decode(), "none")  # as tierkv.calibrate_model calls the model's profile

    def test_no_other_file_is_touched(self):
        """Neither one under the name of a part, nor one that appeared while the model ran."""
        neighbour = self.path.with_name("dump.h5.part")
        neighbour.write_bytes(b"precious")
        model = make_model("llama")
        self.capture(model, self.prompts(4))
        self.path.chmod(0o600)
        self.capture(model, self.prompts(4))
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)
        dump = capture_hf.DumpFile(self.path, 1, 0, overwrite=False)
        with self.assertRaisesRegex(capture_hf.CaptureError, "exists already"):
            capture_hf.capture(model, self.prompts(4), dump, "test")
        self.assertTrue(h5py.is_hdf5(self.path))
        self.path.unlink()
        capture_hf.capture(model, self.prompts(4), capture_hf.DumpFile(self.path, 1, 0, overwrite=False), "test")
        self.assertTrue(h5py.is_hdf5(self.path))
        self.assertEqual(neighbour.read_bytes(), b"precious")
        self.assertEqual(len(list(self.path.parent.iterdir())), 2)

    def refused(self, message, *arguments):
        said = io.StringIO()
        with mock.patch.object(sys, "argv", ["capture_hf.py", *map(str, arguments)]), contextlib.redirect_stderr(said):
            self.assertEqual(capture_hf.main(), 3, said.getvalue())
        self.assertIn(message, said.getvalue())

    def test_bad_input_is_named(self):
        folder = self.path.parent
        prompt, other, text = (folder / name for name in ("prompt.h5", "other.h5", "bytes.txt"))
        model = make_model("llama")
        self.capture(model, self.prompts(4))
        os.replace(self.path, prompt)
        model.save_pretrained(folder / "llama")
        with h5py.File(other, "w") as f:
            f["x"] = 1
        text.write_bytes(b"\xff\xfe\xfd")
        common = ("--model", folder / "llama", "--out", self.path, "--device", "cpu")
        self.refused("other.h5: cannot be read as a kv-dump", *common, "--prompt", other)
        self.refused("bytes.txt: cannot be read as text", *common, "--prompt", text)
        with h5py.File(folder / "long.h5", "w") as f:
            f["seq/" + "x" * 101 + "/tokens"] = np.arange(4, dtype=np.int32)
        self.refused("x' cannot name a sequence: 1 to 100 bytes", "--model", folder / "none", "--out", self.path, "--device", "cpu",
                     "--prompt", folder / "long.h5")
        for count in (0, -5000):
            self.refused("--max-tokens: must be positive", *common, "--prompt", prompt, f"--max-tokens={count}")
        self.refused("--queries: must not be below -1", *common, "--prompt", prompt, "--queries=-2")
        for device in ("foo", "cuda:99", "meta"):
            self.refused(f"--device {device}: ", *common, "--prompt", prompt, "--device", device)
        before = prompt.read_bytes()
        os.link(prompt, folder / "link.h5")
        for out in (prompt, folder / "link.h5"):
            self.refused("would replace the prompt", *common, "--prompt", prompt, "--force", "--out", out)
        self.assertEqual(prompt.read_bytes(), before)
        with h5py.File(other, "w") as f:
            f["seq/a/tokens"] = np.array([1, 97], np.int32)
        self.refused("a: its tokens are 1 to 97, the model knows 97", *common, "--prompt", other)
        falcon = AutoConfig.for_model("falcon", vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        AutoModelForCausalLM.from_config(falcon).save_pretrained(folder / "falcon")
        self.refused("falcon: transformers cannot load it: it does not call the attention interface", *common, "--prompt", prompt,
                     "--model", folder / "falcon")
        weights = folder / "llama" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        self.refused("llama: transformers cannot load it", *common, "--prompt", prompt)
        self.assertFalse(self.path.exists() or any(folder.glob("*.part")))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    unittest.main(argv=[sys.argv[0], "-v"])
