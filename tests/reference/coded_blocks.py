# SPDX-License-Identifier: Apache-2.0
"""Order-0 entropy and the size of coded blocks, from docs/reference/format.md.

The format leaves the codebook to the writer. Here: code words of at most 12 bits, one stream per lane, four codes a symbol where
there are at most 4 levels, else pairs, over the best of a few alphabets of at most 32 levels; wide codes split off their low nibbles.
"""
import itertools
from dataclasses import dataclass

import numpy as np

LIMIT = 12
EXCEPTION_BITS = 32
FAR = 1 << 20  # bits of what cannot be
CODES_A_SYMBOL = {"quad": 4, "pair": 2, "split": 2}


def entropy_bits(codes):
    """Order-0 entropy times the number of codes."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def package_merge(counts, limit):
    """Code lengths, 0 for absent symbols, optimal for `limit` bits; the ties of the format's text."""
    present = [int(s) for s in np.flatnonzero(counts)]
    absent = (s for s in range(len(counts)) if counts[s] == 0)
    present += itertools.islice(absent, max(0, 2 - len(present)))
    order = sorted(present, key=lambda s: (counts[s], s))
    weights, m = counts[order], len(order)
    items, is_symbol = weights, [np.ones(m, bool)]
    for _ in range(limit - 1):
        even = len(items) // 2 * 2
        both = np.concatenate([weights, items[0:even:2] + items[1:even:2]])
        sort = np.argsort(both, kind="stable")
        items = both[sort]
        is_symbol.append(sort < m)
    # The first items of a list name the first symbols and the first packages, those the first items of the list before.
    lengths, take = np.zeros(len(counts), np.int64), 2 * m - 2
    for flags in reversed(is_symbol):
        symbols = int(flags[:take].sum())
        lengths[order[:symbols]] += 1
        take = 2 * (take - symbols)
    assert (0.5 ** lengths[lengths > 0]).sum() == 1
    return lengths


def cheapest_symbols(lengths, k, radix):
    """(word bits, wrong codes) for every combination of k digits, which may also be `radix`: outside, or radix + 1: padding.

    A combination takes the symbol of least word bits plus 32 for each real code it gets wrong: keep some digits, give up the rest.
    """
    present = np.where(lengths > 0, lengths, FAR).reshape((radix,) * k)
    real = np.append(np.ones(radix + 1, np.int64), 0)
    word = np.full((radix + 2,) * k, FAR)
    wrong = np.zeros_like(word)
    for given_up in itertools.chain.from_iterable(itertools.combinations(range(k), n) for n in range(k + 1)):
        bits = present.min(given_up, keepdims=True)
        bits = np.pad(bits, [(0, 0) if a in given_up else (0, 2) for a in range(k)], constant_values=FAR)
        missed = sum((real.reshape([-1 if a == b else 1 for b in range(k)]) for a in given_up), np.zeros((1,) * k, np.int64))
        better = bits + EXCEPTION_BITS * missed < word + EXCEPTION_BITS * wrong
        word, wrong = np.where(better, bits, word), np.where(better, missed, wrong)
    return word.ravel(), wrong.ravel()


