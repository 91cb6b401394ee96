#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Answers and KL of a model that reads its prompts from compressed caches, as JSON.

Prompts are prefilled exactly, compressed by the library before the question is seen, decoded, and continued teacher-forced: an answer is
right when all of its tokens have the highest probability; KL is against the same model over its exact cache, the mean of all
positions of the continuation. Means and steps come from `tierkv calibrate` on dumps that hold none of the prompts.

run.py --model FOLDER --tierkv BUILD --calibrate DUMP... --text FILE... [--more EARLIER.json] [-o bench/results/answers.json]

BUILD: a build folder, with the command and the Python package. --text: plain texts to hide needles in and to go on with. --more takes the
prompts of an earlier result, of another seed, into this one."""
import argparse
import json
import math
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"
import h5py
import numpy as np

from model import Model
from predictions import kl_by_position, log_probabilities, right_answers
from tasks import make_items

FIXED = ["fp16", "k8v4:window=64", "k4v4:window=64", "kivi4:group=64,residual=64", "kivi4:group=128,residual=64", "kivi2:group=32,residual=64",
         "diffkv:alpha_h=1,window_format=raw", "diffkv:alpha_h=3,window_format=raw"]
KVCOMP = {
    "KVComp, blocks": ("block", [(0.02, 0.06), (0.03, 0.1), (0.05, 0.15)]),
    "KVComp, channels": ("channel", [(0.04, 0.06), (0.08, 0.1), (0.15, 0.15)]),
}
EVEN_STEPS = [(0.1, 0.06), (0.14, 0.08), (0.2, 0.12), (0.3, 0.25), (0.4, 0.3)]
COLUMNS = ("memory", "error", "kl", "right")  # of a scheme, by prompt
LARGEST_DUMP_ERROR = 2e-3  # of keys and values against a dump: float16 queries and weights in bfloat16 leave about 5e-4


def step_presets(basis, steps):
    return [f"step:window=64,basis={basis},k={k},v={v}" for k, v in steps]


def schemes(quick):
    from codec import Scheme
    out = [Scheme("fixed", p) for p in FIXED]
    if quick:
        preset = step_presets("mean", EVEN_STEPS[1:2])[0]
        return out[:3] + [Scheme("global step, mean basis", preset, own_means=own) for own in (False, True)]
    for family, (unit, errors) in KVCOMP.items():
        out += [Scheme(family, f"kvcomp:unit={unit},window=64,rel_k={k},rel_v={v}") for k, v in errors]
    for basis, steps in (("mean", EVEN_STEPS), ("hadamard", EVEN_STEPS[1:4])):
        out += [Scheme(f"global step, {basis} basis", p) for p in step_presets(basis, steps)]
    out += [Scheme("global step, own means", p, own_means=True) for p in step_presets("mean", EVEN_STEPS[1:4])]
    return out


class Worker:
    """What a process keeps between prompts."""
    model = profiles = chosen = None

    @classmethod
    def start(cls, folder, profiles, chosen):
        cls.model, cls.profiles, cls.chosen = Model(folder), profiles, chosen

    @classmethod
    def measure(cls, item):
        from codec import PromptCodec
        cache = cls.model.prefill(item.prompt)
        exact = log_probabilities(cls.model.continued(item.continuation[:-1], cache))
        with tempfile.TemporaryDirectory() as folder:
            codec = PromptCodec(folder, cls.model, item.prompt, cache, cls.profiles)
            sizes, rows = codec.measured(cls.chosen), []
            for s in cls.chosen:
                log_p = log_probabilities(cls.model.continued(item.continuation[:-1], codec.decoded(s)))
                kl = kl_by_position(exact, log_p).mean()
                rows.append({"memory": sizes[s][0], "error": sizes[s][1], "kl": kl, "right": right_answers(item, log_p)})
        following = exact[np.arange(len(exact)), item.continuation[1:]]
        return {"task": item.task, "tokens": len(item.prompt), "positions": len(exact), "answers": len(item.answers),
                "nll": -following.mean(), "rows": rows}


def check_model(model, dump):
    """The largest relative error of keys and values against a dump that holds this model's."""
    worst = 0.0
    with h5py.File(dump) as f:
        seq = next(iter(f["seq"].values()))
        for i, layer in enumerate(model.prefill(seq["tokens"][:])):
            for got, name in ((layer.k, "k"), (layer.v, "v")):
                want = seq[f"layer/{i}/{name}"][:].astype(np.float32)
                worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    if not worst < LARGEST_DUMP_ERROR:
        sys.exit(f"{dump}: keys and values differ by {worst:.1e} from this model's")
    return worst


