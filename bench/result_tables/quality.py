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


def tasks_mean(size, scheme, key, task):
    """The mean over the prompts of a task, weighted alike; None without one."""
    values = [x for x, p in zip(scheme[key], size["prompts"]) if p["task"] == task]
    return summary.mean(values) if values else None


def real_model_table(size):
    """Memory and text over texts, answers over lookups."""
    lookups = [p for p in size["prompts"] if p["task"] == "lookup"]
    asked = sum(p["answers"] for p in lookups)
    rows = []
    if asked:
        rows.append(["exact cache", "100", "0", "100", "0", f"{100 * sum(p['right'] for p in lookups) / asked:.1f}"])
    for s in size["schemes"]:
        memory, kl, top = (tasks_mean(size, s, key, "text") for key in ("memory", "kl", "same_top"))
        right = sum(x for x, p in zip(s["right"], size["prompts"]) if p["task"] == "lookup")
        rows.append([s["name"], number(memory and 100 * memory, 1), number(kl, 4), number(top and 100 * top, 1),
                     number(tasks_mean(size, s, "kl", "lookup"), 4), f"{100 * right / asked:.1f}" if asked else "-"])
    return markdown(["scheme", "memory %", "KL of text", "same top token %", "KL of lookups", "lookups right %"], rows)


@table
def quality_smollm2():
    """A table for each size of prompt."""
    sizes = result("quality_smollm2.json")["sizes"]
    return "\n\n".join(f"Prompts of {size['tokens']} tokens:\n\n{real_model_table(size)}" for size in sizes)
