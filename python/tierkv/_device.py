"""Arrays in GPU memory, without a copy: DLPack (torch, CuPy, JAX, ...) or __cuda_array_interface__ (CuPy, Numba, ...)."""
from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from typing import Any, Dict, NamedTuple, Sequence, Tuple, Union

# DLDeviceType: CUDA memory, and CUDA memory that is managed.
CUDA_DEVICES = (2, 13)
# (DLDataTypeCode, bits) of the types that the library takes.
DLPACK_DTYPES = {(2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16"}
TYPESTRS = {"<f2": "float16", "<f4": "float32"}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class DLTensor(ctypes.Structure):
    """dlpack.h, the struct at the start of what a capsule called "dltensor" holds."""

    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


class DeviceArray(NamedTuple):
    """A dense array of the caller's; valid as long as `owner` is held."""

    address: int
    shape: Tuple[int, ...]
    dtype: str
    owner: object


def device_array(x: Any, name: str, dtypes: Sequence[str], shape: "Sequence[Union[int, None]]", stream: int) -> DeviceArray:
    """x, checked to be one of `dtypes`, once what its library has enqueued for it precedes new work on `stream` (DLPack alone can promise that)."""
    a = _from_dlpack(x, name, stream) if hasattr(x, "__dlpack__") else _from_interface(x, name)
    if a.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {a.dtype} instead of {' or '.join(dtypes)}")
    if len(a.shape) != len(shape) or any(want is not None and want != got for want, got in zip(shape, a.shape)):
        raise ValueError(f"{name}: shape {a.shape} instead of ({', '.join('any' if s is None else str(s) for s in shape)})")
    return a


def empty(like: Any, dtype: str, shape: Tuple[int, ...]) -> Any:
    """An array for results beside `like`, where its library is known."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(like, "new_empty"):
        raise TypeError(f"results for a {type(like).__name__} must be given with `into`")
    return like.new_empty(shape, dtype=getattr(torch, dtype))


def _from_dlpack(x: Any, name: str, stream: int) -> DeviceArray:
    if x.__dlpack_device__()[0] not in CUDA_DEVICES:
        raise TypeError(f"{name}: not in GPU memory")
    try:
        capsule = x.__dlpack__(stream=_stream_to_tell(x, stream))
    except (BufferError, RuntimeError) as e:
        raise TypeError(f"{name}: no array that can be shared: {e}") from e
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, [py_object, c_char_p]
    # The capsule keeps its name, so that it releases the array itself when it goes.
    tensor = DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    dtype = DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise TypeError(f"{name}: dtype is not one of {', '.join(DLPACK_DTYPES.values())}")
    if tensor.strides:
        _require_dense(shape, tuple(tensor.strides[i] for i in range(tensor.ndim)), 1, name)
    return DeviceArray((tensor.data or 0) + tensor.byte_offset, shape, dtype, capsule)


def _stream_to_tell(x: Any, stream: int) -> int:
    """For __dlpack__: the stream that must wait, or -1 where x is made on that stream already, so that a graph which is being
    captured gets no events."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor) and torch.cuda.current_stream(x.device).cuda_stream == stream:
        return -1
    return stream or 1  # 1 is DLPack's name of the default stream


def _from_interface(x: Any, name: str) -> DeviceArray:
    interface: "Dict[str, Any] | None" = getattr(x, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"{name}: not in GPU memory")
    shape = tuple(interface["shape"])
    dtype = TYPESTRS.get(interface["typestr"])
    if dtype is None:
        raise TypeError(f"{name}: dtype {interface['typestr']} is not one of {', '.join(TYPESTRS)}")
    if interface.get("strides") is not None:
        _require_dense(shape, tuple(interface["strides"]), ITEM_BYTES[dtype], name)
    return DeviceArray(interface["data"][0], shape, dtype, x)


def _require_dense(shape: Tuple[int, ...], strides: Tuple[int, ...], item: int, name: str) -> None:
    step = item
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != step:
            raise ValueError(f"{name}: not contiguous")
        step *= extent
