# SPDX-License-Identifier: Apache-2.0
"""compress, decompress and verify as their users meet them; containers read by an independent decoder."""
import json
import os
import pathlib
import sys

import h5py
import numpy as np

from cli import ROOT, SAMPLE, CliTest, Dump, main, run

sys.path.insert(0, str(ROOT / "tests" / "reference"))
import read_tkv  # noqa: E402

PRESETS = ["fp16", "k8v4", "k4v2:group_k=32", "k1v1", "k8v2+rot", "k16v4:sinks=4", "diffkv", "diffkv:alpha_l=0.4,sinks=2", "kivi4",
           "kivi2", "k2v2n", "tiers:classes=k4v4/k4v2", "tiers:classes=k4v2/k2v2@1:0.3,rotate=off", "tiers:classes=k2v2,means=off",
           "kvcomp", "kvcomp:unit=channel", "step", "step:basis=none", "step:k=0.05,v=0.05", "small", "small:books=4,k=0.1",
           "small:only=k,sinks=0", "small:window=0,sinks=70", "step+rot", "k4v4+huffman",
           "k4v4+huffman+rot", "k2v8+huffman", "diffkv+huffman"]


class Container(CliTest):
    def ok(self, *args):
        r = run(*args)
        self.assertEqual(r.returncode, 0, f"seed {self.seed}: {args}: {r.stderr}")
        return r.stdout

    def compressed(self, preset, dump, *args):
        out = self.dir / "a.tkv"
        self.ok("compress", "--force", "--preset", preset, dump, out, *args)
        return out

    def compare(self, preset, dump, *args):
        """The independent decoder and `decompress` agree bit for bit; returns the decompressed file's name."""
        tkv = self.compressed(preset, dump, *args)
        cache = read_tkv.read(tkv)
        self.assertEqual(cache.preset, preset)
        self.ok("decompress", "--force", "--dtype", "float32", tkv, self.dir / "out.h5")
        with h5py.File(self.dir / "out.h5") as f:
            for s, seq in enumerate(cache.sequences):
                for layer in range(cache.layers):
                    group = f[f"/seq/{seq.id}/layer/{layer}"]
                    for head in range(cache.kv_heads):
                        k, v, pruned = cache.rows[s, layer, head]
                        where = f"seed {self.seed}: {preset} sequence {s} layer {layer} head {head}"
                        self.assertTrue(np.array_equal(group["k"][head], k), where)
                        self.assertTrue(np.array_equal(group["v"][head], v), where)
                        stated = group["pruned"][head] if "pruned" in group else np.zeros(len(k), np.uint8)
                        self.assertTrue(np.array_equal(stated.astype(bool), pruned), where)
        return self.dir / "out.h5"

    def test_an_independent_decoder_reads_every_preset(self):
        for tokens, head_dim, dtype in ((1, 64, "float16"), (150, 96, "float16"), (201, 256, "float32")):
            dump = Dump(seed=self.seed, layers=1, tokens=tokens, head_dim=head_dim, dtype=dtype).write(self.dir / "in.h5")
            for preset in PRESETS:
                self.compare(preset, dump)

    def test_rows_of_classes_say_their_formats(self):
        for head_dim in (64, 80):  # with pages and without
            dump, profile = self.dir / f"in{head_dim}.h5", self.dir / f"p{head_dim}.h5"
            self.ok("synth", "-o", dump, "--tokens", "300,70", "--head-dim", head_dim, "--layers", 3, "--kv-heads", 2, "--seed", self.seed)
            self.ok("calibrate", dump, "-o", profile, "--no-thresholds")
            with h5py.File(profile, "a") as f:
                f["joint_sensitivity"] = np.random.default_rng(self.seed).permutation(6) + 1.0
                first = int(np.argmax(f["joint_sensitivity"]))
            self.compare("tiers:classes=0.17*k8v4|0.33*k4v4/k4v2|k4v2/k2v2@2", dump, "--profile", profile)
            cache = read_tkv.read(self.dir / "a.tkv")
            if head_dim == 80:
                continue
            formats = {key[2:4]: data for key, data in cache.chunks.items() if key[0] == read_tkv.PAGE_FORMAT and key[5] == read_tkv.HIGH}
            self.assertEqual(len(formats), 6)
            eight = [row for row, data in formats.items() if np.frombuffer(data, "<i4")[4] == 8]
            self.assertEqual(eight, [divmod(first, 2)])
            self.assertEqual({np.frombuffer(data, "<i4")[3] for data in formats.values()}, {4})

    def test_a_profile_is_stored_once_for_all_sequences(self):
        dump, profile = self.dir / "in.h5", self.dir / "p.h5"
        self.ok("synth", "-o", dump, "--tokens", "300,70", "--head-dim", 64, "--seed", self.seed)
        self.ok("calibrate", dump, "-o", profile)
        for preset in ("step:basis=hadamard", "step"):
            self.compare(preset, dump, "--profile", profile)
            chunks = read_tkv.read(self.dir / "a.tkv").chunks
            self.assertEqual({key[1] for key in chunks if key[0] == read_tkv.BASIS}, {-1})
        before = (self.dir / "a.tkv").read_bytes()
        refused = run("compress", "--force", "--preset", "small", "--profile", profile, dump, self.dir / "a.tkv")
        self.expect(refused, 3, "preset small", "key_sensitivity")
        self.assertEqual((self.dir / "a.tkv").read_bytes(), before)
        self.compare("small:k=0.5,v=0.45", dump, "--profile", profile)
        chunks = read_tkv.read(self.dir / "a.tkv").chunks
        self.assertEqual({key[1] for key in chunks if key[0] == read_tkv.WEIGHTED_ROW}, {-1})

    def dump(self, name, rotation=None, **attrs):
        dump = Dump(seed=self.seed)
        dump.attrs.update(attrs)
        return (dump if rotation is None else dump.rotate(rotation)).write(self.dir / name)

    def test_a_profile_serves_models_with_unrotated_layers(self):
        inv_freq, profile = 1e4 ** (-np.arange(32) / 32), self.dir / "p.h5"
        unknown = self.dump("unknown.h5", rope_theta=0.0)
        for turned in (0, 1):
            known = self.dump("known.h5", rotation=np.stack([inv_freq * (turned == l) for l in range(2)]))
            self.ok("calibrate", "--force", known, "-o", profile, "--no-thresholds")
            for dump in (known, unknown):
                self.compare("small:k=0.5,v=0.45", dump, "--profile", profile)
                text = "keys before RoPE: halves of 64 dims, frequencies by layer"
                text += "" if dump == known else ", by the profile"
                self.assertIn(text, self.ok("analyze", "--preset", "small:k=0.5,v=0.45", "--profile", profile, dump))
                j = json.loads(self.ok("analyze", "--json", "--preset", "k8v4", "--profile", profile, dump))
                self.assertEqual(j["files"][0]["rope"], text)
        other = self.dump("other.h5", rotation=np.stack([inv_freq, inv_freq]))
        self.expect(run("compress", "--preset", "k8v4", "--profile", profile, other, self.dir / "b.tkv"), 3, other, "in layer 0")

    def test_keys_before_and_after_rope_are_kept_apart(self):
        none, unknown = self.dump("none.h5", rope_applied=0, rope_theta=0.0), self.dump("unknown.h5", rope_theta=0.0)
        known, profile, out = self.dump("known.h5"), self.dir / "p.h5", self.dir / "b.tkv"
        self.ok("calibrate", none, "-o", profile, "--no-thresholds")
        for command in (("compress", unknown, out), ("analyze", unknown), ("sweep", unknown)):
            r = run(*command, "--preset", "k8v4", "--profile", profile)
            self.expect(r, 3, unknown, "rope_applied is 1, but keys of the profile are not rotated")
        self.assertFalse(out.exists())
        for a, b in ((none, unknown), (unknown, none), (none, known)):
            r = run("calibrate", a, b, "-o", self.dir / "q.h5", "--no-thresholds")
            self.expect(r, 3, f"{b}: rope_applied is {int(b != none)}, unlike that of {a}")
        for dumps in ((known, unknown), (unknown, known)):  # the rotation that one of them knows
            self.ok("calibrate", "--force", *dumps, "-o", profile, "--no-thresholds")
            with h5py.File(profile) as f:
                self.assertEqual((f.attrs["rope_pairing"], f.attrs["rope_dims"]), (b"halves", 64))
            self.compare("small:k=0.5,v=0.45", unknown, "--profile", profile)

    def test_info_says_how_keys_are_rotated(self):
        inv_freq = 5e5 ** (-np.arange(32) / 32)
        for text, dump in {"applied (plain, theta 10000)": self.dump("plain.h5"),
                           "not applied (no rotation)": self.dump("none.h5", rope_applied=0),
                           "applied (rotation unknown)": self.dump("unknown.h5", rope_theta=0.0),
                           "applied (halves of 64 dims, own frequencies)": self.dump("own.h5", rotation=inv_freq),
                           "applied (halves of 32 dims, frequencies by layer)": self.dump("layers.h5", rotation=inv_freq.reshape(2, 16))}.items():
            for file in (dump, self.compressed("k8v4", dump)):
                self.assertIn(f", RoPE {text}\n", self.ok("info", file))
                self.assertIn(f"applied ({json.loads(self.ok('info', '--json', file))['files'][0]['rope']})", text)

    def test_info_says_steps_and_whose_statistics(self):
        dump, profile = self.dir / "in.h5", self.dir / "p.h5"
        self.ok("synth", "-o", dump, "--tokens", "300,70", "--head-dim", 64, "--layers", 1, "--seed", self.seed)
        self.ok("calibrate", dump, "-o", profile, "--no-thresholds")
        wanted = {("small",): ("weighted", 0.33, 0.28, "sequence"), ("small:k=0.5,v=0.4", "--profile", profile): ("weighted", 0.5, 0.4, "profile"),
                  ("step:k=0.2", "--profile", profile): ("global", 0.2, 0.25, "profile"), ("kvcomp",): ("relative", 0.05, 0.15, None),
                  ("k8v4",): ("min-max", None, None, None)}
        for (preset, *args), (rule, k, v, statistics) in wanted.items():
            tkv = self.compressed(preset, dump, *args)
            info = json.loads(self.ok("info", "--json", tkv))["files"][0]
            self.assertEqual((info["format"], info["preset"], info["file_bytes"]), ("tkv", preset, tkv.stat().st_size))
            self.assertEqual([info[name] for name in ("key_step_rule", "key_step", "value_step", "statistics")], [rule, k, v, statistics], preset)
            self.assertEqual([s["tokens"] for s in info["sequences"]], [300, 70])
            self.assertIn(f"preset {preset}: keys {rule}", self.ok("info", tkv))
        tkv.write_bytes(tkv.read_bytes()[:-100])
        self.expect(run("info", tkv), 3, "a.tkv")

    def test_decompressed_values_have_the_error_that_analyze_states(self):
        for preset in ("k8v4", "step", "small", "kivi4", "diffkv:alpha_l=0.02"):
            out = self.compare(preset, SAMPLE)
            stated = json.loads(self.ok("analyze", "--json", "--preset", preset, SAMPLE))["results"][0]
            with h5py.File(SAMPLE) as a, h5py.File(out) as b:
                for name, field in (("k", "key_rel_error"), ("v", "value_rel_error")):
                    error = norm = 0.0
                    for layer in a["/seq/notes/layer"]:
                        x = a[f"/seq/notes/layer/{layer}/{name}"][:].astype(np.float64)
                        y = b[f"/seq/notes/layer/{layer}/{name}"][:].astype(np.float64)
                        kept = np.ones(x.shape[:2], bool)
                        if "pruned" in b[f"/seq/notes/layer/{layer}"]:
                            kept = b[f"/seq/notes/layer/{layer}/pruned"][:] == 0
                        error, norm = error + ((x - y)[kept] ** 2).sum(), norm + (x[kept] ** 2).sum()
                    self.assertAlmostEqual(np.sqrt(error / norm), stated[field], delta=1e-9, msg=preset)

    def test_everything_else_is_carried_over(self):
        out = self.dir / "out.h5"
        self.ok("decompress", self.compressed("fp16", SAMPLE), out)
        with h5py.File(SAMPLE) as a, h5py.File(out) as b:
            for name in ("model_id", "num_layers", "num_q_heads", "head_dim", "dtype", "rope_applied", "rope_theta", "sm_scale"):
                x, y = (v.decode() if isinstance(v, bytes) else v for v in (a.attrs[name], b.attrs[name]))
                self.assertEqual(x, y, name)
            names = []
            a["/seq"].visititems(lambda name, x: names.append(name) if isinstance(x, h5py.Dataset) else None)
            self.assertTrue(any(n.endswith("/q") for n in names) and any(n.endswith("significance") for n in names))
            for name in names:
                x, y = a["/seq"][name], b["/seq"][name]
                self.assertEqual(x.dtype, y.dtype, name)
                self.assertTrue(np.array_equal(x, y), name)

    def test_bytes_do_not_depend_on_threads(self):
        for preset in ("diffkv+huffman", "step", "small"):
            one = self.compressed(preset, SAMPLE, "--threads", 1).read_bytes()
            self.assertEqual(one, self.compressed(preset, SAMPLE, "--threads", 5).read_bytes())

    def test_any_flipped_byte_and_any_truncation_fails_verification(self):
        dump = Dump(seed=self.seed, layers=1, kv_heads=1, q_heads=1, head_dim=8, tokens=5, queries=1).write(self.dir / "in.h5")
        good = self.compressed("step:window=1", dump).read_bytes()
        rng = np.random.default_rng(self.seed)
        names = []
        for i in range(len(good)):
            for name, data in ((f"flip{i}.tkv", good[:i] + bytes([good[i] ^ 1 << rng.integers(8)]) + good[i + 1:]),
                               (f"cut{i}.tkv", good[:i])):
                (self.dir / name).write_bytes(data)
                names.append(str(self.dir / name))
        for first in range(0, len(names), 500):
            part = names[first:first + 500]
            r = run("verify", *part)
            self.assertEqual(r.stdout, "", f"seed {self.seed}: a damaged container passed")
            self.assertEqual(r.returncode, 1)
            lines = r.stderr.splitlines()
            self.assertEqual(len(lines), len(part))
            for name, line in zip(part, lines):
                self.assertIn(name + ": ", line)
        r = run("decompress", self.dir / "flip100.tkv", self.dir / "no.h5")
        self.expect(r, 3, "flip100.tkv: ")
        self.assertFalse([p for p in os.listdir(self.dir) if p.startswith("no.h5")])

    def test_a_stores_sequence_is_verified_by_its_bytes(self):
        good = ROOT / "tests" / "golden" / "store_sequence.tkv"
        self.expect(run("verify", good), 0, "ok (a store's sequence: checksums only)")
        self.expect(run("decompress", good, self.dir / "out.h5"), 3, "which only a store can load")
        data = bytearray(good.read_bytes())
        data[len(data) // 2] ^= 1
        bad = self.dir / "bad.tkv"
        bad.write_bytes(data)
        self.expect(run("verify", bad), 1, "bad.tkv: ", "checksum does not match")
        r = run("verify", "--json", good, bad)
        self.assertEqual([(f["ok"], f.get("decoded")) for f in json.loads(r.stdout)["files"]], [(True, False), (False, None)])

    def test_verify_tells_damage_from_other_files(self):
        good = self.compressed("k8v4", SAMPLE)
        self.expect(run("verify", good), 0, "ok")
        self.expect(run("verify", SAMPLE), 3, "not a .tkv container")
        self.expect(run("verify", self.dir / "none.tkv"), 3, "none.tkv")
        data = bytearray(good.read_bytes())
        data[len(data) // 2] ^= 4
        bad = self.dir / "bad.tkv"
        bad.write_bytes(data)
        self.expect(run("verify", bad), 1, "bad.tkv: ", "layer ", "head ", "checksum does not match")
        r = run("verify", "--json", good, bad)
        self.assertEqual(r.returncode, 1)
        self.assertEqual([f["ok"] for f in json.loads(r.stdout)["files"]], [True, False])
        data = bytearray(good.read_bytes())
        data[8] = 0
        bad.write_bytes(data)
        self.expect(run("verify", bad), 3, "major version 0 is not known", "write the file again from its source")

    def test_what_cannot_be_compressed_is_refused_and_leaves_nothing(self):
        out = self.dir / "z.tkv"
        for preset in ("zstd-fp16", "zstd-codes:of=k4v4"):
            self.expect(run("compress", "--preset", preset, SAMPLE, out), 3, preset)
        self.expect(run("compress", "--preset", "k9v9", SAMPLE, out), 3, "--preset", "k9v9")
        self.expect(run("compress", "--preset", "k8v4", self.dir / "none.h5", out), 3, "none.h5")
        plain = Dump(seed=self.seed, queries=0).write(self.dir / "plain.h5")
        self.expect(run("compress", "--preset", "step", plain, out), 3, "q")
        dump = Dump(seed=self.seed)
        dump.data = {k: v for k, v in dump.data.items() if "significance" not in k}
        dump.write(plain)  # its 8 queries of 96 do not tell the significance
        for command in (("compress", "--preset", "diffkv", plain, out), ("analyze", "--preset", "diffkv", plain)):
            self.expect(run(*command), 3, plain, "significance")
        self.assertEqual(sorted(os.listdir(self.dir)), ["plain.h5"])

    def test_what_is_printed_is_the_ratio_of_the_file(self):
        whole, bare = self.dir / "whole.tkv", self.dir / "bare.tkv"
        text = self.ok("compress", "--preset", "diffkv", SAMPLE, whole)
        values = 2 * 6 * 2 * 1024 * 128
        self.assertIn(f"{2 * values / whole.stat().st_size:.3f} of the file", text)
        text = self.ok("compress", "--preset", "diffkv", "--without-queries", SAMPLE, bare)
        self.assertIn(f"ratio {2 * values / bare.stat().st_size:.3f} of keys and values, ", text)
        self.assertNotIn("of the file", text)
        j = json.loads(self.ok("compress", "--json", "--force", "--preset", "diffkv", "--without-queries", SAMPLE, bare))
        self.assertEqual((j["carried_bytes"], j["file_ratio"]), (0, j["ratio"]))
        for name in (whole, bare):
            self.ok("decompress", name, name.with_suffix(".h5"))
        with h5py.File(whole.with_suffix(".h5")) as a, h5py.File(bare.with_suffix(".h5")) as b:
            for layer, group in a["/seq/notes/layer"].items():
                self.assertEqual(set(group) - {"q", "q_positions", "significance"}, set(b["/seq/notes/layer"][layer]))
                self.assertTrue(np.array_equal(group["k"], b["/seq/notes/layer"][layer]["k"]))

    def test_json_summaries(self):
        j = json.loads(self.ok("compress", "--json", "--preset", "k8v4", SAMPLE, self.dir / "a.tkv"))
        self.assertEqual(j["schema"], "tierkv.compress/1")
        self.assertEqual(j["file_bytes"], pathlib.Path(self.dir / "a.tkv").stat().st_size)
        self.assertAlmostEqual(j["ratio"], 16 / j["bits_per_value"])
        self.assertAlmostEqual(j["file_ratio"], 2 * j["values"] / j["file_bytes"])
        self.assertLess(j["file_ratio"], 0.9 * j["ratio"])
        self.assertEqual(sum(j["tiers"].values()), 1)
        j = json.loads(self.ok("decompress", "--json", self.dir / "a.tkv", self.dir / "o.h5"))
        self.assertEqual((j["schema"], j["preset"], j["dtype"]), ("tierkv.decompress/1", "k8v4", "float16"))


if __name__ == "__main__":
    main()
