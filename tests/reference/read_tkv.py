# SPDX-License-Identifier: Apache-2.0
"""An independent reader of `.tkv` containers, written from docs/reference/format.md.

read(path) -> Cache; Slow and small on purpose; raises ValueError on anything the formats do
not allow for."""
import ctypes
import ctypes.util
import struct
from types import SimpleNamespace

import numpy as np

import weighted

(MODEL, SEQUENCE, BASIS, CODEBOOK, ROW, SEGMENT, POSITIONS, QUERIES, SIGNIFICANCE, PAGE, PAGE_FORMAT,
 STORE, STORE_ROW, STORE_PAGE, STORE_FIXED, WEIGHTED_ROW) = range(1, 17)
SINKS, HIGH, LOW, KEY_GAP, WINDOW = range(5)
_xxhash = ctypes.CDLL(ctypes.util.find_library("xxhash"))
_xxhash.XXH3_64bits.restype = ctypes.c_uint64


def xxh3(data):
    return _xxhash.XXH3_64bits(bytes(data), ctypes.c_size_t(len(data)))


def need(condition, what):
    if not condition:
        raise ValueError(what)


class Bytes:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        need(self.at + n <= len(self.data), "cut short")
        self.at += n
        return self.data[self.at - n:self.at]

    def __call__(self, layout):
        values = struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))
        return values if len(values) > 1 else values[0]

    def array(self, dtype, n):
        dtype = np.dtype(dtype).newbyteorder("<")
        return np.frombuffer(self.take(dtype.itemsize * n), dtype)

    def text(self):
        return self.take(self("I")).decode(errors="replace")

    def end(self):
        need(self.at == len(self.data), "bytes left over")


def bfloat16(u16):
    return (u16.astype(np.uint32) << 16).view(np.float32)


def load_chunks(data):
    need(data[:8] == b"\x89TKV\r\n\x1a\0", "magic")
    major, _, count, size, index, index_sum, _, _, header_sum = struct.unpack("<HHIQQQQQQ", data[8:64])
    need(major == 2, "major version")
    need(header_sum == xxh3(data[:56]), "header checksum")
    need(size == len(data) and index + 48 * count == size, "sizes")
    need(index_sum == xxh3(data[index:]), "index checksum")
    chunks, following = {}, 64
    for i in range(count):
        fields = struct.unpack("<HHiiiBBHiQQQ", data[index + 48 * i:index + 48 * i + 48])
        kind, flags, seq, layer, head, component, part, _, page, start, n, checksum = fields
        padded = (n + 15) // 16 * 16
        need(start == following and xxh3(data[start:start + padded]) == checksum, f"chunk {i}")
        following += padded
        need(kind <= 16 or flags & 1, f"unknown chunk {kind}")
        chunks[kind, seq, layer, head, component, part, page] = data[start:start + n]
    need(following == index, "index")
    return chunks


