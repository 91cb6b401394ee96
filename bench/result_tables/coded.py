# SPDX-License-Identifier: Apache-2.0
"""Coded blocks: attention, and the two products alone."""
from .kit import markdown, number, result, span, table


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
            floor = f"{m['floor_us']['median']:.1f}" if "floor_us" in m else "-"
            rows.append([name, m.get("layer", "-"), m["shape"], number(m.get("bits_per_symbol"), 2), floor])
        spread = f" [{us['p10']:.1f}, {us['p90']:.1f}]" if "p10" in us else ""
        rows[-1] += [f"{us['median']:.1f}{spread}", rate]
    return (f"{r['gpu']}, commit {r['commit'][:7]}, {r['q_heads']}/{r['kv_heads']} heads, head_dim {r['head_dim']}, raw window of {r['window']}, "
            f"{r['replays']} replays.\n\n" +
            markdown(["what", "layer", "shape", "bits a code", "floor us", "us: median [p10, p90]", "rate"], rows))


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
    return (f"{r['gpu']}, commit {r['commit']}, {r['q_heads']}/{r['kv_heads']} heads, {r['sinks']} raw sinks and a raw window of {r['window']}, "
            f"{r['replays']} replays.\n\n" +
            markdown(["kernel", "head_dim", "layer", "shape", "bits a code", "warps", "floor us", "us: median [p10, p90]", "T codes/s"], rows))


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


LADDER = {"tree walk": "the paper's tree walk", "array tree": "the paper's tree without branches", "single 8 bits x1": "single 8 bits x1, one stream",
          "single 8 bits x32 /2": "single 8 bits x32, two streams", "pair 9 bits x32 /2": "pair 9 bits x32, two streams",
          "pair 10 bits x16 /2": "**pair 10 bits x16, two streams**", "pair 10 bits x16": "pair 10 bits x16, one stream",
          "pair 11 bits x8 /2": "pair 11 bits x8, two streams", "pair 11 bits x1 /2": "pair 11 bits x1, two streams",
          "pair 11 bits x1": "pair 11 bits x1, one stream", "pair 12 bits x1 /2": "pair 12 bits x1, two streams",
          "block-adaptive width": "block-adaptive width"}
LADDER_SHAPES = ["64x4096", "8x32768", "64x16384", "1x32768", "1x131072"]


@table
def coded_ladder():
    measured = result("coded.json")["results"]

    def speed(kind, key, value, shape):
        return [m["tera_symbols_per_s"] for m in measured if m["kind"] == kind and m[key] == value and m["shape"] == shape]

    rows = []
    for bits, name in ((16, "fp16 pages"), (4, "4-bit pages")):
        by_shape = (speed("pages", "bits", bits, shape) for shape in LADDER_SHAPES)
        rows.append([name, 16 if bits == 16 else 4.25] + [span(x, 2) if x else "-" for x in by_shape])
    for rung, name in LADDER.items():
        bits = [m["bits_per_symbol"] for m in measured if m["kind"] == "attention" and m["rung"] == rung]
        if not bits:
            continue
        rows.append([name, span(bits, 2)] + [span(speed("attention", "rung", rung, shape), 2) for shape in LADDER_SHAPES])
    return markdown(["rung", "bits"] + [shape.replace("x", " x ") for shape in LADDER_SHAPES], rows)


@table
def coded_decoding():
    r, rows = result("coded.json"), []
    for rung in dict.fromkeys(m["rung"] for m in r["results"] if m["kind"] == "decode"):
        row = [LADDER.get(rung, rung).strip("*")]
        for what, digits in (("bits_per_symbol", 2), ("output_gb_per_s", 0)):
            for component in ("keys", "values"):
                row.append(span([m[what] for m in r["results"]
                                 if m["kind"] == "decode" and (m["rung"], m["component"]) == (rung, component)], digits))
        rows.append(row)
    return markdown(["rung", "bits of keys", "of values", "keys, GB/s of fp16", "values"], rows)


@table
def coded_kvcomp():
    measured = [m for m in result("coded_kvcomp.json")["results"] if m["kind"] == "attention"]
    return markdown(["bits a code"] + [m["shape"].replace("x", " x ") for m in measured],
                    [[f"{measured[0]['bits_per_symbol']:.2f}"] + [f"{m['tera_symbols_per_s']:.2f} T" for m in measured]])
