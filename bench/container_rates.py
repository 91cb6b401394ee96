#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Rates of `tierkv compress` and `decompress` on a dump, beside the page codec's own: JSON on stdout.

container_rates.py TIERKV BENCH_PAGES DUMP [--preset k8v4] [--repeat 9] [--threads 1 2 4]

Files lie in memory (/dev/shm) so that no disk is timed. The dump is timed as it is and rewritten without gzip, because inflating
is HDF5's price and not the codec's. Rates count fp16 bytes of keys and values; seconds are those of the whole process. Beside
them stands what the kernel alone takes to copy the same input out of one file and as many bytes as the output into another,
which replaces one: one thread with one buffer, since a file has one writer at a time."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

PIECE = 2 << 20


def run(*command):
    start = time.monotonic()
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return time.monotonic() - start, out


def kernel_seconds(source, size, folder):
    """Reads a file and writes `size` bytes to another, in pieces that stay in the cache."""
    buffer = bytearray(PIECE)
    start = time.monotonic()
    with open(source, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass
    if size:
        with open(folder / "kernel.part", "wb", buffering=0) as f:
            for first in range(0, size, PIECE):
                f.write(memoryview(buffer)[:min(PIECE, size - first)])
        os.rename(folder / "kernel.part", folder / "kernel")
    return time.monotonic() - start


def codec_rates(bench_pages):
    """GB/s of the page codec: of one core, and of all with threads:N."""
    out = run(bench_pages, f"--benchmark_filter=Simd/k:8/v:4/d:128(/real_time/threads:{os.cpu_count()})?$", "--benchmark_format=json",
              "--benchmark_min_time=0.2")[1]
    return {b["name"]: b["bytes_per_second"] * 1e-9 for b in json.loads(out)["benchmarks"]}


def main():
    args = argparse.ArgumentParser()
    args.add_argument("tierkv")
    args.add_argument("bench_pages")
    args.add_argument("dump")
    args.add_argument("--preset", default="k8v4")
    args.add_argument("--repeat", type=int, default=9)
    args.add_argument("--threads", type=int, nargs="+", default=sorted({1, 2, os.cpu_count()}))
    args = args.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        folder = pathlib.Path(folder)
        tkv, plain, out = folder / "a.tkv", folder / "plain.h5", folder / "out.h5"
        run(args.tierkv, "compress", "--preset", "fp16", args.dump, tkv)
        run(args.tierkv, "decompress", tkv, plain)
        values = json.loads(run(args.tierkv, "compress", "--force", "--preset", args.preset, plain, tkv, "--json")[1])["values"]
        gb = 2e-9 * values
        for threads in args.threads:
            for verb, source, to in (("compress", args.dump, tkv), ("compress", plain, tkv), ("decompress", tkv, out), ("verify", tkv, None)):
                command = [args.tierkv, verb, "--threads", str(threads)] + (["--preset", args.preset] if verb == "compress" else [])
                command += [source] + ([to, "--force"] if to else []) + ["--json"]
                runs = [run(*command) for _ in range(args.repeat)]
                rates = [gb / seconds for seconds, _ in runs]
                stage = [json.loads(text)["encode_seconds"] for _, text in runs] if verb == "compress" else []
                size = os.path.getsize(to) if to else 0
                kernel = statistics.median(kernel_seconds(source, size, folder) for _ in range(args.repeat))
                rows.append({"verb": verb, "input": "gzip" if source == args.dump else "plain" if verb == "compress" else "tkv",
                             "threads": threads, "values": values, "gbps": statistics.median(rates), "least": min(rates),
                             "most": max(rates), "encode_stage_gbps": gb / statistics.median(stage) if stage else None,
                             "kernel_gbps": gb / kernel})
    print(json.dumps({"schema": "tierkv.bench.container/2", "dump": pathlib.Path(args.dump).name, "preset": args.preset,
                      "cpus": os.cpu_count(), "start_ms": 1e3 * statistics.median(run(args.tierkv, "--version")[0] for _ in range(args.repeat)),
                      "codec_gbps": codec_rates(args.bench_pages), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
