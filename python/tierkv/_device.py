# SPDX-License-Identifier: Apache-2.0
"""Arrays in GPU memory, without a copy: DLPack (torch, CuPy, JAX, ...) or __cuda_array_interface__ (CuPy, Numba, ...)."""
from __future__ import annotations

import ctypes
import math
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from typing import Any, Dict, NamedTuple, Sequence, Tuple, Union

from .errors import ArgumentTypeError, InvalidArgumentError

# DLDeviceType: CUDA memory, and CUDA memory that is managed.
CUDA_DEVICES = (2, 13)
# (DLDataTypeCode, bits) of the types that the library takes.
DLPACK_DTYPES = {(0, 32): "int32", (2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16"}
TYPESTRS = {"<f2": "float16", "<f4": "float32", "<i4": "int32"}
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}


class DLTensor(ctypes.Structure):
    """dlpack.h, the struct at the start of what a capsule called "dltensor" holds."""

    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8),
                ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


class DeviceArray(NamedTuple):
    """An array of the caller's; valid as long as `owner` is held."""

    address: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]  # elements
    dtype: str
    owner: object


def is_on_device(x: Any) -> bool:
    """Whether x says that it lies in GPU memory."""
    if hasattr(x, "__dlpack_device__"):
        return x.__dlpack_device__()[0] in CUDA_DEVICES
    return hasattr(x, "__cuda_array_interface__")


def device_array(x: Any, name: str, dtypes: Sequence[str], shape: "Sequence[Union[int, None]]", stream: int, dense: bool = True,
                 index: "int | None" = None) -> DeviceArray:
    """x, checked to be one of `dtypes`, `dense` and on GPU `index`, once what its library has enqueued for it precedes new work on `stream` (DLPack
    alone can promise that, and tell the GPU)."""
    if _is_made_on(x, stream):
        a = _from_torch(x, name)
    else:
        a = _from_dlpack(x, name, stream) if hasattr(x, "__dlpack__") else _from_interface(x, name)
    if index is not None and hasattr(x, "__dlpack_device__"):
        at = x.get_device() if hasattr(x, "get_device") else x.__dlpack_device__()[1]  # torch's own takes less time
        if at != index:
            raise ArgumentTypeError(f"{name}: on GPU {at} instead of {index}")
    if dense:
        _require_dense(a, name)
    if a.dtype not in dtypes:
        raise ArgumentTypeError(f"{name}: dtype {a.dtype} instead of {' or '.join(dtypes)}")
    if len(a.shape) != len(shape) or any(want is not None and want != got for want, got in zip(shape, a.shape)):
        raise InvalidArgumentError(f"{name}: shape {a.shape} instead of ({', '.join('any' if s is None else str(s) for s in shape)})")
    return a


def empty(like: Any, dtype: str, shape: Tuple[int, ...]) -> Any:
    """An array for results beside `like`, where its library is known."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(like, "new_empty"):
        raise ArgumentTypeError(f"results for a {type(like).__name__} must be given with `into`")
    return like.new_empty(shape, dtype=getattr(torch, dtype))


def _from_dlpack(x: Any, name: str, stream: int) -> DeviceArray:
    if x.__dlpack_device__()[0] not in CUDA_DEVICES:
        raise ArgumentTypeError(f"{name}: not in GPU memory")
    try:
        capsule = x.__dlpack__(stream=stream or 1)  # 1 is DLPack's name of the default stream
    except (BufferError, RuntimeError) as e:
        raise ArgumentTypeError(f"{name}: no array that can be shared: {e}") from e
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, [py_object, c_char_p]
    # The capsule keeps its name, so that it releases the array itself when it goes.
    tensor = DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    dtype = DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise ArgumentTypeError(f"{name}: dtype is not one of {', '.join(DLPACK_DTYPES.values())}")
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else _dense(shape)
    return DeviceArray((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, capsule)


def _is_made_on(x: Any, stream: int) -> bool:
    """Whether x is a torch.Tensor that DLPack would share and that is made on that stream: nobody has to wait, so that a graph which is
    being captured gets no events, and DLPack's time can be saved."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or not x.is_cuda or x.requires_grad or x.layout != torch.strided:
        return False
    return bool(torch.cuda.current_stream(x.device).cuda_stream == stream)


def _from_torch(x: Any, name: str) -> DeviceArray:
    dtype = str(x.dtype)[len("torch."):]
    if dtype not in ITEM_BYTES:
        raise ArgumentTypeError(f"{name}: dtype is not one of {', '.join(ITEM_BYTES)}")
    return DeviceArray(x.data_ptr(), tuple(x.shape), tuple(x.stride()), dtype, x)


def _from_interface(x: Any, name: str) -> DeviceArray:
    interface: "Dict[str, Any] | None" = getattr(x, "__cuda_array_interface__", None)
    if interface is None:
        raise ArgumentTypeError(f"{name}: not in GPU memory")
    shape = tuple(interface["shape"])
    dtype = TYPESTRS.get(interface["typestr"])
    if dtype is None:
        raise ArgumentTypeError(f"{name}: dtype {interface['typestr']} is not one of {', '.join(TYPESTRS)}")
    if interface.get("strides") is None:
        strides = _dense(shape)
    elif any(stride % ITEM_BYTES[dtype] for stride in interface["strides"]):
        raise InvalidArgumentError(f"{name}: strides are no multiples of the items")
    else:
        strides = tuple(stride // ITEM_BYTES[dtype] for stride in interface["strides"])
    return DeviceArray(interface["data"][0], shape, strides, dtype, x)


def _dense(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


def _require_dense(a: DeviceArray, name: str) -> None:
    for extent, stride, dense in zip(a.shape, a.strides, _dense(a.shape)):
        if extent != 1 and stride != dense:
            raise InvalidArgumentError(f"{name}: not contiguous")
