"""The store on a device, block tables of engines, and vLLM over them."""
from .kit import markdown, result, table
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
    rows = [[m["name"], m["shape"], f"{m['median_us']:.0f} [{m['p10_us']:.0f}, {m['p90_us']:.0f}]"] for m in r["results"]
            if not m["name"].startswith("copy")]
    return f"{r['gpu']}, commit {r['commit'][:7]}, {r['replays']} replays.\n\n" + markdown(["what", "of", "us: median [p10, p90]"], rows)


@table
def vllm_quality():
    r = result("vllm_quality.json")
    rows = [[m["format"], "yes" if m["profile"] else "no", f"{m['kl']['text']:.4f}", f"{m['kl']['lookup']:.4f}"]
            for m in r["results"] if m["way"] == "hit"]
    return (f"{r['model']}, {r['prompt_tokens']} tokens of prompt, vLLM {r['vllm']}, {r['gpu']}. KL in nats against vLLM's bf16 cache.\n\n" +
            markdown(["blocks", "key means of a profile", "KL of text", "KL of lookups"], rows))
