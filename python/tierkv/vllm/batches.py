# SPDX-License-Identifier: Apache-2.0
"""Which way each request of a step goes, and how cached prefixes are cut. Numbers alone: no tensors.

    decodes    up to `decode_queries` new tokens: attend in the cache, in captured graphs as well
    tails      up to 8 new tokens behind cached ones: attend in the cache
    chunks     more new tokens: attend to their own raw keys and values; what is cached before them is decoded in slices, attended
               to beside it, and joined by lse
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Sequence, Tuple

from .refusals import MAX_QUERIES
from ..errors import InvalidArgumentError

Range = Tuple[int, int]  # [first, last)


@dataclass(frozen=True)
class Classes:
    decodes: List[int] = field(default_factory=list)  # requests, ascending
    tails: List[int] = field(default_factory=list)
    chunks: List[int] = field(default_factory=list)


def classify(query_lens: Sequence[int], seq_lens: Sequence[int], decode_queries: int) -> Classes:
    """Requests without queries are padding. seq_lens may be too large for decodes, as vLLM's upper bounds are."""
    classes = Classes()
    for i, (queries, tokens) in enumerate(zip(query_lens, seq_lens)):
        is_cached = tokens > queries
        if queries <= 0:
            continue
        if queries <= decode_queries and (is_cached or queries == 1):
            classes.decodes.append(i)
        elif queries <= MAX_QUERIES and is_cached:
            classes.tails.append(i)
        else:
            classes.chunks.append(i)
    return classes


def runs(requests: Sequence[int]) -> List[Range]:
    """Neighbours together: their tokens are neighbours as well."""
    found: List[Range] = []
    for i in requests:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found


@dataclass(frozen=True)
class Slice:
    """Cached tokens [first, first + tokens) of a request."""

    request: int
    first: int
    tokens: int


def rounds(contexts: Sequence[Tuple[int, int]], slice_tokens: int) -> List[List[Slice]]:
    """Cuts the prefixes of requests, given as (request, cached tokens), into rounds of at most slice_tokens tokens.

    A round holds neighbouring requests, each once, so that its queries lie side by side; the slices of a request come in order.
    """
    found: List[List[Slice]] = []
    room = 0
    for request, cached in contexts:
        first = 0
        while first < cached:
            tokens = min(cached - first, slice_tokens)
            fits = found and tokens <= room and found[-1][-1].request == request - 1
            if not fits:
                found.append([])
                room = slice_tokens
            found[-1].append(Slice(request, first, tokens))
            room -= tokens
            first += tokens
    return found


def head_range(of_model: int, of_layer: int, rank: int, ranks: int) -> Range:
    """The kv_heads of the model that a layer has on one of several ranks. ValueError where they do not divide."""
    if of_layer * ranks == of_model or of_model == of_layer:
        first = 0 if of_model == of_layer else rank * of_layer
        return first, first + of_layer
    if of_layer == 1 and of_model < ranks and ranks % of_model == 0:  # heads are repeated
        first = rank // (ranks // of_model)
        return first, first + 1
    raise InvalidArgumentError(f"a profile of {of_model} kv heads for {of_layer} on each of {ranks} ranks")
