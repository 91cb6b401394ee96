# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out of the C ABI: dtypes, contiguity, pointers."""
from __future__ import annotations

import sys
from typing import Any, NamedTuple, Sequence, Union

import numpy as np
import numpy.typing as npt

from .errors import ArgumentTypeError, InvalidArgumentError

FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
# Anything with __array__ or __dlpack__ in CPU memory: numpy.ndarray, torch.Tensor and others.
ArrayLike = Any
Bytes = Union[bytes, bytearray, memoryview, ArrayLike]
# A numpy.ndarray, or a torch.Tensor where the call was given one.
AnyArray = Any

FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2
DTYPES = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32}


class Values(NamedTuple):
    """Keys or values in the bits that the library takes."""

    bits: Array  # contiguous float16 or float32, or uint16 holding bfloat16
    dtype: str  # of DTYPES

    def to_float32(self) -> FloatArray:
        if self.dtype == "bfloat16":
            return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return self.bits.astype(np.float32)


def is_tensor(x: Any) -> bool:
    """Whether x is a torch.Tensor. torch is not imported for that."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def like(result: Array, x: Any) -> Any:
    """`result` as a tensor where x is one; both share their memory."""
    return sys.modules["torch"].from_numpy(result) if is_tensor(x) else result


def to_numpy(x: ArrayLike, name: str) -> Array:
    """x without a copy where that is possible."""
    if is_tensor(x):
        if x.device.type != "cpu":
            raise ArgumentTypeError(f"{name}: a tensor on {x.device}, but this call runs on the CPU; pass {name}.cpu()")
        try:
            return x.detach().numpy()  # type: ignore[no-any-return]
        except (RuntimeError, TypeError) as e:
            raise ArgumentTypeError(f"{name}: no tensor that NumPy can share: {e}") from e
    if not isinstance(x, np.ndarray) and hasattr(x, "__dlpack__"):
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as e:
            raise ArgumentTypeError(f"{name}: no array that NumPy can share: {e}") from e
    return np.asarray(x)


def byte_memory(data: Any, name: str) -> Array:
    """The memory of bytes, or of an array or CPU tensor of uint8."""
    is_plain = isinstance(data, (bytes, bytearray, memoryview))
    if not (is_plain or is_tensor(data) or isinstance(data, np.ndarray) or hasattr(data, "__dlpack__")):
        raise ArgumentTypeError(f"{name}: neither bytes nor an array of uint8")
    try:
        array: Array = np.frombuffer(data, np.uint8) if is_plain else to_numpy(data, name)
    except (BufferError, ValueError) as e:
        raise ArgumentTypeError(f"{name}: {e}") from None
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ArgumentTypeError(f"{name}: neither bytes nor a dense array of uint8 with one dimension")
    return array


def values(x: ArrayLike, name: str, shape: "Sequence[Union[int, None]]", dtypes: Sequence[str] = tuple(DTYPES)) -> Values:
    """Keys or values of `dtypes`: float16, bfloat16 (ml_dtypes, torch, or as uint16 where nothing else is taken) or float32; float64 is
    refused, not rounded."""
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":
        # Neither NumPy nor DLPack as NumPy reads it knows the type; the bits are the same.
        bits, dtype = to_numpy(x.view(sys.modules["torch"].int16), name).view(np.uint16), "bfloat16"
    else:
        bits = to_numpy(x, name)
        dtype = bits.dtype.name
        if not bits.dtype.isnative:
            raise ArgumentTypeError(f"{name}: dtype {bits.dtype.str} is not in this machine's byte order")
    if dtype == "uint16" and list(dtypes) == ["bfloat16"]:
        dtype = "bfloat16"
    if dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: dtype {dtype} instead of {' or '.join(dtypes)}")
    bits = shaped(np.ascontiguousarray(bits), shape, name)
    return Values(bits.view(np.uint16) if dtype == "bfloat16" else bits, dtype)


def floats(x: ArrayLike, dtype: Any, name: str) -> Array:
    """x as contiguous floats of `dtype`."""
    return np.ascontiguousarray(to_numpy(x, name), dtype)


def integers(x: ArrayLike, dtype: Any, name: str) -> Array:
    """x as integers of `dtype`; values that do not fit are refused."""
    a = to_numpy(x, name)
    if not np.issubdtype(a.dtype, np.integer):
        raise ArgumentTypeError(f"{name}: dtype {a.dtype} is not an integer type")
    limits = np.iinfo(dtype)
    if a.size and not np.can_cast(a.dtype, dtype) and (int(a.min()) < limits.min or int(a.max()) > limits.max):
        raise InvalidArgumentError(f"{name}: values beyond {np.dtype(dtype).name}")
    return np.ascontiguousarray(a, dtype)


def shaped(a: Array, shape: "Sequence[Union[int, None]]", name: str) -> Array:
    """a, whose shape must match; None stands for any size."""
    if a.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, a.shape)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise InvalidArgumentError(f"{name}: shape {a.shape} instead of ({wanted})")
    return a


def pointer(a: "Array | None") -> "int | None":
    return None if a is None else a.ctypes.data
