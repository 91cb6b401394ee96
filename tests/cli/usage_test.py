# SPDX-License-Identifier: Apache-2.0
"""Exit code 2 for unknown or missing words and options, 3 for wrong values, which the message names; --help and --version on stdout."""
from cli import SAMPLE, CliTest, main, run


class Usage(CliTest):
    def test_help_and_version(self):
        for args in (["--help"], ["analyze", "--help"], ["sweep", "--help"], ["convert", "--help"], ["info", "--help"], ["synth", "--help"], ["calibrate", "--help"]):
            r = run(*args)
            self.assertEqual(r.returncode, 0, args)
            self.assertIn("Usage", r.stdout)
        self.assertRegex(run("--version").stdout, r"^\d+\.\d+\.\d+\n$")
        self.assertRegex(run("verify", "--help").stdout, r"0 all are sound; 1 [^;]+; 2 [^;]+;\s+3 ")

    def test_wrong_words(self):
        for args in ([], ["frobnicate"], ["analyze"], ["analyze", SAMPLE, "--json", "--csv"], ["analyze", SAMPLE, "--details"], ["sweep", SAMPLE, "--details", "--csv"],
                     ["analyze", SAMPLE, "--report", "r.html"], ["analyze", SAMPLE, "--threads"],
                     ["report", "--help"], ["report", "--version"], ["synth"], ["calibrate", SAMPLE],
                     ["calibrate", SAMPLE, "-o", "/dev/null/x", "--no-thresholds", "--error-budget", "0.1"],
                     ["calibrate", SAMPLE, "-o", "/dev/null/x", "--no-thresholds", "--prune-budget", "0.1"],
                     ["calibrate", SAMPLE, "-o", "/dev/null/x", "--balance", "0.1"]):
            r = run(*args)
            self.assertEqual(r.returncode, 2, args)
            self.assertRegex(r.stderr, r"^tierkv: .", args)
        for word in ("frobnicate", "--verson", "-x"):
            self.expect(run(word, "--help"), 2, f"'{word}'")

    def test_empty_values(self):
        out = self.dir / "out.h5"
        for name, *args in (("FILE", "info", ""), ("FILE", "verify", ""), ("FILE", "analyze", SAMPLE, ""), ("IN", "compress", "--preset", "step", "", out),
                            ("OUT", "decompress", SAMPLE, ""), ("--output", "synth", "-o", ""), ("--preset", "analyze", SAMPLE, "--preset", ""),
                            ("--layers", "analyze", SAMPLE, "--layers", ""), ("--seq", "analyze", SAMPLE, "--seq="),
                            ("--profile", "compress", SAMPLE, out, "--profile=", "--preset", "step"),
                            ("--model-id", "calibrate", SAMPLE, "-o", out, "--no-thresholds", "--model-id", ""),
                            ("--names", "convert", SAMPLE, out, "--names", "")):
            self.expect(run(*args), 3, f"{name}: is empty")
        self.assertFalse(out.exists())

    def test_wrong_presets(self):
        for preset, words in {"nonsense": "unknown name", "k3v4": "unknown name", "k8v4:": "not key=value", "k8v4:alpha_h=1": "no key",
                              "diffkv:alpha_h=x": "expected a number", "diffkv:alpha_h=1,alpha_l=2": "above", "k8v4+zip": "unknown suffix",
                              "small+fse": "no other entropy stage", "fp16+huffman": "needs codes", "fp16+rot": "no effect",
                              "kivi4:group=0": "whole number", "step:basis=moon": "one of", "diffkv:high=k3v3": "format",
                              "k8v4:window=-1": "whole number", "k8v4:window=1,window=2": "twice", "zstd-codes:of=zstd-fp16": "zstd",
                              "step:basis=mean+rot": "exclude", "k8v4+rot+rot": "twice", "snapkv:keep=0": "a number", "h2o:window=3": "no key",
                              "fp16+fse": "needs codes", "k4v4+fse+fixed": "after another stage", "k4v4:predict=plane": "entropy stage",
                              "k16v4:only=k": "nothing is left", "fp16:group_k=32+huffman": "group_k=32: 16-bit keys",
                              "k16v4:group_k=32,only=k": "group_k=32: 16-bit keys", "k4v16:group_v=32": "group_v=32: 16-bit values",
                              "zstd-codes:of=fp16": "of=fp16: it has no codes", "zstd-codes:of=h2o": "of=h2o: it has no codes",
                              "zstd-codes:of=snapkv": "of=snapkv: it has no codes", "step:only=x": "one of k, v", "zstd-codes:of=step+fse": "needs codes",
                              "zstd-codes:of=step:predict=token": "of their own", "tiers": "needs classes=",
                              "tiers:classes=0.1*k8v4|": "class 2: a format is missing", "tiers:classes=0.5*k8v4|0.4*k4v4": "sum to 0.9",
                              "tiers:classes=k8v4|k4v4": "class 1 has no share", "tiers:classes=k5v4": "class 1", "fast+fse": "fixed widths",
                              "k8v4n": "unknown name"}.items():
            r = run("analyze", SAMPLE, "--preset", preset)
            self.expect(r, 3, "--preset", words)

    def test_classes_of_heads_need_a_profile(self):
        self.expect(run("analyze", SAMPLE, "--preset", "fast"), 3, SAMPLE, "preset fast", "--profile")
        out = self.dir / "a.tkv"
        self.expect(run("compress", SAMPLE, out, "--preset", "fast"), 3, SAMPLE, "preset fast", "--profile")
        self.assertFalse(out.exists())
        profile = self.dir / "p.h5"
        self.assertEqual(run("calibrate", SAMPLE, "-o", profile, "--no-thresholds").returncode, 0)
        self.expect(run("analyze", SAMPLE, "--preset", "fast", "--profile", profile), 3, "joint_sensitivity")
        warned = run("analyze", SAMPLE, "--layers", "0", "--preset", "tiers:classes=k4v4/k4v2@1:0.1", "--json")
        self.assertEqual(warned.returncode, 0, warned.stderr)
        self.assertIn("prunes", warned.stderr)

    def test_wrong_layers(self):
        for layers in ("x", "3-1", "-1", "1-", "1-2-3"):
            self.expect(run("analyze", SAMPLE, "--layers=" + layers), 3, "--layers")
        self.expect(run("analyze", SAMPLE, "--layers", "5-6"), 3, "--layers", "the dump has 0-5")
        self.expect(run("analyze", SAMPLE, "--seq", "nobody"), 3, "--seq", "nobody")

    def test_wrong_values(self):
        out = self.dir / "out"
        for command, options in (
                (["analyze", SAMPLE], {"--threads": ("0", "1025", "x", "1.5")}),
                (["decompress", SAMPLE, out], {"--gzip": ("10", "-1"), "--dtype": ("int8",)}),
                (["calibrate", SAMPLE, "-o", out], {"--error-budget": ("1.1", "nan"), "--prune-budget": ("-1", "x")}),
                (["synth", "-o", out], {"--layers": ("0", "5000"), "--q-heads": ("0", "3"), "--kv-heads": ("0", "3", "16"), "--head-dim": ("0", "4097"),
                                        "--tokens": ("0", "1,x", "1,,2", "1,", "200000000"), "--dtype": ("float64",), "--queries": ("-1",), "--seed": ("-1", "x"),
                                        "--outliers": ("-1", "129"), "--outlier-scale": ("-1", "inf"), "--heavy": ("2", "nan"),
                                        "--significance": ("some",)})):
            for option, values in options.items():
                for value in values:
                    self.expect(run(*command, f"{option}={value}"), 3, option)
        for value in ("-1", "134217729", "x"):
            self.expect(run("synth", "-o", out, f"--sinks={value}"), 3, f"--sinks: '{value}' is not a whole number from 0 to 134217728")
        for option, value, tokens in (("--queries", 33, "32"), ("--sinks", 21, "32,20")):
            self.expect(run("synth", "-o", out, option, value, "--tokens", tokens), 3, f"{option} {value} is more than the {value - 1} tokens")
        self.assertFalse(out.exists())


if __name__ == "__main__":
    main()
