#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What the schemes with entropy coding gain over KIVI at KIVI's own attention error, as JSON on stdout.

Every dump is measured with the means and steps that `tierkv calibrate` takes from the *other* dumps, so nothing is fitted to
what it is judged by. Windows are equal (64 raw tokens; KIVI adds its incomplete group). Every family's front of memory and online
attention error is interpolated, linear in memory and in the logarithm of the error; a family that does not reach the error on both
sides gets null.

ratio_at_error.py [--keep EARLIER.json] TIERKV DUMP DUMP... > bench/results/ratio_at_error.json

--keep takes the families that an earlier result has from there and measures the others only: for a new family beside old ones
whose code has not changed. The references are measured again and must be those of the earlier result."""
import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile

REFERENCES = ["kivi4:group=64,residual=64", "kivi4:group=128,residual=64", "kivi2:group=32,residual=64", "k4v4:window=64"]
STEPS = "k=0.04/0.06/0.08/0.12/0.16/0.2/0.25/0.3/0.4,v=0.03/0.05/0.07/0.1/0.15/0.2/0.25"
FAMILIES = {
    "KVComp, blocks": "kvcomp:window=64,rel_k=0.015/0.02/0.03/0.04/0.05/0.07,rel_v=0.04/0.06/0.08/0.12/0.15/0.2",
    "KVComp, channels": "kvcomp:unit=channel,window=64,rel_k=0.02/0.04/0.06/0.09/0.12/0.15,rel_v=0.04/0.06/0.08/0.12/0.15/0.2",
    "global step, mean basis": f"step:window=64,basis=mean,{STEPS}",
    "global step, Hadamard basis": f"step:window=64,basis=hadamard,{STEPS}",
    "weighted steps": "small:window=64,k=0.15/0.2/0.28/0.4/0.55/0.75/1,v=0.12/0.17/0.23/0.33/0.45/0.6/0.8",
}


def measure(tierkv, dump, profile, presets):
    """[(memory share of fp16, online attention error, preset)] over all sequences of the dump."""
    flags = [word for p in presets for word in ("--preset", p)]
    run = subprocess.run([tierkv, "sweep", "--json", "--profile", profile, *flags, dump], check=True, capture_output=True, text=True)
    rows = [r for r in json.loads(run.stdout)["results"] if r["seq"] == "all"]
    return [(1 / r["ratio"], r["attention_rel_error_online"], r["preset"]) for r in rows]


def front(points):
    """By rising error: each takes less memory than all before."""
    kept, least = [], math.inf
    for memory, error, preset in sorted(points, key=lambda p: p[1]):
        if memory < least:
            least = memory
            kept.append((memory, error, preset))
    return kept


def memory_at(points, error):
    """Memory of the front at an error, and the presets on both sides; None outside."""
    kept = front(points)
    finer = [p for p in kept if p[1] <= error]
    coarser = [p for p in kept if p[1] > error]
    if not finer or not coarser:
        return None
    a, b = finer[-1], coarser[0]
    share = math.log(error / a[1]) / math.log(b[1] / a[1])
    return {"memory": a[0] + share * (b[0] - a[0]), "between": [a[2], b[2]]}


def calibrate(tierkv, profile, dumps):
    subprocess.run([tierkv, "calibrate", "--no-thresholds", "--force", "-o", profile, *dumps], check=True, capture_output=True)


def compare(tierkv, dump, others, kept):
    """kept: the rows of an earlier result for this dump, or None."""
    done = kept[0]["families"] if kept else {}
    with tempfile.TemporaryDirectory() as folder:
        profile = str(pathlib.Path(folder) / "profile.h5")
        calibrate(tierkv, profile, others)
        references = measure(tierkv, dump, profile, REFERENCES)
        families = {name: measure(tierkv, dump, profile, [grid]) for name, grid in FAMILIES.items() if name not in done}
    rows = []
    for i, (memory, error, preset) in enumerate(references):
        at = {name: memory_at(points, error) for name, points in families.items()}
        if kept:
            if kept[i]["preset"] != preset or not math.isclose(kept[i]["error"], error, rel_tol=1e-9):
                sys.exit(f"{dump}: {preset} has another error than in the earlier result")
            at = kept[i]["families"] | at
        rows.append({"preset": preset, "memory": memory, "error": error, "families": at})
    return {"dump": pathlib.Path(dump).name, "calibrated_on": [pathlib.Path(o).name for o in others], "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("tierkv")
    parser.add_argument("dumps", nargs="+")
    args = parser.parse_args()
    if len(args.dumps) < 2:
        parser.error("two dumps at least: each is calibrated on the others")
    kept = {}
    if args.keep:
        kept = {d["dump"]: d["rows"] for d in json.loads(args.keep.read_text())["dumps"]}
    out = [compare(args.tierkv, dump, [o for o in args.dumps if o != dump], kept.get(pathlib.Path(dump).name)) for dump in args.dumps]
    print(json.dumps({"schema": "tierkv.bench.ratio_at_error/1", "dumps": out}, indent=1))


if __name__ == "__main__":
    main()
