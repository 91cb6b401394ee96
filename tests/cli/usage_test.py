# SPDX-License-Identifier: Apache-2.0
"""Usage: exit code 2 and a message on stderr for what is typed wrong; --help and --version on stdout."""
from cli import SAMPLE, CliTest, main, run


class Usage(CliTest):
    def test_help_and_version(self):
        for args in (["--help"], ["analyze", "--help"], ["sweep", "--help"], ["convert", "--help"], ["info", "--help"], ["synth", "--help"], ["calibrate", "--help"]):
            r = run(*args)
            self.assertEqual(r.returncode, 0, args)
            self.assertIn("Usage", r.stdout)
        self.assertRegex(run("--version").stdout, r"^\d+\.\d+\.\d+\n$")

    def test_wrong_words(self):
        for args in ([], ["frobnicate"], ["analyze"], ["analyze", SAMPLE, "--json", "--csv"], ["analyze", SAMPLE, "--details"], ["sweep", SAMPLE, "--details", "--csv"],
                     ["analyze", SAMPLE, "--report", "r.html"], ["analyze", SAMPLE, "--threads", "0"],
                     ["report", "--help"], ["report", "--version"], ["synth"], ["calibrate", SAMPLE],
                     ["calibrate", SAMPLE, "-o", "/dev/null/x", "--balance", "0.1"]):
            r = run(*args)
            self.assertEqual(r.returncode, 2, args)
            self.assertNotEqual(r.stderr, "")

    def test_wrong_presets(self):
        for preset, words in {"nonsense": "unknown name", "k3v4": "unknown name", "k8v4:": "not key=value", "k8v4:alpha_h=1": "no key",
                              "diffkv:alpha_h=x": "expected a number", "diffkv:alpha_h=1,alpha_l=2": "above", "k8v4+zip": "unknown suffix",
                              "kvcomp+huffman": "always", "step+huffman": "always", "fp16+huffman": "needs codes", "fp16+rot": "no effect",
                              "kivi4:group=0": "whole number", "step:basis=moon": "one of", "diffkv:high=k3v3": "format",
                              "k8v4:window=-1": "whole number", "k8v4:window=1,window=2": "twice", "zstd-codes:of=zstd-fp16": "zstd",
                              "step:basis=mean+rot": "exclude", "k8v4+rot+rot": "twice", "": "unknown name", "snapkv:keep=0": "a number", "h2o:window=3": "no key",
                              "fp16+fse": "needs codes", "k4v4+fse+fixed": "after another stage", "k4v4:predict=plane": "entropy stage",
                              "k16v4:only=k": "nothing is left", "step:only=x": "one of k, v", "zstd-codes:of=step+fse": "needs codes",
                              "zstd-codes:of=step:predict=token": "of their own", "tiers": "needs classes=",
                              "tiers:classes=0.1*k8v4|": "class 2: a format is missing", "tiers:classes=0.5*k8v4|0.4*k4v4": "sum to 0.9",
                              "tiers:classes=k8v4|k4v4": "class 1 has no share", "tiers:classes=k5v4": "class 1", "fast+fse": "fixed widths",
                              "k8v4n": "unknown name"}.items():
            r = run("analyze", SAMPLE, "--preset", preset)
            self.expect(r, 2, words)

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
            self.expect(run("analyze", SAMPLE, "--layers=" + layers), 2, "--layers")
        self.expect(run("analyze", SAMPLE, "--layers", "5-6"), 3, "the dump has 0-5")
        self.expect(run("analyze", SAMPLE, "--seq", "nobody"), 3, "nobody")


if __name__ == "__main__":
    main()
