#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Online attention error of each layer and kv head of a dump, as JSON on stdout: what the mean that `tierkv analyze` prints is made of.

heads.py BUILD PROFILE DUMP PRESET      BUILD: a build folder, with the Python package

Every head is cut out into a dump of its own, with the head's part of the profile, so each has codebooks of its own: the errors do not
depend on them."""
import json
import pathlib
import sys
import tempfile

import h5py
import numpy as np


def cut_dump(source, path, layer, head):
    """One layer and kv head, with the query heads of its group, of every sequence."""
    group = int(source.attrs["num_q_heads"]) // int(source.attrs["num_kv_heads"])
    with h5py.File(path, "w") as f:
        f.attrs.update(source.attrs)
        f.attrs.update(num_layers=1, num_kv_heads=1, num_q_heads=group)
        for name, seq in source["seq"].items():
            f[f"seq/{name}/tokens"] = seq["tokens"][:]
            old, new = seq[f"layer/{layer}"], f.create_group(f"seq/{name}/layer/0")
            new["k"], new["v"] = old["k"][head:head + 1], old["v"][head:head + 1]
            new["q"], new["q_positions"] = old["q"][head * group:(head + 1) * group], old["q_positions"][:]


def cut_profile(source, path, row):
    with h5py.File(path, "w") as f:
        f.attrs.update(source.attrs)
        f.attrs.update(num_layers=1, num_kv_heads=1)
        for name, array in source.items():
            f[name] = array[row:row + 1]


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    build, profile, dump, preset = sys.argv[1:]
    sys.path.append(str(pathlib.Path(build) / "python"))
    import tierkv
    out = []
    with h5py.File(profile) as p, h5py.File(dump) as d, tempfile.TemporaryDirectory() as folder:
        heads = int(d.attrs["num_kv_heads"])
        for row in range(int(d.attrs["num_layers"]) * heads):
            one, its_profile = f"{folder}/{row}.h5", f"{folder}/{row}.profile.h5"
            cut_dump(d, one, row // heads, row % heads)
            cut_profile(p, its_profile, row)
            result = next(r for r in tierkv.analyze(one, [preset], profile=its_profile) if r.seq == "all")
            out.append({"layer": row // heads, "kv_head": row % heads, "error": result.attention_rel_error_online})
    errors = [r["error"] for r in out]
    print(json.dumps({"preset": preset, "least": min(errors), "mean": float(np.mean(errors)), "most": max(errors), "heads": out}, indent=1))


if __name__ == "__main__":
    main()
