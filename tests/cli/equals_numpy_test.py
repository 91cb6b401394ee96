"""`tierkv analyze --json` equals the independent NumPy computation: 0.5% relative, tier counts exactly.

Usage: equals_numpy_test.py TIERKV SOURCE_DIR [--preset P]... [DUMP...]
Without arguments: the sample dump and all presets below.
"""
import json
import pathlib
import subprocess
import sys

TIERKV, ROOT = sys.argv[1], pathlib.Path(sys.argv[2])
sys.path.insert(0, str(ROOT / "tests" / "reference"))
from analyze_numpy import analyze  # noqa: E402

PRESETS = ["fp16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v4", "k8v2", "k4v1", "k1v1", "k16v4", "k4v16", "k8v4:window=64",
           "k8v4:window=64,sinks=4", "k4v4:group_k=32,group_v=64", "k4v4+rot", "diffkv", "diffkv:alpha_h=3,sinks=4",
           "diffkv:alpha_h=3,alpha_l=0.3", "diffkv:low=k4v4,window=128", "diffkv:window_format=raw", "diffkv+rot", "kivi4",
           "kivi2", "kivi4:group=64,residual=100", "kvcomp", "kvcomp:unit=channel,rel_k=0.15", "kvcomp:window=100,sinks=3", "step",
           "step:k=0.4,v=0.3", "step:basis=none", "step+rot", "k4v4+huffman", "k8v4+huffman", "k4v2+huffman+rot", "diffkv+huffman",
           "zstd-fp16", "zstd-codes:of=k8v4", "zstd-codes:of=step"]
TOLERANCE = 0.005
SKIP = {"file", "preset", "seq", "pairs", "tiers"}
ZSTD_SIZES = {"bits_per_value", "ratio", "key_coded_bits", "value_coded_bits"}  # of zstd itself, which NumPy does not have


def deviations(got, want):
    for key, value in want.items():
        if key in SKIP or ("zstd" in want["preset"] and key in ZSTD_SIZES):
            continue
        other = got[key]
        if value is None or other is None:
            if value is not other:
                yield key, other, value
            continue
        # Errors of lossless presets are zero on both sides; nothing else is near zero.
        if abs(other - value) > TOLERANCE * abs(value) + 1e-12:
            yield key, other, value
    for tier, share in want["tiers"].items():
        if round(got["tiers"][tier] * want["pairs"]) != round(share * want["pairs"]):
            yield "tiers." + tier, got["tiers"][tier], share


def main():
    words, presets, dumps = sys.argv[3:], [], []
    while words:
        w = words.pop(0)
        presets.append(words.pop(0)) if w == "--preset" else dumps.append(w)
    presets, dumps = presets or PRESETS, dumps or [ROOT / "datasets" / "sample_1k.h5"]
    failed = checked = 0
    for dump in dumps:
        flags = [x for p in presets for x in ("--preset", p)]
        got = json.loads(subprocess.run([TIERKV, "analyze", "--json", *flags, str(dump)], check=True, capture_output=True).stdout)
        want = analyze(dump, presets)
        assert [(r["preset"], r["seq"]) for r in got["results"]] == [(r["preset"], r["seq"]) for r in want]
        for g, w in zip(got["results"], want):
            for key, a, b in deviations(g, w):
                print(f"MISMATCH {dump} {w['preset']} {w['seq']} {key}: tierkv {a} NumPy {b}")
                failed += 1
            checked += len(w)
    print(f"{checked} numbers compared, {failed} differ")
    return 1 if failed or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
