# SPDX-License-Identifier: Apache-2.0
"""Attention over pages, its peers and its rungs."""
from .kit import markdown, result, span, table


@table
def attention():
    r = result("attention.json")
    rows = []
    for m in r["results"]:
        rows.append([m["name"], m["shape"], f"{m['bytes'] * 1e-6:.1f}", f"{m['floor_us']['median']:.1f}",
                     f"{m['attend_us']['median']:.1f} [{m['attend_us']['p10']:.1f}, {m['attend_us']['p90']:.1f}]",
                     f"{m['step_us']['median']:.1f}", f"{m['plan_us']['median']:.2f}",
                     f"{100 * m['floor_us']['median'] / m['attend_us']['median']:.0f}"])
    return (f"{r['gpu']}, commit {r['commit'][:7]}, head_dim {r['head_dim']}, {r['q_heads']}/{r['kv_heads']} heads, {r['replays']} replays, "
            f"stream ceiling {r['ceiling_gbps']:.0f} GB/s.\n\n" +
            markdown(["format", "shape", "MB", "floor us", "attend us: median [p10, p90]", "with plan us", "plan us", "floor / attend %"], rows))


def beside_floor(r, name_of):
    """Rows of a part of bench_attention: each time beside that of a kernel that only reads the bytes."""
    rows = [[name_of(m["name"]), m["shape"], f"{m['bytes'] * 1e-6:.1f}",
             f"{m['floor_us']['median']:.1f}", f"{m['attend_us']['median']:.1f} [{m['attend_us']['p10']:.1f}, {m['attend_us']['p90']:.1f}]",
             f"{m['attend_us']['median'] / m['floor_us']['median']:.2f}"] for m in r["results"]]
    return markdown(["heads", "shape", "MB", "floor us", "attend us: median [p10, p90]", "of the floor"], rows)


@table
def attention_classes():
    r = result("attention_classes.json")
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['q_heads']}/{r['kv_heads']} heads, {r['replays']} replays.\n\n" +
            beside_floor(r, lambda name: name.replace("classes ", "").replace("classes", "4 classes")))


@table
def attention_models():
    r = result("attention_models.json")
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['replays']} replays.\n\n" + beside_floor(r, lambda name: name.removeprefix("model ")))


# Microseconds of a launch on an H100, set before the kernels were written.
GOALS = {"1x4096": (6.5, 6, 6, 7), "1x32768": (23, 17, 14.5, 16), "1x131072": (73, 51.5, 41, 45), "32x4096": (73, 51.5, 41, 45),
         "64x4096": (143, 99, 77, 86), "8x32768": (143, 99, 77, 86)}


def attention_by_name():
    return {(m["name"], m["shape"]): m for m in result("attention.json")["results"]}


@table
def attention_goals():
    of, schemes = attention_by_name(), ("k8v4", "k4v4", "k4v2", "mixed")
    rows = []
    for shape, goals in GOALS.items():
        row = [shape.replace("x", " x ")]
        for scheme, goal in zip(schemes, goals):
            m = of[scheme, shape]
            ours = m["attend_us"]["median"]
            row.append(f"{m['floor_us']['median']:.1f} / {ours:.1f} / {goal:g} ({100 * (ours / goal - 1):+.0f} %)")
        fp16, k4v2 = of["fp16", shape], of["k4v2", shape]
        row += [f"{fp16['floor_us']['median']:.1f} / {fp16['attend_us']['median']:.1f}", f"{k4v2['step_us']['median']:.1f}"]
        rows.append(row)
    return markdown(["shape", "K8V4", "K4V4", "K4V2", "mixed", "fp16, floor / ours", "K4V2, plan and attend"], rows)


@table
def attention_unsettled():
    of, schemes = attention_by_name(), ("k8v4", "k4v4", "k4v2", "mixed", "fp16")
    rows = [[shape.replace("x", " x ")] + [f"{of[scheme, shape]['unsettled_us']['median']:.1f} / {of[scheme, shape]['attend_us']['median']:.1f}"
                                           for scheme in schemes] for shape in GOALS]
    return markdown(["shape", "K8V4", "K4V4", "K4V2", "mixed", "fp16"], rows)


