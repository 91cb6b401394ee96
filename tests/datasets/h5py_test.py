# SPDX-License-Identifier: Apache-2.0
"""Dumps go to and from h5py: the example of docs/reference/kv-dump.md makes a dump that the reader takes,
and h5py sees in a dump of the writer what was written. make_sample.py cuts profiles of either form.

usage: h5py_test.py TEST_DATASETS_BINARY PAGE
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import h5py
import numpy as np


def run_gtest(binary, name, path):
    environment = dict(os.environ, TIERKV_H5PY_DUMP=str(path))
    command = [binary, f"--gtest_filter=H5pyTest.{name}", "--gtest_also_run_disabled_tests"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "[  PASSED  ] 1 test" in done.stdout, done.stdout + done.stderr


def example_is_readable(binary, page, folder):
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.S).group(1)
    path = folder / "my.h5"
    rng = np.random.default_rng()
    L, Hq, Hkv, D = 3, 4, 2, 16
    for T in (40, 300):  # below the size of a chunk and above
        keys = rng.normal(size=(L, Hkv, T, D)).astype(np.float16)
        values = rng.normal(size=(L, Hkv, T, D)).astype(np.float16)
        names = dict(h5py=h5py, L=L, Hq=Hq, Hkv=Hkv, D=D, T=T, keys=keys, values=values,
                     tokens=np.arange(T, dtype=np.int32))
        exec(code.replace('"my.h5"', repr(str(path))), names)
    run_gtest(binary, "DISABLED_ReadsTheExample", path)


def writer_is_readable(binary, folder):
    # The values of write_small() in dump_files.h, exact in all three types.
    expected = (0.25 * (np.arange(300 * 8) % 64)).reshape(300, 8)
    for dtype in ("float16", "bfloat16", "float32"):
        path = folder / f"{dtype}.h5"
        run_gtest(binary, "DISABLED_Writes", path)
        with h5py.File(path, "r") as f:
            # Fixed-length texts are bytes to h5py.
            assert f.attrs["format"] == b"kv-dump", dict(f.attrs)
            assert f.attrs["dtype"] == dtype.encode(), dict(f.attrs)
            assert f.attrs["head_dim"] == 8 and f.attrs["sm_scale"] == 1 / np.sqrt(8)
            for name in ("k", "v"):
                stored = f[f"seq/a/layer/1/{name}"]
                assert stored.shape == (2, 300, 8) and stored.chunks == (1, 256, 8)
                assert np.array_equal(stored[1].astype(np.float64), expected), dtype
            assert list(f["seq/a/layer/0/q_positions"]) == [298, 299]
            assert f["seq/a/tokens"].dtype == np.int32


def a_cut_profile_has_the_frequencies_of_its_layers(root, folder):
    sys.path.insert(0, str(root / "datasets"))
    import make_sample
    source, cut, layers = folder / "whole.h5", folder / "cut.h5", [0, 4, 29]
    shutil.copy(root / "datasets" / "smollm2_profile.h5", source)
    for by_layer in (False, True):
        with h5py.File(source, "r+") as f:
            shared = f["rope_inv_freq"][()]
            if by_layer:
                del f["rope_inv_freq"]
                f["rope_inv_freq"] = np.arange(1, 31, dtype=np.float32)[:, None] * shared
        make_sample.cut_profile(source, layers, cut)
        with h5py.File(source) as f, h5py.File(cut) as out:
            whole = f["rope_inv_freq"][()]
            assert np.array_equal(out["rope_inv_freq"], whole[layers] if by_layer else whole)
            assert out["key_mean"].shape == (3 * int(f.attrs["num_kv_heads"]), int(f.attrs["head_dim"]))


binary, page = sys.argv[1], pathlib.Path(sys.argv[2])
with tempfile.TemporaryDirectory() as name:
    example_is_readable(binary, page, pathlib.Path(name))
    writer_is_readable(binary, pathlib.Path(name))
    a_cut_profile_has_the_frequencies_of_its_layers(page.resolve().parents[2], pathlib.Path(name))
