# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, drawn by Matplotlib as SVG that inherits the page's text colour."""
from __future__ import annotations

import io
import re
from html import escape
from typing import Any, Dict, List, Optional, Sequence, Tuple

import matplotlib  # type: ignore
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore
from matplotlib.figure import Figure  # type: ignore
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator  # type: ignore

from ._report_input import COMPONENTS, Json, KlTable, Scheme, Subject

# Okabe and Ito's colours, without those that vanish on white or on black.
BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f7f7f"
COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY)
LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
FAMILIES: Tuple[Tuple[str, str, str, str], ...] = (
    (r"small|step", "weighted and global steps", "*", BLUE), (r"diffkv|fast|tiers", "tiers", "^", RED), (r"kivi", "KIVI", "s", GREEN),
    (r"kvcomp", "KVComp", "D", PINK), (r"k\d", "token by token", "o", ORANGE), (r"snapkv|h2o", "pruning", "X", SKY),
    (r"", "fp16, zstd and others", "P", GREY))
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tierkv", "font.size": 10, "axes.edgecolor": GREY, "axes.spines.top": False,
         "axes.spines.right": False, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": "black", "ytick.labelcolor": "black",
         "axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 9, "axes.titlesize": 10,
         "axes.titlelocation": "left", "figure.titlesize": 12, "figure.titleweight": "bold"}
NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))
WIDTH = 9.0  # inches


def family(preset: str) -> int:
    return next(i for i, (pattern, *_) in enumerate(FAMILIES) if re.match(pattern, preset))


def new_figure(title: str, height: float, rows: int = 1, columns: int = 1, **more: Any) -> Tuple[Any, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def svg(figure: Any, name: str, label: str, tips: Optional[Dict[str, str]] = None) -> str:
    """Inline SVG whose ids begin with `name`; `tips` are shown when a group is pointed at."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=NOTHING)
    text = file.getvalue()
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg"):]).replace("xlink:href", "href")
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", text)  # two maps of equal cells have one id
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'url\(#', f'url(#{name}-', text).replace('href="#', f'href="#{name}-')
    for group, tip in (tips or {}).items():
        text = text.replace(f'<g id="{name}-{group}">', f'<g id="{name}-{group}"><title>{escape(tip)}</title>')
    text = re.sub(r"(\.\d{3})\d+", r"\1", re.sub(r"\n\s*", "\n", re.sub(r"<!--.*?-->", "", text)))
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def percent_axis(axis: Any, low: float, high: float) -> None:
    """Logarithmic, labelled in plain percent."""
    ticks = [t for t in (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 70, 100, 150) if low <= t <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def plain_log(axis: Any) -> None:
    """Plain numbers; between powers of ten only where there are few of those."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    low, high = axis.get_view_interval()
    axis.set_minor_locator(LogLocator(subs=(2, 3, 5) if high > 4 * low else (2, 3, 4, 5, 6, 7, 8, 9)))
    axis.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:g}") if high < 60 * low else NullFormatter())


def legend_below(ax: Any, columns: int) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=4.6, ncol=columns)  # below the axis and its label


def place_names(ax: Any, points: Sequence[Tuple[float, float, Sequence[str], bool]]) -> None:
    """Beside each point the first of its texts that hides neither a point nor a text; strong points first, none without texts."""
    figure = ax.figure
    figure.draw_without_rendering()
    renderer, frame = figure.canvas.get_renderer(), ax.get_window_extent()
    places = ax.transData.transform([p[:2] for p in points])
    taken: List[Any] = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    for i in sorted(range(len(points)), key=lambda i: not points[i][3]):
        x, y, texts, strong = points[i]
        for words, dx, dy in [(w, dx, dy) for w in texts for dx, dy in ((-7, -9), (8, 0), (8, 9), (-8, 0), (8, -11), (0, 12), (0, -13))]:
            side = "right" if dx < 0 else "left" if dx > 0 else "center"
            text = ax.annotate(words, (x, y), (dx, dy), textcoords="offset points", ha=side, va="center", fontsize=8,
                               fontweight="bold" if strong else "normal")
            box = text.get_window_extent(renderer).extents + (-3, -1, 3, 1)
            inside = box[0] > frame.x0 and box[2] < frame.x1 and box[1] > frame.y0 and box[3] < frame.y1
            if inside and all(box[2] < t[0] or t[2] < box[0] or box[3] < t[1] or t[3] < box[1] for t in taken):
                taken.append(tuple(box))
                break
            text.remove()


