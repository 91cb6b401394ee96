#!/usr/bin/python3
"""Writes the tables of README.md, docs/BENCHMARKS.md and docs/QUALITY.md from bench/results/*.json.

tables.py          replaces what stands between `<!-- table NAME -->` and `<!-- end -->`
tables.py --check  exits 1 when a document is not what the results make it"""
import json
import pathlib
import sys

from answers import summary

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "docs/BENCHMARKS.md", "docs/QUALITY.md")]
TABLES = {}


def table(function):
    TABLES[function.__name__] = function
    return function


def result(name):
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def markdown(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(x) for x in row) + " |" for row in rows])


def number(x, digits):
    return "-" if x is None else f"{x:.{digits}f}"


@table
def dumps():
    all_dumps = result("dumps.json")["dumps"]
    head = ["preset"]
    for d in all_dumps:
        name = d["dump"].removesuffix(".h5")
        head += [f"{name}: memory %", "ratio", "page ratio", "error"]
    by_preset = {}
    for d in all_dumps:
        for r in d["rows"]:
            by_preset.setdefault(r["preset"], {})[d["dump"]] = r
    last = all_dumps[-1]["dump"]
    rows = []
    for preset, of in sorted(by_preset.items(), key=lambda item: -item[1][last]["ratio"]):
        row = [f"`{preset}`"]
        for d in all_dumps:
            r = of[d["dump"]]
            row += [number(100 / r["ratio"], 1), number(r["ratio"], 2), number(r["page_ratio"], 2),
                    number(r["attention_rel_error_online"], 4)]
        rows.append(row)
    gzip = ["HDF5 gzip 4 with shuffle, lossless"]
    for d in all_dumps:
        gzip += [number(100 / d["gzip_ratio"], 1), number(d["gzip_ratio"], 2), "-", "0.0000"]
    return markdown(head, rows + [gzip])


def google(name):
    """{benchmark: (median, coefficient of variation)} of a Google Benchmark file with aggregates."""
    out = {}
    for b in result(name)["benchmarks"]:
        out.setdefault(b["run_name"], {})[b["aggregate_name"]] = b
    return out


def spread(group):
    return f"{100 * group['cv']['cpu_time']:.1f}"


@table
def host_pages():
    rows = []
    for name, group in google("host_pages.json").items():
        median = group["median"]
        if "bytes_per_second" in median:
            rate = f"{median['bytes_per_second'] * 1e-9:.2f} GB/s"
        else:
            rate = f"{median['items_per_second'] * 1e-6:.0f} M tokens/s"
        rows.append([f"`{name.removeprefix('BM_')}`", rate, spread(group)])
    return markdown(["benchmark", "rate", "spread %"], rows)


@table
def host_entropy():
    rows = []
    for name, group in google("host_entropy.json").items():
        median = group["median"]
        rate = f"{median['items_per_second'] * 1e-6:.0f} M codes/s" if "items_per_second" in median else \
            f"{median['cpu_time'] * 1e-6:.2f} ms"
        rows.append([f"`{name}`", rate, number(median.get("bits_per_code"), 2), spread(group)])
    return markdown(["benchmark", "rate", "bits a code", "spread %"], rows)


def container(r):
    rows = []
    for row in r["rows"]:
        what = {"gzip": "compress, gzipped dump", "plain": "compress, plain dump", "tkv": row["verb"]}[row["input"]]
        rows.append([what, row["threads"], f"{row['gbps']:.2f} [{row['least']:.2f}, {row['most']:.2f}]",
                     number(row["encode_stage_gbps"], 2), f"{row['kernel_gbps']:.2f}"])
    codec = ", ".join(f"`{name.removeprefix('BM_')}` {rate:.2f}" for name, rate in r["codec_gbps"].items())
    megabytes = 2e-6 * r["rows"][0]["values"]
    return (f"`{r['dump']}`, {megabytes:.0f} MB of fp16 keys and values; the command starts in {r['start_ms']:.1f} ms. The page codec alone "
            f"in the same run, GB/s: {codec}.\n\n" +
            markdown(["command", "threads", "GB/s of fp16: median [least, most]", "its encoding, of one core", "the kernel's copies alone"],
                     rows))


@table
def host_container():
    return container(result("host_container.json"))


@table
def host_container_large():
    return container(result("host_container_large.json"))