def load_codebook(data):
    b = Bytes(data)
    version, mode, component, table, levels, base, longest, streams, size = b("BBBBHhBBH")
    need(version == 1 and size == len(data), "codebook")
    per_symbol = {4: 1, 5: 2, 6: 4, 7: 2}[mode]
    radix = (levels + 15) // 16 if mode == 7 else levels
    lengths, nibbles = [], iter([x >> s & 15 for x in data[12:] for s in (0, 4)])
    while len(lengths) < radix ** per_symbol:
        n = next(nibbles)
        lengths += [n] if n else [0] * (next(nibbles) + 1)
    symbol_of, length_of = np.zeros(1 << longest, np.int64), np.zeros(1 << longest, np.int64)
    word = previous = 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        word <<= length - previous
        reversed_word = int(f"{word:0{length}b}"[::-1], 2)
        symbol_of[reversed_word::1 << length], length_of[reversed_word::1 << length] = symbol, length
        word, previous = word + 1, length
    need(word == 1 << previous and previous == longest, "code is not complete")
    digits = np.stack([np.arange(radix ** per_symbol) // radix ** i % radix for i in range(per_symbol)], 1)
    codes = base + digits * (16 if mode == 7 else 1)
    return SimpleNamespace(mode=mode, component=component, per_symbol=per_symbol, streams=streams, longest=longest,
                           symbol_of=symbol_of, length_of=length_of, codes=codes)


def raw_tiles(data, bits, tiles, width, component):
    """Values [16 * tiles, width] of fixed-width tiles (docs/reference/format.md, section 2)."""
    token, dim = np.meshgrid(np.arange(16), np.arange(width), indexing="ij")
    f, inside = dim // 16, dim % 16
    row, col = (token, inside) if component == 0 else (inside, token)
    lane, odd = 4 * (row % 8) + col % 8 // 2, col % 2
    if bits == 16:
        word, bit = 4 * f + row // 8 + 2 * (col // 8), 16 * odd
    elif bits == 8:
        word, bit = 2 * f + token // 8, 16 * odd + 8 * (inside // 8)
    elif bits == 4:
        word, bit = f, 16 * odd + 8 * (token // 8) + 4 * (inside // 8)
    else:
        word, bit = f // 2, 16 * odd + 8 * (token // 8) + 4 * (f % 2) + 2 * (inside // 8)
    words = width * bits // 64
    quads, pairs = words & ~3, words & ~1
    byte = np.where(word < quads, word // 4 * 512 + lane * 16 + word % 4 * 4,
                    np.where(word < pairs, quads * 128 + lane * 8 + (word - quads) * 4, pairs * 128 + lane * 4))
    stored = np.frombuffer(data, "<u4").reshape(tiles, -1)
    return (stored[:, byte // 4] >> bit & ((1 << bits) - 1)).reshape(16 * tiles, width).astype(np.int64)


def hadamard_undo(y):
    d, state, signs = y.shape[1], 0x7469657264, []
    for _ in range(d):
        state = (state + 0x9e3779b97f4a7c15) % 2**64
        z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9 % 2**64
        z = (z ^ z >> 27) * 0x94d049bb133111eb % 2**64
        signs.append(-1 if (z ^ z >> 31) >> 63 else 1)
    done = 0
    for n in [1 << i for i in range(12, -1, -1) if d >> i & 1]:
        part, h = y[:, done:done + n], 1
        while h < n:
            x = part.reshape(len(y), -1, 2, h)
            part = np.stack([x[:, :, 0] + x[:, :, 1], x[:, :, 0] - x[:, :, 1]], 2).reshape(len(y), n)
            h *= 2
        y[:, done:done + n] = part * (np.float32(1) / np.sqrt(np.float32(n)))
        done += n
    return y * np.array(signs, np.float32)


def undo_basis(data, y):
    b = Bytes(data)
    kind, d, _, _ = b("iifI")
    if kind == 2:
        y = hadamard_undo(y)
        if b.at == len(data):
            return y
    return y + b.array("f2", d).astype(np.float32)


def units(unit, group, n, d):
    """The unit of every value [n, d]."""
    token, channel = np.meshgrid(np.arange(n), np.arange(d), indexing="ij")
    if unit == 0:
        return (token * d + channel) // (group or d)
    return token // group if unit == 2 else token // group * d + channel


def decode_segment(chunks, key):
    b = Bytes(chunks[key])
    bits, rule, unit, group, _, basis, coder, raw_dtype, d = b("iiiidiiii")
    n, data_bytes, parameters, blocks, flags, raw_values, first = b("QQQQQQQ")
    _, seq, layer, head, component, part, _ = key
    data = b.take(data_bytes)
    scale, zero = b.array("f2", 2 * parameters).astype(np.float32).reshape(-1, 2).T
    starts = b.array("u4", blocks)
    flagged = np.unpackbits(b.array("u1", (flags + 7) // 8), bitorder="little")[:flags].astype(bool)
    raw = b.array("f2", raw_values).astype(np.float32)
    b.end()
    if bits == 16:
        y = bfloat16(np.frombuffer(data, "<u2")) if raw_dtype else np.frombuffer(data, "<f2").astype(np.float32)
        return y.reshape(n, d)
    if rule == 3:
        return weighted_tokens(chunks, key, data, starts, n, d, first)
    if coder:
        book, source, rows = load_codebook(chunks[CODEBOOK, seq, layer, -1, component, part, 0]), Bytes(data), []
        for start in starts:
            need(source.at == start, "block start")
            slices = [weighted.decode_block(source, [book], raw_tiles) for _ in range(0, d, 128)]
            need(not any(exponents.any() for _, exponents in slices), "exponents")
            rows.append(np.concatenate([codes for codes, _ in slices], 1))
        source.end()
        codes = np.concatenate(rows)
    else:
        codes = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:n * d * bits]
        codes = (codes.reshape(-1, bits).astype(np.int64) << np.arange(bits)).sum(1).reshape(n, d)
    stored = basis_of(chunks, seq, layer, head, component)
    if rule == 2:
        y = np.float32(struct.unpack("<f", stored[8:12])[0]) * codes.astype(np.float32)
    else:
        of = units(unit, group, n, d)
        y = scale[of] * codes.astype(np.float32) + zero[of]
        if flagged.any():
            order = np.argsort(of.ravel(), kind="stable")
            where = order[flagged[of.ravel()[order]]]
            y.ravel()[where] = raw
    return undo_basis(stored, y) if basis else y


def weighted_tokens(chunks, key, data, starts, n, d, first):
    """Values [n, d] of weighted steps."""
    _, seq, layer, head, component, part, _ = key
    books, source, rows, exponents = [], Bytes(data), [], []
    while (CODEBOOK, seq, layer, -1, component, part, len(books)) in chunks:
        books.append(load_codebook(chunks[CODEBOOK, seq, layer, -1, component, part, len(books)]))
    for start in starts:
        need(source.at == start, "block start")
        slices = [weighted.decode_block(source, books, raw_tiles) for _ in range(0, d, 128)]
        rows.append(np.concatenate([codes for codes, _ in slices], 1))
        need(first + sum(map(len, rows)) in (first + n, (first + sum(map(len, rows))) // 64 * 64), "block end")
        exponents.append(slices[0][1])
    source.end()
    codes, exponents = np.concatenate(rows), np.concatenate(exponents)
    need(len(codes) == n, "tokens")
    own = (WEIGHTED_ROW, seq, layer, head, 0, 0, 0)
    b = Bytes(chunks.get(own, chunks.get((WEIGHTED_ROW, -1, *own[2:]))))
    _, key_step, value_step, has = b("iffI")
    mean = b.array("f2", d).astype(np.float32) if has & 1 else np.zeros(d, np.float32)
    weight = b.array("f4", d) if has & 2 else np.ones(d, np.float32)
    b.end()
    if component == 1:
        return weighted.dequantize(codes, exponents, value_step, np.float32(0), np.float32(1))
    x = weighted.dequantize(codes, exponents, key_step, mean, weight)
    rope = model_of(chunks).rope
    positions = np.arange(first, first + n)
    return weighted.turn(x, rope[layer if len(rope) > 1 else 0] if rope else None, positions, back=False)


def basis_of(chunks, seq, layer, head, component):
    own = (BASIS, seq, layer, head, component, 0, 0)
    return chunks.get(own, chunks.get((BASIS, -1, *own[2:])))


def page_format_of(chunks, seq, layer, head, part):
    """The key of a row's own format, or of its layer's."""
    own = (PAGE_FORMAT, seq, layer, head, 0, part, 0)
    return own if own in chunks else (PAGE_FORMAT, seq, layer, -1, 0, part, 0)


def decode_pages(chunks, seq, layer, head, part, members):
    """Keys and values [n, d] of the tokens `members`, page by page."""
    b = Bytes(chunks[page_format_of(chunks, seq, layer, head, part)])
    d, per_page, raw_dtype, segments, *sides = b("iiii8i")
    b.end()
    out = [[], []]
    for page in range(-(-len(members) // per_page)):
        tokens = members[page * per_page:][:per_page]
        tiles = -(-len(tokens) // 16)
        b = Bytes(chunks[PAGE, seq, layer, head, 0, part, page])
        for component, (bits, groups, basis, rule) in enumerate((sides[:4], sides[4:])):
            need(rule == 0 or rule == 4 and bits == 2, "step rule")
            codes = raw_tiles(b.take(tiles * 2 * d * bits), bits, tiles, d, component)
            if bits == 16:
                raw = codes.astype(np.uint16)
                y = bfloat16(raw) if raw_dtype else raw.view(np.float16).astype(np.float32)
            else:  # [tile, group, token % 8, token / 8, (scale, zero point)]
                pairs = b.array("f2", tiles * groups * 32).astype(np.float32).reshape(tiles, groups, 8, 2, 2)
                pairs = pairs.transpose(0, 3, 2, 1, 4).reshape(16 * tiles, groups, 2).repeat(d // groups, 1)
                y = pairs[..., 0] * codes.astype(np.float32) + pairs[..., 1]
            y = y[:len(tokens)]
            out[component].append(undo_basis(basis_of(chunks, seq, layer, head, component), y) if basis else y)
        if segments == 6:
            need(np.isfinite(b.array("f4", 16 * tiles)[:len(tokens)]).all(), "scores")
            need((b.array("i4", 16 * tiles)[:len(tokens)] == tokens).all(), "positions")
        b.end()
    return [np.concatenate(x) for x in out]


def decode_row(chunks, seq, layer, head, tokens, d):
    b = Bytes(chunks[ROW, seq, layer, head, 0, 0, 0])
    stated, begin, gap, end, tiered = b("QQQQQ")
    need(stated == tokens, "row map")
    t, tier = np.arange(tokens), np.ones(tokens, int)
    if tiered:
        packed = b.array("u1", (tokens + 3) // 4)
        tier = (packed[:, None] >> np.array([0, 2, 4, 6]) & 3).ravel()[:tokens]
    body = (t >= begin) & (t < end)
    out = []
    for component in (0, 1):
        high_end = gap if component == 0 else end
        parts = {SINKS: t < begin, HIGH: body & (t < high_end) & (tier == 1), LOW: body & (tier == 2),
                 KEY_GAP: body & (t >= high_end), WINDOW: t >= end}
        x = np.zeros((tokens, d), np.float32)
        for part, members in parts.items():
            if not members.any() or (part == KEY_GAP and tiered):
                continue
            if page_format_of(chunks, seq, layer, head, part) in chunks:
                x[members] = decode_pages(chunks, seq, layer, head, part, np.flatnonzero(members))[component]
            else:
                x[members] = decode_segment(chunks, (SEGMENT, seq, layer, head, component, part, 0))
        out.append(x)
    return out[0], out[1], body & (tier == 3)


def model_of(chunks):
    """The model record; rope: [(pairing, inv_freq)] of one or all layers, empty where unknown."""
    b = Bytes(chunks[MODEL, -1, -1, -1, 0, 0, 0])
    m = SimpleNamespace()
    m.layers, m.q_heads, m.kv_heads, m.head_dim, m.dtype, m.rope_applied = b("iiiiii")
    m.rope_theta, m.sm_scale, m.count = b("ddi")
    m.preset, m.model_id, m.created_by = b.text(), b.text(), b.text()
    ropes, pairing, dims = b("Iii")
    m.rope = [(pairing, b.array("f4", dims // 2)) for _ in range(ropes)]
    b.end()
    return m


def read(path):
    with open(path, "rb") as f:
        chunks = load_chunks(f.read())
    cache = model_of(chunks)
    cache.sequences, cache.rows, cache.chunks = [], {}, chunks
    for seq in range(cache.count):
        b = Bytes(chunks[SEQUENCE, seq, -1, -1, 0, 0, 0])
        name, kind, n = b.text(), b.text(), b("Q")
        cache.sequences.append(SimpleNamespace(id=name, kind=kind, tokens=b.array("i4", n)))
        for layer in range(cache.layers):
            for head in range(cache.kv_heads):
                cache.rows[seq, layer, head] = decode_row(chunks, seq, layer, head, n, cache.head_dim)
    return cache


def values(data):
    """The chunk `queries` or `significance`."""
    b = Bytes(data)
    dtype, _, n = b("iIQ")
    return [lambda: b.array("f2", n).astype(np.float32), lambda: bfloat16(b.array("u2", n)), lambda: b.array("f4", n)][dtype]()
