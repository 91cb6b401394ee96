#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What every scheme does to dumps, as JSON on stdout: the rows of `tierkv analyze` over all sequences, and what HDF5's own gzip
(shuffle, level 4 as the dumps are stored) makes of keys and values.

dump_results.py TIERKV DUMP... > bench/results/dumps.json"""
import json
import pathlib
import subprocess
import sys

import h5py

FIELDS = ["preset", "bits_per_value", "ratio", "page_ratio", "key_rel_error", "value_rel_error", "attention_rel_error",
          "attention_rel_error_online", "key_coded_bits", "value_coded_bits", "tiers"]
EXTRA = ["zstd-fp16:level=19", "k2v2:window=64", "k4v4:window=64+huffman"]


def gzip_ratio(dump):
    raw = stored = 0
    with h5py.File(dump) as f:
        for seq in f["seq"].values():
            for layer in seq["layer"].values():
                for name in ("k", "v"):
                    if layer[name].compression != "gzip":
                        return None
                    raw += 2 * layer[name].size
                    stored += layer[name].id.get_storage_size()
    return raw / stored


def presets(tierkv, dump):
    """The default table's names, and a few more."""
    run = subprocess.run([tierkv, "analyze", "--json", dump], check=True, capture_output=True, text=True)
    return [r["preset"] for r in json.loads(run.stdout)["results"] if r["seq"] == "all"] + EXTRA


def main():
    tierkv, *dumps = sys.argv[1:]
    if not dumps:
        sys.exit(__doc__)
    names = presets(tierkv, dumps[0])
    out = []
    for dump in dumps:
        flags = [word for p in names for word in ("--preset", p)]
        run = subprocess.run([tierkv, "analyze", "--json", *flags, dump], check=True, capture_output=True, text=True)
        rows = [r for r in json.loads(run.stdout)["results"] if r["seq"] == "all"]
        out.append({"dump": pathlib.Path(dump).name, "gzip_ratio": gzip_ratio(dump),
                    "rows": [{f: r.get(f) for f in FIELDS} for r in rows]})
    print(json.dumps({"schema": "tierkv.bench.dumps/1", "dumps": out}, indent=1))


if __name__ == "__main__":
    main()
