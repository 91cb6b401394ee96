# SPDX-License-Identifier: Apache-2.0
"""vLLM serves a small random model over compressed blocks: what a serving engine does to a cache must not change its answers.

    vllm_serve_test.py [--only NAME,...] [--skip NAME,...] [--list]

    predictions  log-probabilities of prompts and tokens beside those of vLLM's own cache, for each format
    layers       a format of its own for one layer
    graphs       CUDA graphs against eager mode
    chunks       prompts in chunks of 256 tokens against whole ones
    prefixes     prompts whose beginnings are cached against prompts without a cache of prefixes
    preemption   a pool so small that requests are preempted and computed again, against a large one
    drafts       n-gram speculation on and off, in graphs; refused drafts are overwritten

Each engine runs in a process of its own, a few at a time. Needs a GPU, vLLM 0.26 and the wheel installed, so that vLLM finds the plugin.
"""
import argparse
import concurrent.futures
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
          "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 4096,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
          "tie_word_embeddings": False, "initializer_range": 0.08}  # so wide that attention is not even
GENERATED = 24
TOP = 20  # log-probabilities of a generated token
AT_ONCE, SECONDS = 8, 240
# Largest mean difference of a log-probability: from vLLM's own cache, and between two ways that compress the same tokens.
BOUNDS = {"vllm": 0.02, "raw": 0.02, "k8v4": 0.1, "k4v4": 0.2, "k4v2": 0.4}
COMMON = 0.5  # least share of tokens before a sequence's first difference; two near tokens turn the rest of a sequence
# "work": which requests. Of a cache of 24 blocks the first is never used, and twelve sequences want three or four each.
ENGINES = {
    **{f: {"format": f} for f in BOUNDS},
    "layers": {"format": "k4v4", "layers": {"1": "k8v4"}},
    "raw graphs": {"format": "raw", "graphs": True}, "k4v4 graphs": {"format": "k4v4", "graphs": True},
    "k4v4 whole": {"format": "k4v4", "chunk": 4096},
    "k4v4 uncached": {"format": "k4v4", "prefixes": False},
    **{f"{f} {pool}": {"format": f, "work": "long", **({"blocks": 24} if pool == "tight" else {})}
       for f in ("vllm", "raw", "k4v4") for pool in ("roomy", "tight")},
    **{f"{f} drafts {how}": {"format": f, "work": "repeats", "graphs": "full", "drafts": 4 if how == "on" else 0}
       for f in ("vllm", "k4v4") for how in ("off", "on")},
}


def make_work(rng):
    """Requests by kind of work."""
    def random_ids(n):
        return [rng.randrange(3, 1000) for _ in range(n)]

    shared, phrase = random_ids(200), random_ids(40)
    mixed = [random_ids(n) for n in (5, 64, 300, 700, 1, 129)] + [shared + random_ids(n) for n in (3, 60, 200)]
    return {"mixed": {"prompts": mixed, "tokens": GENERATED},
            "long": {"prompts": [random_ids(rng.randrange(60, 121)) for _ in range(12)], "tokens": 110},
            "repeats": {"prompts": [random_ids(n) + 3 * phrase for n in (10, 80, 200, 400)], "tokens": 80}}


# ---- an engine, in a process of its own ----

