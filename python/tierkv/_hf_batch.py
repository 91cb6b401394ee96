# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a padded batch each sequence of a store holds. Plain Python: no torch."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from .errors import InvalidArgumentError


class PaddingError(InvalidArgumentError):
    """The attention mask is one that a store cannot hold."""


class Batch:
    """Rows of equal length, each padded on the left: row i shows positions pads[i] to length - 1, which are the tokens of its sequence."""

    def __init__(self) -> None:
        self.length = 0
        self.pads: List[int] = []

    def tokens(self, length: Optional[int] = None) -> List[int]:
        """Tokens of each row, now or with `length` positions."""
        return [max(0, (self.length if length is None else length) - pad) for pad in self.pads]

    def extend(self, rows: int, tokens: int, mask: Optional[Any]) -> List[int]:
        """Appends `tokens` positions to each row and returns how many of them are tokens of its sequence. mask: [rows, length + tokens],
        nonzero where a position is visible; None: all are. PaddingError leaves the batch as it was."""
        if self.pads and len(self.pads) != rows:
            raise InvalidArgumentError(f"a batch of {rows} follows on one of {len(self.pads)}; reset() empties the cache")
        before = self.tokens() if self.pads else [0] * rows
        pads = _left_padding(mask, rows, self.length + tokens) if mask is not None else ([min(pad, self.length) for pad in self.pads] or [0] * rows)
        if self.pads and any(a != b for a, b, seen in zip(self.pads, pads, before) if seen > 0):
            raise PaddingError("attention_mask: hides or shows tokens that are in the cache already")
        self.length, self.pads = self.length + tokens, list(pads)
        return [now - then for now, then in zip(self.tokens(), before)]

    def crop(self, length: int) -> None:
        """Forgets positions from `length` on."""
        if not 0 <= length <= self.length:
            raise InvalidArgumentError(f"length: {length} is not between 0 and {self.length}")
        self.length = length

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        self.pads = [self.pads[i] for i in rows]


def _left_padding(mask: Any, rows: int, length: int) -> List[int]:
    visible = np.asarray(mask) != 0
    if visible.shape != (rows, length):
        raise PaddingError(f"attention_mask: has shape {visible.shape}, needed is {(rows, length)}")
    counts = visible.sum(axis=1)
    for row in range(rows):
        if not visible[row, length - counts[row]:].all():
            raise PaddingError(f"attention_mask: row {row} is not padded on the left alone")
    return [int(length - count) for count in counts]


def groups(counts: Sequence[int]) -> List[List[int]]:
    """Rows of equal counts above 0 together, in the order of their first row."""
    found: Dict[int, List[int]] = {}
    for row, count in enumerate(counts):
        if count > 0:
            found.setdefault(count, []).append(row)
    return list(found.values())


class Moves:
    """How the sequences of rows become those of chosen rows, for beams: the first row that chooses a sequence keeps it, others fork it."""

    def __init__(self, chosen: Sequence[int], rows: int) -> None:
        seen: Dict[int, int] = {}
        self.forked: List[bool] = []  # of each new row
        for new, old in enumerate(chosen):
            if not 0 <= old < rows:
                raise InvalidArgumentError(f"row {old} is not one of {rows}")
            self.forked.append(old in seen)
            seen.setdefault(old, new)
        self.dropped = [row for row in range(rows) if row not in seen]  # old rows that nobody chose
