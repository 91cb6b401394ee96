# SPDX-License-Identifier: Apache-2.0
"""Quality against memory."""
from answers import summary

from .kit import markdown, number, result, table


@table
def ratio_at_error():
    rows = []
    for dump in result("ratio_at_error.json")["dumps"]:
        for r in dump["rows"]:
            row = [dump["dump"].removesuffix(".h5"), f"`{r['preset']}`", f"{r['error']:.4f}", f"{100 * r['memory']:.1f}"]
            for at in r["families"].values():
                row.append("-" if at is None else f"{100 * at['memory']:.1f} ({100 * (r['memory'] / at['memory'] - 1):+.0f} %)")
            rows.append(row)
    families = result("ratio_at_error.json")["dumps"][0]["rows"][0]["families"]
    return markdown(["dump", "reference", "its error", "its memory %", *families], rows)


@table
def answers():
    return markdown(*summary.answers_table(result("answers.json")))


@table
def answers_at_equal_kl():
    return markdown(*summary.equal_table(result("answers.json")))


# ---- Results of bench/answers/quality.py ----

FEW = 4  # prompts of each size that every scheme was measured on: two texts, two lookups
TASKS = ("text", "lookup")
ERRORS = {"attention_weighted_error": "attention error weighted with sensitivities", "attention_pooled_error": "attention error pooled by layer",
          "attention_rel_error_online": "mean of relative attention errors", "attention_rel_error": "the same, window at the end",
          "key_rel_error": "key error", "value_rel_error": "value error", "memory": "memory (less of it)"}
SIMULATED = {"weighted steps 0.5 / 0.45": "small:k=0.5,v=0.45", "weighted steps 0.4 / 0.35": "small:k=0.4,v=0.35", "weighted steps 0.3 / 0.25": "small:k=0.3,v=0.25",
             "weighted steps without a profile, 0.3 / 0.25": "small:k=0.3,v=0.25, no profile", "tiers by class of heads": "tiers:classes=0.1*k8v4|0.4*k4v4/k4v2@1|k4v2/k2v2@1"}
PARTS = ("codes", "headers", "exponents", "stream_lengths", "padding", "exceptions", "means_and_steps")
KIVI = "KIVI 4 bit, groups of 64"  # groups aligned
RECOMMENDED = ("small", "small:k=0.5,v=0.45", "fast", "small, no profile")
KEPT_APART = 4 + 64  # tokens of a sequence that are not coded


def size_of(name, tokens):
    return next(size for size in result(name)["sizes"] if size["tokens"] == tokens)


def scheme_of(size, name):
    return next((s for s in size["schemes"] if s["name"] == name), None)


def tasks_mean(size, scheme, key, task, prompts=None):
    """The mean over the first prompts of a task, weighted alike; None without one."""
    values = [x for x, p in zip(scheme.get(key, [])[:prompts], size["prompts"]) if p["task"] == task]
    return summary.mean(values) if values else None


def task_counts(size, prompts):
    """`8 texts and 6 lookups`"""
    texts, lookups = (sum(p["task"] == task for p in size["prompts"][:prompts]) for task in TASKS)
    return f"{texts} text{'s' * (texts > 1)} and {lookups} lookup prompt{'s' * (lookups > 1)} of {size['tokens']} tokens"


def scheme_row(size, s):
    """Memory and text over texts, answers over lookups."""
    memory, kl, top = (tasks_mean(size, s, key, "text") for key in ("memory", "kl", "same_top"))
    pairs = [(x, p) for x, p in zip(s["right"], size["prompts"]) if p["task"] == "lookup"]
    right = sum(x for x, _ in pairs) / sum(p["answers"] for _, p in pairs) if pairs else None
    name = s["name"] + " (NumPy)" * ("memory" in s and "key_rel_error" not in s)
    return [name, number(memory and 100 * memory, 1), number(kl, 4), number(top and 100 * top, 1), number(tasks_mean(size, s, "kl", "lookup"), 4),
            number(right and 100 * right, 1)]


