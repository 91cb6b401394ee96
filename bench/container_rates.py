#!/usr/bin/python3
"""Rates of `tierkv compress` and `decompress` on a dump, beside the page codec's own: JSON on stdout.

container_rates.py TIERKV BENCH_PAGES DUMP [--preset k8v4] [--repeat 9]

Files lie in memory (/dev/shm) so that no disk is timed. The dump is timed as it is and rewritten without gzip, because inflating
is HDF5's price and not the codec's. Rates count fp16 bytes of keys and values; seconds are those of the whole process."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time


def timed(repeat, *command):
    seconds = []
    for _ in range(repeat):
        start = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - start)
    return seconds


def main():
    args = argparse.ArgumentParser()
    args.add_argument("tierkv")
    args.add_argument("bench_pages")
    args.add_argument("dump")
    args.add_argument("--preset", default="k8v4")
    args.add_argument("--repeat", type=int, default=9)
    args = args.parse_args()
    codec = {}
    run = subprocess.run([args.bench_pages, "--benchmark_filter=Simd/k:8/v:4/d:128$", "--benchmark_format=json"], check=True,
                         capture_output=True, text=True)
    for b in json.loads(run.stdout)["benchmarks"]:
        codec[b["name"]] = b["bytes_per_second"] * 1e-9
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        folder = pathlib.Path(folder)
        tkv, plain, out = folder / "a.tkv", folder / "plain.h5", folder / "out.h5"
        subprocess.run([args.tierkv, "compress", "--preset", "fp16", args.dump, tkv], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([args.tierkv, "decompress", tkv, plain], check=True)
        for threads in sorted({1, 2, os.cpu_count()}):
            for verb, source, to in (("compress", args.dump, tkv), ("compress", plain, tkv), ("decompress", tkv, out), ("verify", tkv, None)):
                command = [args.tierkv, verb, "--threads", str(threads)] + (["--preset", args.preset] if verb == "compress" else [])
                command += [source] + ([to] if to else [])
                runs = [json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout)
                        for _ in range(args.repeat)]
                gb = 2e-9 * (runs[0]["values"] if verb == "compress" else rows[0]["values"])
                rates = [gb / s for s in timed(args.repeat, *command)]
                stages = [gb / statistics.median(r["encode_seconds"] for r in runs)] if verb == "compress" else [None]
                rows.append({"verb": verb, "input": "gzip" if source == args.dump else "plain" if verb == "compress" else "tkv",
                             "threads": threads, "values": round(gb / 2e-9), "gbps": statistics.median(rates),
                             "least": min(rates), "most": max(rates), "encode_stage_gbps": stages[0]})
    print(json.dumps({"schema": "tierkv.bench.container/1", "dump": pathlib.Path(args.dump).name, "preset": args.preset,
                      "cpus": os.cpu_count(), "codec_gbps": codec, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
