"""Quality against memory."""
from answers import summary

from .kit import markdown, result, table


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