def scheme_table(size, prompts):
    """Schemes that were measured on the first `prompts` prompts and no more, least KL of text first."""
    rows = sorted((scheme_row(size, s) for s in size["schemes"] if len(s["kl"]) == prompts), key=lambda row: row[2])
    lookups = [p for p in size["prompts"][:prompts] if p["task"] == "lookup"]
    right = 100 * sum(p["right"] for p in lookups) / sum(p["answers"] for p in lookups) if lookups else None
    rows = [["exact cache", "100", "0", "100", "0", number(right, 1)], *rows]
    return markdown(["scheme", "memory %", "KL of text", "same top token %", "KL of lookups", "lookups right %"], rows)


def counted_table(size, prompts):
    return f"{task_counts(size, prompts)}:\n\n{scheme_table(size, prompts)}"


@table
def quality_smollm2():
    size = size_of("quality_smollm2.json", 2048)
    return counted_table(size, len(size["prompts"]))


@table
def quality_smollm2_few():
    size = size_of("quality_smollm2.json", 2048)
    return "\n\n".join(counted_table(size, n) for n in sorted({len(s["kl"]) for s in size["schemes"]} - {len(size["prompts"])}, reverse=True))


@table
def quality_smollm2_8k():
    size = size_of("quality_smollm2_8k.json", 7936)
    return counted_table(size, len(size["prompts"]))


@table
def quality_against_kivi():
    """Shares of what KIVI's 4 bits have on the same prompts."""
    rows = []
    for name, tokens in (("quality_smollm2.json", 2048), ("quality_smollm2_8k.json", 7936)):
        size = size_of(name, tokens)
        kivi = scheme_of(size, KIVI)
        for preset in RECOMMENDED:
            s = scheme_of(size, preset)
            if s is None:
                continue
            pairs = [[tasks_mean(size, x, key, task) for x in (s, kivi)] for key, task in (("memory", "text"), ("kl", "text"), ("kl", "lookup"))]
            rows.append([tokens, f"`{preset}`", *(f"{a / b:.2f}" for a, b in pairs)])
    return markdown(["tokens", "preset", "memory", "KL of text", "KL of lookups"], rows)


@table
def quality_second_model():
    size = size_of("quality_24m.json", 2048)
    return counted_table(size, len(size["prompts"]))


def ranks(values):
    """From 0; equal values share the mean of their ranks."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def rank_correlation(a, b):
    """Spearman's."""
    a, b = ranks(a), ranks(b)
    ma, mb = summary.mean(a), summary.mean(b)
    variance = sum((x - ma)**2 for x in a) * sum((y - mb)**2 for y in b)
    return sum((x - ma) * (y - mb) for x, y in zip(a, b)) / variance**0.5


@table
def quality_metrics():
    size = size_of("quality_smollm2.json", 2048)
    schemes = [s for s in size["schemes"] if all(s.get(key) for key in ERRORS)]
    rows = []
    for key, name in ERRORS.items():
        row = [name]
        for task in TASKS:
            values, kl = ([tasks_mean(size, s, k, task, FEW) for s in schemes] for k in (key, "kl"))
            row.append(number(rank_correlation([-v for v in values] if key == "memory" else values, kl), 2))
        rows.append(row)
    rows.sort(key=lambda row: -float(row[1]) - float(row[2]))
    counted = f"Spearman's rank correlation over {len(schemes)} schemes, {task_counts(size, FEW)}:"
    return f"{counted}\n\n{markdown(['metric', 'with KL of text', 'with KL of lookups'], rows)}"


@table
def quality_ladder():
    size = size_of("quality_ladder.json", 2048)
    rows = []
    whole, *others = size["schemes"]  # the last of the ideas is the whole's
    first = [s for s in others if s["name"].startswith(("one step", "+"))]
    for s in [*first, whole, *(s for s in others if s not in first)]:
        memory, kl, top = (tasks_mean(size, s, key, "text") for key in ("memory", "kl", "same_top"))
        factor = tasks_mean(size, s, "factor", "text")
        rows.append(["**+ importance: all ideas**" if s is whole else s["name"], number(1.0 if factor is None else factor, 2), number(100 * memory, 1), number(kl, 4), number(100 * top, 1),
                     number(tasks_mean(size, s, "kl", "lookup"), 4)])
    head = ["ideas", "steps times", "memory %", "KL of text", "same top token %", "KL of lookups"]
    return f"{task_counts(size, len(size['prompts']))}:\n\n{markdown(head, rows)}"


