"""Arrays in and out of the C ABI: dtypes, contiguity, pointers."""
from __future__ import annotations

from typing import Any, Sequence, Union

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
# Anything with __array__ or __dlpack__ in CPU memory; ndarray, torch.Tensor, ...
ArrayLike = Any

FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2
DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}


def to_numpy(x: ArrayLike, name: str) -> Array:
    """x without a copy where that is possible; bfloat16 needs NumPy's ml_dtypes."""
    if not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as e:
            raise TypeError(f"{name}: no array that NumPy can share: {e}") from e
    return np.asarray(x)


def values(x: ArrayLike, name: str) -> Array:
    """Keys or values as the library takes them: float16, bfloat16 or float32; float64 is refused, not rounded."""
    a = to_numpy(x, name)
    if a.dtype.name not in DTYPES:
        raise TypeError(f"{name}: dtype {a.dtype} is not one of {', '.join(DTYPES)}")
    return np.ascontiguousarray(a)


def integers(x: ArrayLike, dtype: Any, name: str) -> Array:
    """x as integers of `dtype`; values that do not fit are refused."""
    a = to_numpy(x, name)
    if not np.issubdtype(a.dtype, np.integer):
        raise TypeError(f"{name}: dtype {a.dtype} is not an integer type")
    limits = np.iinfo(dtype)
    if a.size and not np.can_cast(a.dtype, dtype) and (int(a.min()) < limits.min or int(a.max()) > limits.max):
        raise ValueError(f"{name}: values beyond {np.dtype(dtype).name}")
    return np.ascontiguousarray(a, dtype)


def shaped(a: Array, shape: "Sequence[Union[int, None]]", name: str) -> Array:
    """a, whose shape must match; None stands for any size."""
    if a.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, a.shape)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name}: shape {a.shape} instead of ({wanted})")
    return a


def pointer(a: "Array | None") -> "int | None":
    return None if a is None else a.ctypes.data
