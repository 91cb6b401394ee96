# SPDX-License-Identifier: Apache-2.0
"""datasets/gguf_to_hf.py on small GGUF files; skipped where the package gguf is missing.

gguf_test.py SOURCE_DIR"""
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(sys.argv.pop(1))
if importlib.util.find_spec("gguf") is None:
    print("skipped: needs the package gguf")
    sys.exit(77)

import gguf  # noqa: E402
import numpy as np  # noqa: E402

sys.path[:0] = [str(SOURCE / "bench" / "answers"), str(SOURCE / "tests" / "answers")]
import tiny  # noqa: E402
from model import Model  # noqa: E402

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}


def gguf_name(name):
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(w):
    """Rows of each head as GGUF has them: dim i of the first half, then dim i of the second."""
    return w.reshape(-1, 2, tiny.HEAD_DIM // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path, weights, architecture="llama", pre="smollm", leave_out=(), rope_dims=tiny.HEAD_DIM):
    w = gguf.GGUFWriter(path, architecture)
    w.add_block_count(tiny.LAYERS)
    w.add_context_length(512)
    w.add_embedding_length(tiny.HIDDEN)
    w.add_feed_forward_length(tiny.INNER)
    w.add_head_count(tiny.Q_HEADS)
    w.add_head_count_kv(tiny.KV_HEADS)
    w.add_rope_freq_base(tiny.THETA)
    w.add_rope_dimension_count(rope_dims)
    w.add_layer_norm_rms_eps(tiny.EPS)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    tokens = tiny.byte_tokens()
    w.add_token_list(tokens)
    w.add_token_types([3 if i == tiny.OPENING else 1 for i in range(len(tokens))])
    w.add_token_merges(["t h", "th e"])
    w.add_bos_token_id(tiny.OPENING)
    w.add_eos_token_id(tiny.OPENING)
    w.add_add_bos_token(False)
    for name, x in weights.items():
        name = gguf_name(name)
        if name not in leave_out:
            w.add_tensor(name, interleaved(x) if "attn_q." in name or "attn_k." in name else x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


class Convert(unittest.TestCase):
    def setUp(self):
        self.seed = int(np.random.SeedSequence().entropy % 2**32)
        self.weights = tiny.random_weights(np.random.default_rng(self.seed))
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        self.file, self.out = self.folder / "tiny.gguf", self.folder / "out"

    def tearDown(self):
        self.temporary.cleanup()

    def convert(self):
        return subprocess.run([sys.executable, "-B", SOURCE / "datasets" / "gguf_to_hf.py", self.file, self.out], capture_output=True, text=True)

    def refused(self, message):
        before = sorted(self.folder.iterdir())
        run = self.convert()
        self.assertEqual(run.returncode, 3, run.stderr)
        self.assertTrue(run.stderr.startswith("gguf_to_hf: "), run.stderr)
        self.assertIn(message, run.stderr)
        self.assertNotIn("Traceback", run.stderr)
        self.assertEqual(sorted(self.folder.iterdir()), before)

    def test_the_model_is_the_same(self):
        write_gguf(self.file, self.weights)
        run = self.convert()
        self.assertEqual((run.returncode, run.stdout, run.stderr), (0, "", ""))
        direct = self.folder / "direct"
        direct.mkdir()
        tiny.write_model(direct, np.random.default_rng(self.seed))
        got, want = Model(self.out), Model(direct)
        ids = want.tokenizer.encode("then 42 others")
        self.assertEqual(got.tokenizer.encode("then 42 others"), ids)
        for a, b in zip(got.prefill(ids), want.prefill(ids)):
            np.testing.assert_array_equal(a.k, b.k, f"seed {self.seed}")
            np.testing.assert_array_equal(a.v, b.v)
        self.assertEqual(json.loads((self.out / "config.json").read_text())["rms_norm_eps"], tiny.EPS)
        self.assertEqual(got.opening, [])

    def test_what_cannot_be_converted_leaves_nothing(self):
        write_gguf(self.file, self.weights, architecture="gpt2")
        self.refused(f"{self.file}: the architecture is 'gpt2'; only llama is supported")
        write_gguf(self.file, self.weights, pre="llama-bpe")
        self.refused(f"{self.file}: the tokenizer is 'gpt2' / 'llama-bpe'")
        write_gguf(self.file, self.weights, leave_out=("blk.1.ffn_up.weight",))
        self.refused(f"{self.file}: the tensor blk.1.ffn_up.weight is missing")
        write_gguf(self.file, self.weights, rope_dims=tiny.HEAD_DIM - 2)
        self.refused(f"{self.file}: RoPE turns 6 of 8 dims")
        narrow = dict(self.weights, **{"model.norm.weight": self.weights["model.norm.weight"][:-1]})
        write_gguf(self.file, narrow)
        self.refused(f"{self.file}: the tensor output_norm.weight has the shape (31,); the fields say (32,)")
        huge = dict(self.weights, **{"model.norm.weight": np.full(tiny.HIDDEN, 1e6, np.float32)})
        write_gguf(self.file, huge)
        self.refused(f"{self.file}: the tensor output_norm.weight does not fit into float16")

    def test_broken_files(self):
        write_gguf(self.file, self.weights)
        whole = self.file.read_bytes()
        for size in (0, 3, 20, 400, len(whole) // 2, len(whole) - 1):
            self.file.write_bytes(whole[:size])
            self.refused(str(self.file))
        self.file.unlink()
        self.refused(f"{self.file}: No such file or directory")

    def test_a_folder_that_exists_is_kept(self):
        write_gguf(self.file, self.weights)
        self.out.mkdir()
        (self.out / "mine").write_text("x")
        self.refused(f"{self.out}: exists already")
        self.assertEqual((self.out / "mine").read_text(), "x")


if __name__ == "__main__":
    unittest.main()