@table
def attention_columns():
    of, rows = attention_by_name(), []
    for dim in (64, 128, 256):
        row = [dim]
        for q, groups in ((1, (1, 2, 4, 8, 16)), (4, (1, 2, 4, 8))):
            for group in groups:
                usual = q == 1 and (dim == 128 or group == 4)
                name = " ".join(["k4v2"] + ([f"d{dim}"] if not usual or dim != 128 else []) +
                                ([f"{8 * group}/8"] if group != 4 or q == 4 else []) + ([f"q{q}"] if not usual else []))
                m = of[name, "32x4096"]
                row.append(f"{m['attend_us']['median']:.0f} ({100 * m['floor_us']['median'] / m['attend_us']['median']:.0f}%)")
        rows.append(row)
    return markdown(["head_dim", "group 1", "2", "4", "8", "16", "1, q_len 4", "2", "4", "8"], rows)


@table
def peers():
    r = result("peers.json")
    of = {(m["name"], m["shape"]): m for m in r["results"]}
    schemes = list(dict.fromkeys(m["name"] for m in r["results"] if m["kind"] == "tierkv"))
    rows = []
    for shape in dict.fromkeys(m["shape"] for m in r["results"]):
        cudnn = of["cudnn", shape]["us"]
        rows.append([shape, f"{cudnn:.1f}", f"{of['flash', shape]['us']:.1f}"] +
                    [f"{of[s, shape]['us']:.1f} ({cudnn / of[s, shape]['us']:.2f}x)" for s in schemes])
    worst = {kind: max(m["relative_error"] for m in r["results"] if m["kind"] == kind) for kind in ("peer", "tierkv")}
    return (f"{r['gpu']}, commit {r['commit'][:7]}, torch {r['torch']}, cuDNN {r['cudnn']}, {r['replays']} replays. Relative error against float64 at "
            f"most {worst['peer']:.1e} for the peers, {worst['tierkv']:.1e} for ours over the decoded cache.\n\n" +
            markdown(["shape", "cuDNN fp16, us", "FlashAttention fp16"] + ["ours: " + s for s in schemes], rows))


@table
def attention_in_short():
    of = {(m["name"], m["shape"]): m["us"] for m in result("peers.json")["results"]}
    bytes_of = {(m["name"], m["shape"]): m["bytes"] for m in result("peers.json")["results"] if m["kind"] == "tierkv"}
    coded = [m for m in result("weighted_attention.json")["results"] if m["variant"] == "rope, 10 bits x16 /2"]
    shapes = {"1 x 32K": "1x32768", "64 x 4K": "64x4096", "8 x 32K": "8x32768"}
    schemes = {"K8V4": "k8v4", "K4V4": "k4v4", "K4V2": "k4v2", "tiers 30 % K8V4, 50 % K4V2, 20 % pruned": "mixed"}
    fp16 = bytes_of["fp16", "8x32768"]
    smaller = [f"{fp16 / bytes_of[name, '8x32768']:.1f}" for name in schemes.values()]
    rows = [["ratio", "1", *smaller, span([fp16 / m["bytes"] for m in coded if m["shape"] == "8x32768"], 1)]]
    rows += [[title] + [f"{of[name, shape]:.1f}" for name in ("cudnn", *schemes.values())] +
             [span([m["attend_us"]["median"] for m in coded if m["shape"] == shape], 1)] for title, shape in shapes.items()]
    return markdown(["sequences x tokens", "cuDNN fp16", *schemes, "weighted steps + Huffman, three layers"], rows)


RUNGS = {"diffkv": "CUDA cores, DiffKV's layout", "query_as_a": "queries as A, BitDecoding's form", "kv_as_a": "KV as A, in rounds, second kernel",
         "sync_loads": "ours, loads through registers", "cta_rounds": "ours, warps in rounds", "second_merge": "ours, second kernel merges",
         "fixed_split": "ours, fixed split"}


@table
def rungs():
    r = result("rungs.json")
    rows = []
    for m in r["results"]:
        row = [m["setting"], m["heads"], m["shape"], m["format"], f"{m['floor_us']['median']:.1f}"]
        row += [f"{m['rungs'][name]['attend_us']['median']:.1f}" for name in RUNGS]
        p = m["product_us"]
        rows.append(row + [f"{p['median']:.1f} [{p['p10']:.1f}, {p['p90']:.1f}]"])
    return (f"{r['gpu']}, commit {r['commit'][:7]}, head_dim {r['head_dim']}, {r['replays']} replays, stream ceiling {r['ceiling_gbps']:.0f} GB/s; "
            "microseconds, medians.\n\n" +
            markdown(["setting", "heads", "shape", "format", "floor", *RUNGS.values(), "product: median [p10, p90]"], rows))