def scatter(ax: Any, points: Sequence[Tuple[float, float, str, str, Optional[int], bool]], ids: str) -> Tuple[Dict[str, str], List[Any]]:
    """(memory, level, name, tip, number, on the front): a mark each, and a line through the front. {id: tip}, and what place_names() takes
    once the figure is laid out."""
    tips, floor = {}, min((p[1] for p in points if p[1] > 1e-5), default=1e-4) / 1.5
    front = sorted((p[0], max(p[1], floor)) for p in points if p[5])
    ax.set_xscale("log"), ax.set_yscale("log")
    if len(front) > 1:
        ax.plot(*zip(*front), "--", color=GREY, linewidth=1.2, label="no other has less of both", zorder=1)
    used = set()
    for i, (x, y, name, tip, number, _) in enumerate(points):
        f = family(name)
        _, label, marker, colour = FAMILIES[f]
        ax.plot([x], [max(y, floor)], marker, color=colour, markersize=9 if marker == "*" else 6, gid=f"{ids}{i}", linestyle="none",
                label=None if f in used else label, markerfacecolor=colour if number is not None else "none")
        used.add(f)
        tips[f"{ids}{i}"] = tip
    low, high = min(p[0] for p in points) * 0.8, max(p[0] for p in points) * 1.15
    ax.set_xlim(low, high)
    ax.margins(y=0.12)
    percent_axis(ax.xaxis, low, high)
    plain_log(ax.yaxis)
    ax.set_xlabel("memory, % of fp16 (logarithmic)")
    return tips, [(x, max(y, floor), [f"{n} {name}", f"{n}"] if n is not None and on else [f"{n}"] if n is not None else [name] if on else [], on)
                  for x, y, name, _, n, on in points]


ERROR_NAMES = {"attention_weighted_error": "weighted", "attention_pooled_error": "pooled"}


def rate_distortion(subject: Subject, name: str) -> str:
    error = str(subject.error)
    shown = [s for s in subject.schemes if s.result.get(error) is not None]
    figure, axes = new_figure("Memory against attention error", 5.2)
    ax = axes[0, 0]
    points = [(s.memory, s.result[error], s.name, f"{s.number}: {s.name}: {s.memory:.1f}% of fp16, error {s.result[error]:.4f}", s.number, s.front)
              for s in shown]
    tips, names = scatter(ax, points, "scheme")
    ax.set_ylabel(f"{ERROR_NAMES[error]} attention error (logarithmic)")
    legend_below(ax, 3)
    place_names(ax, names)
    return svg(figure, name, f"Scatter plot of {len(shown)} schemes: memory in percent of fp16 against {ERROR_NAMES[error]} attention error", tips)


def rate_kl(table: KlTable, numbers: Dict[str, int], name: str) -> str:
    """One panel a task. numbers: of the schemes that the results hold."""
    figure, axes = new_figure("Memory against KL of the model's predictions", 4.6, 1, len(table.prompts))
    tips: Dict[str, str] = {}
    names = []
    for i, task in enumerate(table.prompts):
        ax, known = axes[0, i], table.schemes
        best = [not any(o.memory <= s.memory and o.kl[task] <= s.kl[task] and (o.memory, o.kl[task]) != (s.memory, s.kl[task]) for o in known)
                for s in known]
        points = [(s.memory, s.kl[task], s.name, f"{s.name}: {s.memory:.1f}% of fp16, KL {s.kl[task]:.5f} nats", numbers.get(s.name), b)
                  for s, b in zip(known, best)]
        ax.set_title(f"{task}, {table.prompts[task]} prompts of {table.tokens} tokens")
        panel_tips, panel_names = scatter(ax, points, f"kl{i}-")
        tips.update(panel_tips)
        names.append(panel_names)
        ax.set_ylabel("KL, nats a token (logarithmic)" if i == 0 else "")
    legend_below(axes[0, 0], 2)
    for ax, panel_names in zip(axes[0], names):
        place_names(ax, panel_names)
    return svg(figure, name, f"Scatter plots of {len(table.schemes)} schemes: memory in percent of fp16 against KL in nats, by task", tips)


def sensitivities(profile: Json, classes: Optional[Tuple[str, Any]], name: str) -> str:
    """Heads sorted by sensitivity, coloured by their class under a scheme."""
    kl = np.array(profile["joint_sensitivity"], dtype=float)
    order = np.argsort(-kl, axis=None, kind="stable")
    figure, axes = new_figure("Heads by sensitivity", 3.8)
    ax, place = axes[0, 0], np.arange(kl.size)
    of_head = np.array(classes[1]).ravel()[order] if classes else np.zeros(kl.size, int)
    for c in sorted(set(of_head.tolist())):
        label = f"class {c} of {classes[0]}" if classes else "head"
        ax.bar(place[of_head == c], kl.ravel()[order][of_head == c], width=0.8, color=COLOURS[int(c) % len(COLOURS)], label=label)
    ax.set_yscale("log")
    ax.set_xlabel("key/value heads of all layers, most sensitive first (rank)")
    ax.set_ylabel("sensitivity: KL, nats")
    if kl.size <= 40:
        ax.set_xticks(place, [f"{i // kl.shape[1]}.{i % kl.shape[1]}" for i in order], rotation=90, fontsize=8)
        ax.set_xlabel("key/value heads as layer.head, most sensitive first")
    ax.grid(False, axis="x")
    ax.legend(loc="upper right")
    return svg(figure, name, f"Bars of the sensitivity of {kl.size} heads, largest first")


