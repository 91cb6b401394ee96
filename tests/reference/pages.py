# SPDX-License-Identifier: Apache-2.0
"""How many pages a row takes, from docs/reference/format.md."""
from presets import RAW

PAGED_BITS, PAGED_DIMS = (16, 8, 4, 2), (64, 96, 128, 256)


def token_bytes(tier, head_dim, records=True):
    """Six segments: codes and metadata of keys and values, score, position; four without records."""
    return 8 * records + sum(head_dim * f.bits // 8 + (0 if f is RAW else 4 * (head_dim // (f.group or head_dim))) for f in tier)


def page_size(tiers, head_dim, records=True, min_tokens=64, max_waste=0.06, max_bytes=65536):
    sizes = [token_bytes(t, head_dim, records) for t in tiers]
    candidates = []
    for size in sizes:
        for tokens in range(16, max_bytes // size + 1, 16):
            page = -(-tokens * size // 128) * 128
            fits = [page // s // 16 * 16 for s in sizes]
            if page <= max_bytes and min(fits) >= 16 and max(fits) >= min_tokens:
                candidates.append((page, max(1 - n * s / page for n, s in zip(fits, sizes))))
    good = [page for page, waste in candidates if waste <= max_waste]
    return min(good) if good else min(candidates, key=lambda c: (c[1], c[0]))[0]


def slab_bytes(raw_tokens, head_dim):
    """Raw tokens of rows with classes of heads: tiles of 16 outside the pages."""
    return sum(-(-n // 16) * 16 * 4 * head_dim for n in raw_tokens)


def paged_bytes(counts, head_dim, records=True):
    """counts: {tier format: [tokens of each row]}; None where the format has no pages."""
    tiers = list(counts)
    formats = [f for t in tiers for f in t]
    if head_dim not in PAGED_DIMS or any(f.bits not in PAGED_BITS or (f.group and f.group % 16) for f in formats):
        return None
    page = page_size(tiers, head_dim, records)
    total = 0
    for t, rows in counts.items():
        per_page = page // token_bytes(t, head_dim, records) // 16 * 16
        total += sum(-(-n // per_page) for n in rows) * page
    return total
