#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Draws bench/ladder.svg from bench/results/coded.json: bits a value against speed of every rung of the decoder, on real codes.

ladder_plot.py          writes the figure
ladder_plot.py --check  exits 1 when the figure is not what the results make it"""
import bisect
import json
import pathlib
import sys
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIGURE = ROOT / "bench" / "ladder.svg"
SHAPE = "64x4096"
HEIGHT, WIDTH, TOP, PLOT = 510, 980, 60, 250
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22", "#000000", "#e377c2", "#003f7f",
           "#7f3f00"]
PAGES = {4: ("plain: pages of 4-bit codes", 4.25), 16: ("plain: pages of fp16", 16)}  # bits with scales and zero points


def attention_points(results):
    """(name, bits, T codes a second, what of) of attention over the codes of all layers that were timed, and over fixed-width pages."""
    points = [(m["rung"], m["bits_per_symbol"], m["tera_symbols_per_s"], f"layer {m['layer']}") for m in results
              if m["kind"] == "attention" and m["shape"] == SHAPE]
    return points + [(*PAGES[m["bits"]], m["tera_symbols_per_s"], "values of any layer") for m in results
                     if m["kind"] == "pages" and m["shape"] == SHAPE]


def decode_points(results):
    """(name, bits, T codes a second, what of) of decoding to fp16, keys and values apart."""
    return [(m["rung"], m["bits_per_symbol"], m["output_gb_per_s"] / 2000, m["component"]) for m in results if m["kind"] == "decode"]


class Panel:
    """One pair of axes: x over `bits`, each as far from the next as any other, y from 0 to the last of `rates`."""

    def __init__(self, left, title, bits, rates):
        self.left, self.title, self.bits, self.rates, self.lines = left, title, bits, rates, []

    def x(self, bits):
        i = min(max(bisect.bisect(self.bits, bits), 1), len(self.bits) - 1)
        share = (bits - self.bits[i - 1]) / (self.bits[i] - self.bits[i - 1])
        return round(self.left + (i - 1 + share) / (len(self.bits) - 1) * 380, 1)

    def y(self, rate):
        return round(TOP + PLOT - rate / self.rates[-1] * PLOT, 1)

    def text(self, x, y, words, anchor="middle", size=11, fill="#333"):
        self.lines.append(f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>')

    def axes(self):
        self.text(self.left + 190, TOP - 16, self.title, size=13)
        for bits in self.bits:
            self.lines.append(f'<path d="M{self.x(bits)} {TOP}v{PLOT}" stroke="#e5e5e5"/>')
            self.text(self.x(bits), TOP + PLOT + 16, f"{bits:g}")
        for rate in self.rates:
            self.lines.append(f'<path d="M{self.left} {self.y(rate)}h380" stroke="#e5e5e5"/>')
            self.text(self.left - 6, self.y(rate) + 4, f"{rate:g}", "end")
        self.text(self.left + 190, TOP + PLOT + 34, "bits a value, starts and headers included")

    def mark(self, bits, rate, colour, hollow, words):
        fill = "white" if hollow else colour
        self.lines.append(f'<circle cx="{self.x(bits)}" cy="{self.y(rate)}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2">'
                          f'<title>{escape(words)}</title></circle>')


def figure(r):
    points = attention_points(r["results"])
    decoded = decode_points(r["results"])
    rungs = list(dict.fromkeys([p[0] for p in points] + [p[0] for p in decoded]))
    colour = {rung: COLOURS[i % len(COLOURS)] for i, rung in enumerate(rungs)}
    left = Panel(60, "attention, T codes a second", (2.6, 2.8, 3.0, 3.2, 4, 5, 6, 8, 16), range(7))
    right = Panel(550, "decoding to fp16 alone, T codes a second", (2, 2.5, 3, 3.5, 4, 4.5, 5, 8), (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    for panel in (left, right):
        panel.axes()
    for rung, bits, rate, what in points:
        left.mark(bits, rate, colour[rung], False, f"{rung}, {what}: {bits:.2f} bits, {rate:.2f} T/s")
    for rung, bits, rate, component in decoded:
        right.mark(bits, rate, colour[rung], component == "values", f"{rung}, {component}: {bits:.2f} bits, {rate:.3f} T/s")
    legend = Panel(0, "", (), ())
    for i, rung in enumerate(rungs):
        x, y = 60 + 230 * (i % 4), TOP + PLOT + 64 + 20 * (i // 4)
        legend.lines.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colour[rung]}"/>')
        legend.text(x + 12, y, rung, "start")
    layers = {m["layer"] for m in r["results"] if m["kind"] == "attention"}
    notes = (f"{r['gpu']}, commit {r['commit'][:7]}. Left: {SHAPE.replace('x', ' sequences of ')} tokens, keys and values, codes of "
             f"{len(layers)} layers of a real prompt.", "Bits are not to one scale: grid lines are equally far from each other.",
             "Right: keys full, values hollow. \"x16\": the table is held 16 times; \"/2\": two streams a lane.")
    for i, note in enumerate(notes):
        legend.text(60, HEIGHT - 44 + 16 * i, note, "start", 11, "#666")
    body = "\n".join(left.lines + right.lines + legend.lines)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="sans-serif">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n')


def main():
    text = figure(json.loads((ROOT / "bench" / "results" / "coded.json").read_text()))
    if "--check" not in sys.argv[1:]:
        FIGURE.write_text(text)
    elif not FIGURE.exists() or FIGURE.read_text() != text:
        sys.exit("bench/ladder.svg is not what bench/results/coded.json says: run bench/ladder_plot.py")


if __name__ == "__main__":
    main()