def serve(folder, engine, work):
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours, drafts, chunk = engine["format"] != "vllm", engine.get("drafts", 0), engine.get("chunk", 256)
    settings = {"format": engine["format"], "layers": engine.get("layers", {}), "slice_tokens": 128}
    more = {"num_gpu_blocks_override": engine["blocks"]} if "blocks" in engine else {}
    if engine.get("graphs") == "full":  # of decodes alone, without torch.compile
        more["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if drafts:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=1024, block_size=64, max_num_seqs=16,
              max_num_batched_tokens=chunk, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28,
              enforce_eager=not engine.get("graphs", False), enable_prefix_caching=engine.get("prefixes", True),
              attention_backend=AttentionBackendEnum.CUSTOM if ours else AttentionBackendEnum.FLASH_ATTN,
              additional_config={"tierkv": settings} if ours else {}, **more)
    counted = {"preemptions": 0, "accepted": 0}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler

    def count(method, amount):
        inner = getattr(scheduler, method)

        def outer(*args, **kwargs):
            amount(kwargs)
            return inner(*args, **kwargs)
        setattr(scheduler, method, outer)

    count("_preempt_request", lambda given: counted.update(preemptions=counted["preemptions"] + 1))
    count("make_spec_decoding_stats", lambda given: counted.update(accepted=counted["accepted"] + given["num_accepted_tokens"]))
    prompts = [{"prompt_token_ids": p} for p in work["prompts"]]

    def generated():
        """Of each request its tokens, each with the log-probabilities of the likeliest."""
        params = SamplingParams(temperature=0, max_tokens=work["tokens"], logprobs=TOP, detokenize=False, ignore_eos=True)
        return [[(t, {i: x.logprob for i, x in step.items()}) for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)]
                for o in llm.generate(prompts, params, use_tqdm=False)]

    found = {}
    if engine.get("work", "mixed") == "mixed":
        scored = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
        found["prompt"] = [[p[t].logprob for p, t in list(zip(o.prompt_logprobs, r))[1:]] for o, r in zip(scored, work["prompts"])]
    found["generated"] = generated()  # behind cached prefixes, where the prompts were scored before
    return {**found, **counted}


# ---- what engines found, compared ----

