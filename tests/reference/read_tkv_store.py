"""What read_tkv.py leaves out: sequences that stores keep as containers, docs/reference/format.md, section 8.

read_store(path) -> the content of each row. Raises ValueError on anything the formats do not allow for."""
import struct
from types import SimpleNamespace

import numpy as np

from read_tkv import (CODEBOOK, HIGH, LOW, MODEL, STORE, STORE_FIXED, STORE_PAGE, STORE_ROW, WINDOW, Bytes, decode_block, load_chunks,
                      load_codebook, need, raw_tiles)


def fixed_values(b, bits, component):
    """What the fixed-rate block that starts at b reads as, fp16 [64, dims] (section 5)."""
    _, mode, table, _, tokens, dims, base, payload_bits, exceptions, units, _ = b("BBBBBBhHHHH")
    need(mode == (9 if bits == 8 else 8) | 16 and (table, tokens, base, payload_bits, exceptions) == (0, 64, 0, 0, 0), "a fixed-rate block")
    need(16 * units == 16 + 8 * dims * bits + 256, "its size")
    codes = raw_tiles(b.take(8 * dims * bits), bits, 4, dims, component)
    # Of a tile's metadata tokens r and r + 8 are neighbours.
    params = b.array("f2", 128).reshape(4, 8, 2, 2).transpose(0, 2, 1, 3).reshape(64, 2).astype(np.float32)
    need(np.isfinite(params).all() and (params[:, 0] >= 0).all(), "scales")
    y = params[:, :1] * codes.astype(np.float32) + params[:, 1:]
    return np.clip(y, -65504, 65504).astype(np.float16)


def field_codes(b, book, size, bits, width):
    """The bytes of coded codes of a store page, section 8."""
    fields, rows = [], size * 8 // bits // width
    for first in range(0, rows, 64):
        fields.append(decode_block(b, book))
        need(fields[-1].shape == (min(64, rows - first), width), "shape of a block")
    fields = np.concatenate(fields).reshape(-1, 8 // bits)
    need(((fields >= 0) & (fields < 1 << bits)).all(), "a field is too large")
    return (fields << np.arange(0, 8, bits)).sum(1).astype(np.uint8).tobytes()


def packed_page(data, used, side, d, books):
    """The six segments of a store page as they lie in the page."""
    b, tiles, out = Bytes(data), -(-used // 16), b""
    for component, (bits, groups) in enumerate((side[:2], side[2:4])):
        size = tiles * 2 * d * bits
        out += field_codes(b, books[component], size, bits, min(d, 128)) if books[component] else b.take(size)
        out += b.take(tiles * groups * 64)
    scores, positions = b.array("f4", 16 * tiles), b.array("i4", 16 * tiles)
    b.end()
    need((np.isfinite(scores[:used])).all() and (positions[:used] >= 0).all(), "scores or positions")
    need((scores[used:] == -np.inf).all() and (positions[used:] == -1).all(), "unused slots")
    return out + scores.tobytes() + positions.tobytes()


def tiered_rows(chunks, model, b):
    sides = [b("5i") for _ in range(3)] if b("i") in (0, 1) else need(False, "raw dtype")
    b("5i")
    b.end()
    for layer in range(model.layers):
        for head in range(model.kv_heads):
            counts, row = struct.unpack("<3i", chunks[STORE_ROW, 0, layer, head, 0, 0, 0]), b""
            for part, count, side in zip((HIGH, LOW, WINDOW), counts, sides):
                keys = [(CODEBOOK, 0, layer, -1, component, part, 0) for component in (0, 1)]
                books = [load_codebook(chunks[key]) if key in chunks else None for key in keys]
                for page in range(-(-count // side[4])):
                    used = min(side[4], count - page * side[4])
                    row += packed_page(chunks[STORE_PAGE, 0, layer, head, 0, part, page], used, side, model.head_dim, books)
            yield row


def coded_rows(chunks, model, b):
    tokens, first, origin, _, _ = b("5i")
    b.end()
    need(origin == 0 and first % 64 == 0, "window")
    d = model.head_dim
    key = (STORE_FIXED, 0, -1, -1, 0, 0, 0)
    fixed = struct.unpack("<2i", chunks[key]) if key in chunks else None
    for layer in range(model.layers):
        for head in range(model.kv_heads):
            of_row = Bytes(chunks[STORE_ROW, 0, layer, head, 0, 0, 0])
            need((of_row.array("f4", 2) > 0).all() and np.isfinite(of_row.array("f2", 2 * d)).all(), "steps or means")
            of_row.end()
            codes, raw = [b"", b""], [b"", b""]
            for page in range(first // 64):
                data = Bytes(chunks[STORE_PAGE, 0, layer, head, 0, HIGH, page])
                *sizes, zero = data("IIQ")
                need(zero == 0, "reserved")
                for component in (0, 1):
                    block = Bytes(data.take(sizes[component]))
                    if fixed and block.data[1] & 15 >= 8:
                        y = [fixed_values(block, fixed[component], component) for _ in range(0, d, 128)]
                        codes[component] += np.concatenate(y, 1).astype("<f2").tobytes()
                        block.end()
                        continue
                    book = load_codebook(chunks[CODEBOOK, 0, layer, -1, component, HIGH, 0])
                    codes[component] += np.concatenate([decode_block(block, book) for _ in range(0, d, 128)], 1).astype("<i2").tobytes()
                    block.end()
                data.end()
            for page in range(-(-(tokens - first) // 64)):
                data = Bytes(chunks[STORE_PAGE, 0, layer, head, 0, WINDOW, page])
                n = min(64, tokens - first - 64 * page) * d
                raw = [part + data.array("u2", n).tobytes() for part in raw]
                data.end()
            yield b"".join(codes + raw)


def read_store(path):
    """A store's sequence: of each row its packed pages; of a coded one its codes and raw values, keys before values (at a fixed rate: values)."""
    with open(path, "rb") as f:
        chunks = load_chunks(f.read())
    model, b = SimpleNamespace(), Bytes(chunks[MODEL, -1, -1, -1, 0, 0, 0])
    model.layers, _, model.kv_heads, model.head_dim, _, _ = b("iiiiii")
    b = Bytes(chunks[STORE, 0, -1, -1, 0, 0, 0])
    coded = b("iiiiQ")[0]
    return list((coded_rows if coded else tiered_rows)(chunks, model, b))
