# SPDX-License-Identifier: Apache-2.0
"""vLLM serves a small random model over compressed blocks: what a serving engine does to a cache must not change its answers.

    vllm_serve_test.py [--only NAME,...] [--skip NAME,...] [--list]

    predictions  log-probabilities of prompts and tokens beside those of vLLM's own cache, for each format
    layers       a format of its own for one layer
    graphs       CUDA graphs against eager mode
    chunks       prompts in chunks of 256 tokens against whole ones
    prefixes     prompts whose beginnings are cached against prompts without a cache of prefixes
    preemption   a pool so small that requests are preempted and computed again, against a large one
    drafts       n-gram speculation in graphs against eager mode without it; refused drafts are overwritten
    ranks        two GPUs, each with half of the heads, against one; left out where there is one GPU

Each engine runs in a process of its own, eight at a time. Needs a GPU, vLLM 0.26 and the wheel installed, so that vLLM finds the plugin.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
          "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 4096,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
          "tie_word_embeddings": False, "initializer_range": 0.05}  # so wide that attention matters, so narrow that errors hardly grow
GENERATED = 24
TOP = 20  # log-probabilities of a generated token
AT_ONCE, SECONDS = 8, 240  # engines at a time, which have two cores each where there are 16; seconds of one engine
# Largest mean differences of a log-probability. Behind each bound stands what gave rise to it:
# - s: a simulation of this model (float32, rounded to bf16 between layers; all tokens in the format), the largest of eight seeds, "prompts / generated".
# - m: an H100, with weights of 0.08 instead of 0.05, whose errors the simulation makes two to three times as large.
# What a fault gives in the simulation, the least of eight seeds: one block of five is another sequence's, 0.77 / 0.98; four tokens are, 0.16 / 0.28.
NOISE = 0.1  # another order of sums in bf16: s 0.016 / 0.016, m 0.029 / 0.032
PROMPTS = {"raw": NOISE, "k8v4": 0.4, "k4v4": 0.5}  # s 0.20, 0.28 and m 0.18, 0.37 for the last two. K4V2 differs as much as a fault: s 0.77
GENERATED_OF = {"raw": NOISE, "k8v4": 0.5, "k4v4": 0.75}  # s 0.26, 0.44, over as few as 12 tokens
OWN_SHARE = 0.5  # another order of sums over quantised tokens, by the format's own difference from vLLM's cache: s 0.14, m 0.20
# "works": which requests, without it "mixed". vLLM never uses the first of 24 blocks, and twelve sequences want three or four each.
ALL_WORKS = ["mixed", "long", "repeats"]
ENGINES = {
    "vllm": {"format": "vllm"}, "k8v4": {"format": "k8v4"}, "k4v2": {"format": "k4v2"},
    **{f: {"format": f, "works": ALL_WORKS} for f in ("raw", "k4v4")},
    "layers": {"format": "k4v4", "layers": {"1": "k8v4"}},
    "k4v4 whole": {"format": "k4v4", "chunk": 4096},
    "k4v4 uncached": {"format": "k4v4", "prefixes": False},
    **{f"{f} graphs": {"format": f, "graphs": True} for f in ("raw", "k4v4")},
    **{f"{f} tight": {"format": f, "works": ["long"], "blocks": 24} for f in ("raw", "k4v4")},
    **{f"{f} ranks": {"format": f, "ranks": 2, "graphs": "full"} for f in ("raw", "k4v4")},
    **{f"{f} drafts": {"format": f, "works": ["repeats"], "graphs": "full", "drafts": 4} for f in ("raw", "k4v4")},
}


def make_work(rng):
    """Requests by kind of work."""
    def random_ids(n):
        return [rng.randrange(3, 1000) for _ in range(n)]

    shared, phrase = random_ids(200), random_ids(15)
    mixed = [random_ids(n) for n in (5, 64, 300, 700, 1, 129)] + [shared + random_ids(n) for n in (3, 60, 200)]
    return {"mixed": {"prompts": mixed, "tokens": GENERATED},
            "long": {"prompts": [random_ids(rng.randrange(60, 121)) for _ in range(12)], "tokens": 110},
            # All fit into one chunk, so that drafts do not move the places where chunks of prompts end.
            "repeats": {"prompts": [random_ids(n) + 3 * phrase for n in (5, 10, 15, 30)], "tokens": 80}}


class Clock:
    """Seconds of phases, one behind the other."""

    def __init__(self):
        self.last, self.phases = time.monotonic(), []

    def note(self, phase):
        now = time.monotonic()
        self.phases.append(f"{phase} {now - self.last:.1f} s")
        self.last = now

    def text(self):
        return ", ".join(self.phases)


def works_of(engine):
    return engine.get("works", ["mixed"])


# ---- an engine, in a process of its own ----

def serve(folder, engine, works):
    clock = Clock()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // AT_ONCE)))
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    clock.note("import")

    ours, drafts, chunk = engine["format"] != "vllm", engine.get("drafts", 0), engine.get("chunk", 256)
    settings = {"format": engine["format"], "layers": engine.get("layers", {}), "slice_tokens": 128}
    more = {"num_gpu_blocks_override": engine["blocks"]} if "blocks" in engine else {}
    if engine.get("graphs") == "full":  # of decodes alone, without torch.compile
        more["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if "ranks" in engine:
        more["tensor_parallel_size"], more["disable_custom_all_reduce"] = engine["ranks"], True
    if drafts:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=1024, block_size=64, max_num_seqs=16,
              max_num_batched_tokens=chunk, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28,
              enforce_eager=not engine.get("graphs", False), enable_prefix_caching=engine.get("prefixes", True),
              attention_backend=AttentionBackendEnum.CUSTOM if ours else AttentionBackendEnum.FLASH_ATTN,
              additional_config={"tierkv": settings} if ours else {}, **more)
    clock.note("start")
    counted = {"preemptions": 0, "drafted": 0, "accepted": 0}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def count(method, amount):
        inner = getattr(scheduler, method)

        def outer(*args, **kwargs):
            amount(kwargs)
            return inner(*args, **kwargs)
        setattr(scheduler, method, outer)

    def drafts_came(given):
        counted["drafted"] += given["num_draft_tokens"]
        counted["accepted"] += given["num_accepted_tokens"]

    count("_preempt_request", lambda given: counted.update(preemptions=counted["preemptions"] + 1))
    count("make_spec_decoding_stats", drafts_came)

    def answers(work, **params):
        prompts = [{"prompt_token_ids": p} for p in work["prompts"]]
        return llm.generate(prompts, SamplingParams(temperature=0, detokenize=False, **params), use_tqdm=False)

    def generated(work):
        """The tokens of each request, each with the log-probabilities of the likeliest."""
        return [[(t, {i: x.logprob for i, x in step.items()}) for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)]
                for o in answers(work, max_tokens=work["tokens"], logprobs=TOP, ignore_eos=True)]

    found = {}
    for name in works_of(engine):
        if name == "mixed":  # scored first: tokens are then generated behind cached prefixes
            found["prompt"] = [[p[t].logprob for p, t in list(zip(o.prompt_logprobs, r))[1:]]
                               for o, r in zip(answers(works[name], max_tokens=1, prompt_logprobs=0), works[name]["prompts"])]
            clock.note("prompts")
        found[name] = generated(works[name])
        clock.note(name)
    return {**found, **counted, "phases": clock.text()}


# ---- what engines found, compared ----

def mean_difference(a, b):
    pairs = [(x, y) for p, q in zip(a, b) for x, y in zip(p, q)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def apart(token, x, y):
    """How far the log-probabilities of a token of x are apart; at least so far, if it is not among the likeliest of y."""
    known = y.get(token)
    return abs(x[token] - known) if known is not None else max(0.0, x[token] - min(y.values()))


def compare(a, b):
    """How the tokens of two engines differ: (tokens up to the first difference of their sequence, that one included; the share of tokens before
    it; the mean difference of the log-probabilities of a's tokens up to it). Behind it contexts differ."""
    same = total = 0
    differences = []
    for p, q in zip(a, b):
        total += len(p)
        for (s, x), (t, y) in zip(p, q):
            differences.append(apart(str(s), x, y))
            if s != t:
                break
            same += 1
    return len(differences), same / total, sum(differences) / len(differences)


class Report:
    def __init__(self, found, seed):
        self.found, self.seed, self.failed = found, seed, []

    def check(self, name, passed, text):
        print(f"{name}: {text}, seed {self.seed}{'' if passed else '  FAILED'}", flush=True)
        if not passed:
            self.failed.append(name)

    def pair(self, name, a, b, bound, work="mixed"):
        """bound None: told, not judged."""
        tokens, share, difference = compare(self.found[a][work], self.found[b][work])
        limit = "without a bound" if bound is None else f"at most {bound:.3f}"
        self.check(name, bound is None or difference <= bound, f"{a} against {b}: log-probabilities of {tokens} generated tokens differ by "
                                                               f"{difference:.5f}, {limit}; {share:.3f} of all come before a difference")

    def scores(self, name, a, b, bound):
        difference = self.of_prompts(a, b)
        self.check(name, difference <= bound, f"{a} against {b}: log-probabilities of prompts differ by {difference:.5f}, at most {bound:.3f}")

    def of_prompts(self, a, b):
        return mean_difference(self.found[a]["prompt"], self.found[b]["prompt"])

    def noise_of(self, format):
        """Bound of two ways that compress the same numbers, up to the order of sums."""
        return NOISE if format == "raw" else max(NOISE, OWN_SHARE * self.of_prompts("vllm", format))


def predictions(r):
    for format, bound in PROMPTS.items():
        r.scores("predictions", "vllm", format, bound)
        r.pair("predictions", "vllm", format, GENERATED_OF[format])
    r.pair("predictions", "vllm", "k4v2", None)
    # The weights must make attention matter: narrower codes show.
    off = {format: r.of_prompts("vllm", format) for format in (*PROMPTS, "k4v2")}
    r.check("predictions", list(off.values()) == sorted(set(off.values())),
            "log-probabilities of prompts differ from vLLM's the more the narrower codes are: " + ", ".join(f"{f} {x:.5f}" for f, x in off.items()))


def layers(r):
    r.scores("layers", "vllm", "layers", PROMPTS["k4v4"])
    uniform = r.of_prompts("layers", "k4v4")
    r.check("layers", uniform > 0, f"a layer of K8V4 changes log-probabilities by {uniform:.5f}")


def graphs(r):
    for format in ("raw", "k4v4"):
        r.scores("graphs", format, f"{format} graphs", r.noise_of(format))
        r.pair("graphs", format, f"{format} graphs", r.noise_of(format))


def chunks(r):
    # A prompt in one chunk attends to its own tokens before they are compressed. What is generated attends to compressed ones, which were made of
    # hidden states that differ by the error of the format.
    r.scores("chunks", "vllm", "k4v4 whole", NOISE)
    r.pair("chunks", "k4v4 whole", "k4v4", GENERATED_OF["k4v4"])


def prefixes(r):
    # As chunks: without a cached prefix the first token attends to a prompt that is not compressed yet.
    r.pair("prefixes", "k4v4 uncached", "k4v4", GENERATED_OF["k4v4"])


def preemption(r):
    # As chunks: what is computed again is a prompt.
    for format in ("raw", "k4v4"):
        roomy, tight = (r.found[name]["preemptions"] for name in (format, f"{format} tight"))
        r.check("preemption", tight > 0 == roomy, f"{format}: {tight} preemptions in the small pool, {roomy} in the large one")
        r.pair("preemption", format, f"{format} tight", GENERATED_OF[format], "long")


def drafts(r):
    for format in ("raw", "k4v4"):
        drafted, accepted = (r.found[f"{format} drafts"][what] for what in ("drafted", "accepted"))
        r.check("drafts", drafted > accepted, f"{format}: {drafted} draft tokens, {accepted} of them accepted")
        r.pair("drafts", format, f"{format} drafts", r.noise_of(format), "repeats")


def ranks(r):
    # Two ranks add what each has of a row of weights in bf16.
    for format in ("raw", "k4v4"):
        r.scores("ranks", format, f"{format} ranks", r.noise_of(format))
        r.pair("ranks", format, f"{format} ranks", r.noise_of(format))


TESTS = {
    predictions: ["vllm", *PROMPTS, "k4v2"], layers: ["vllm", "k4v4", "layers"], graphs: ["vllm", "raw", "k4v4", "raw graphs", "k4v4 graphs"],
    chunks: ["vllm", "k4v4", "k4v4 whole"], prefixes: ["k4v4", "k4v4 uncached"],
    preemption: [f"{f}{pool}" for f in ("raw", "k4v4") for pool in ("", " tight")],
    drafts: ["vllm", *(f"{f}{how}" for f in ("raw", "k4v4") for how in ("", " drafts"))],
    ranks: ["vllm", *(f"{f}{how}" for f in ("raw", "k4v4") for how in ("", " ranks"))],
}


def run_engines(folder, names, works):
    """What each found; its last lines for one that failed."""
    given = folder / "works.json"
    given.write_text(json.dumps(works))

    def one(name):
        out, clock = folder / f"{name.replace(' ', '_')}.json", Clock()
        log = out.with_suffix(".log")  # no pipe, which processes that an engine started could keep open
        try:
            with log.open("w") as said:
                code = str(subprocess.run([sys.executable, "-B", __file__, "--serve", folder, name, given, out], timeout=SECONDS,
                                          stdout=said, stderr=subprocess.STDOUT).returncode)
        except subprocess.TimeoutExpired:
            code = f"none after {SECONDS} s"
        clock.note("all")
        if code != "0":
            print(f"{name}: {clock.text()}, exit code {code}\n", end="", flush=True)  # with its newline, in one piece beside other threads'
            return "\n".join([f"exit code {code}", *log.read_text(errors="replace").splitlines()[-25:]])
        found = json.loads(out.read_text())
        print(f"{name}: {clock.text()}: {found['phases']}\n", end="", flush=True)
        return found

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(one, names)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_name = {t.__name__: t for t in TESTS}
    parser.add_argument("--only", default=",".join(by_name))
    parser.add_argument("--skip", default="")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    unknown = sorted({n for n in f"{options.only},{options.skip}".split(",") if n} - set(by_name))
    if unknown:
        parser.error(f"no test is called {unknown[0]}")
    tests = [by_name[n] for n in options.only.split(",") if n and n not in options.skip.split(",")]
    if options.list:
        print("\n".join(f"{t.__name__}: {', '.join(TESTS[t])}" for t in tests))
        return 0
    clock = Clock()
    try:
        import torch
        import transformers
        import vllm  # noqa: F401
        if not torch.cuda.is_available():
            raise ImportError("no GPU")
    except ImportError as e:
        print(f"skipped: needs a GPU and vLLM 0.26: {e}")
        return 77
    if ranks in tests and torch.cuda.device_count() < 2:
        tests.remove(ranks)
        print("ranks: left out, one GPU")
    clock.note("import")
    seed = random.SystemRandom().randrange(2**32)
    works = make_work(random.Random(seed))
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(name)
        clock.note("model")
        print(f"seed {seed}: {clock.text()}", flush=True)
        found = run_engines(pathlib.Path(name), list(dict.fromkeys(e for t in tests for e in TESTS[t])), works)
    clock.note("engines")
    report = Report(found, seed)
    for test in tests:
        broken = [engine for engine in TESTS[test] if isinstance(found[engine], str)]
        for engine in broken:
            report.check(test.__name__, False, f"{engine}: {found[engine]}")
        if not broken:
            test(report)
    clock.note("comparison")
    print(clock.text(), flush=True)
    print(f"{len(tests) - len(set(report.failed))} of {len(tests)} tests passed" + (f", failed: {', '.join(sorted(set(report.failed)))}"
                                                                                 if report.failed else ""))
    return 1 if report.failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _, _, model, which, source, target = sys.argv
        pathlib.Path(target).write_text(json.dumps(serve(model, ENGINES[which], json.loads(pathlib.Path(source).read_text()))))
    else:
        sys.exit(main())
