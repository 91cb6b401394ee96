# SPDX-License-Identifier: Apache-2.0
"""Bad input: exit code 3, nothing on stdout, and a message that names the file, the dataset and what is wrong."""
import json
import os

import h5py
import numpy as np

from cli import CliTest, Dump, main, run


class BadInput(CliTest):
    def refused(self, dump_or_path, *words, args=()):
        path = dump_or_path
        if isinstance(dump_or_path, Dump):
            path = dump_or_path.write(self.dir / "bad.h5")
        for command in (["info"], ["analyze", "--preset", "k8v4"]):
            if command[0] == "info" and args == "values":
                continue  # info does not read values
            self.expect(run(*command, path), 3, path, *words)

    def test_valid_dump_is_accepted(self):
        path = Dump(seed=self.seed).write(self.dir / "good.h5")
        self.assertEqual(run("analyze", "--preset", "k8v4", path).returncode, 0)

    def test_not_a_dump(self):
        empty = self.dir / "empty.h5"
        empty.write_bytes(b"")
        self.refused(empty, "is empty")
        noise = self.dir / "noise.h5"
        noise.write_bytes(bytes(16) + os.urandom(4096))
        self.expect(run("info", noise), 3, noise, "is neither HDF5 nor a .tkv container")
        self.expect(run("analyze", "--preset", "k8v4", noise), 3, noise, "not an HDF5 file")
        container, tensors = self.dir / "cache.tkv", self.dir / "cache.safetensors"
        container.write_bytes(b"\x89TKV\r\n\x1a\0" + bytes(64))
        tensors.write_bytes((16).to_bytes(8, "little") + b'{"a": 1}        ')
        self.expect(run("analyze", "--preset", "k8v4", container), 3, container, "tierkv decompress")
        self.expect(run("analyze", "--preset", "k8v4", tensors), 3, tensors, "tierkv convert")
        self.refused(self.dir / "missing.h5", "No such file")
        self.refused(self.dir, "")
        other = self.dir / "other.h5"
        with h5py.File(other, "w") as f:
            f["x"] = np.arange(3)
        self.refused(other, "attribute 'format' is missing")
        profile = self.dir / "profile.h5"
        self.assertEqual(run("calibrate", Dump(seed=self.seed).write(self.dir / "good.h5"), "--no-thresholds", "-o", profile).returncode, 0)
        self.expect(run("info", profile), 3, profile, "a profile; info reads dumps and containers")

    def test_truncated(self):
        good = Dump(seed=self.seed).write(self.dir / "good.h5").read_bytes()
        for share in (0.1, 0.5, 0.9, 0.999):
            path = self.dir / "cut.h5"
            path.write_bytes(good[: int(len(good) * share)])
            self.refused(path, "truncated")

    def test_attributes(self):
        for name, value, words in (("format", "zip", "'zip'"), ("format_version", 2, "format_version 2"), ("head_dim", 0, "head_dim"),
                                   ("head_dim", 4097, "head_dim"), ("head_dim", -1, "head_dim"), ("num_layers", 2**40, "absurd"),
                                   ("num_layers", 0, "num_layers"), ("num_q_heads", 3, "multiple"), ("num_kv_heads", 0, "num_kv_heads"),
                                   ("num_kv_heads", 8, "num_kv_heads"), ("sm_scale", np.nan, "sm_scale"), ("sm_scale", -1.0, "sm_scale"),
                                   ("head_dim", "many", "not an integer"), ("num_layers", 3, "has 2 layers"), ("head_dim", 63, "shape")):
            dump = Dump(seed=self.seed)
            dump.attrs[name] = value
            self.refused(dump, words)
        for name in ("format_version", "num_layers", "head_dim", "sm_scale", "num_q_heads"):
            dump = Dump(seed=self.seed)
            del dump.attrs[name]
            self.refused(dump, f"'{name}' is missing")

    def test_missing_and_ragged(self):
        for name in ("k", "v", "q_positions"):
            dump = Dump(seed=self.seed)
            del dump.data[f"/seq/a/layer/1/{name}"]
            self.refused(dump, f"/seq/a/layer/1/{name}", "missing")
        dump = Dump(seed=self.seed)
        dump.data["/seq/a/layer/1/k"] = dump.data["/seq/a/layer/1/k"][:, :-1]
        self.refused(dump, "/seq/a/layer/1/k", "shape")
        dump = Dump(seed=self.seed)
        dump.data["/seq/a/layer/0/significance"] = dump.data["/seq/a/layer/0/significance"][:, 1:]
        self.refused(dump, "significance", "shape")
        dump = Dump(seed=self.seed)
        dump.data = {k: v for k, v in dump.data.items() if "/layer/" in k}
        self.refused(dump, "/seq/a/tokens", "missing")

    def test_types_and_values(self):
        for dtype, words in (("float64", "64-bit float"), ("int16", "integer")):
            dump = Dump(seed=self.seed)
            dump.data["/seq/a/layer/0/k"] = dump.data["/seq/a/layer/0/k"].astype(dtype)
            self.refused(dump, "/seq/a/layer/0/k", words)
        dump = Dump(seed=self.seed)
        dump.data["/seq/a/layer/0/v"] = dump.data["/seq/a/layer/0/v"].astype("float32")
        self.refused(dump, "is float32", "expected float16")
        for bad in (np.nan, np.inf):
            dump = Dump(seed=self.seed)
            dump.data["/seq/a/layer/1/v"][1, 5, 3] = bad
            self.refused(dump, "/seq/a/layer/1/v", "element [1, 5, 3]", "not finite", args="values")
        dump = Dump(seed=self.seed)
        dump.data["/seq/a/layer/0/q_positions"][0] = 96
        self.refused(dump, "q_positions", args="values")
        dump = Dump(seed=self.seed)
        dump.data["/seq/a/layer/0/q_positions"][1] = dump.data["/seq/a/layer/0/q_positions"][0]
        self.refused(dump, "increasing positions", args="values")

    def test_zero_tokens(self):
        dump = Dump(seed=self.seed)
        dump.data = {k: (v[:0] if k.endswith("tokens") else v[:, :0]) for k, v in dump.data.items() if "/q" not in k}
        self.refused(dump, "no tokens")

    def test_links_and_filters(self):
        path = Dump(seed=self.seed).write(self.dir / "links.h5")
        with h5py.File(path, "a") as f:
            del f["/seq/a/layer/1/k"]
            f["/seq/a/layer/1/k"] = h5py.ExternalLink("other.h5", "/k")
        self.refused(path, "external links are refused")
        with h5py.File(path, "a") as f:
            del f["/seq/a/layer/1/k"]
            f["/seq/a/layer/1/k"] = h5py.SoftLink("/seq/a/layer/0/k")
        self.refused(path, "soft and external links are refused")
        lzf = Dump(seed=self.seed).write(self.dir / "lzf.h5", chunks=True, compression="lzf")
        self.refused(lzf, "filter 32000 is not known")

    def test_damaged_values(self):
        path = Dump(seed=self.seed, tokens=512, queries=512).write(self.dir / "damaged.h5", chunks=(1, 256, 64), compression="gzip", fletcher32=True)
        with h5py.File(path, "r") as f:
            offset = f["/seq/a/layer/0/k"].id.get_chunk_info(0).byte_offset
        raw = bytearray(path.read_bytes())
        raw[offset + 1000] ^= 0xFF
        path.write_bytes(raw)
        self.refused(path, "/seq/a/layer/0/k", "checksum does not match", args="values")

    def test_scheme_needs_what_the_dump_lacks(self):
        path = Dump(seed=self.seed, queries=0).write(self.dir / "noq.h5")
        self.expect(run("analyze", "--preset", "step", path), 3, path, "no q")
        dump = Dump(seed=self.seed)
        dump.data = {k: v for k, v in dump.data.items() if "significance" not in k}
        path = dump.write(self.dir / "nosig.h5")
        self.expect(run("analyze", "--preset", "diffkv", path), 3, path, "significance")
        self.expect(run("calibrate", "-o", self.dir / "p.h5", path), 3, path, "significance", "--no-thresholds")
        self.expect(run("analyze", "--preset", "k8v4:group_k=48", path), 3, "group 48")
        self.expect(run("analyze", "--profile", path, path), 3, "kv-profile")

    def test_values_beyond_the_format_are_named(self):
        for part, size, presets in (("k", 1e6, ("k1v4", "fp16", "k4v4+huffman")), ("v", 1e38, ("step", "k4v4", "diffkv", "small", "kvcomp"))):
            dump = Dump(seed=self.seed, dtype="float32")
            dump.data[f"/seq/a/layer/1/{part}"][1, 5, 3] = size
            path, out = dump.write(self.dir / "big.h5"), self.dir / "out"
            what = f"{'keys' if part == 'k' else 'values'} up to {size:g} (token 5)"
            for preset in presets:
                self.expect(run("analyze", "--preset", preset, path), 3, path, "/seq/a/layer/1", "kv head 1", what, "out_of_range")
                self.expect(run("compress", "--preset", preset, path, out), 3, path, "/seq/a/layer/1", "kv head 1", what)
        for part in "kvq":
            dump = Dump(seed=self.seed, dtype="float32")
            dump.data[f"/seq/a/layer/1/{part}"][1, 5, 3] = 1e38
            self.expect(run("calibrate", "--no-thresholds", dump.write(self.dir / "big.h5"), "-o", out), 3, self.dir / "big.h5", "/seq/a/layer/1",
                        "kv head", "root mean square", "channel 3", "65504")
        self.assertFalse(out.exists())

    def test_zeros_of_pruned_tokens_are_no_data(self):
        dump = Dump(seed=self.seed)
        dump.data["/seq/a/layer/1/pruned"] = np.zeros((2, 96), np.uint8)
        path, out = dump.write(self.dir / "pruned.h5"), self.dir / "out"
        for command in (("analyze",), ("sweep", "--preset", "k8v4"), ("calibrate", "--no-thresholds", "-o", out), ("compress", "--preset", "k8v4", out)):
            self.expect(run(command[0], path, *command[1:]), 3, path, "/seq/a/layer/1/pruned")
        self.assertEqual(run("info", path).returncode, 0)
        self.assertFalse(out.exists())

    def test_texts_that_are_no_utf8(self):
        dump = Dump(seed=self.seed, tokens=80)
        dump.attrs["model_id"] = np.bytes_(b"m\xff\x1b[2J")
        path = self.dir / os.fsdecode(b"\xff.h5")
        with h5py.File(dump.write(path), "a") as f:
            f["seq/a"].attrs["kind"] = np.bytes_(b"\xfd\n")
            f["seq"].move("a", b"\xfe")
        tkv = path.with_suffix(".tkv")
        for command in (("info", path), ("analyze", "--preset", "k8v4", path), ("analyze", "--preset", "k8v4", "--details", path),
                        ("sweep", "--preset", "k8v4", path), ("compress", "--preset", "k8v4", path, tkv), ("info", tkv), ("verify", tkv),
                        ("decompress", tkv, path.with_suffix(".back")), ("calibrate", path, "-o", path.with_suffix(".profile"))):
            r = run(*command, "--json")
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assertIn("\ufffd", str(json.loads(r.stdout)), command)

    def test_control_characters_are_not_printed(self):
        dump = Dump(seed=self.seed, tokens=80)
        dump.attrs["model_id"] = "m\x1b[2J"
        path, tkv = self.dir / "a.h5", self.dir / "a.tkv"
        with h5py.File(dump.write(path), "a") as f:
            f["/seq/a"].attrs["kind"] = "k\r"
        self.assertEqual(run("compress", "--preset", "k8v4", path, tkv).returncode, 0)
        for file in (path, tkv):
            r = run("info", file)
            self.expect(r, 0, "model m?[2J\n", "(k?)\n")
            self.assertEqual(r.stdout, r.stdout.replace("\x1b", "").replace("\r", ""))

    def test_pipes_are_refused(self):
        pipe, out = self.dir / "pipe", self.dir / "out"
        os.mkfifo(pipe)
        for command in (("info",), ("verify",), ("analyze",), ("decompress", out), ("compress", "--preset", "k8v4", out), ("convert", f"{out}.h5"),
                        ("convert", f"{out}.safetensors"), ("calibrate", "-o", out)):
            name, *rest = command
            self.expect(run(name, pipe, *rest), 3, pipe, "is not a regular file")

    def test_one_bad_file_of_two_prints_nothing(self):
        good = Dump(seed=self.seed).write(self.dir / "good.h5")
        self.expect(run("analyze", "--preset", "k8v4", good, self.dir / "missing.h5"), 3, "missing.h5")

    def test_unwritable_output(self):
        self.expect(run("synth", "-o", self.dir / "no" / "such" / "folder.h5"), 3, "cannot be created")
        self.assertEqual(list(self.dir.iterdir()), [])


if __name__ == "__main__":
    main()
