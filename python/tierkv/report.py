# SPDX-License-Identifier: Apache-2.0
"""One page with plots of what `tierkv analyze` or `sweep` measured: HTML that needs neither network nor other files, at most 1 MB.

    tierkv sweep --json --details --profile profile.h5 dump.h5 > results.json
    python -m tierkv.report results.json -o report.html [--kl quality.json] [--force]

--kl: KL of schemes on a model, as bench/answers/quality.py writes it; schemes are joined by name. Needs Matplotlib (tierkv[report]).
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from html import escape
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from ._report_input import (COMPONENTS, SENSITIVITIES, TIERS, Json, KlTable, Path, ReportError, Scheme, Subject, read_kl, read_results,
                            subjects, writable)

EXIT_BAD_INPUT = 3
MAX_BYTES = 1_000_000
MAX_COMPARED = 6  # schemes in figures that compare a few
CRITICAL = (("critical_of_query", "of one query's attention"), ("critical_received", "of all attention received"))

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
@media (prefers-color-scheme: dark) { body { color: #e6e6e6; background: #161616; } }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; } figure { margin: 0 0 1.4rem; max-width: 66rem; }
figcaption { max-width: 50rem; font-size: .92rem; } svg { width: 100%; height: auto; display: block; }
svg text { fill: currentColor; } svg image { image-rendering: pixelated; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .68rem; margin: .5rem 0; }
th, td { padding: .2rem .24rem; text-align: right; border-bottom: 1px solid #8886; white-space: nowrap; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
th { vertical-align: bottom; white-space: normal; } th:first-child, td:first-child, td.text, th.text { text-align: left; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; } tr.front { font-weight: 600; }
summary { cursor: pointer; font-size: .85rem; }
@media print { body { max-width: none; margin: 0; font-size: 11px; } figure, tr { break-inside: avoid; } .scroll { overflow: visible; } }
"""
# A click on a head sorts the table by that column, a second one turns the order round.
SORT = """
document.querySelectorAll('table.sort').forEach(t => t.querySelectorAll('th button').forEach((b, i) => b.onclick = () => {
  const body = t.tBodies[0], down = b.dataset.down = b.dataset.down == '1' ? '0' : '1';
  const key = r => r.cells[i].dataset.v ?? r.cells[i].textContent, n = x => x === '' ? Infinity : Number(x);
  const by = (x, y) => isNaN(n(x)) || isNaN(n(y)) ? x.localeCompare(y) : n(x) - n(y);
  [...body.rows].sort((x, y) => (down == '1' ? 1 : -1) * by(key(x), key(y))).forEach(r => body.append(r));
}));
"""
LEGEND = ("Memory is the share of fp16 with everything counted: codes, scales, windows, codebooks. Pooled error: the norm of all errors of "
          "attention outputs of a layer by the norm of the outputs, mean over layers. Weighted error: the same by head, weighted with the "
          "profile's sensitivities. Attention error: mean over heads and queries. In all three the window moves with each query. Window and "
          "sinks are the newest and the first tokens that are kept apart; rows compare where these are equal. Rates are of one host thread. "
          "Bold rows are on the front: no other row has both less memory and less error.")
COLUMNS: Tuple[Tuple[str, str, float, str], ...] = (  # head, field, factor, format
    ("bits/value", "bits_per_value", 1, ".2f"), ("ratio", "ratio", 1, ".2f"), ("page ratio", "page_ratio", 1, ".2f"),
    ("pooled error", "attention_pooled_error", 1, ".4f"), ("weighted error", "attention_weighted_error", 1, ".4f"),
    ("attention error", "attention_rel_error_online", 1, ".4f"), ("key error", "key_rel_error", 1, ".4f"),
    ("value error", "value_rel_error", 1, ".4f"), ("coded bits, keys", "key_coded_bits", 1, ".2f"),
    ("coded bits, values", "value_coded_bits", 1, ".2f"), ("window", "window", 1, ".0f"), ("sinks", "sinks", 1, ".0f"),
    ("encode GB/s", "encode_gbps", 1, ".2f"), ("decode GB/s", "decode_gbps", 1, ".2f"))


def cell(value: Optional[float], form: str, exact: bool = False) -> str:
    if value is None:
        return "<td data-v=''>-"
    return f"<td data-v='{value!r}'>{value:{form}}" if exact else f"<td>{value:{form}}"


