"""Profiles of models, as calibrate() writes them: means, steps, bases and thresholds for stores."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np

from . import _library as lib
from ._arrays import FloatArray, pointer
from .store_config import BASIS_KINDS, Basis

COMPONENTS = {"key": 0, "value": 1}


@dataclass(frozen=True)
class Matrices:
    forward: FloatArray  # [num_layers, num_kv_heads, head_dim, head_dim]
    inverse: FloatArray  # likewise


@dataclass(frozen=True)
class ComponentProfile:
    """Of keys or of values."""

    means: FloatArray  # [num_layers, num_kv_heads, head_dim]
    # [num_layers, num_kv_heads] for an error of 1: steps are proportional to what they aim at.
    unit_steps: FloatArray
    unit_matrix_steps: Optional[FloatArray]  # of coordinates in the matrix basis
    matrices: Optional[Matrices]

    def basis(self, kind: str) -> Basis:
        """The basis of StoreConfig: "mean", "hadamard" or "matrix"."""
        if kind not in BASIS_KINDS:
            raise ValueError(f"basis {kind!r} is not one of {', '.join(BASIS_KINDS)}")
        if kind == "hadamard":
            return Basis(kind)
        if kind == "mean":
            return Basis(kind, self.means)
        if self.matrices is None:
            raise ValueError("the profile was calibrated without a matrix basis")
        return Basis(kind, self.means, self.matrices.forward, self.matrices.inverse)

    def steps(self, error: float, basis: str = "mean") -> FloatArray:
        """Steps [num_layers, num_kv_heads] that lead to this error: of the logits for keys, relative for values."""
        unit = self.unit_matrix_steps if basis == "matrix" else self.unit_steps
        if unit is None:
            raise ValueError("the profile was calibrated without a matrix basis")
        return np.asarray(error * unit.astype(np.float64), np.float32)


@dataclass(frozen=True)
class Balance:
    """Steps balanced over heads: attention error of the calibration dumps with steps(k) of keys and steps(v) of values."""

    error: float
    k: float
    v: float


@dataclass(frozen=True)
class Profile:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    alpha_high: float
    alpha_low: float
    key: ComponentProfile
    value: ComponentProfile
    balance: Optional[Balance] = None


def read_profile(path: lib.Path, sm_scale: float = 0.0) -> Profile:
    """The profile that calibrate() wrote. sm_scale: of the model, 0 for 1 / sqrt(head_dim); the steps of keys depend on it."""
    handle = ctypes.c_void_p()
    lib.dumps().call("tkv_profile_open", lib.encode_path(path), handle)
    try:
        info = lib.ProfileInfoStruct()
        lib.dumps().call("tkv_profile_get_info", handle, info)
        key, value = (_component(handle, info, name, sm_scale) for name in COMPONENTS)
        balance = Balance(info.balance_error, info.balance_k, info.balance_v) if info.balance_error > 0 else None
        return Profile(info.num_layers, info.num_kv_heads, info.head_dim, info.alpha_high, info.alpha_low, key, value, balance)
    finally:
        lib.dumps().dll.tkv_profile_destroy(handle)


def _component(handle: ctypes.c_void_p, info: lib.ProfileInfoStruct, name: str, sm_scale: float) -> ComponentProfile:
    def array(*shape: int) -> FloatArray:
        return np.empty((info.num_layers, info.num_kv_heads, *shape), np.float32)

    def read(matrix: bool, **arrays: FloatArray) -> Tuple[FloatArray, ...]:
        request = lib.ProfileComponent(component=COMPONENTS[name], matrix_steps=matrix, error=1.0, sm_scale=sm_scale,
                                       **{field: pointer(a) for field, a in arrays.items()})
        lib.dumps().call("tkv_profile_get_component", handle, request)
        return tuple(arrays.values())

    means, steps = read(False, means=array(info.head_dim), steps=array())
    if not info.matrix_basis:
        return ComponentProfile(means, steps, None, None)
    square = (info.head_dim, info.head_dim)
    forward, inverse, matrix_steps = read(True, forward=array(*square), inverse=array(*square), steps=array())
    return ComponentProfile(means, steps, matrix_steps, Matrices(forward, inverse))
