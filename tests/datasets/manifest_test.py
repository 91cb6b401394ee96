# SPDX-License-Identifier: Apache-2.0
"""Compares every file of datasets/MANIFEST.json with its size and SHA-256.

usage: manifest_test.py DATASETS_FOLDER
"""

import hashlib
import json
import pathlib
import sys


def problems(folder):
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    if manifest["schema"] != "tierkv.datasets/1":
        yield f"schema is {manifest['schema']}"
    for entry in manifest["files"]:
        path = folder / entry["path"]
        if not path.is_file():
            yield f"{path}: is missing"
            continue
        data = path.read_bytes()
        if len(data) != entry["size"]:
            yield f"{path}: has {len(data)} bytes, the manifest says {entry['size']}"
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry["sha256"]:
            yield f"{path}: has SHA-256 {digest}, the manifest says {entry['sha256']}"
        for field in ("format", "contents", "provenance"):
            if not entry.get(field):
                yield f"{entry['path']}: the manifest has no {field}"
    listed = {entry["path"] for entry in manifest["files"]}
    for path in sorted(folder.glob("*.h5")):
        if path.name not in listed:
            yield f"{path}: is not in the manifest"


found = list(problems(pathlib.Path(sys.argv[1])))
print("\n".join(found) or "the manifest holds", file=sys.stderr)
sys.exit(1 if found else 0)
