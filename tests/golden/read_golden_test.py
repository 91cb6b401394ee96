# SPDX-License-Identifier: Apache-2.0
"""The independent reader decodes the kept containers to the recorded values, bit for bit.

Usage: read_golden_test.py SOURCE"""
import csv
import sys
from pathlib import Path

import numpy as np

source = Path(sys.argv[1])
sys.path.insert(0, str(source / "tests" / "reference"))
import read_tkv  # noqa: E402

folder = source / "tests" / "golden"
with open(folder / "sizes.csv") as f:
    recorded = {row["preset"]: row for row in csv.DictReader(f)}
files = sorted((folder / "containers").glob("*.tkv"))
by_name = {preset.translate(str.maketrans(":=+ /", "_____")): row for preset, row in recorded.items()}
assert len(files) >= 8, files
for file in files:
    row, data = by_name[file.stem], file.read_bytes()
    cache = read_tkv.read(file)
    values = b"".join(np.concatenate([k.ravel(), v.ravel(), pruned.astype(np.float32)]).astype("<f4").tobytes()
                      for k, v, pruned in cache.rows.values())
    assert len(data) == int(row["file_bytes"]) and read_tkv.xxh3(data) == int(row["file_xxh3"], 16), file
    assert read_tkv.xxh3(values) == int(row["values_xxh3"], 16), file
print(f"{len(files)} containers")