@table
def cold():
    rows = []
    for d in result("cold.json")["dumps"]:
        for r in d["rows"]:
            if r["threads"] != 1:  # the clock's time, of a machine that was busy
                continue
            rows.append([d["dump"].removesuffix(".h5"), r["pages"], f"{r['bytes'] * 1e-6:.2f}", f"{100 * r['bytes'] / d['fp16_bytes']:.2f}"] +
                        [number(r.get(f"{stage}_gbps"), 2) for stage in ("encode", "decode", "save", "load")])
    return markdown(["dump", "pages", "MB", "% of fp16", "encode GB/s", "decode GB/s", "`save_sequence` GB/s", "`load_sequence` GB/s"], rows)


@table
def allocator():
    r = result("allocator.json")
    rows = [[m["name"], m["where"] + (f", {m['threads'] or 1} threads" if m["where"] == "cpu" else ""), m["cache"], m["pages"],
             f"{m['median_us']:.1f} [{m['p10_us']:.1f}, {m['p90_us']:.1f}]"] for m in r["results"]]
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['rows']} rows, {r['repeats']} repeats.\n\n" +
            markdown(["what", "where", "cache", "pages", "us: median [p10, p90]"], rows))


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
def codec():
    return kernels(result("codec.json"))


@table
def basis():
    return kernels(result("basis.json"))


@table
def channel():
    return kernels(result("channel.json"))


@table
def prompt():
    peers = result("peers_prompt.json")
    rows = [[f"{p['backend']} causal attention, torch {peers['torch']}", f"{p['median_us']:.0f}", f"{p['tflop_per_s']:.0f}"]
            for p in peers["results"]]
    return kernels(result("prompt.json")) + "\n\n" + markdown(["peer on the same prompt", "us", "TFLOP/s"], rows)


@table
def store():
    r = result("store.json")
    rows = [[m["name"], f"{m['median_us']:.1f} [{m['p10_us']:.1f}, {m['p90_us']:.1f}]"] for m in r["results"]]
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['sequences']} sequences of {r['tokens']} tokens, {r['layers']} layers; pool gain "
            f"{r['before']['pool_gain']:.2f} after the prompt, {r['after']['pool_gain']:.2f} after {r['steps']} steps.\n\n" +
            markdown(["call", "us: median [p10, p90]"], rows))


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
def readme_attention():
    of = {(m["name"], m["shape"]): m["us"] for m in result("peers.json")["results"]}
    shapes = {"1 x 32K": "1x32768", "64 x 4K": "64x4096", "8 x 32K": "8x32768"}
    schemes = {"cuDNN fp16": "cudnn", "K8V4": "k8v4", "K4V4": "k4v4", "K4V2": "k4v2",
               "tiers 30 % K8V4, 50 % K4V2, 20 % pruned": "mixed"}
    rows = [[title] + [f"{of[name, shape]:.1f}" for name in schemes.values()] for title, shape in shapes.items()]
    return markdown(["sequences x tokens"] + list(schemes), rows)


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


@table
def coded():
    r = result("coded.json")
    rows = []
    for m in r["results"]:
        if m["kind"] in ("decode", "encode"):
            us = m[m["kind"] + "_us"]
            rate = f"{m['output_gb_per_s']:.0f} GB/s of fp16" if m["kind"] == "decode" else f"{m['giga_symbols_per_s']:.0f} G/s"
            what = m["kind"] + (" by a counter" if m.get("places") == "counter" else "")
            rows.append([f"{what} {m['component']}, {m['rung']}", m["layer"], "-", number(m.get("bits_per_symbol"), 2), "-"])
        else:
            us, rate = m["attend_us"], f"{m['tera_symbols_per_s']:.2f} T/s"
            name = f"{m['bits']}-bit pages" if m["kind"] == "pages" else m["rung"]
            if m["kind"] == "attention_kvcomp_codes":
                name += ", KVComp's codes"
            floor = f"{m['floor_us']['median']:.1f}" if "floor_us" in m else "-"
            rows.append([name, m.get("layer", "-"), m["shape"], number(m.get("bits_per_symbol"), 2), floor])
        spread = f" [{us['p10']:.1f}, {us['p90']:.1f}]" if "p10" in us else ""
        rows[-1] += [f"{us['median']:.1f}{spread}", rate]
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['q_heads']}/{r['kv_heads']} heads, head_dim {r['head_dim']}, raw window of {r['window']}, "
            f"{r['replays']} replays.\n\n" +
            markdown(["what", "layer", "shape", "bits a code", "floor us", "us: median [p10, p90]", "rate"], rows))


def matvec_shape(m):
    return m["component"], m["setting"], m["tokens"]


def matvec_results():
    """With cuBLAS at its best: it was timed anew beside every relative step."""
    results = result("matvec.json")["results"]
    best = {}
    for m in results:
        if matvec_shape(m) not in best or m["blas_us"]["median"] < best[matvec_shape(m)]["blas_us"]["median"]:
            best[matvec_shape(m)] = m
    return [{**m, **{name: best[matvec_shape(m)][name] for name in ("blas", "blas_us")}} for m in results]


