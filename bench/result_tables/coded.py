# SPDX-License-Identifier: Apache-2.0
"""Attention over coded blocks, and decoders of their codes alone."""
from .kit import markdown, number, result, table, table_of


@table
def weighted_attention():
    r = result("weighted_attention.json")
    rows = []
    for m in r["results"] + result("weighted_attention_64.json")["results"]:
        if "10 bits x16 /2" not in m["variant"]:
            continue
        us, floor = m["attend_us"], m["floor_us"]["median"]
        rows.append([m["variant"], m["head_dim"], m["layer"], m["shape"], number(m["bits_per_code"], 2), m["warps"], f"{floor:.1f}",
                     f"{us['median']:.1f} [{us['p10']:.1f}, {us['p90']:.1f}]", f"{m['tera_codes_per_s']:.2f}"])
    tokens = f"{r['sinks']} raw sinks and a raw window of {r['window']}" if "window" in r else f"behind {r['sinks']} sinks"
    return (f"{r['gpu']}, commit {r['commit']}, {r['q_heads']}/{r['kv_heads']} heads, {tokens}, "
            f"{r['replays']} replays.\n\n" +
            markdown(["kernel", "head_dim", "layer", "shape", "bits a code", "warps", "floor us", "us: median [p10, p90]", "T codes/s"], rows))


@table_of("tree.json")
def tree_decoders():
    r = result("tree.json")
    # A byte is written for each code.
    rows = [[m["name"], m["shape"], f"{m['median_us']:.1f} [{m['p10_us']:.1f}, {m['p90_us']:.1f}]",
             f"{m['bytes_written'] / m['median_us'] * 1e-3:.0f}", f"{m['bytes_read'] / m['median_us'] * 1e-3:.0f}"]
            for m in r["results"] if not m["name"].startswith("copy")]
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['replays']} replays.\n\n" +
            markdown(["decoder", "of", "us: median [p10, p90]", "G codes/s", "GB/s of blocks"], rows))
