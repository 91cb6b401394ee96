# SPDX-License-Identifier: Apache-2.0
"""Exceptions: one class for each status code of the library, and one for arguments of a wrong type.

Each is a TierkvError and the built-in exception that says the same.
"""
from __future__ import annotations

from typing import Dict, Type


class TierkvError(Exception):
    """Base of all errors that the library reports; `name` is its status, such as "corrupt"."""

    name = "internal"


class InvalidArgumentError(TierkvError, ValueError):
    """A size, shape or configuration out of range."""

    name = "invalid_argument"


class ArgumentTypeError(TierkvError, TypeError):
    """An argument of a type or dtype that the call does not take."""

    name = "argument_type"


class UnsupportedError(TierkvError, ValueError):
    """A combination that the library names and refuses."""

    name = "unsupported"


class NonFiniteError(TierkvError, ValueError):
    """NaN or infinity in the input."""

    name = "non_finite"


class OutOfRangeError(TierkvError, IndexError):
    """A value that its format cannot hold, or an index beyond its table."""

    name = "out_of_range"


class OutOfPagesError(TierkvError, MemoryError):
    """The page pool cannot serve the demand; nothing was allocated."""

    name = "out_of_pages"


class CorruptError(TierkvError, ValueError):
    """Compressed bytes or a file that contradicts itself."""

    name = "corrupt"


class BufferTooSmallError(TierkvError, ValueError):
    """An output smaller than what it is to hold."""

    name = "buffer_too_small"


class StaleSequenceError(TierkvError, LookupError):
    """A sequence that was released, or never there."""

    name = "stale_sequence"


class NotFoundError(TierkvError, LookupError):
    """A named thing that is not there."""

    name = "not_found"


class InputOutputError(TierkvError, OSError):
    """The operating system refused a read or a write."""

    name = "io"


class CudaError(TierkvError, RuntimeError):
    """A call of the CUDA runtime failed."""

    name = "cuda"


class VersionError(TierkvError, ValueError):
    """A format version that this build does not know."""

    name = "version"


class OutOfMemoryError(TierkvError, MemoryError):
    """No host or device memory left, the pool of a store included."""

    name = "out_of_memory"


# By status, in the order of tierkv_c.h.
_CLASSES: Dict[int, Type[TierkvError]] = dict(enumerate((
    InvalidArgumentError, UnsupportedError, NonFiniteError, OutOfRangeError, OutOfPagesError, CorruptError, BufferTooSmallError, StaleSequenceError,
    NotFoundError, InputOutputError, CudaError, VersionError, OutOfMemoryError), 1))


def error_of(status: int, message: str) -> TierkvError:
    """The exception for a status code other than 0."""
    return _CLASSES.get(status, TierkvError)(message)
