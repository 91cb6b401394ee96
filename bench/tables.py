#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the documents below from bench/results/*.json; bench/REPORT.md has nearly all.

tables.py          replaces what stands between `<!-- table NAME -->` and `<!-- end -->`
tables.py --check  exits 1 when a document is not what the results make it, or when no document has a table"""
import sys

from result_tables import attention, coded, engines, host, memory, quality  # noqa: F401, each adds its tables
from result_tables.kit import ROOT, TABLES

DOCUMENTS = [ROOT / name for name in ("README.md", "bench/REPORT.md")]


def filled(text, document, used):
    out, rest = [], text
    while "<!-- table " in rest:
        before, rest = rest.split("<!-- table ", 1)
        name, rest = rest.split(" -->", 1)
        if name not in TABLES:
            sys.exit(f"{document.name}: no table is called {name}")
        used.add(name)
        _, rest = rest.split("<!-- end -->", 1)
        out += [before, f"<!-- table {name} -->\n", TABLES[name](), "\n<!-- end -->"]
    return "".join(out + [rest])


def main():
    used = set()
    for document in DOCUMENTS:
        text = document.read_text()
        new = filled(text, document, used)
        if "--check" not in sys.argv[1:]:
            document.write_text(new)
        elif new != text:
            sys.exit(f"{document.name} is not what bench/results say: run bench/tables.py")
    if used != set(TABLES):
        sys.exit(f"no document has the tables {', '.join(sorted(set(TABLES) - used))}")


if __name__ == "__main__":
    main()
