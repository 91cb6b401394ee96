"""Sizes of entropy-coded codes from the text of docs/FORMAT_CODED.md: codebook, starts, payload, exceptions, padding.

The format leaves the choice of alphabet to the writer. Here the smallest of a few alphabets is taken, by real size; the
writer under test must come within the comparison's tolerance of it.
"""
import heapq

import numpy as np

BLOCK, SLICE, LIMIT = 64, 128, 12


def package_merge(counts, limit=LIMIT):
    """Optimal code lengths of at most `limit` bits for the symbols with a count, in the counting form of the text."""
    used = sorted((n, s) for s, n in enumerate(counts) if n > 0)
    lengths = np.zeros(len(counts), int)
    if len(used) < 2:
        for s in ([s for _, s in used] + [s for s in range(len(counts)) if counts[s] == 0])[:2]:
            lengths[s] = 1
        return lengths
    leaves = [(n, 0, (s,)) for n, s in used]
    items = leaves
    for _ in range(limit - 1):
        packages = [(a[0] + b[0], 1, a[2] + b[2]) for a, b in zip(items[0::2], items[1::2])]
        items = list(heapq.merge(leaves, packages, key=lambda x: x[:2]))
    for _, _, symbols in items[:2 * len(used) - 2]:
        for s in symbols:
            lengths[s] += 1
    return lengths


def codebook_size(lengths):
    nibbles, absent = 0, 0
    for n in list(lengths) + [1]:
        if n == 0:
            absent += 1
            continue
        nibbles += 2 * -(-absent // 16) + 1
        absent = 0
    return 12 + (nibbles - 1 + 1) // 2


def blocks_of(name, codes):
    """-> [(codes [n, 4], which are real [n, 4], block)] of every block. A row of four is two pairs that follow each other in
    a lane (r = 0, 1 or 2, 3): two neighbours along the contracted axis, and the same eight rows further."""
    def fours(x):
        x = x.reshape(len(x) // 16, 2, 8, -1, 2)
        return x.transpose(0, 2, 3, 1, 4).reshape(-1, 4)

    for t in range(0, len(codes), BLOCK):
        for d in range(0, codes.shape[1], SLICE):
            block = codes[t:t + BLOCK, d:d + SLICE]
            rows, dims = -(-len(block) // 16) * 16, -(-block.shape[1] // 16) * 16
            padded, real = np.zeros((rows, dims), int), np.zeros((rows, dims), bool)
            padded[:len(block), :block.shape[1]], real[:len(block), :block.shape[1]] = block, True
            yield fours(padded if name == "k" else padded.T), fours(real if name == "k" else real.T), block


def symbols_of(digits, radix, width):
    """Digits [n, 4] -> symbols of `width` codes [n * 4 / width]."""
    return (digits.reshape(-1, width) * radix ** np.arange(width)).sum(1)


def replacement(lengths, radix, width):
    """For every symbol over the digits 0 .. radix - 1, outside (radix) and padding (radix + 1): bits of the present symbol
    that costs least, 32 for every code it gets wrong, and how many those are. Padding is never wrong, outside always."""
    present = np.flatnonzero(lengths)
    have = (present[:, None] // radix ** np.arange(width)) % radix
    wide = radix + 2
    bits, wrong = np.zeros(wide ** width), np.zeros(wide ** width, int)
    for s in range(wide ** width):
        want = (s // wide ** np.arange(width)) % wide
        errors = ((have != want) & (want != radix + 1)).sum(1)
        best = np.argmin(32 * errors + lengths[present])
        bits[s], wrong[s] = lengths[present[best]], errors[best]
    return bits, wrong


def size_with(blocks, mode, base, levels, rarest):
    """Bytes of all blocks and of the codebook, for one alphabet; symbols rarer than one in `rarest` become exceptions."""
    unit, width = (16 if mode == "split" else 1), {"single": 1, "quad": 4}.get(mode, 2)
    radix = -(-levels // unit)
    codes, real = np.concatenate([b[0] for b in blocks]), np.concatenate([b[1] for b in blocks])
    inside = (codes >= base) & (codes < base + levels) & real
    digits = np.where(inside, (codes - base) // unit, 0)
    filled = np.where(inside, digits, np.bincount(digits[inside], minlength=radix).argmax())
    counts = np.bincount(symbols_of(filled, radix, width), minlength=radix ** width)
    lengths = package_merge(np.where(counts >= counts.sum() // rarest, counts, 0))
    bits, wrong = replacement(lengths, radix, width)
    symbols = symbols_of(np.where(inside, digits, np.where(real, radix, radix + 1)), radix + 2, width)
    cost = bits[symbols].reshape(len(codes), -1).sum(1)
    exceptions = wrong[symbols].reshape(len(codes), -1).sum(1)
    total, first = 0, 0
    for p, _, block in blocks:
        n = slice(first, first + len(p))
        first += len(p)
        plane = 2 * len(p) if mode == "split" else 0
        coded = 16 + 64 + plane + 4 * int(np.ceil(cost[n].sum() / 32)) + 4 * int(exceptions[n].sum())
        spread = int(block.max() - block.min())
        raw_bits = next((b for b in (2, 4, 8) if spread < 2 ** b), 16)
        total += min(-(-coded // 16), -(-(16 + len(p) * 4 * raw_bits // 8) // 16)) * 16
    return total, codebook_size(lengths)


def of_component(name, parts):
    """parts: the codes [n, D] of every row that shares the codebook. -> bytes of blocks, of the codebook, block offsets."""
    blocks = [b for p in parts for b in blocks_of(name, p)]
    everything = np.concatenate([p.ravel() for p in parts])
    low, high = everything.min(), everything.max()
    spread = int(high - low) + 1
    values, counts = np.unique(everything, return_counts=True)
    table = dict(zip(values, counts))

    def window(levels):
        return max(range(low - levels, high + 1), key=lambda b: sum(table.get(c, 0) for c in range(b, b + levels)))

    best = None
    for mode, widths in (("pair", [w for w in (16, 20, 24, 28, 32) if w < spread] + [spread] * (spread <= 32)),
                         ("quad", [spread] * (spread <= 4)),
                         ("split", [spread] * (17 <= spread <= 256)), ("single", [w for w in (28,) if w < spread] + [min(spread, 256)])):
        for levels in widths:
            base = low if levels == spread else window(levels)
            for rarest in (8 << LIMIT, 24 << LIMIT, 1 << 40):
                size = size_with(blocks, mode, base, max(levels, 2), rarest)
                handicap = 1.05 if mode == "single" and best else 1
                if best is None or handicap * sum(size) < sum(best):
                    best = size
    offsets = sum(-(-len(p) // BLOCK) for p in parts)
    return best[0], best[1], offsets
