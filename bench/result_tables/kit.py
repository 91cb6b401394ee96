# SPDX-License-Identifier: Apache-2.0
"""What the tables are made with: results, Markdown, and the tables by name."""
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TABLES = {}


def table(function):
    TABLES[function.__name__] = function
    return function


def table_of(name):
    """A table of a result that may not be there yet; where it is, a document must have the table."""
    return table if (ROOT / "bench" / "results" / name).exists() else lambda function: function


def result(name):
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def markdown(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(x).replace("|", "\\|") for x in row) + " |" for row in rows])


def number(x, digits):
    return "-" if x is None else f"{x:.{digits}f}"


def span(values, digits):
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"
