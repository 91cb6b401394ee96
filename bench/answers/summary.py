#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of a result of run.py. summary.py RESULT.json prints them; bench/tables.py puts them into bench/REPORT.md."""
import json
import math
import pathlib
import sys

REFERENCES = ["kivi4:group=64,residual=64", "kivi4:group=128,residual=64", "k4v4:window=64",
              "kvcomp:unit=block,window=64,rel_k=0.05,rel_v=0.15"]
RETRIEVAL = ["needle 4K", "needle 16K", "recall 64", "recall 160"]
# What to be equal in: (name, column, tasks)
LEVELS = [0.005]  # of KL of text, without a reference
MEASURES = [("KL, text", "kl", ["text"]), ("KL, retrieval", "kl", RETRIEVAL), ("attention error, text", "error", ["text"])]


def mean(values):
    return sum(values) / len(values)


def standard_error(values):
    if len(values) < 2:
        return math.nan
    m = mean(values)
    return math.sqrt(sum((v - m)**2 for v in values) / (len(values) - 1) / len(values))


def places(result, tasks):
    """Indices of the prompts of these tasks."""
    return [i for i, p in enumerate(result["prompts"]) if p["task"] in tasks]


def answer_tasks(result):
    return list(dict.fromkeys(p["task"] for p in result["prompts"] if p["answers"]))


def name(scheme):
    own = ", own means" if scheme["own_means"] else ""
    return f"`{scheme['preset']}`" + (f", balanced{own}" if scheme["profile"] == "balanced" else "")


def score(result, scheme, task):
    """Share of right answers."""
    at = places(result, [task])
    return sum(scheme["right"][i] for i in at) / sum(result["prompts"][i]["answers"] for i in at)


def change(result, scheme, exact):
    """(mean over tasks of the change of the share of right answers, its standard error over prompts), paired with the exact cache."""
    shifts, variance, tasks = [], 0.0, answer_tasks(result)
    for task in tasks:
        by_prompt = [(scheme["right"][i] - exact["right"][i]) / result["prompts"][i]["answers"] for i in places(result, [task])]
        shifts.append(mean(by_prompt))
        variance += standard_error(by_prompt)**2
    return mean(shifts), math.sqrt(variance) / len(tasks)


def uncertain(error, digits):
    """How a standard error is written; nothing where there is none."""
    return "" if math.isnan(error) else f" ± {error:.{digits}f}"


def with_error(values, scale):
    return f"{scale * mean(values):.2f}" + uncertain(scale * standard_error(values), 2)


def answers_table(result):
    """(head, rows)"""
    tasks, exact = answer_tasks(result), next(s for s in result["schemes"] if s["preset"] == "fp16")
    head = ["scheme", "memory %", "KL of text, 1/1000", "KL of retrieval, 1/1000", *tasks, "change of all tasks, points"]
    rows = []
    text, retrieval = places(result, ["text"]), places(result, RETRIEVAL)
    for s in result["schemes"]:
        shift, error = change(result, s, exact)
        row = [name(s), f"{100 * mean([s['memory'][i] for i in text]):.1f}"]
        row += [with_error([s["kl"][i] for i in at], 1000) for at in (text, retrieval)]
        row += [f"{100 * score(result, s, task):.1f}" for task in tasks]
        rows.append([*row, "0" if s is exact else f"{100 * shift:+.1f}" + uncertain(100 * error, 1)])
    return head, rows


def memory_at(points, level):
    """Memory where a curve of (memory, level) reaches a level, linear in memory and the logarithm of the level; None outside."""
    kept = sorted(points, key=lambda p: p[1])
    for a, b in zip(kept, kept[1:]):
        if a[1] <= level <= b[1]:
            return a[0] + math.log(level / a[1]) / math.log(b[1] / a[1]) * (b[0] - a[0])
    return None


def curve(result, family, column, at):
    """[(memory, level)] of a family's schemes, means over the prompts `at`."""
    return [tuple(mean([s[c][i] for i in at]) for c in ("memory", column)) for s in result["schemes"] if s["family"] == family]


def at_equal_level(result, reference, family, column, at):
    """(memory of the family where its mean level over the prompts `at` is the reference's, what a byte holds more), or None."""
    memory = memory_at(curve(result, family, column, at), mean([reference[column][i] for i in at]))
    return None if memory is None else (memory, mean([reference["memory"][i] for i in at]) / memory - 1)


def gain_with_error(result, reference, family, column, at):
    """(memory, gain, the gain's standard error by the jackknife over prompts: NaN where a sample falls off the curve), or None."""
    whole = at_equal_level(result, reference, family, column, at)
    if whole is None:
        return None
    parts = [at_equal_level(result, reference, family, column, at[:i] + at[i + 1:]) for i in range(len(at))]
    if None in parts:
        return *whole, math.nan
    gains = [p[1] for p in parts]
    return *whole, (len(at) - 1) * standard_error(gains)


def equal_table(result):
    """(head, rows): a row per measure and reference, a column per family with steps."""
    families = list(dict.fromkeys(s["family"] for s in result["schemes"] if s["family"] != "fixed"))
    rows = []
    for measure, column, tasks in MEASURES:
        at = places(result, tasks)
        for preset in REFERENCES:
            reference = next(s for s in result["schemes"] if s["preset"] == preset)
            level, memory = (mean([reference[c][i] for i in at]) for c in (column, "memory"))
            row = [measure, f"`{preset}`", f"{level:.4f}", f"{100 * memory:.1f}"]
            for family in families:
                gain = gain_with_error(result, reference, family, column, at) if family != reference["family"] else None
                row.append("-" if gain is None else f"{100 * gain[0]:.1f} ({100 * gain[1]:+.0f}{uncertain(100 * gain[2], 0)} %)")
            rows.append(row)
    for level in LEVELS:
        memory = [memory_at(curve(result, family, "kl", places(result, ["text"])), level) for family in families]
        rows.append(["KL, text", "-", f"{level}", "-", *("-" if m is None else f"{100 * m:.1f}" for m in memory)])
    return ["equal in", "reference", "its level", "its memory %", *families], rows


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    result = json.loads(pathlib.Path(sys.argv[1]).read_text())
    for head, rows in (answers_table(result), equal_table(result)):
        for row in (head, ["---"] * len(head), *rows):
            print("| " + " | ".join(row) + " |")
        print()


if __name__ == "__main__":
    main()
