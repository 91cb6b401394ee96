# SPDX-License-Identifier: Apache-2.0
"""Dumps, and what was measured on a CPU."""
from .kit import markdown, number, result, table


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
