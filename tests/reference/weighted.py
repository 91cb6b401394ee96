# SPDX-License-Identifier: Apache-2.0
"""Coded blocks and weighted steps, from docs/reference/format.md, sections 5 and 6."""
import numpy as np

LEAST_G, MOST_G = -8, 4
f32 = np.float32


def fma(a, b, c):
    """a * b + c of float32, rounded once: the sum of doubles is rounded to odd, then to float32."""
    product, c = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.ascontiguousarray(total).view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    bits = np.where((error != 0) & (bits & 1 == 0), bits + towards, bits)
    return bits.view(np.float64).astype(f32)


def factor(exponents):
    fractions = (2.0 ** (np.arange(8) / 8)).astype(f32)
    e = np.asarray(exponents, np.int64)
    return np.ldexp(fractions[e % 8], e // 8).astype(f32)


# ---- RoPE ----

def turns(inv_freq, positions):
    """Cosines and sines [tokens, pairs] of the turns by positions."""
    def table(at):
        angles = at[:, None].astype(np.float64) * np.asarray(inv_freq, f32).astype(np.float64)
        return np.cos(angles).astype(f32), np.sin(angles).astype(f32)
    (cos_a, sin_a), (cos_b, sin_b) = table(positions // 64 * 64), table(positions % 64)
    return fma(cos_a, cos_b, -(sin_a * sin_b)), fma(sin_a, cos_b, cos_a * sin_b)


def turn(x, rope, positions, back):
    """Keys [tokens, D] rotated by their positions, or back. rope: (pairing, inv_freq) or None."""
    x = np.array(x, f32)
    if rope is None or rope[0] == 0:
        return x
    pairing, inv_freq = rope
    pairs = len(inv_freq)
    first, second = (np.arange(pairs), np.arange(pairs) + pairs) if pairing == 1 else (2 * np.arange(pairs), 2 * np.arange(pairs) + 1)
    cos, sin = turns(inv_freq, positions)
    a, b = x[:, first], x[:, second]
    sign = f32(1 if back else -1)
    x[:, first], x[:, second] = fma(a, cos, sign * (b * sin)), fma(b, cos, -sign * (a * sin))
    return x


# ---- the law ----

def importance_exponents(u):
    with np.errstate(divide="ignore"):
        g = np.clip(np.asarray(u, np.float64) ** -0.15, 0.5, 1.4)
    return np.clip(np.rint(8 * np.log2(g)), LEAST_G, MOST_G).astype(np.int64)


def norm_exponents(x):
    """R of every token [tokens, D]; None where the token is all zeros is left to the caller."""
    squares = np.zeros((len(x), -(-x.shape[1] // 32) * 32), f32)
    squares[:, :x.shape[1]] = x * x
    lane = np.zeros((len(x), 32), f32)
    for d in range(0, squares.shape[1], 32):
        lane = lane + squares[:, d:d + 32]
    for offset in (16, 8, 4, 2, 1):
        lane = lane[:, :offset] + lane[:, offset:2 * offset]
    mean = lane[:, 0] / f32(x.shape[1])
    with np.errstate(divide="ignore"):
        r = np.rint(4 * np.log2(mean.astype(np.float64)))
    return np.where(mean < 2.0 ** -126, -128, np.where(np.isfinite(r), r, 0)).astype(np.int64), lane[:, 0] == 0


def value_exponents(x, g):
    r, zero = norm_exponents(x)
    return np.where(zero, -128, np.clip(r + g, -128, 127))


def quantize(x, exponents, step, mean, weight):
    scale = np.broadcast_to(f32(step) / weight, (x.shape[1],)).astype(f32)
    return np.rint((x - mean) / (scale * factor(exponents)[:, None])).astype(np.int64)


def dequantize(codes, exponents, step, mean, weight):
    """[tokens, D] before RoPE. mean, weight: float32 [D]."""
    scale = np.broadcast_to(f32(step) / weight, (codes.shape[1],)).astype(f32)
    return fma(codes.astype(f32) * factor(exponents)[:, None], scale, np.broadcast_to(mean, codes.shape))


def fit_keys(x, k):
    """(means, step) of the first body tokens before RoPE, without a profile."""
    mean = x.astype(np.float64).mean(0).astype(f32).astype(np.float16).astype(f32)
    rms = np.sqrt(((x - mean).astype(np.float64) ** 2).mean())
    return mean, f32(k * rms) if rms > 0 else f32(1)


# ---- blocks ----

def fields(data, count, bits):
    if bits == 0:
        return np.zeros(count, np.int64)
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count * bits]
    return (flat.reshape(count, bits).astype(np.int64) << np.arange(bits)).sum(1)


def align(b, start):
    b.take(-(b.at - start) % 16)


def dim_block_order(component, blocks):
    """The dim blocks of a tile in the order of a stream: of keys 0, h, 1, h + 1, ..."""
    i = np.arange(blocks)
    return i if component == 1 else i // 2 + i % 2 * ((blocks + 1) // 2)


def read_symbols(payload, lengths, books, book_of, streams, steps, blocks):
    """Codes [steps, streams, codes of a symbol] of all streams; book_of: of the dim blocks in their order."""
    bits = np.unpackbits(np.frombuffer(payload, np.uint8), bitorder="little")
    longest = max(book.longest for book in books)
    bits = np.concatenate([bits, np.zeros(1 << 13, np.uint8)]).astype(np.int64)
    window = sum(bits[i:len(bits) - 16 + i] << i for i in range(longest))
    at = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ends = np.cumsum(lengths)
    per_symbol, symbols_a_block = books[0].per_symbol, 8 // books[0].per_symbol
    which = np.arange(32 * streams) // 32
    found = []
    for step in range(steps):
        if books[0].mode == 4 and streams == 2:
            dim_block = np.full(32 * streams, step // (symbols_a_block // 2) % blocks)
        else:
            dim_block = (step * streams + which) // symbols_a_block % blocks
        codes, length = np.zeros((32 * streams, per_symbol), np.int64), np.zeros(32 * streams, np.int64)
        for i, book in enumerate(books):
            mine = book_of[dim_block] == i
            word = window[at[mine]] & ((1 << book.longest) - 1)
            codes[mine], length[mine] = book.codes[book.symbol_of[word]], book.length_of[word]
        found.append(codes)
        at = at + length
    if not (at == ends).all():
        raise ValueError("streams do not meet their lengths")
    return np.array(found)


def decode_block(b, books, raw_tiles):
    """(codes [tokens, dims], exponents [tokens]) of the coded block that starts at b."""
    start = b.at
    version, kind, _, least, tokens, dims, base, least_length, exceptions, widths, units, _ = b("BBBbBBHHBBHH")
    mode, streams, component = kind & 15, kind >> 4 & 3, kind >> 6
    x_bits, w_bits = widths & 15, widths >> 4
    if version != 2:
        raise ValueError("block version")
    exponents = least + fields(b.take((tokens * x_bits + 31) // 32 * 4), tokens, x_bits)
    tiles, blocks = (tokens + 15) // 16, (dims + 15) // 16
    codes = np.zeros((16 * tiles, 16 * blocks), np.int64)
    if mode < 4:
        align(b, start)
        bits = 2 << mode
        width = 16 * (blocks + blocks % 2 if bits == 2 else blocks)
        values = raw_tiles(b.take(tiles * width * bits * 2), bits, tiles, width, component)[:, :16 * blocks]
        base = base - 65536 if base > 32767 else base
        codes = (values + base).astype(np.uint16).view(np.int16).reshape(codes.shape).astype(np.int64)
    else:
        if any((mode, component, streams) != (book.mode, book.component, book.streams) for book in books):
            raise ValueError("another family")
        lengths = least_length + fields(b.take(4 * streams * w_bits), 32 * streams, w_bits)
        low = 0
        if mode == 7:
            align(b, start)
            low = raw_tiles(b.take(tiles * 128 * blocks), 4, tiles, 16 * blocks, component)
        payload = b.take((int(lengths.sum()) + 31) // 32 * 4)
        order = dim_block_order(component, blocks)
        book_of = base >> 2 * order & 3
        steps = 8 * tiles * blocks // books[0].per_symbol // streams
        found = read_symbols(payload, lengths, books, book_of, streams, steps, blocks)
        found = found.reshape(steps, streams, 32, -1).transpose(2, 0, 1, 3)  # lane, step, stream, code
        if mode == 4 and streams == 2:
            found = found.reshape(32, -1, 2, 2).transpose(0, 1, 3, 2)
        found = found.reshape(32, tiles, blocks, 4, 2)
        lane, tile, f, r, which = np.meshgrid(*map(np.arange, found.shape), indexing="ij")
        row, col = lane // 4 + 8 * (r % 2), 2 * (lane % 4) + 8 * (r // 2) + which
        token, dim = (row, col) if component == 0 else (col, row)
        codes[16 * tile + token, 16 * order[f] + dim] = found
        codes = (codes + low + 32768) % 65536 - 32768
    for _ in range(exceptions):
        index, delta = b("Hh")
        codes[index // 128, index % 128] += delta
    b.at = start + 16 * units
    return codes[:tokens, :dims], exponents
