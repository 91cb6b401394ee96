# SPDX-License-Identifier: Apache-2.0
"""sweep: grids, formats, totals over several dumps, the Pareto front, and presets that a dump cannot serve."""
import csv
import io
import json

import h5py
import numpy as np

from cli import SAMPLE, CliTest, Dump, main, run

TIMING = ("encode_gbps", "decode_gbps")


class Sweep(CliTest):
    def sweep(self, *args):
        r = run("sweep", "--json", *args)
        self.assertEqual(r.returncode, 0, f"seed {self.seed}: {r.stderr}")
        return json.loads(r.stdout)

    def two_dumps(self):
        return [Dump(seed=self.seed + i, tokens=100 + 150 * i).write(self.dir / f"{i}.h5") for i in range(2)]

    def test_results_are_those_of_analyze(self):
        presets = ["k4v4:window=8", "k4v4:window=8+huffman", "k8v4:window=8", "k8v4:window=8+huffman"]
        flags = [w for p in presets for w in ("--preset", p)]
        want = json.loads(run("analyze", "--json", *flags, SAMPLE).stdout)["results"]
        got = self.sweep("--sequences", "--preset", "k4v4/k8v4:window=8+/huffman", "--preset", "k4v4:window=8", SAMPLE)
        self.assertEqual(got["schema"], "tierkv.sweep/1")
        self.assertEqual(got["skipped"], [])
        self.assertEqual(len(got["results"]), len(want))
        for g, w in zip(got["results"], want):
            self.assertIsInstance(g.pop("pareto"), bool)
            for key in w:
                if isinstance(w[key], float) and key not in TIMING:
                    self.assertAlmostEqual(g[key], w[key], delta=1e-9)
                elif key not in TIMING:
                    self.assertEqual(g[key], w[key])

    def test_several_dumps_are_pooled(self):
        paths = self.two_dumps()
        results = self.sweep("--preset", "k4v4/k8v4", *paths)["results"]
        self.assertEqual([(r["file"], r["preset"]) for r in results],
                         [(f, p) for f in ("all", *map(str, paths)) for p in ("k4v4", "k8v4")])
        both, first, second = results[0], results[2], results[4]
        self.assertEqual(both["values"], first["values"] + second["values"])
        bits = sum(r["bits_per_value"] * r["values"] for r in (first, second)) / both["values"]
        self.assertAlmostEqual(both["bits_per_value"], bits, delta=1e-9)

    def test_pages_are_pooled_where_all_dumps_have_them(self):
        paths = [Dump(seed=self.seed, head_dim=d).write(self.dir / f"{d}.h5") for d in (64, 7, 64)]
        for files, has_pages in ((paths[:2], False), (paths[1:], False), (paths[::2], True)):
            results = self.sweep("--preset", "k4v4", *files)["results"]
            self.assertEqual(results[0]["page_ratio"] is not None, has_pages, files)
            self.assertEqual({r["file"]: r["page_ratio"] is not None for r in results[1:]}, {str(f): f != paths[1] for f in files})

    def check_front(self, results, error):
        for r in results:
            others = [o for o in results if o["file"] == r["file"]]
            beaten = any(o["bits_per_value"] <= r["bits_per_value"] and o[error] <= r[error] and
                         (o["bits_per_value"], o[error]) != (r["bits_per_value"], r[error]) for o in others)
            self.assertEqual(r["pareto"], not beaten, r)
        self.assertEqual({r["pareto"] for r in results}, {True, False})

    def test_pareto_front(self):
        results = self.sweep("--preset", "k2v2/k4v4/k8v8", "--preset", "k2v8", *self.two_dumps())["results"]
        self.check_front(results, "attention_pooled_error")

    def test_sensitivities_rank_by_the_heads_that_matter(self):
        """In the one head that matters keys are large, so that they need the bits; in the others values do."""
        dump, path, profile = Dump(seed=self.seed), self.dir / "a.h5", self.dir / "p.h5"
        for name in dump.data:
            if name.endswith("/k"):
                dump.data[name] = (dump.data[name] * np.float16(0.1)).astype("float16")
        dump.data["/seq/a/layer/1/k"][1] *= 100
        dump.data["/seq/a/layer/1/v"][1] *= np.float16(0.01)  # the pooled error hardly sees this head
        dump.write(path)
        self.assertEqual(run("calibrate", path, "-o", profile, "--no-thresholds").returncode, 0)
        with h5py.File(profile, "a") as f:
            f["joint_sensitivity"] = np.array([1e-6, 1e-6, 1e-6, 1.0])
        presets = ("--preset", "k8v2:window=8", "--preset", "k2v8:window=8", path)
        plain, weighted = self.sweep(*presets)["results"], self.sweep("--profile", profile, *presets)["results"]
        self.check_front(plain, "attention_pooled_error")
        self.check_front(weighted, "attention_weighted_error")
        self.assertEqual([r["pareto"] for r in plain], [False, True], f"seed {self.seed}")
        self.assertEqual([r["pareto"] for r in weighted], [True, False], f"seed {self.seed}")
        table = run("sweep", "--profile", profile, *presets).stdout
        self.assertLess(table.index("k8v2"), table.index("k2v8"))

    def test_csv_and_markdown_have_every_preset(self):
        paths = self.two_dumps()
        rows = list(csv.DictReader(io.StringIO(run("sweep", "--csv", "--preset", "k4v4:window=0/8,sinks=2", *paths).stdout)))
        self.assertEqual(len(rows), 6)
        self.assertEqual(rows[1]["preset"], "k4v4:window=8,sinks=2")
        self.assertGreater(float(rows[1]["bits_per_value"]), float(rows[0]["bits_per_value"]))
        markdown = run("sweep", "--markdown", "--preset", "k4v4/k8v8", *paths).stdout
        self.assertEqual(markdown.count("### "), 3)
        tables = [line for line in markdown.splitlines() if line.startswith("| ")]
        self.assertEqual(len(tables), 3 * 3)
        self.assertEqual({line.count("|") for line in tables}, {14})
        self.assertIn("**`k4v4`**", markdown)
        table = run("sweep", "--preset", "k4v4/k8v8", *paths).stdout
        self.assertIn("* k8v8", table)

    def test_what_a_dump_cannot_serve_is_left_out_and_named(self):
        dump = Dump(seed=self.seed, queries=0)
        dump.data = {k: v for k, v in dump.data.items() if "significance" not in k}
        bare = dump.write(self.dir / "bare.h5")
        r = run("sweep", "--json", "--preset", "step/diffkv/k8v4", bare, SAMPLE)
        self.assertEqual(r.returncode, 0)
        j = json.loads(r.stdout)
        self.assertEqual([(s["file"], s["preset"]) for s in j["skipped"]], [(str(bare), "step"), (str(bare), "diffkv")])
        self.assertEqual(r.stderr.count("left out"), 2)
        self.assertIn("has no q", j["skipped"][0]["reason"])
        self.assertIn("significance", j["skipped"][1]["reason"])
        of = lambda file: [x["preset"] for x in j["results"] if x["file"] == str(file)]
        self.assertEqual((of("all"), of(bare), of(SAMPLE)), (["k8v4"], ["k8v4"], ["step", "diffkv", "k8v4"]))
        self.assertIsNone(j["results"][1]["attention_rel_error_online"])
        self.assertFalse(j["results"][1]["pareto"])
        self.expect(run("sweep", "--preset", "step", bare), 3, "no preset can be tried")

    def test_baselines(self):
        r = lambda *presets: self.sweep("--layers", "2-3", *(w for p in presets for w in ("--preset", p)), SAMPLE)["results"]
        for keep in (0.25, 0.5, 1):
            for x in r(f"snapkv:keep={keep}", f"h2o:keep={keep}"):
                self.assertAlmostEqual(x["tiers"]["pruned"], 1 - keep, delta=1e-9)
                self.assertAlmostEqual(x["bits_per_value"], 16 * keep, delta=1e-9)
                self.assertEqual(x["attention_rel_error"] < 1e-9, keep == 1)
        for name in ("step", "kvcomp", "k8v4+huffman"):
            base = name.split("+")[0]
            results = r(name, *(base + "+" + s for s in ("fse", "fixed", "bitshuffle")), *(
                f"{base}:predict={p}" + name[len(base):] for p in ("token", "channel", "plane")))
            for x in results:  # no stage loses anything
                for field in ("key_rel_error", "value_rel_error", "attention_rel_error_online"):
                    self.assertAlmostEqual(x[field], results[0][field], delta=1e-12)
            fse = results[1]
            for c in ("key", "value"):  # entropy is per layer, so coders with a table per layer cannot do better
                self.assertGreaterEqual(fse[c + "_coded_bits"], fse[c + "_entropy_bits"])
                self.assertLess(fse[c + "_coded_bits"], fse[c + "_entropy_bits"] + 0.04)
        both, keys, values = r("kvcomp", "kvcomp:only=k", "kvcomp:only=v")
        self.assertEqual((keys["value_rel_error"], values["key_rel_error"]), (0, 0))
        self.assertAlmostEqual(keys["key_rel_error"], both["key_rel_error"], delta=1e-12)
        self.assertAlmostEqual(values["value_rel_error"], both["value_rel_error"], delta=1e-12)
        self.assertIsNone(keys["value_coded_bits"])
        # What each component takes beside a raw one adds up to what both take.
        self.assertAlmostEqual(keys["bits_per_value"] + values["bits_per_value"] - 16, both["bits_per_value"], delta=1e-9)

    def test_what_baselines_need(self):
        dump = Dump(seed=self.seed, queries=20)
        path = dump.write(self.dir / "few.h5")
        self.assertEqual(len(self.sweep("--preset", "snapkv:window=20", path)["results"]), 1)
        self.expect(run("analyze", "--preset", "snapkv:window=21", path), 3, "snapkv needs q of the newest 21")
        for name in [n for n in dump.data if "q_positions" in n]:
            dump.data[name] -= 1
        self.expect(run("analyze", "--preset", "snapkv:window=20", dump.write(path)), 3, "newest 20 positions is not there")
        dump.data = {k: v for k, v in dump.data.items() if "significance" not in k}
        self.expect(run("analyze", "--preset", "h2o", dump.write(path)), 3, "significance")
        self.expect(run("compress", "--preset", "h2o", SAMPLE, self.dir / "a.tkv"), 3, "baseline")
        self.expect(run("compress", "--preset", "step+fse", SAMPLE, self.dir / "a.tkv"), 3, "baseline")
        self.expect(run("compress", "--preset", "kvcomp:predict=token", SAMPLE, self.dir / "a.tkv"), 3, "baseline")

    def test_usage(self):
        self.expect(run("sweep", SAMPLE, "--preset", "step:k=0.2/"), 3, "--preset", "empty")
        self.expect(run("sweep", SAMPLE, "--preset", "k4v4/nonsense"), 3, "--preset", "unknown name 'nonsense'")
        self.expect(run("sweep", SAMPLE, "--json", "--markdown"), 2)
        self.expect(run("sweep"), 2, "FILE")
        self.expect(run("sweep", self.dir / "missing.h5"), 3, "missing.h5")
        r = run("sweep", "--layers", "7", "--preset", "k4v4/k8v8", SAMPLE)
        self.expect(r, 3, "the dump has 0-5")
        self.assertEqual(r.stderr.count("\n"), 1)

    def test_default_is_44_presets(self):
        path = Dump(seed=self.seed, layers=1, tokens=150, head_dim=128, queries=64).write(self.dir / "d.h5")
        r = self.sweep(path)
        self.assertEqual((len(r["results"]), r["skipped"]), (44, []))


if __name__ == "__main__":
    main()