def matvec_rows(cell, wanted, head=(), first=lambda m: []):
    """A row for every matrix and shape that is wanted, a column for every relative step."""
    rows, steps = {}, {}
    for m in matvec_results():
        if wanted(m):
            rows.setdefault(matvec_shape(m), [*matvec_shape(m), *first(m)]).append(cell(m))
            steps[m["relative"]] = True
    return markdown(["matrix", "sequences x heads", "tokens", *head] + [f"{s:.2f}" for s in steps], rows.values())


def fp16_rate(m, us):
    return 1e3 * m["fp16_mb"] / us["median"]


def one_and_several(m, form):
    return f"{fp16_rate(m, m[form]['one_us']):.0f} / {fp16_rate(m, m[form]['several_us']):.0f}"


@table
def matvec_bits():
    r = result("matvec.json")
    rows = {}
    for m in r["results"]:
        rows[m["component"], m["relative"]] = [
            m["component"], f"{m['relative']:.2f}", f"{m['relative_error']:.4f}", number(m["tree"]["bits"], 2), number(m["table"]["bits"], 2),
            m["table"]["rung"], number(m["unit_bits"], 2), number(16 / (m["table"]["bits"] + m["unit_bits"]), 2)]
    worst = max(m[form]["difference"] for m in r["results"] for form in ("tree", "table"))
    return (f"{r['gpu']}, commit {r['commit'][:7]}, head_dim {r['head_dim']}, {r['replays']} replays. One kernel and several differ by at most "
            f"{worst:.1e} of the result.\n\n" +
            markdown(["matrix", "relative step", "its error", "bits a code, tree", "table", "the table", "steps and lows, bits", "ratio"],
                     rows.values()))


@table
def matvec_tree():
    return matvec_rows(lambda m: one_and_several(m, "tree"), lambda m: m["setting"] in ("1 x 32/32", "8 x 32/8"))


@table
def matvec_table():
    return matvec_rows(lambda m: one_and_several(m, "table"), lambda m: True)


@table
def matvec_blas():
    def against(m):
        one = m["table"]["one_us"]["median"]
        return f"{one:.1f} ({m['blas_us']['median'] / one:.2f}x)"
    return matvec_rows(against, lambda m: True, ["cuBLAS", "us", "GB/s"],
                       lambda m: [m["blas"], f"{m['blas_us']['median']:.1f}", f"{fp16_rate(m, m['blas_us']):.0f}"])


@table
def matvec_equivalent():
    def rate(m):
        beyond = m["table"]["one_us"]["median"] - m["blas_us"]["median"]
        return "faster" if beyond <= 0 else f"{1e3 * m['fp16_mb'] / beyond:.0f}"
    return matvec_rows(rate, lambda m: m["component"] == "values" and m["setting"] in ("1 x 32/32", "1 x 32/8"))


@table
def ratio_at_error():
    rows = []
    for dump in result("ratio_at_error.json")["dumps"]:
        for r in dump["rows"]:
            row = [dump["dump"].removesuffix(".h5"), f"`{r['preset']}`", f"{r['error']:.4f}", f"{100 * r['memory']:.1f}"]
            for at in r["families"].values():
                row.append("-" if at is None else f"{100 * at['memory']:.1f} ({100 * (r['memory'] / at['memory'] - 1):+.0f} %)")
            rows.append(row)
    families = result("ratio_at_error.json")["dumps"][0]["rows"][0]["families"]
    return markdown(["dump", "reference", "its error", "its memory %", *families], rows)


@table
def answers():
    return markdown(*summary.answers_table(result("answers.json")))


@table
def answers_at_equal_kl():
    return markdown(*summary.equal_table(result("answers.json")))


def filled(text, document):
    out, rest = [], text
    while "<!-- table " in rest:
        before, rest = rest.split("<!-- table ", 1)
        name, rest = rest.split(" -->", 1)
        if name not in TABLES:
            sys.exit(f"{document.name}: no table is called {name}")
        _, rest = rest.split("<!-- end -->", 1)
        out += [before, f"<!-- table {name} -->\n", TABLES[name](), "\n<!-- end -->"]
    return "".join(out + [rest])


def main():
    for document in DOCUMENTS:
        text = document.read_text()
        new = filled(text, document)
        if "--check" not in sys.argv[1:]:
            document.write_text(new)
        elif new != text:
            sys.exit(f"{document.name} is not what bench/results say: run bench/tables.py")


if __name__ == "__main__":
    main()