def rung_times(name, shape, formats=("k8v4", "k4v4", "k4v2")):
    """Microseconds of a rung at 32/8 heads, the formats in turn; `floor` and `product` are rungs here."""
    of = {(m["setting"], m["shape"], m["format"]): m for m in result("rungs.json")["results"] if m["heads"] == "32/8"}
    times = []
    for f in formats:
        m = of[{"32x4096": "Batches", "8x32768": "Batches", "1x32768": "Single"}.get(shape, "Ragged"), shape, f]
        us = m["floor_us"] if name == "floor" else m["product_us"] if name == "product" else m["rungs"][name]["attend_us"]
        times.append(f"{us['median']:.1f}")
    return " / ".join(times)


@table
def ablation_ladder():
    ladder = {"diffkv": "`diffkv`: CUDA cores, DiffKV's layout", "query_as_a": "`query_as_a`: BitDecoding's form",
              "kv_as_a": "`kv_as_a`: keys and values as operand A",
              "fixed_split": "`fixed_split`: and every warp on its own, the last to arrive merges",
              "product": "the product: and the plan in place of the fixed split", "floor": "floor: only reads the bytes"}
    rows = [[title, rung_times(name, "32x4096"), rung_times(name, "8x32768"), rung_times(name, "32 of 256..32768", ("k4v2",))]
            for name, title in ladder.items()]
    return markdown(["rung", "32 x 4K: K8V4 / K4V4 / K4V2", "8 x 32K: K8V4 / K4V4 / K4V2", "ragged, K4V2"], rows)


@table
def ablation_steps():
    steps = {"fixed_split": "`fixed_split`", "sync_loads": "`sync_loads`: copies through registers instead of bulk copies",
             "cta_rounds": "`cta_rounds`: the warps of a CTA take chunks in rounds", "second_merge": "`second_merge`: a second kernel merges"}
    rows = [[title] + [rung_times(name, shape) for shape in ("32x4096", "8x32768", "1x32768")] for name, title in steps.items()]
    return markdown(["rung", "32 x 4K: K8V4 / K4V4 / K4V2", "8 x 32K", "1 x 32K"], rows)


@table
def rung_kernels():
    r = result("rungs.json")
    rows = [[RUNGS[k["name"]], k["registers"], k["local_bytes"], k["shared_bytes"], k["threads"], k["ctas_per_sm"]] for k in r["kernels"]]
    return markdown(["kernel", "registers", "spilled bytes", "shared memory (K4V4, group 4)", "threads", "CTAs on an SM"], rows)


@table
def tensor_rates():
    r = result("rungs.json")
    t = r["tensor"]
    head = t["mma_m16n8k16_per_us_sm"]
    rows = [["`mma.m16n8k16`", f"{head:.0f}", "1.00"]]
    rows += [[f"`wgmma.m64n8k16`, A from {name}", f"{rate:.0f}", f"{4 * rate / head:.2f}"] for name, rate in t["wgmma_m64n8k16_per_us_sm"].items()]
    arithmetic = []
    for a in t["arithmetic"]:
        name = "fp16" if a["k_bits"] == 16 else f"K{a['k_bits']}V{a['v_bits']}"
        share = 100 * 16 * a["tiles_per_us_sm"] / head
        arithmetic.append([name, f"{a['tiles_per_us_sm']:.1f}", f"{a['gbps']:.0f}", f"{100 * r['ceiling_gbps'] / a['gbps']:.0f}", f"{share:.0f}"])
    return (markdown(["instruction, 8 warps on an SM", "per us and SM", "work of an `mma.m16n8k16`"], rows) + "\n\n" +
            markdown(["the arithmetic of keys and values as A, on tiles in shared memory", "tiles per us and SM", "as GB/s of all SMs",
                      "time as % of reading them", "% of `mma`'s rate"], arithmetic))