def text_cell(words: str) -> str:
    return f"<td class=text>{escape(words)}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, sort: bool = False, marked: Sequence[bool] = ()) -> str:
    def head(words: str) -> str:
        return f"<th><button>{escape(words)}</button>" if sort else f"<th>{escape(words)}"

    body = "\n".join(f"<tr{' class=front' if i < len(marked) and marked[i] else ''}>" + "".join(r) for i, r in enumerate(rows))
    return (f"<div class=scroll tabindex=0><table{' class=sort' if sort else ''}><thead><tr>{''.join(map(head, heads))}</thead>\n"
            f"<tbody>\n{body}\n</tbody></table></div>\n")


class Page:
    """The parts of a page. numbers: figures have a folded table of their numbers."""

    def __init__(self, numbers: bool) -> None:
        self.numbers, self.parts, self.figures = numbers, [], 0  # type: bool, List[str], int

    def add(self, html: str) -> None:
        self.parts.append(html + "\n")

    def figure(self, draw: Callable[[str], str], caption: str, heads: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> None:
        """draw gets the name by which the figure's ids begin."""
        self.figures += 1
        self.add(f"<figure>\n{draw(f'f{self.figures}')}<figcaption>{escape(caption)}</figcaption>")
        if heads and self.numbers:
            self.add(f"<details><summary>The numbers</summary>\n{table(heads, rows)}</details>")
        self.add("</figure>")


def scheme_row(s: Scheme) -> List[str]:
    tiers = [cell(100 * s.result["tiers"][t], ".1f", True) for t in TIERS]
    return [cell(s.number, "d"), text_cell(s.name), cell(s.memory, ".1f", True),
            *(cell(s.result.get(field), form, True) for _, field, _, form in COLUMNS), *tiers]


def compared(subject: Subject, wanted: Callable[[Json], bool]) -> List[Scheme]:
    """Schemes for figures of a few: all that are wanted where they are few, else an even choice of the front."""
    found = [s for s in subject.schemes if s.result.get("detail") and wanted(s.result)]
    if len(found) > MAX_COMPARED:
        found = [s for s in found if s.front] or found
    if len(found) > MAX_COMPARED:
        found = [found[i * (len(found) - 1) // (MAX_COMPARED - 1)] for i in range(MAX_COMPARED)]
    return found


def add_rates(page: Page, subject: Subject, title: str) -> None:
    from . import _report_figures as figures
    page.add(f"<h2>Rate and distortion: {escape(title)}</h2>")
    if subject.error is None:
        page.add("<p>No attention error is drawn: the dump has no queries.</p>")
    else:
        page.figure(lambda name: figures.rate_distortion(subject, name),
                    "Each mark is a scheme, numbered as in the table below. Left is smaller, low is closer to the exact attention outputs. "
                    "The dashed line joins the schemes that no other beats in both. Schemes without loss lie on the floor. Attention error "
                    "does not see what pruned tokens would have been needed for.")
    heads = ["#", "scheme", "memory, %", *(h for h, *_ in COLUMNS), *(f"{t}, % of tokens" for t in TIERS)]
    page.add(table(heads, map(scheme_row, subject.schemes), sort=True, marked=[s.front for s in subject.schemes]))
    page.add(f"<p>{LEGEND} A click on a head sorts.</p>")


def kl_names(table: KlTable, subject: Subject, has_profile: bool) -> Dict[str, Scheme]:
    """The results by the scheme's name in the KL file, where runs without a profile are named so."""
    out = {}
    for s in subject.schemes:
        bare = f"{s.name}, no profile"
        measured_bare = any(k.name == bare for k in table.schemes)
        out[s.name if has_profile or not measured_bare else bare] = s
    return out


def add_kl(page: Page, tables: Sequence[KlTable], subject: Subject, has_profile: bool) -> None:
    from . import _report_figures as figures
    page.add("<h2>Rate and KL</h2>")
    for t in tables:
        known = kl_names(t, subject, has_profile)
        joined = [s.name for s in t.schemes if s.name in known]
        rows = [[text_cell(s.name), cell(s.memory, ".1f", True), *(cell(s.kl[task], ".5f", True) for task in t.prompts),
                 cell(known[s.name].number if s.name in known else None, "d"),
                 cell(known[s.name].memory if s.name in known else None, ".1f"),
                 cell(known[s.name].result.get(str(subject.error)) if s.name in known else None, ".4f")] for s in t.schemes]
        numbers = {name: s.number for name, s in known.items()}
        page.figure(lambda name: figures.rate_kl(t, numbers, name),
                    f"KL of the predictions of model {t.model} over the compressed cache from those over the exact one, mean over prompts "
                    f"that all schemes saw; memory is that of the same prompts. Low means that the model answers as before. Filled marks with "
                    f"a number are schemes of the table above ({len(joined)} of {len(t.schemes)}, joined by name); hollow ones were "
                    f"measured on the model alone.")
        page.add(table(["scheme", "memory, %", *(f"KL of {task}, nats" for task in t.prompts), "#", "memory here, %",
                        f"{figures.ERROR_NAMES.get(str(subject.error), 'attention')} error here"],
                       rows, sort=True))


def add_heads(page: Page, data: Json, subject: Subject) -> None:
    from . import _report_figures as figures
    profile: Json = data.get("profile") or {}
    classed = compared(subject, lambda r: bool(r["detail"].get("classes")))
    exponents = compared(subject, lambda r: any(r["detail"]["exponents"][c] for c in COMPONENTS))
    if profile.get("joint_sensitivity"):
        grid = profile["joint_sensitivity"]
        first = (classed[0].name, classed[0].result["detail"]["classes"]) if classed else None
        if first and [len(r) for r in first[1]] != [len(r) for r in grid]:
            first = None
        page.add("<h2>Heads by sensitivity</h2>")
        kinds = [k for k in SENSITIVITIES if profile.get(k)]
        rows = [[cell(l, "d"), cell(h, "d"), *(cell(profile[k][l][h], ".6g", True) for k in kinds)] for l in range(len(grid)) for h in range(len(grid[0]))]
        page.figure(lambda name: figures.sensitivities(profile, first, name),
                    "How far the model's predictions move (KL) when keys and values of this head alone are stored coarsely. A few heads matter "
                    "far more than the rest, so schemes give them more bits." + (" Colours are the classes of the scheme named." if first else ""),
                    ["layer", "head", *(k.replace("_", " ") + ", nats" for k in kinds)], rows)
    if classed or exponents:
        page.add("<h2>Exponents and classes</h2>")
    if exponents:
        rows = [[text_cell(s.name), text_cell(c), cell(e, "d"), cell(n, "d")] for s in exponents for c in COMPONENTS
                for e, n in s.result["detail"]["exponents"][c]]
        page.figure(lambda name: figures.exponents(exponents, name),
                    "Weighted steps scale each token's step by 2^(e/8). Tokens that are attended to much have the finer steps; a value's "
                    "exponent follows its size as well. A narrow histogram costs few bits a token.",
                    ["scheme", "of", "exponent", "tokens"], rows)
    if classed:
        maps = [[(f"{s.name}: class of each head", s.result["detail"]["classes"])] for s in classed]
        rows = [[text_cell(s.name), cell(l, "d"), *(cell(c, "d") for c in row)] for s in classed for l, row in enumerate(s.result["detail"]["classes"])]
        page.figure(lambda name: figures.heat_maps("Classes of heads", maps, name, "Map of the class of each head by layer", "class", discrete=True),
                    "Class 0 holds the most sensitive heads and keeps the most bits.", *by_layer(["scheme"], maps[0][0][1], rows))


def by_layer(before: List[str], grid: Any, rows: List[List[str]]) -> Tuple[List[str], List[List[str]]]:
    return [*before, "layer", *(f"head {h}" for h in range(len(grid[0])))], rows


def tier_maps(s: Scheme) -> List[Tuple[str, Any]]:
    tiers = s.result["detail"]["tiers"]
    total = [[max(1, sum(tiers[t][l][h] for t in TIERS)) for h in range(len(row))] for l, row in enumerate(tiers["high"])]
    return [((f"{s.name}\n" if t == "high" else "") + f"{t}, % of tokens", [[100 * n / total[l][h] for h, n in enumerate(row)] for l, row in enumerate(tiers[t])])
            for t in ("high", "low", "pruned")]


def add_tiers(page: Page, subject: Subject) -> None:
    from . import _report_figures as figures
    tiered = compared(subject, lambda r: bool(r["tiers"]["low"] + r["tiers"]["pruned"]))[:4]
    if not tiered:
        return
    maps = [tier_maps(s) for s in tiered]
    rows = [[text_cell(f"{s.name}, {words.splitlines()[-1]}"), cell(l, "d"), *(cell(x, ".1f") for x in row)]
            for s, m in zip(tiered, maps) for words, grid in m for l, row in enumerate(grid)]
    page.add("<h2>Tiers per layer and head</h2>")
    page.figure(lambda name: figures.heat_maps("Tiers per layer and head", maps, name, "Maps of the share of tokens in each tier", "% of tokens"),
                "Bright cells hold many tokens of the tier. What is missing to 100% are the newest and the first tokens, which are kept apart.",
                *by_layer(["scheme and tier"], maps[0][0][1], rows))


def add_codes(page: Page, subject: Subject) -> None:
    from . import _report_figures as figures
    coded = compared(subject, lambda r: any(counts for part in r["detail"]["codes"].values() for counts in part.values()))
    panels = []
    for s in coded:
        found = s.result["detail"]["codes"]
        tiered = any(found[c]["low"] for c in COMPONENTS)
        panels += [(s.name, t if tiered else "", found) for t in ("high", "low") if any(found[c][t] for c in COMPONENTS)]
    if panels:
        rows = [[text_cell(n), text_cell(t), text_cell(c), cell(code, "d"), cell(count, "d")] for n, t, found in panels for c in COMPONENTS
                for code, count in found[c][t or "high"]]
        page.add("<h2>Codes</h2>")
        page.figure(lambda name: figures.codes(panels, name),
                    "How often each quantisation code occurs over all layers and heads, without window and sinks. The rarest codes, one in "
                    "10,000, are cut off. A narrow histogram gains much by entropy coding; a flat one gains nothing.",
                    ["scheme", "tier", "of", "code", "tokens x channels"], rows)
    lossy = compared(subject, lambda r: bool((r.get("key_rel_error") or 0) > 1e-4 or r["tiers"]["pruned"]))
    if lossy:
        errors = [(s.name, c, s.result["detail"]["rel_error_by_place"][c]) for s in lossy for c in COMPONENTS]
        page.add("<h2>Error along the sequence</h2>")
        page.figure(lambda name: figures.error_by_place(lossy, name),
                    "Norm of the difference by norm of the original, over kept tokens. A raw window shows as a drop at the right end.",
                    ["place", *(f"{n}, {c}s" for n, c, _ in errors)],
                    [[cell(i, "d"), *(cell(e[i], ".4f") for _, _, e in errors)] for i in range(min(len(e) for _, _, e in errors))])


def add_survey(page: Page, survey: Json) -> None:
    from . import _report_figures as figures
    layers = figures.seen_layers(survey)
    kinds = [k for k in ("significance", "value_norm", "key_norm") if any(survey[k])]
    page.add("<h2>Who is attended to</h2>")
    if layers:
        rows = [[text_cell(k.replace("_", " ")), cell(l, "d"), cell(10 ** (survey["first_decade"] + b / survey["bins_per_decade"]), ".3g"), cell(n, "d")]
                for k in kinds for l in layers for b, n in survey[k][l]]
        page.figure(lambda name: figures.distributions(survey, name),
                    "Significance is the attention that a token receives from each later query, the largest of the group's heads. It spans many "
                    "more decades than the values' norms; that is why keys get more bits than values. First, middle and last layer.",
                    ["of", "layer", "from", "tokens"], rows)
    found: Json = survey.get("trace") or {}
    if found:
        rows = [[cell(a, "d"), cell(b, ".3g"), cell(c, ".3g")] for a, b, c in zip(found["first"], found["median"], found["max"])]
        page.figure(lambda name: figures.trace(found, name),
                    f"Sequence {found['seq']}, layer {found['layer']}, head {found['kv_head']}. A few tokens receive most of the attention. "
                    "Few queries have seen the newest tokens yet.", ["position", "median", "largest"], rows)
    else:
        page.add("<p>The dumps hold no significance: it is not drawn.</p>")
    kept = [(k, w) for k, w in CRITICAL if any(x is not None for x in survey[k]["layer_mean"])]
    if not kept:
        page.add("<p>No critical tokens are drawn: the dumps hold neither q nor significance.</p>")
        return
    page.add("<h2>Critical tokens</h2>")

    def percent(x: Optional[float]) -> Optional[float]:
        return None if x is None else 100 * x

    rows = [[cell(l, "d"), *(cell(percent(survey[k][f][l]), ".1f") for k, _ in kept for f in ("layer_mean", "layer_deviation"))]
            for l in range(int(survey["num_layers"]))]
    page.figure(lambda name: figures.critical_by_layer(survey, name),
                "The smallest share of tokens that holds 95% of the attention. Low bars mean that few tokens matter. Mean over heads and "
                "sequences, with the standard deviation.", ["layer", *(f"{w}{d}, %" for _, w in kept for d in ("", ", deviation"))], rows)
    maps = [[(w + ", % of tokens", [[percent(x) for x in row] for row in survey[k]["mean"]]) for k, w in kept]]
    rows = [[text_cell(w), cell(l, "d"), *(cell(x, ".1f") for x in row)] for w, grid in maps[0] for l, row in enumerate(grid)]
    page.figure(lambda name: figures.heat_maps("Critical tokens by layer and head", maps, name, "Maps of the share of critical tokens", "% of tokens"),
                "The same for each head: heads differ, so one budget for all of them wastes memory.", *by_layer(["of"], maps[0][0][1], rows))


def introduction(page: Page, data: Json) -> None:
    page.add("<h1>KV cache: rate and distortion</h1>\n<ul>")
    for f in data["files"]:
        page.add(f"<li><code>{escape(f['file'])}</code>: {escape(f['model_id'] or 'unknown model')}, {f['num_sequences']} sequences, {f['num_tokens']} "
                 f"tokens, {f['num_layers']} layers, {f['num_q_heads']} query heads, {f['num_kv_heads']} key/value heads of {f['head_dim']} channels, "
                 f"{escape(f['dtype'])}")
    page.add("</ul>")
    if data.get("skipped"):
        page.add("<p>Left out:<ul>" + "".join(f"<li>{escape(s['reason'])}" for s in data["skipped"]) + "</ul>")


def body(data: Json, kl: Sequence[KlTable], numbers: bool, every_file: bool) -> str:
    page, found = Page(numbers), subjects(data)
    introduction(page, data)
    for s in found if every_file else found[:1]:
        add_rates(page, s, "all dumps together" if len(data["files"]) > 1 and s.file == "all" else s.file)
    add_kl(page, kl, found[0], bool(data.get("profile"))) if kl else None
    drawn = next((s for s in found if any(r.result.get("detail") for r in s.schemes)), None)
    if drawn is None:
        page.add("<p>Tiers, codes and heads are not drawn: the results were written without --details.</p>")
    for s in [] if drawn is None else [drawn] if drawn.file == "all" or not every_file else found:
        if len(found) > 1 and s.file != "all":
            page.add(f"<h2>{escape(s.file)}</h2>")
        add_heads(page, data, s)
        add_tiers(page, s)
        add_codes(page, s)
    for survey in data.get("surveys") or []:
        add_survey(page, survey)
    if not numbers:
        page.add(f"<p>Tables under figures{'' if every_file else ' and all dumps but the first'} are left out: the page would be above "
                 f"{MAX_BYTES} bytes. The JSON holds them.</p>")
    return "".join(page.parts)


def html(results: Path, kl: Sequence[Path] = ()) -> str:
    """The page of a file of results; ReportError for a file that it cannot be made from."""
    import matplotlib  # type: ignore

    from ._report_figures import STYLE as FIGURE_STYLE
    data, tables = read_results(results), [t for path in kl for t in read_kl(path)]
    with matplotlib.rc_context(FIGURE_STYLE):
        for numbers, every_file in ((True, True), (False, True), (False, False)):
            page = ("<!DOCTYPE html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content='width=device-width, initial-scale=1'>\n"
                    f"<title>tierkv report</title>\n<style>{STYLE}</style>\n<body>\n{body(data, tables, numbers, every_file)}<script>{SORT}</script>\n</html>\n")
            if len(page.encode()) <= MAX_BYTES:
                return page
    raise ReportError(f"{results}: results: {len(data['results'])} results make a page above {MAX_BYTES} bytes")


def write(path: Path, text: str) -> None:
    """Whole or not at all; a pipe or a device is written as it is."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        return
    target = os.path.realpath(path)
    handle, part = tempfile.mkstemp(dir=os.path.dirname(target), prefix=os.path.basename(target) + ".", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as f:
            f.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, 0o666 & ~umask)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tierkv.report", description=str(__doc__).split("\n")[0])
    parser.add_argument("results", help="JSON of tierkv analyze or sweep, with --json --details")
    parser.add_argument("-o", "--output", required=True, help="the page")
    parser.add_argument("--kl", action="append", default=[], metavar="FILE", help="KL by scheme, of bench/answers/quality.py; repeat for more")
    parser.add_argument("--force", action="store_true", help="replace an output that exists")
    args = parser.parse_args(arguments)
    try:
        out = writable(args.output, args.force, [args.results, *args.kl])
        write(out, html(args.results, args.kl))
    except ReportError as e:
        print(f"tierkv: {e}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as e:
        print(f"tierkv: {args.output}: cannot be written: {e.strerror}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except ModuleNotFoundError as e:
        print(f"tierkv: the report needs {e.name}: pip install matplotlib, or Debian's python3-matplotlib", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