def heat_maps(title: str, rows: Sequence[Sequence[Tuple[str, Any]]], name: str, label: str, unit: str, discrete: bool = False) -> str:
    """A row of maps for each of `rows`; a map is (title, matrix [layers][heads])."""
    shape = np.array(rows[0][0][1], dtype=float).T.shape
    figure, axes = new_figure(title, 0.9 + len(rows) * max(1.6, 0.85 + 0.2 * shape[0]), len(rows), max(map(len, rows)))
    grids = [[np.array(m, dtype=float).T for _, m in row] for row in rows]
    high = max(np.nanmax(g) if np.isfinite(g).any() else 1 for row in grids for g in row)
    for i, row in enumerate(rows):
        for k, (words, _) in enumerate(row):
            ax, grid = axes[i, k], grids[i][k]
            colours = matplotlib.colors.ListedColormap(COLOURS) if discrete else "viridis"
            image = ax.imshow(grid, cmap=colours, vmin=-0.5 if discrete else 0, vmax=len(COLOURS) - 0.5 if discrete else high or 1, aspect="auto", interpolation="none")
            ax.set_title(words)
            ax.grid(False)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
            ax.set_xlabel("layer" if i + 1 == len(rows) else "")
            ax.set_ylabel("head" if k == 0 else "")
            if grid.size <= 160 and grid.shape[1] * len(row) <= 40:
                for (h, l), x in np.ndenumerate(grid):
                    if np.isfinite(x):
                        ax.text(l, h, f"{x:.0f}", ha="center", va="center", fontsize=7,
                                color="white" if discrete or x < 0.6 * high else "#010101")
        for ax in axes[i, len(row):]:
            ax.set_axis_off()
    if discrete:
        for c in sorted({int(x) for row in grids for g in row for x in g[np.isfinite(g)].ravel()}):
            axes[-1, 0].bar([0], [0], color=COLOURS[c % len(COLOURS)], label=f"class {c}")
        legend_below(axes[-1, 0], 6)
    else:
        figure.colorbar(image, ax=axes, label=unit, aspect=max(8, 10 * len(rows)), fraction=0.05)
    return svg(figure, name, label)


def exponents(schemes: Sequence[Scheme], name: str) -> str:
    figure, axes = new_figure("Exponents of tokens", 3.2, 1, 2)
    for c, component in enumerate(COMPONENTS):
        ax = axes[0, c]
        for i, s in enumerate(schemes):
            counts = np.array(s.result["detail"]["exponents"][component], dtype=float).reshape(-1, 2)
            if counts.size:
                ax.step(counts[:, 0], 100 * counts[:, 1] / counts[:, 1].sum(), where="mid", color=COLOURS[i % 6], linestyle=LINES[i % 6],
                        label=s.name)
        ax.set_title(f"{component}s")
        ax.set_xlabel("exponent e: the token's step times 2^(e/8)")
        ax.set_ylabel("share of tokens, %" if c == 0 else "")
    legend_below(axes[0, 0], 2)
    return svg(figure, name, "Histograms of the exponents of tokens, keys and values")


def main_codes(counts: Sequence[Sequence[int]]) -> Tuple[int, Any]:
    """The first code and the shares from it on, in percent, without the rarest at either end, one in 20000 each."""
    grid = np.array(counts, dtype=float).reshape(-1, 2)
    below = np.cumsum(grid[:, 1]) / grid[:, 1].sum()
    kept = grid[(below > 5e-5) & (below - grid[:, 1] / grid[:, 1].sum() < 1 - 5e-5)]
    first = int(kept[0, 0])
    shares = np.zeros(int(kept[-1, 0]) - first + 1)
    shares[kept[:, 0].astype(int) - first] = 100 * kept[:, 1] / grid[:, 1].sum()
    return first, shares


def codes(panels: Sequence[Tuple[str, str, Json]], name: str) -> str:
    """(preset, tier or "", codes of a detail)"""
    figure, axes = new_figure("Quantisation codes", 0.7 + 1.5 * len(panels), len(panels), 2)
    for i, (preset, tier, found) in enumerate(panels):
        for c, component in enumerate(COMPONENTS):
            ax, counts = axes[i, c], found[component][tier or "high"]
            ax.set_title(f"{preset}{', ' + tier + ' tier' if tier else ''}: {component}s" + ("" if counts else " (stored raw)"), fontsize=9)
            if counts:
                first, shares = main_codes(counts)
                ax.stairs(shares, first - 0.5 + np.arange(shares.size + 1), fill=True, color=(BLUE, RED)[c], label=f"{component}s")
                ax.legend(loc="upper right", fontsize=8)
                ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            ax.set_ylabel("share, %" if c == 0 else "")
            ax.set_xlabel("code" if i + 1 == len(panels) else "")
    return svg(figure, name, f"Histograms of the codes of keys and values, {len(panels)} rows")