def nibbles(lengths):
    """How many nibbles the transmitted code lengths take: one a present symbol, two for up to 16 absent ones in a row."""
    runs = ((absent, len(list(run))) for absent, run in itertools.groupby(lengths == 0))
    return sum(2 * -(-n // 16) if absent else n for absent, n in runs)


@dataclass
class Tiles:
    """The codes of one row and slice, [tiles, symbols of a tile, codes of a symbol], and which of them are real."""
    codes: np.ndarray
    real: np.ndarray


def tile(codes, component, k):
    """codes: int16 [tokens, dims]. Symbols as the fragment order makes them: pairs along what is contracted; quads of two
    pairs 8 apart, in tokens for keys and in channels for values."""
    tokens, dims = codes.shape
    shape = -(-tokens // 16) * 16, -(-dims // 16) * 16
    padded, real = np.zeros(shape, np.int64), np.zeros(shape, bool)
    padded[:tokens, :dims], real[:tokens, :dims] = codes, True

    def arrange(x):
        if component == 1:
            x = x.T.reshape(shape[1], -1, 16).transpose(1, 2, 0)  # [tiles, 16 tokens, dims]
            x = x.reshape(len(x), 8, 2, -1, 2, 8).transpose(0, 1, 3, 5, 4, 2)
        else:
            x = x.reshape(-1, 2, 8, shape[1] // 2, 2).transpose(0, 2, 3, 1, 4)
        return x.reshape(len(x), -1, k)

    return Tiles(arrange(padded), arrange(real))


class Codebook:
    def __init__(self, mode, base, levels, scope):
        """scope: the Tiles it is trained on."""
        self.mode, self.base, self.levels, self.k = mode, base, levels, CODES_A_SYMBOL[mode]
        self.radix = -(-levels // 16) if mode == "split" else levels
        n = self.radix + 2
        counts = sum(np.bincount(self.symbols(t).ravel(), minlength=n ** self.k) for t in scope)
        known = counts.reshape((n,) * self.k)[(slice(0, self.radix),) * self.k].ravel()
        lengths = package_merge(known, LIMIT)
        self.word, self.wrong = cheapest_symbols(lengths, self.k, self.radix)
        self.bytes = 12 + -(-nibbles(lengths) // 2)
        low_bits = 4 * self.k if mode == "split" else 0
        self.training_bits = (counts * (self.word + EXCEPTION_BITS * self.wrong + low_bits)).sum() + 8 * self.bytes

    def symbols(self, tiles):
        """Index into `word` and `wrong`: the digits in radix + 2, the first one lowest."""
        at = tiles.codes - self.base
        inside = (at >= 0) & (at < self.levels)
        digit = np.where(inside, at // 16 if self.mode == "split" else at, self.radix)
        digit = np.where(tiles.real, digit, self.radix + 1)
        return digit @ (self.radix + 2) ** np.arange(self.k)


def choose_codebook(rows, component):
    codes, counts = np.unique(np.concatenate([r.ravel() for r in rows]), return_counts=True)
    low, high = int(codes[0]), int(codes[-1])
    histogram = np.zeros(high - low + 1, np.int64)
    histogram[codes - low] = counts
    spread = max(2, len(histogram))
    if spread > 256:
        return None
    if spread <= 4:
        choices = [("quad", spread)]
    else:
        choices = [("pair", n) for n in sorted({min(n, spread) for n in (12, 16, 20, 24, 28, 32)})]
        choices += [("split", spread)] if spread > 32 else []
    books = []
    for mode, levels in choices:
        inside = np.convolve(histogram, np.ones(levels, np.int64), "valid") if levels <= len(histogram) else np.zeros(1)
        scope = [tile(r, component, CODES_A_SYMBOL[mode]) for r in rows]
        books.append(Codebook(mode, low + int(inside.argmax()), levels, scope))
    return min(books, key=lambda b: b.training_bits)


def lanes(component, shape, k):
    """The lane of each symbol of a tile [16 tokens, dims], in the order of tile()."""
    dims = shape[1]
    if component == 1:
        pair, _, inside = np.meshgrid(np.arange(8), np.arange(dims // 8), np.arange(8), indexing="ij")
        pair, _, inside = (x.reshape(8, -1, 2, 8).transpose(0, 1, 3, 2) for x in (pair, pair, inside))
        lane = 4 * inside + pair % 4
        return (lane if k == 2 else lane[..., 0]).ravel()
    row, pair = np.meshgrid(np.arange(8), np.arange(dims // 2), indexing="ij")
    return np.repeat((4 * row + pair % 4).ravel(), 4 // k)


def field_width(values):
    return int(values.max() - values.min()).bit_length()


def block_size(codes, exponents, component, book):
    """Bytes of a block of at most 64 tokens and 128 dims, coded or raw, whichever is smaller; exponents: None where all are 0."""
    tiles, dims = -(-len(codes) // 16), -(-codes.shape[1] // 16) * 16
    head = 16 + (4 * -(-len(codes) * field_width(exponents) // 32) if exponents is not None else 0)
    spread = int(codes.max()) - int(codes.min())
    bits = next(b for b in (2, 4, 8, 16) if b == 16 or spread < 2 ** b)
    width = -(-dims // 32) * 32 if bits == 2 else dims
    align = lambda n: -(-n // 16) * 16
    raw = align(head) + tiles * 16 * width * bits // 8
    if book is None:
        return raw
    symbols = book.symbols(tile(codes, component, book.k))
    lane = lanes(component, (16, dims), book.k)
    streams = np.bincount(np.tile(lane, tiles), book.word[symbols].ravel(), 32)
    wrong = int(book.wrong[symbols].sum())
    size = head + 4 * field_width(streams)
    if book.mode == "split":
        size = align(size) + tiles * 8 * dims
    size = align(size + 4 * -(-int(streams.sum()) // 32) + 4 * wrong)
    return size if size < raw and wrong <= 255 else raw


def coded_size(rows, component, exponents=None, first=0):
    """(bytes of blocks, number of blocks, bytes of the codebook) of one scope. rows: a list of code arrays [tokens, dims] whose
    first token is at position `first`; exponents: one [tokens] a row."""
    def cut(row):
        return np.split(row, range((first // 64 + 1) * 64 - first, len(row), 64))
    book = choose_codebook([row[:, c:c + 128] for row in rows for c in range(0, row.shape[1], 128)], component)
    size = blocks = 0
    for i, row in enumerate(rows):
        parts = cut(row)
        blocks += len(parts)
        for n, part in enumerate(parts):
            for s in range(0, row.shape[1], 128):
                own = cut(exponents[i])[n] if exponents is not None and s == 0 else None
                size += block_size(part[:, s:s + 128], own, component, book)
    return size, blocks, book.bytes if book else 0
