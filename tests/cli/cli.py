# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the command: runs it, and makes small dumps with h5py, independently of the project's writer."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np

TIERKV = sys.argv[1] if len(sys.argv) > 1 else "build/tierkv"
ROOT = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else pathlib.Path(".")
SAMPLE = ROOT / "datasets" / "sample_1k.h5"


def run(*args, cwd=None):
    return subprocess.run([TIERKV, *map(str, args)], capture_output=True, text=True, cwd=cwd, timeout=300)


def bfloat16_type():
    t = h5py.h5t.IEEE_F32LE.copy()
    t.set_fields(15, 7, 8, 0, 7)
    t.set_precision(16)
    t.set_ebias(127)
    t.set_size(2)
    return t


class Dump:
    """A small valid dump as a dict of attributes and arrays, changed at will before it is written."""

    def __init__(self, layers=2, q_heads=4, kv_heads=2, head_dim=64, tokens=96, queries=8, dtype="float16", seed=None):
        rng = np.random.default_rng(seed)
        self.attrs = dict(format="kv-dump", format_version=1, model_id="test", num_layers=layers, num_q_heads=q_heads,
                          num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, rope_applied=1, rope_theta=1e4,
                          sm_scale=head_dim ** -0.5, created_by="test")
        self.data = {"/seq/a/tokens": np.arange(tokens, dtype=np.int32)}
        for l in range(layers):
            base = f"/seq/a/layer/{l}/"
            self.data[base + "k"] = rng.normal(size=(kv_heads, tokens, head_dim)).astype(dtype)
            self.data[base + "v"] = rng.normal(size=(kv_heads, tokens, head_dim)).astype(dtype)
            if queries:
                queries = min(queries, tokens)
                self.data[base + "q"] = rng.normal(size=(q_heads, queries, head_dim)).astype(dtype)
                self.data[base + "q_positions"] = np.arange(tokens - queries, tokens, dtype=np.int32)
            self.data[base + "significance"] = rng.random((kv_heads, tokens)).astype(np.float32) / tokens

    def rotate(self, inv_freq, pairing="halves"):
        """A rotation of its own, by layer where `inv_freq` has two axes."""
        self.attrs.update(rope_pairing=np.bytes_(pairing), rope_dims=2 * inv_freq.shape[-1])
        self.data["/rope_inv_freq"] = inv_freq.astype(np.float32)
        return self

    def write(self, path, **dataset_options):
        with h5py.File(path, "w") as f:
            f.attrs.update(self.attrs)
            for name, array in self.data.items():
                options = dataset_options if array.ndim == 3 else {}
                f.create_dataset(name, data=array, **options)
        return path


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.dir = pathlib.Path(self.folder.name)
        self.seed = int(np.random.SeedSequence().entropy % 2**32)

    def tearDown(self):
        self.folder.cleanup()

    def expect(self, result, code, *words):
        text = f"seed {self.seed}: exit {result.returncode}\nstdout: {result.stdout[:500]}\nstderr: {result.stderr[:500]}"
        self.assertEqual(result.returncode, code, text)
        for w in words:
            self.assertIn(str(w), result.stderr if code else result.stdout, text)
        if code:
            self.assertEqual(result.stdout, "", text)


def main():
    unittest.main(argv=[sys.argv[0], "-v"])