def error_by_place(schemes: Sequence[Scheme], name: str) -> str:
    figure, axes = new_figure("Error along the sequence", 4.0, 1, 2, sharey=True)
    for c, component in enumerate(COMPONENTS):
        ax = axes[0, c]
        for i, s in enumerate(schemes):
            error = np.array(s.result["detail"]["rel_error_by_place"][component], dtype=float)
            error[error < 1e-4] = np.nan
            ax.plot(100 * (np.arange(error.size) + 0.5) / error.size, error, color=COLOURS[i % 6], linestyle=LINES[i % 6], label=s.name)
        ax.set_yscale("log")
        plain_log(ax.yaxis)
        ax.set_title(f"{component}s")
        ax.set_xlabel("position, % of the sequence")
    axes[0, 0].set_ylabel("relative error (logarithmic)")
    legend_below(axes[0, 0], 2)
    return svg(figure, name, f"Lines of the relative error of keys and values by position, {len(schemes)} schemes")


def seen_layers(survey: Json) -> List[int]:
    """First, middle and last of the layers that were looked at."""
    seen = [i for i, counts in enumerate(survey["value_norm"]) if counts]
    return sorted({seen[0], seen[(len(seen) - 1) // 2], seen[-1]}) if seen else []


def distributions(survey: Json, name: str) -> str:
    kinds = [(k, w) for k, w in (("significance", "significance"), ("value_norm", "norm of the value"), ("key_norm", "norm of the key"))
             if any(survey[k])]
    figure, axes = new_figure("Significance, value norms and key norms of tokens", 3.2, 1, len(kinds))
    for k, (kind, words) in enumerate(kinds):
        ax = axes[0, k]
        for i, layer in enumerate(seen_layers(survey)):
            counts = np.array(survey[kind][layer], dtype=float).reshape(-1, 2)
            if counts.size:
                start = 10 ** (survey["first_decade"] + (counts[:, 0] + 0.5) / survey["bins_per_decade"])
                ax.plot(start, 100 * counts[:, 1] / counts[:, 1].sum(), color=COLOURS[i], linestyle=LINES[i], label=f"layer {layer}", linewidth=1.2)
        ax.set_xscale("log")
        plain_log(ax.xaxis)
        ax.set_xlabel(words)
        ax.set_ylabel("share of tokens, %" if k == 0 else "")
    legend_below(axes[0, 0], 3)
    return svg(figure, name, "Distributions of significance, value norms and key norms of tokens in three layers")


def trace(found: Json, name: str) -> str:
    figure, axes = new_figure("Significance along one row", 3.2)
    ax, first = axes[0, 0], np.array(found["first"], dtype=float)
    floor = max(max(found["max"]) * 1e-9, 1e-12)
    low, high = (np.maximum(np.array(found[k], dtype=float), floor) for k in ("median", "max"))
    ax.fill_between(first, low, high, color=SKY, alpha=0.3, linewidth=0)
    ax.plot(first, high, color=RED, linewidth=1, label="largest of a group of neighbours")
    ax.plot(first, low, color=BLUE, linewidth=1.2, label="median of the group")
    ax.set_yscale("log")
    ax.set_xlabel("position, tokens")
    ax.set_ylabel("significance (logarithmic)")
    legend_below(ax, 2)
    return svg(figure, name, "Lines of the median and the largest significance by position")


def critical_by_layer(survey: Json, name: str) -> str:
    figure, axes = new_figure("Critical tokens by layer", 3.2)
    ax, layers = axes[0, 0], np.arange(int(survey["num_layers"]))
    for i, (kind, label) in enumerate((("critical_of_query", "of one query's attention"), ("critical_received", "of all attention received"))):
        mean, spread = (100 * np.array(survey[kind][k], dtype=float) for k in ("layer_mean", "layer_deviation"))
        if np.isfinite(mean).any():
            ax.bar(layers + 0.4 * i - 0.2, mean, 0.38, color=COLOURS[i], label=label, yerr=spread, ecolor=GREY)
    ax.xaxis.set_major_locator(MaxNLocator(20, integer=True, min_n_ticks=1))
    ax.set_xlabel("layer")
    ax.set_ylabel("share of tokens, %")
    legend_below(ax, 2)
    ax.grid(False, axis="x")
    return svg(figure, name, "Bars of the share of critical tokens by layer, with standard deviations")
