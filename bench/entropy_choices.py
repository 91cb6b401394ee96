# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/notes/2026-11-21-entropy-choices.md: how to code the quantiser's integers, by size on real caches and by expected work.

Usage: entropy_choices.py [DUMP.h5...]   (the bundled dump if none is named)

Code words of at most 12 bits, one codebook per (sequence, layer, component), billed. Sizes are bits per code with everything a
block carries but its 16-byte header and the lengths of its streams, which all designs share.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "reference"))
import numpy as np  # noqa: E402
from analyze_numpy import read_layers  # noqa: E402
from coded_blocks import entropy_bits, nibbles, package_merge, tile  # noqa: E402
from presets import parse  # noqa: E402
from quantizers import Basis, global_steps, quantize  # noqa: E402

PRESETS = ["step:k=0.2,v=0.2", "step", "step:k=0.4,v=0.3", "step:k=0.4,v=0.3,basis=none"]
BLOCK = 64 * 128  # codes
EXCEPTION_BITS, PRICE = 32, 64
# Expected work of the warp that decodes a block, in instructions; reasons in the document.
PAIR = 7.1             # a lookup of two codes with its share of the refill, counted in the prototype
SINGLE = PAIR * 0.75   # a lookup of one code: the prototypes' measured rates are 1.5 to 1
TEST, ESCAPE = 2, 30   # an escape's test at each lookup; the path of a warp where one lane has met it
LIST, EXCEPTION = 12, 14  # finding the list; 32 of its entries


def codes_of(layer, scheme, component):
    """[kv_heads][T, D] int of one component."""
    step = global_steps(scheme, layer.q, layer.kv[1], layer.sm_scale, layer.rows)[component]
    x = Basis(scheme.basis, layer.kv[component]).forward(layer.kv[component])
    return quantize(x, scheme.high[component], None, step=step)[0]


def window(codes, levels):
    """The base of the `levels` neighbouring codes that hold the most."""
    values, counts = np.unique(codes, return_counts=True)
    histogram = np.bincount(values - values[0], counts).astype(np.int64)
    if levels >= len(histogram):
        return int(values[0])
    return int(values[0]) + int(np.convolve(histogram, np.ones(levels, np.int64), "valid").argmax())


class Size:
    """Bits of a scope, and how many of its codes are listed or escaped."""

    def __init__(self, bits, listed=0, escaped=0):
        self.bits, self.listed, self.escaped = float(bits), int(listed), int(escaped)


def code_bits(symbols, n):
    """Bits of symbols below n, with their codebook."""
    counts = np.bincount(symbols, minlength=n)
    lengths = package_merge(counts, 12)
    return float((counts * lengths).sum()) + 8 * (12 + -(-nibbles(lengths) // 2))


def pairs_of(rows, component):
    """Real pairs [n, 2] as the lanes hold them; the dumps' tokens are cut to whole tiles."""
    return np.concatenate([tile(r[:len(r) // 16 * 16], component, 2).codes.reshape(-1, 2) for r in rows])


def digits_of(codes, levels):
    """Digits in the best window; outside it the most frequent one. And which codes are inside."""
    digit = codes - window(codes, levels)
    inside = (digit >= 0) & (digit < levels)
    return np.where(inside, digit, np.bincount(digit[inside]).argmax()), inside


def pair_list(pairs, levels):
    digit, inside = digits_of(pairs, levels)
    listed = (~inside).sum()
    return Size(code_bits(digit @ [1, levels], levels * levels) + EXCEPTION_BITS * listed, listed)


def pair_dropped(pairs):
    """The best of some alphabets and of some limits below which a pair is not worth a code word: what the encoder does."""
    best, least = None, np.inf
    for levels in (16, 20, 24, 28, 32):
        digit, inside = digits_of(pairs, levels)
        symbols = digit @ [1, levels]
        counts = np.bincount(symbols, minlength=levels * levels)
        for share in (8, 24, 72, 1 << 30):
            rare = (counts > 0) & (counts < counts.sum() // (share << 12))
            # A rare pair takes the cheapest pair that keeps one of its digits: one exception, about a mean word.
            kept = symbols[~rare[symbols]]
            bits = code_bits(kept, levels * levels) * len(symbols) / len(kept)
            listed = (~inside).sum() + rare[symbols].sum()
            if bits + PRICE * listed < least:
                best, least = Size(bits + EXCEPTION_BITS * listed, listed), bits + PRICE * listed
    return best


def pair_escape(pairs, levels):
    """One digit means that the code's 8 bits follow the word of the pair."""
    digit = pairs - window(pairs, levels - 1)
    inside = (digit >= 0) & (digit < levels - 1)
    escaped = (~inside).sum()
    symbols = np.where(inside, digit, levels - 1) @ [1, levels]
    return Size(code_bits(symbols, levels * levels) + 8 * escaped, escaped=escaped)


def single_list(pairs, levels):
    digit, inside = digits_of(pairs.ravel(), levels)
    listed = (~inside).sum()
    return Size(code_bits(digit, levels) + EXCEPTION_BITS * listed, listed)


DESIGNS = [
    ("entropy of single codes", lambda p: Size(entropy_bits(p))),
    ("pairs, 16 levels, list", lambda p: pair_list(p, 16)),
    ("pairs, 32 levels, list", lambda p: pair_list(p, 32)),
    ("pairs, chosen levels, rare pairs listed", pair_dropped),
    ("pairs, 15 levels and an escape", lambda p: pair_escape(p, 16)),
    ("pairs, 31 levels and an escape", lambda p: pair_escape(p, 32)),
    ("single codes, 32 levels, list", lambda p: single_list(p, 32)),
    ("single codes, 256 levels", lambda p: single_list(p, 256)),
]


def time(name, sizes, codes):
    """Expected, as a multiple of pairs without exceptions."""
    listed, escaped = (sum(getattr(s, what) for s in sizes) / codes for what in ("listed", "escaped"))
    lookups = BLOCK / 32 / (1 if "single" in name else 2)
    total = lookups * (SINGLE if "single" in name else PAIR)
    if "escape" in name:
        total += lookups * (TEST + ESCAPE * (1 - (1 - escaped) ** 64))
    if "list" in name:
        per_block = listed * BLOCK
        total += (1 - np.exp(-per_block)) * (LIST + EXCEPTION) + EXCEPTION * (per_block // 32)
    return total / (BLOCK / 64 * PAIR)


def table(dump, preset):
    scheme = parse(preset)
    found = {(component, name): [] for component in (0, 1) for name, _ in DESIGNS}
    total = [0, 0]
    for _, layers in read_layers(dump):
        for layer in layers:
            for component in (0, 1):
                pairs = pairs_of(list(codes_of(layer, scheme, component).astype(np.int64)), component)
                total[component] += pairs.size
                for name, design in DESIGNS:
                    found[component, name].append(design(pairs))
    print(f"\n{Path(dump).name}, {preset}\n")
    print("| design | K bits | apart, per block | time | V bits | apart | time |")
    print("|---|---|---|---|---|---|---|")
    for name, _ in DESIGNS:
        cells = []
        for component in (0, 1):
            sizes, codes = found[component, name], total[component]
            apart = sum(s.listed + s.escaped for s in sizes) / codes * BLOCK
            cells.append(f"{sum(s.bits for s in sizes) / codes:.3f}")
            cells += ["-", "-"] if "entropy" in name else [f"{apart:.1f}", f"{time(name, sizes, codes):.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    dumps = sys.argv[1:] or [str(Path(__file__).parent.parent / "datasets" / "sample_1k.h5")]
    for path in dumps:
        for one in PRESETS:
            table(path, one)