def mean_difference(a, b):
    pairs = [(x, y) for p, q in zip(a, b) for x, y in zip(p, q)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def compare(a, b):
    """Of two engines' generated tokens: (the share of tokens before the first difference of their sequence; the mean difference of the chosen
    tokens' log-probabilities up to that token, itself included; the mean KL before it over the likeliest tokens that both name)."""
    same = total = 0
    differences, kls = [], []
    for p, q in zip(a, b):
        total += len(p)
        for (s, x), (t, y) in zip(p, q):
            differences.append(abs(x[str(s)] - y[str(t)]))
            if s != t:
                break
            same += 1
            kls.append(sum(math.exp(x[i]) * (x[i] - y[i]) for i in x if i in y))
    return same / total, sum(differences) / len(differences), sum(kls) / max(1, len(kls))


class Report:
    def __init__(self, found, seed):
        self.found, self.seed, self.failed = found, seed, []

    def check(self, name, passed, text):
        print(f"{name}: {text}, seed {self.seed}{'' if passed else '  FAILED'}", flush=True)
        if not passed:
            self.failed.append(name)

    def pair(self, name, a, b, bound, common=COMMON):
        share, difference, kl = compare(self.found[a]["generated"], self.found[b]["generated"])
        self.check(name, share >= common and difference <= bound,
                   f"{a} against {b}: {share:.3f} of the tokens before a difference, log-probabilities differ by {difference:.5f}, KL {kl:.5f}")

    def scores(self, name, a, b, bound):
        difference = mean_difference(self.found[a]["prompt"], self.found[b]["prompt"])
        self.check(name, difference <= bound, f"{a} against {b}: log-probabilities of prompts differ by {difference:.5f}")


def predictions(r):
    for format in BOUNDS:
        if format != "vllm":
            r.scores("predictions", "vllm", format, BOUNDS[format])
            r.pair("predictions", "vllm", format, BOUNDS[format], common=0.0)
    # The weights must make attention matter: narrower codes show.
    wide, narrow = (mean_difference(r.found["vllm"]["prompt"], r.found[f]["prompt"]) for f in ("k8v4", "k4v2"))
    r.check("predictions", narrow > wide, f"K4V2 differs by {narrow:.5f}, K8V4 by {wide:.5f}")


def layers(r):
    r.scores("layers", "vllm", "layers", BOUNDS["k4v4"])
    uniform = mean_difference(r.found["layers"]["prompt"], r.found["k4v4"]["prompt"])
    r.check("layers", uniform > 0, f"a layer of K8V4 changes log-probabilities by {uniform:.5f}")


def graphs(r):
    for format in ("raw", "k4v4"):
        r.scores("graphs", format, f"{format} graphs", BOUNDS["raw"])
        r.pair("graphs", format, f"{format} graphs", BOUNDS["raw"], common=0.9)


def chunks(r):
    r.scores("chunks", "k4v4 whole", "k4v4", BOUNDS["k4v4"])
    r.pair("chunks", "k4v4 whole", "k4v4", BOUNDS["k4v4"])


def prefixes(r):
    r.pair("prefixes", "k4v4 uncached", "k4v4", BOUNDS["k4v4"])


def preemption(r):
    for format in ("vllm", "raw", "k4v4"):
        roomy, tight = (r.found[f"{format} {pool}"]["preemptions"] for pool in ("roomy", "tight"))
        r.check("preemption", tight > 0 == roomy, f"{format}: {tight} preemptions in the small pool, {roomy} in the large one")
        r.pair("preemption", f"{format} roomy", f"{format} tight", BOUNDS[format])


def drafts(r):
    for format in ("vllm", "k4v4"):
        accepted = r.found[f"{format} drafts on"]["accepted"]
        r.check("drafts", accepted > 0, f"{format}: {accepted} draft tokens were accepted")
        r.pair("drafts", f"{format} drafts off", f"{format} drafts on", BOUNDS[format])


TESTS = {
    predictions: list(BOUNDS), layers: ["vllm", "k4v4", "layers"], graphs: ["raw", "k4v4", "raw graphs", "k4v4 graphs"],
    chunks: ["k4v4", "k4v4 whole"], prefixes: ["k4v4", "k4v4 uncached"],
    preemption: [f"{f} {pool}" for f in ("vllm", "raw", "k4v4") for pool in ("roomy", "tight")],
    drafts: [f"{f} drafts {how}" for f in ("vllm", "k4v4") for how in ("off", "on")],
}


def run_engines(folder, names, works):
    """What each found; None for one that failed."""
    def one(name):
        out = folder / f"{name.replace(' ', '_')}.json"
        given = folder / f"{name.replace(' ', '_')}_work.json"
        given.write_text(json.dumps(works[ENGINES[name].get("work", "mixed")]))
        try:
            child = subprocess.run([sys.executable, "-B", __file__, "--serve", folder, name, given, out], timeout=SECONDS,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        except subprocess.TimeoutExpired:
            return f"more than {SECONDS} s"
        if child.returncode != 0:
            return "\n".join(child.stdout.splitlines()[-25:])
        return json.loads(out.read_text())

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
    try:
        import torch
        import transformers
        import vllm  # noqa: F401
        if not torch.cuda.is_available():
            raise ImportError("no GPU")
    except ImportError as e:
        print(f"skipped: needs a GPU and vLLM 0.26: {e}")
        return 77
    seed = random.SystemRandom().randrange(2**32)
    works = make_work(random.Random(seed))
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(name)
        found = run_engines(pathlib.Path(name), list(dict.fromkeys(e for t in tests for e in TESTS[t])), works)
    report = Report(found, seed)
    for test in tests:
        broken = [e for e in TESTS[test] if isinstance(found[e], str)]
        for e in broken:
            report.check(test.__name__, False, f"{e}: {found[e]}")
        if not broken:
            test(report)
    print(f"{len(tests) - len(set(report.failed))} of {len(tests)} tests passed" + (f", failed: {', '.join(sorted(set(report.failed)))}"
                                                                                 if report.failed else ""))
    return 1 if report.failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _, _, model, which, source, target = sys.argv
        pathlib.Path(target).write_text(json.dumps(serve(model, ENGINES[which], json.loads(pathlib.Path(source).read_text()))))
    else:
        sys.exit(main())
