# SPDX-License-Identifier: Apache-2.0
"""bench/answers with the reference model, whose folder TIERKV_MODEL names; skipped without it.

model_test.py SOURCE_DIR BUILD_DIR"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np

SOURCE, BUILD = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
del sys.argv[1:]
MODEL = os.environ.get("TIERKV_MODEL")
if not MODEL:
    print("TIERKV_MODEL is not set")
    sys.exit(77)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(SOURCE / "bench" / "answers"))
from model import LayerCache, Model

SAMPLE = SOURCE / "datasets" / "sample_1k.h5"
# float16 holds keys and values to 2^-11 of their size, relative; the sample was made in float32 from the same weights, so what differs is
# that rounding carried through at most 6 layers.
CACHE_ERROR = 1e-3


class Forward(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = Model(MODEL)
        with h5py.File(SAMPLE) as f:
            seq = f["seq/notes"]
            cls.ids = seq["tokens"][:].tolist()
            cls.layers = [{name: x[:] for name, x in seq[f"layer/{i}"].items()} for i in range(cls.model.layers)]
        cls.cache = cls.model.prefill(cls.ids)

    def test_tokenizer(self):
        tokenizer = self.model.tokenizer
        self.assertEqual(tokenizer.encode(tokenizer.decode(self.ids)), self.ids[1:])

    def test_cache_is_that_of_the_dump(self):
        for got, want in zip(self.cache, self.layers):
            q = got.q[:, want["q_positions"]]
            for name, x in (("k", got.k), ("v", got.v), ("q", q), ("significance", got.significance)):
                y = want[name].astype(np.float64)
                self.assertLess(np.linalg.norm(x - y) / np.linalg.norm(y), CACHE_ERROR, name)

    def test_continuation_is_the_prefill(self):
        """Logits do not depend on where the prompt ends. Sums in another order may round a key to the next float16, 2^-11 away, so logits,
        which are below 32, may differ by about 2^-6 where many do; a token at a wrong place changes them by more than 1."""
        def cut(n):
            return [LayerCache(layer.k[:, :n], layer.v[:, :n]) for layer in self.cache]
        early, late = self.model.continued(self.ids[300:400], cut(300)), self.model.continued(self.ids[370:400], cut(370))
        np.testing.assert_allclose(early[70:], late, atol=2**-6)


class QuickRun(unittest.TestCase):
    def test_run(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "answers.json"
            run = subprocess.run([sys.executable, "-B", SOURCE / "bench" / "answers" / "run.py", "--quick", "--model", MODEL, "--tierkv",
                                  BUILD, "--calibrate", SAMPLE, "--text", SOURCE / "docs" / "reference" / "format.md", "-o", out],
                                 capture_output=True, text=True)
            self.assertEqual(run.returncode, 0, run.stderr)
            result = json.loads(out.read_text())
        exact, k8v4, k4v4, step, own = result["schemes"]
        self.assertEqual(set(exact["kl"]), {0}, run.stderr)
        self.assertEqual(set(exact["memory"]), {1})
        for i, prompt in enumerate(result["prompts"]):
            for s in (k8v4, k4v4, step, own):
                self.assertGreater(s["kl"][i], 0, run.stderr)
                self.assertLess(s["kl"][i], 0.5, f"{s['preset']}, {prompt}: {run.stderr}")
            self.assertGreater(k8v4["memory"][i], k4v4["memory"][i])
            self.assertGreater(k4v4["memory"][i], step["memory"][i])
        recalled = [r for r, p in zip(exact["right"], result["prompts"]) if p["task"] == "recall 64"]
        self.assertGreaterEqual(recalled[0], 14, run.stderr)  # of 16; the model's README says all but a few of thousands


if __name__ == "__main__":
    unittest.main()