def calibrated(build, folder, dumps):
    """{name: profile}"""
    out = {"even": []}
    for name, options in out.items():
        path = str(pathlib.Path(folder) / f"{name}.h5")
        command = [str(build / "tierkv"), "calibrate", "--threads", "2", "--no-thresholds", *options, "-o", path]
        subprocess.run([*command, *dumps], check=True, capture_output=True)
        out[name] = path
    return out


def collected(pool, items, minutes):
    """Records as they are done; those that are not done in time are left out."""
    end, done = time.monotonic() + 60 * minutes, pool.imap_unordered(Worker.measure, items)
    for count in range(len(items)):
        try:
            yield done.next(max(0.0, end - time.monotonic()))
        except multiprocessing.TimeoutError:
            print(f"\nout of time: {count} of {len(items)} prompts", file=sys.stderr)
            return
        print(f"\r{count + 1} of {len(items)} prompts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def significant(x):
    return x if x is None or x == 0 or not math.isfinite(x) else float(f"{x:.5g}")


def report(args, chosen, records, worst):
    prompts = [{key: significant(r[key]) if key == "nll" else r[key] for key in ("task", "tokens", "positions", "answers", "nll")}
               for r in records]
    rows = []
    for i, s in enumerate(chosen):
        columns = {key: [significant(r["rows"][i][key]) for r in records] for key in COLUMNS}
        rows.append({"family": s.family, "preset": s.preset, "profile": s.profile, "own_means": s.own_means, **columns})
    run = {"commit": args.commit, "seed": args.seed, "prompts": len(prompts), "dump_error": significant(worst)}
    return {"schema": "tierkv.bench.answers/1", "runs": [run],
            "calibrated_on": [pathlib.Path(d).name for d in args.calibrate], "texts": args.text, "prompts": prompts, "schemes": rows}


def merged(earlier, new):
    """Both results' prompts; everything but prompts and runs must be the same."""
    def settings(result):
        schemes = [{k: v for k, v in s.items() if k not in COLUMNS} for s in result["schemes"]]
        return {k: v for k, v in result.items() if k not in ("runs", "prompts")} | {"schemes": schemes}
    if settings(earlier) != settings(new):
        sys.exit("the earlier result has other schemes, texts or calibration")
    if {r["seed"] for r in earlier["runs"]} & {r["seed"] for r in new["runs"]}:
        sys.exit("the earlier result has the same seed: its prompts would count twice")
    schemes = [a | {c: a[c] + b[c] for c in COLUMNS} for a, b in zip(earlier["schemes"], new["schemes"])]
    return new | {"runs": earlier["runs"] + new["runs"], "prompts": earlier["prompts"] + new["prompts"], "schemes": schemes}


def written(result):
    """JSON with a line for each prompt and each list of a scheme."""
    head = json.dumps({k: v for k, v in result.items() if k not in ("prompts", "schemes")}, indent=1)[:-2]
    prompts = ",\n".join("  " + json.dumps(p) for p in result["prompts"])
    rows = ",\n".join("  {" + ",\n   ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in s.items()) + "}" for s in result["schemes"])
    return f'{head},\n "prompts": [\n{prompts}\n ],\n "schemes": [\n{rows}\n ]\n}}\n'


def parsed_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--tierkv", type=pathlib.Path, required=True, metavar="BUILD")
    parser.add_argument("--calibrate", nargs="+", required=True, metavar="DUMP")
    parser.add_argument("--text", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=35, help="prompts that are not done by then are left out")
    parser.add_argument("--quick", action="store_true", help="five schemes on a few short prompts")
    parser.add_argument("--more", type=pathlib.Path, metavar="EARLIER")
    parser.add_argument("-o", "--output", type=pathlib.Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True)
    args.commit = commit.stdout.strip()  # of what is run: the checkout may change during a long run
    return args


def main():
    args = parsed_arguments()
    sys.path.append(str(args.tierkv / "python"))
    print(f"seed {args.seed}", file=sys.stderr)
    model = Model(args.model)
    worst = check_model(model, args.calibrate[0])
    items = make_items(model, [pathlib.Path(t).read_text(errors="replace") for t in args.text], args.seed, args.quick)
    chosen = schemes(args.quick)
    earlier = json.loads(args.more.read_text()) if args.more else None

    def result(records):
        new = report(args, chosen, records, worst)
        return merged(earlier, new) if earlier else new

    result([])  # what does not fit is told before the long run
    records = []
    with tempfile.TemporaryDirectory() as folder:
        profiles = calibrated(args.tierkv, folder, args.calibrate)
        with multiprocessing.get_context("fork").Pool(args.processes, Worker.start, (args.model, profiles, chosen)) as pool:
            for record in collected(pool, items, args.minutes):
                records.append(record)
                if args.output:  # after each, so that little is lost when the run is
                    args.output.write_text(written(result(records)))
    if not records:
        sys.exit("no prompt was done in time: nothing is written")
    if not args.output:
        print(written(result(records)), end="")


if __name__ == "__main__":
    main()
