# SPDX-License-Identifier: Apache-2.0
"""The store on a device, block tables of engines, and vLLM over them."""
from .kit import markdown, result, table, table_of
from .memory import kernels


@table
def engine():
    return kernels(result("engine.json"))


@table
def weighted_codec():
    return kernels(result("weighted.json"))


@table
def kv_store():
    r = result("kv_store.json")
    median = {m["name"]: m["median_us"] for m in r["results"]}

    def of_link(name):
        one_copy = median.get(name.removesuffix(", pinned memory").replace(",", " as one pinned copy,", 1))
        return f", {100 * one_copy / median[name]:.0f} % of one pinned copy's speed" if one_copy else ""

    rows = [[m["name"], m["shape"], f"{m['median_us']:.0f} [{m['p10_us']:.0f}, {m['p90_us']:.0f}]{of_link(m['name'])}"] for m in r["results"]
            if not m["name"].startswith("copy")]
    return f"{r['gpu']}, commit {r['commit'][:7]}, {r['replays']} replays.\n\n" + markdown(["what", "of", "us: median [p10, p90]"], rows)


@table
def kv_store_h200():
    r = result("kv_store_h200.json")
    before = {(m["name"], m["shape"]): m["median_us"] for m in r["before"]["results"]}
    kinds = ("attention", "attend k", "step", "begin", "prompt", "encode")
    rows = [[m["name"], m["shape"], f"{before[m['name'], m['shape']]:.1f}", f"{m['median_us']:.1f} [{m['p10_us']:.1f}, {m['p90_us']:.1f}]"]
            for m in r["results"] if m["name"].startswith(kinds)]
    commits = [r["before"]["commit"][:7], r["commit"][:7]]
    return f"{r['gpu']}, {r['replays']} replays, us.\n\n" + markdown(["what", "of", commits[0], f"{commits[1]}: median [p10, p90]"], rows)


def by_layer(format):
    """k4v4,7=k8v4,18=k8v4 as k4v4, layers 7, 18 k8v4."""
    most, *others = format.split(",")
    layers = {}
    for other in others:
        layer, name = other.split("=")
        layers.setdefault(name, []).append(layer)
    return ", ".join([most, *(f"layers {', '.join(which)} {name}" for name, which in layers.items())])


@table
def vllm_quality():
    r = result("vllm_quality.json")
    rows = [[by_layer(m["format"]), "yes" if m["profile"] else "no", m.get("commit", r["commit"]), f"{m['kl']['text']:.4f}",
             f"{m['kl']['lookup']:.4f}"] for m in r["results"] if m["way"] == "hit"]
    return (f"{r['model']}, {r['prompt_tokens']} tokens of prompt, vLLM {r['vllm']}, {r['gpu']}. KL in nats against vLLM's bf16 cache.\n\n" +
            markdown(["blocks", "profile", "commit", "KL of text", "KL of lookups"], rows))


def head(r):
    commit = "" if r["commit"] == "unknown" else f", commit {r['commit'][:7]}"
    return f"{r['gpu']}{commit}, PyTorch {r['torch']}, {r['shape']} with random weights, {r['budget_bytes'] / 2**30:g} GiB of cache."


def times(of, digits=1):
    return "-" if of is None or of.get("p50") is None else f"{of['p50']:.{digits}f} [{of['p99']:.{digits}f}]"


def generated(name):
    r = result(name)
    base = max((m["tokens_per_s"] for m in r["results"] if m["format"] in ("dense", "raw") and m.get("tokens_per_s")), default=None)
    rows = []
    for m in r["results"]:
        if m.get("tokens_per_s"):
            rows.append([m["format"], m["sequences"], f"{100 * m['held_of_raw']:.1f} %", m["steps"], times(m["step_ms"], 2), f"{m['tokens_per_s']:.0f}",
                         f"{m['tokens_per_s'] / base:.2f}" if base else "-"])
    return (f"{head(r)} Sequences of {r['context']} tokens on average and up to {r['steps']} more.\n\n" +
            markdown(["cache", "sequences", "memory of 16 bits", "steps", "ms a step: p50 [p99]", "tokens a second", "against 16 bits"], rows))


@table_of("serving_generate.json")
def serving_generate():
    return generated("serving_generate.json")


@table_of("serving_generate_4gib.json")
def serving_generate_4gib():
    return generated("serving_generate_4gib.json")


@table_of("serving_generate.json")
def serving_parts():
    """The parts of a step and of a prompt, by kernels and by graphs with parts left out."""
    r, rows = result("serving_generate.json"), []
    parts = ("model", "attention", "compression", "significance", "management")

    def row(cache, what, shares):
        rows.append([cache, what, *(f"{100 * shares.get(p, 0):.2f} %" if shares else "-" for p in parts)])

    for m in r["results"]:
        if m.get("tokens_per_s") and m.get("kernels"):
            row(m["format"], "step", m["kernels"]["share"])
        if m.get("prompt"):
            row(m["format"], f"prompt of {m['prompt']['tokens']} tokens", m["prompt"]["kernels"]["share"])
    return "Shares of the kernels' time.\n\n" + markdown(["cache", "of", *parts], rows)


@table_of("serving_generate.json")
def serving_left_out():
    r, rows = result("serving_generate.json"), []
    names = ("model", "attend", "append", "model_and_append")
    for m in r["results"]:
        if m.get("parts_ms"):
            rows.append([m["format"], f"{m['mean_step_ms']:.2f}", *(f"{m['parts_ms'][n]['mean']:.2f}" for n in names)])
    return markdown(["cache", "ms a step", "model alone", "attention alone", "begin and append alone", "all but attention"], rows)


@table_of("serving_trace.json")
def serving_trace():
    r = result("serving_trace.json")
    rows = [[m["format"], m["slots"], f"{m['tokens_per_s']:.0f}", f"{m['mean_batch']:.0f}", times(m["first_token_s"], 2), times(m["token_ms"], 1),
             m["preemptions"], f"{m['finished']} of {m['requests']}"] for m in r["results"] if m.get("tokens_per_s")]
    return (f"{head(r)} {r['rate']:g} requests a second, prompts of {r['context']} and answers of {r['answer']} tokens on average.\n\n" +
            markdown(["cache", "slots", "tokens a second", "requests at once", "s to the first token: p50 [p99]", "ms a token: p50 [p99]",
                      "preemptions", "answered"], rows))


@table_of("vllm_serving.json")
def vllm_serving():
    r, rows = result("vllm_serving.json"), []

    def batch(m, count):
        of = m.get(f"batch_{count}")
        return ["-", "-"] if of is None else [f"{of['step_ms']:.1f}", f"{of['tokens_per_s']:.0f}"]

    for m in r["results"]:
        if any(name.startswith("batch_") for name in m):
            rows.append([m["format"], *batch(m, r["sequences"]), m["fits_in_16_gib"], *batch(m, m["fits_in_16_gib"])])
    return (f"vLLM {r['vllm']}, {r['gpu']}, commit {r['commit'][:7]}. {r['sequences']} sequences of {r['context']} tokens, and as many as fit into {r['budget_bytes'] / 2**30:g} GiB.\n\n" +
            markdown(["cache", f"ms a step of {r['sequences']}", "tokens a second", "sequences that fit", "ms a step", "tokens a second"], rows))
