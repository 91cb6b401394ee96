# SPDX-License-Identifier: Apache-2.0
"""Allocator, channel-wise blocks and prompts on a GPU."""
from .kit import markdown, result, table


@table
def allocator():
    r = result("allocator.json")
    rows = [[m["name"], m["where"] + (f", {m['threads'] or 1} threads" if m["where"] == "cpu" else ""), m["cache"], m["pages"],
             f"{m['median_us']:.1f} [{m['p10_us']:.1f}, {m['p90_us']:.1f}]"] for m in r["results"] if not m.get("tokens")]
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['rows']} rows, {r['repeats']} repeats.\n\n" +
            markdown(["what", "where", "cache", "pages", "us: median [p10, p90]"], rows))


@table
def allocator_batches():
    """DiffKV's Figure 13."""
    r = result("allocator.json")

    def fastest(batch, phase, where):
        return min((m["median_us"], m["threads"]) for m in r["results"]
                   if m.get("tokens") and m["name"] == f"batch {batch}, {phase}" and (m["where"], m["cache"]) == (where, "warm"))

    rows = []
    for batch in sorted({m["batch"] for m in r["results"] if m.get("tokens")}):
        row = [batch]
        for phase in ("prompt", "step"):
            (gpu, _), (cpu, threads) = fastest(batch, phase, "gpu"), fastest(batch, phase, "cpu")
            row += [f"{gpu:.1f}", f"{cpu:.1f} ({threads or 1})", f"{cpu / gpu:.1f}"]
        rows.append(row)
    return (f"{r['gpu']}, commit {r['commit'][:7]}, 1024 tokens, us; the CPU's best number of threads in brackets.\n\n" +
            markdown(["sequences", "prompt: GPU", "CPU", "ratio", "step: GPU", "CPU", "ratio"], rows))


def kernels(r):
    rows = []
    for m in r["results"]:
        flops = m.get("tflop_per_s", 0)
        rows.append([m["name"], m["shape"], f"{(m['bytes_read'] + m['bytes_written']) * 1e-6:.1f}",
                     f"{m['median_us']:.2f} [{m['p10_us']:.2f}, {m['p90_us']:.2f}]", f"{m['tb_per_s']:.3f}",
                     f"{100 * m['of_ceiling']:.1f}", f"{flops:.0f}" if flops else "-"])
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['replays']} replays, copy ceiling {r['copy_ceiling_tb_per_s']:.3f} TB/s.\n\n" +
            markdown(["kernel", "shape", "MB read + written", "us: median [p10, p90]", "TB/s", "% of ceiling", "TFLOP/s"], rows))


@table
def channel():
    return kernels(result("channel.json"))


@table
def prompt():
    peers = result("peers_prompt.json")
    rows = [[f"{p['backend']} causal attention, torch {peers['torch']}", f"{p['median_us']:.0f}", f"{p['tflop_per_s']:.0f}"]
            for p in peers["results"]]
    return kernels(result("prompt.json")) + "\n\n" + markdown(["peer on the same prompt", "us", "TFLOP/s"], rows)
