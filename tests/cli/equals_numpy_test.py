# SPDX-License-Identifier: Apache-2.0
"""`tierkv analyze --json` equals tests/reference, the second implementation of every metric: 0.5% relative, tier counts exactly.

Usage: equals_numpy_test.py TIERKV SOURCE_DIR [--preset NAME]... [DUMP]...
Without presets or dumps: all of PRESETS on LAYERS of datasets/sample_1k.h5. Prints the largest deviation of each preset and field.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import h5py
import numpy as np

DEFAULT_TABLE = ["fp16", "k8v8", "k8v4", "k4v8", "k4v4", "k4v2", "k2v4", "k8v2", "diffkv", "kivi4", "kivi2", "kvcomp", "small", "step",
                 "zstd-fp16", "zstd-codes"]
ODD = ["k1v1", "k4v1", "k16v4", "k4v16", "k8v4:window=64,sinks=4", "k4v4:group_k=32,group_v=64", "k4v4+rot", "fp16:window=5",
       "k4v4+huffman", "k8v4+huffman", "k4v2+huffman+rot", "k2v2+huffman",
       "diffkv:alpha_h=3,sinks=4", "diffkv:alpha_h=3,alpha_l=0.3", "diffkv:low=k4v4,window=128", "diffkv+rot", "diffkv+huffman",
       "kivi4:group=64,residual=100", "kivi2:residual=0", "kivi2+huffman", "kivi4:residual=5000",
       "kvcomp:unit=channel,rel_k=0.15", "kvcomp:block=32,window=1", "kvcomp+rot", "kvcomp:window=100,sinks=3", "diffkv:window_format=raw", "step:k=0.4,v=0.3", "step:basis=none",
       "k4v2n", "k2nv4:group_k=32+rot", "tiers:classes=k4v4/k4v2", "tiers:classes=k4v2/k2v2@2:0.3,means=off", "tiers:classes=k4v2/k2v2,rotate=off",
       "tiers:classes=0.5*k8v4|k8v4", "step+rot", "zstd-codes:of=step", "snapkv", "snapkv:keep=0.25,window=16", "snapkv:format=k8v4", "h2o", "h2o:keep=0.3,format=k4v4",
       "small:k=0.5,v=0.45,importance=off", "small:window=100,sinks=70", "small:only=k", "small:only=v,sinks=0",
       "kvcomp:only=k", "step:only=v", "kvcomp:predict=token", "step:predict=plane", "k8v8:predict=channel+huffman", "k4v4+fixed",
       "step:predict=token+fixed", "kvcomp+fse", "k4v4+bitshuffle"]
PRESETS = DEFAULT_TABLE + ODD

# With a profile of drawn sensitivities.
CLASSES = ["fast", "tiers:classes=0.3*k8v4|0.3*k4v4/k4v2@2|k2v2@1:0.2,means=off"]

LAYERS = (0, 2, 5)  # of the sample: the first, the last and one between them
TOLERANCE = 0.005
# Errors of what is stored without loss are rounding alone: nothing else lies below this.
ABSOLUTE = 1e-7
FIELDS = {"bits_per_value": "bits", "ratio": "ratio", "page_ratio": "page_ratio", "key_rel_error": "key",
          "value_rel_error": "value", "attention_rel_error": "attention", "attention_rel_error_online": "online",
          "attention_pooled_error": "pooled", "attention_cosine": "cosine", "key_entropy_bits": "key_H", "value_entropy_bits": "value_H",
          "key_coded_bits": "key_coded", "value_coded_bits": "value_coded"}
SIZES = {"bits_per_value", "ratio", "key_coded_bits", "value_coded_bits"}


def deviation(got, want):
    """Relative; infinite where one of the two has no value."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return 0.0 if abs(got - want) <= ABSOLUTE else abs(got - want) / max(abs(want), ABSOLUTE)


def compare(got, want):
    """{field: deviation} of one result; NumPy has no zstd or FSE and the design no coded pages: those sizes are checked for sense."""
    opaque = want["preset"].startswith("zstd") or want["preset"].endswith(("+fse", "+bitshuffle"))
    out = {"values": 0.0 if got["values"] == want["values"] else float("inf")}
    for field in FIELDS:
        if field in SIZES and opaque:
            sensible = got[field] is None or 0 < got[field] < (16.1 if "bits" in field else 100)
            out[field] = 0.0 if sensible else float("inf")
        elif field == "page_ratio" and want[field] is None and got[field] is not None:
            coded = want["key_coded_bits"] is not None or want["value_coded_bits"] is not None
            out[field] = 0.0 if coded and 0 < got[field] <= got["ratio"] else float("inf")
        else:
            out[field] = deviation(got[field], want[field])
    for tier, share in want["tiers"].items():
        pairs = got["tiers"][tier] * want["pairs"]
        whole = abs(pairs - round(pairs)) < 1e-3
        out["tiers." + tier] = 0.0 if whole and round(pairs) == round(share * want["pairs"]) else float("inf")
    return out


