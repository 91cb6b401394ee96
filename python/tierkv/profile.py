# SPDX-License-Identifier: Apache-2.0
"""Profiles of models: means, query energies, head scales, sensitivities, steps and thresholds."""
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from . import _library as lib
from ._arrays import AnyArray, Array, ArrayLike, FloatArray, floats, like, pointer, shaped
from .errors import InvalidArgumentError

PAIRINGS = ("none", "halves", "neighbours")
VECTORS = ("key_mean", "value_mean", "key_mean_before_rope", "query_energy")
SCALARS = ("query_trace", "value_signal", "key_scale", "value_scale", "key_sensitivity", "value_sensitivity", "joint_sensitivity")

Scalars = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rope:
    """How a model rotates queries and keys by position."""

    pairing: str  # of PAIRINGS: dim i turns with dim i + dims / 2 (halves) or 2 i with 2 i + 1 (neighbours)
    dims: int  # rotated ones, even; 0 with "none"
    # [dims / 2] radians a position, or [num_layers, dims / 2] where layers differ; zeros: a layer that is not rotated
    inv_freq: FloatArray


@dataclass(frozen=True)
class ProfileData:
    """What a profile holds. None: unknown. Scalars of heads are [num_layers, num_kv_heads] float64."""

    model_id: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    key_mean: FloatArray  # [num_layers, num_kv_heads, head_dim], sinks left out as in all statistics
    value_mean: FloatArray  # likewise
    query_trace: Scalars  # mean |q|^2
    value_signal: Scalars  # mean |v|^2
    key_mean_before_rope: Optional[FloatArray] = None  # as key_mean
    query_energy: Optional[FloatArray] = None  # as key_mean: mean squared query component, averaged over the two dims of a RoPE pair
    key_scale: Optional[Scalars] = None  # head scales; None when written: ones
    value_scale: Optional[Scalars] = None
    # KL in nats of what follows when this component of this head alone is coarse; joint: keys and values together
    key_sensitivity: Optional[Scalars] = None
    value_sensitivity: Optional[Scalars] = None
    joint_sensitivity: Optional[Scalars] = None
    rope: Optional[Rope] = None
    alpha_high: float = 1.0
    alpha_low: float = 0.0

    def classes(self, shares: Sequence[float]) -> AnyArray:
        """The class of each head [num_layers, num_kv_heads]: shares[0] of the heads, the most sensitive, are class 0, and so on;
        the rest are class len(shares)."""
        if self.joint_sensitivity is None:
            raise InvalidArgumentError("the profile has no joint sensitivities")
        return assign_classes(shares, self.joint_sensitivity)


def read_profile(path: lib.Path) -> ProfileData:
    """The profile that calibrate() or `python -m tierkv.calibrate_model` wrote."""
    handle = ctypes.c_void_p()
    lib.dumps().call("tkv_profile_open", lib.encode_path(path), handle)
    try:
        data = lib.ProfileData()
        lib.dumps().call("tkv_profile_get_data", handle, data)
        rows = (data.num_layers, data.num_kv_heads)
        arrays: Dict[str, Any] = {name: _copied(getattr(data, name), ctypes.c_float, (*rows, data.head_dim)) for name in VECTORS}
        arrays.update({name: _copied(getattr(data, name), ctypes.c_double, rows) for name in SCALARS})
        return ProfileData(data.model_id.decode(), data.num_layers, data.num_q_heads, data.num_kv_heads, data.head_dim, data.sm_scale,
                       rope=_rope(data), alpha_high=data.alpha_high, alpha_low=data.alpha_low, **arrays)
    finally:
        lib.dumps().dll.tkv_profile_destroy(handle)


def write_profile(path: lib.Path, profile: ProfileData) -> None:
    """Replaces the file, whole or not at all."""
    lib.dumps().call("tkv_profile_write", profile_struct(profile), lib.encode_path(path))


def profile_struct(profile: ProfileData) -> lib.ProfileData:
    """For the C ABI; holds the arrays that it points to. Shapes are checked, values are not."""
    rows = (profile.num_layers, profile.num_kv_heads)
    arrays: Dict[str, Optional[Array]] = {}
    for name in VECTORS + SCALARS:
        given, vector = getattr(profile, name), name in VECTORS
        if given is not None:
            given = floats(given, np.float32 if vector else np.float64, name)
            shaped(given, (*rows, profile.head_dim) if vector else rows, name)
        arrays[name] = given
    rope = {"rope_pairing": -1}
    inv_freq = None
    if profile.rope is not None:
        inv_freq = frequencies(profile.rope)
        rope = {"rope_pairing": PAIRINGS.index(profile.rope.pairing), "rope_dims": profile.rope.dims, "rope_layers": len(inv_freq)}
    data = lib.ProfileData(model_id=lib.text(profile.model_id, "model_id"), num_layers=profile.num_layers, num_q_heads=profile.num_q_heads,
                           num_kv_heads=profile.num_kv_heads, head_dim=profile.head_dim, sm_scale=profile.sm_scale,
                           alpha_high=profile.alpha_high, alpha_low=profile.alpha_low, rope_inv_freq=pointer(inv_freq), **rope,
                           **{name: pointer(a) for name, a in arrays.items()})
    data.arrays = [arrays, inv_freq]
    return data


def frequencies(rope: Rope) -> FloatArray:
    """[1 or num_layers, dims / 2]."""
    if rope.pairing not in PAIRINGS:
        raise InvalidArgumentError(f"rope pairing {rope.pairing!r} is not one of {', '.join(PAIRINGS)}")
    inv_freq = np.ascontiguousarray(np.atleast_2d(floats(rope.inv_freq, np.float32, "rope.inv_freq")))
    shaped(inv_freq, (None, rope.dims // 2), "rope.inv_freq")
    return inv_freq


def head_scales(sensitivities: ArrayLike) -> AnyArray:
    """sensitivity^(-1/4), normalised to a geometric mean of 1, then clamped to [1/8, 8]; any shape, all positive. float64; a tensor
    where sensitivities are one."""
    given = floats(sensitivities, np.float64, "sensitivities")
    scales = np.empty_like(given)
    lib.dumps().call("tkv_head_scales", pointer(given), given.size, pointer(scales))
    return like(scales, sensitivities)


def assign_classes(shares: Sequence[float], sensitivities: ArrayLike) -> AnyArray:
    """The class of each head, int32: the most sensitive round(shares[0] * heads) are class 0, and so on; the rest are class len(shares).
    A tensor where sensitivities are one."""
    given, parts = floats(sensitivities, np.float64, "sensitivities"), np.ascontiguousarray(shares, np.float64)
    classes = np.empty(given.shape, np.int32)
    lib.dumps().call("tkv_assign_classes", pointer(parts), parts.size, pointer(given), given.size, pointer(classes))
    return like(classes, sensitivities)


def _copied(address: Optional[int], kind: Any, shape: Tuple[int, ...]) -> Optional[Array]:
    if address is None:
        return None
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(kind)), shape).copy()


def _rope(data: lib.ProfileData) -> Optional[Rope]:
    if data.rope_pairing < 0:
        return None
    inv_freq = _copied(data.rope_inv_freq, ctypes.c_float, (data.rope_layers, data.rope_dims // 2))
    if inv_freq is None:
        inv_freq = np.empty((data.rope_layers, 0), np.float32)
    return Rope(PAIRINGS[data.rope_pairing], data.rope_dims, inv_freq[0] if len(inv_freq) == 1 else inv_freq)
