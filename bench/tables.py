#!/usr/bin/python3
"""Writes the tables of the documents below from bench/results/*.json.

tables.py          replaces what stands between `<!-- table NAME -->` and `<!-- end -->`
tables.py --check  exits 1 when a document is not what the results make it"""
import sys

from result_tables import attention, coded, engines, host, memory, quality  # noqa: F401, each adds its tables
from result_tables.kit import ROOT, TABLES

DOCUMENTS = [ROOT / name for name in ("README.md", "docs/ABLATION.md", "docs/ATTENTION.md", "docs/BENCHMARKS.md", "docs/CODED_ATTENTION.md", "docs/QUALITY.md")]


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