def print_table(results):
    print(f"{'largest deviation, %':44}" + "".join(f"{short:>12}" for short in FIELDS.values()) + f"{'tiers':>8}")
    for name, worst in results.items():
        tiers = max(x for field, x in worst.items() if field.startswith("tiers"))
        print(f"{name:44}" + "".join(f"{100 * worst[f]:12.4f}" for f in FIELDS) + f"{'ok' if tiers == 0 else 'WRONG':>8}")


def compare_dump(binary, dump, presets, analyze, profile=None):
    """{preset: {field: largest deviation over the parts}} of one dump; prints each mismatch."""
    flags = [word for p in presets for word in ("--preset", p)]
    flags += ["--profile", str(profile)] if profile else []
    run = subprocess.run([binary, "analyze", "--json", *flags, str(dump)], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{dump}: tierkv exits {run.returncode}: {run.stderr}")
    got = {(r["preset"], r["seq"]): r for r in json.loads(run.stdout)["results"]}
    want = analyze(dump, presets, profile)
    if set(got) != {(r["preset"], r["seq"]) for r in want}:
        sys.exit(f"{dump}: presets and sequences differ: {sorted(got)}")
    worst = {}
    for w in want:
        g = got[w["preset"], w["seq"]]
        fields = compare(g, w)
        for field, x in fields.items():
            if x > TOLERANCE:
                name, _, tier = field.partition(".")
                pair = (g[name][tier], w[name][tier]) if tier else (g[name], w[name])
                print(f"MISMATCH {pathlib.Path(dump).name} {w['preset']} {w['seq']} {field}: tierkv {pair[0]}, NumPy {pair[1]}")
        before = worst.setdefault(w["preset"], fields)
        worst[w["preset"]] = {field: max(x, before[field]) for field, x in fields.items()}
    return worst


def cut_layers(dump, layers, path):
    """Writes a dump of the named layers, numbered from 0."""
    with h5py.File(dump) as whole, h5py.File(path, "w") as part:
        part.attrs.update(whole.attrs)
        part.attrs["num_layers"] = np.array(len(layers), whole.attrs["num_layers"].dtype)
        for name, sequence in whole["seq"].items():
            group = part.create_group(f"seq/{name}")
            group.attrs.update(sequence.attrs)
            for key in sequence:
                if key != "layer":
                    sequence.copy(key, group)
            for i, layer in enumerate(layers):
                sequence.copy(f"layer/{layer}", group, f"layer/{i}")
    return path


def profile_of(binary, dump, path):
    """A profile of the dump in which the heads' sensitivities are drawn: the seed is printed."""
    subprocess.run([binary, "calibrate", str(dump), "-o", str(path), "--no-thresholds"], check=True, capture_output=True)
    seed = int.from_bytes(os.urandom(4), "little")
    with h5py.File(path, "a") as f:
        rows = int(f.attrs["num_layers"]) * int(f.attrs["num_kv_heads"])
        f["joint_sensitivity"] = np.random.default_rng(seed).permutation(rows) + 1.0
    print(f"sensitivities: seed {seed}")
    return path


def main():
    args = argparse.ArgumentParser()
    args.add_argument("tierkv")
    args.add_argument("source_dir", type=pathlib.Path)
    args.add_argument("dumps", nargs="*")
    args.add_argument("--preset", action="append")
    args = args.parse_args()
    sys.path.insert(0, str(args.source_dir / "tests" / "reference"))
    from analyze_numpy import analyze

    good = True
    folder = tempfile.TemporaryDirectory()
    sample = args.source_dir / "datasets" / "sample_1k.h5"
    for dump in args.dumps or [cut_layers(sample, LAYERS, pathlib.Path(folder.name) / "sample_cut.h5")]:
        worst = compare_dump(args.tierkv, dump, args.preset or PRESETS, analyze)
        print(f"\n{pathlib.Path(dump).name}: {sum(map(len, worst.values()))} numbers")
        print_table(worst)
        good &= all(x <= TOLERANCE for fields in worst.values() for x in fields.values())
        if args.preset:
            continue
        profile = profile_of(args.tierkv, dump, pathlib.Path(folder.name) / (pathlib.Path(dump).stem + "_profile.h5"))
        worst = compare_dump(args.tierkv, dump, CLASSES, analyze, profile)
        print_table(worst)
        good &= all(x <= TOLERANCE for fields in worst.values() for x in fields.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