def change(a, b):
    return f"{a:.3f} / {b:.3f} ({100 * (b / a - 1):+.1f} %)"


@table
def quality_agreement():
    size, rows = size_of("quality_smollm2.json", 2048), []
    for simulated, preset in SIMULATED.items():
        a, b = scheme_of(size, simulated), scheme_of(size, preset)
        if a is None or b is None:
            continue
        row = [f"`{preset}`"]
        for key in ("key_entropy_bits", "value_entropy_bits"):
            row.append(change(*(tasks_mean(size, s, key, "text", FEW) for s in (a, b))) if a.get(key) else "-")
        row.append(change(*(100 * tasks_mean(size, s, "memory", "text", FEW) for s in (a, b))))
        row += [f"{x:.5f} / {y:.5f}" for x, y in ([tasks_mean(size, s, "kl", task, FEW) for s in (a, b)] for task in TASKS)]
        rows.append(row)
    return markdown(["preset", "key entropy, bits", "value entropy, bits", "memory %", "KL of text", "KL of lookups"], rows)


@table
def quality_parts():
    """Bits a code of weighted steps, by what holds them."""
    rows = []
    for model, name, head_dim in (("SmolLM2-135M", "quality_smollm2.json", 64), ("24M", "quality_24m.json", 128)):
        size = size_of(name, 2048)
        s = scheme_of(size, "small:k=0.5,v=0.45")
        codes = (size["tokens"] - KEPT_APART) / size["tokens"]  # of a value
        bits = {part: 16 * tasks_mean(size, s, f"part_{part}", "text") / codes for part in PARTS}
        entropy = (tasks_mean(size, s, "key_entropy_bits", "text") + tasks_mean(size, s, "value_entropy_bits", "text")) / 2
        rows.append([f"{model}, head_dim {head_dim}", number(entropy, 3), *(number(bits[part], 3) for part in PARTS),
                     number(sum(bits.values()) - entropy, 3)])
    return markdown(["model", "entropy", *(part.replace("_", " ") for part in PARTS), "all over entropy"], rows)


@table
def store_quality():
    r = result("store_quality.json")
    rows = [[f"`{m['format']}`" + ("" if m["profile"] else ", no profile"), m["tokens"], m["way"], m["task"], m["prompts"], m["read"],
             "GPU" if m["device"] == "cuda" else "CPU", number(100 * m["nominal"], 1), number(100 * m["held"], 1), number(m["kl"], 4),
             number(100 * m["same_top"], 1), number(100 * m["right"], 1) if "right" in m else "-"]
            for m in sorted(r["rows"], key=lambda m: (m["tokens"], m["device"], m["format"], not m["profile"], m["way"], m["task"] != "text"))]
    return markdown(["format", "tokens", "made in", "task", "prompts", "read at a time", "on", "nominal %", "held %", "KL", "same top token %",
                     "lookups right %"], rows)


POLICIES = {"once": "once", "once_finer": "once, finer", "algorithm_1": "Algorithm 1", "all_queries": "all queries"}
MEMORIES = {"fast": (0.24, 0.25, 0.26), "k8v4/k4v2": (0.3, 0.33, 0.36)}  # that all policies reach


@table
def running_tiers():
    found = result("running_tiers.json")["rows"]

    def kl_at(memory, **of):
        """Along alpha, linear in memory and the logarithm of the mean KL."""
        rows = [r for r in found if all(r[key] == x for key, x in of.items())]
        mean = {a: [summary.mean([r[key] for r in rows if r["alpha"] == a]) for key in ("memory", "kl")] for a in {r["alpha"] for r in rows}}
        points = sorted(mean.values())
        for (m, kl), (next_m, next_kl) in zip(points, points[1:]):
            if m <= memory <= next_m:
                return kl * (next_kl / kl)**((memory - m) / (next_m - m))
        return None
    rows = [[f"`{formats}`", f"{100 * m:.0f}", *(number(kl_at(m, formats=formats, policy=p, task=task), 4) for task in TASKS for p in POLICIES)]
            for formats, memories in MEMORIES.items() for m in memories]
    return markdown(["formats", "memory %", *(f"{name}, {'lookups' if task == 'lookup' else task}" for task in TASKS for name in POLICIES.values())], rows)
