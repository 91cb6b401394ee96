# SPDX-License-Identifier: Apache-2.0
"""Compares a captured dump with another of the same tokens: relative error (Frobenius) of K, V and significance.

    python3 tests/capture/compare_dumps.py CAPTURED.h5 REFERENCE.h5 [TOLERANCE]

Exit code 1 where one exceeds the tolerance (default 2e-3), per layer and kv head.
"""
import sys

import h5py
import numpy as np


def relative(a, b):
    """|a - b| / |b| over tokens (and channels) of each kv head."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise SystemExit(f"shapes {a.shape} and {b.shape}")
    axes = tuple(range(1, b.ndim))
    return np.sqrt(((a - b) ** 2).sum(axes) / (b**2).sum(axes))


def worst(captured, reference):
    errors = {"k": 0.0, "v": 0.0, "significance": 0.0}
    for name, ours in captured["seq"].items():
        theirs = reference[f"seq/{name}"]
        if not np.array_equal(ours["tokens"], theirs["tokens"]):
            raise SystemExit(f"{name}: other tokens")
        if len(ours["layer"]) != len(theirs["layer"]):
            raise SystemExit(f"{name}: {len(ours['layer'])} layers instead of {len(theirs['layer'])}")
        for layer in theirs["layer"]:
            for key in errors:
                errors[key] = max(errors[key], relative(ours[f"layer/{layer}/{key}"], theirs[f"layer/{layer}/{key}"]).max())
    return errors


def main():
    tolerance = float(sys.argv[3]) if len(sys.argv) > 3 else 2e-3
    with h5py.File(sys.argv[1]) as captured, h5py.File(sys.argv[2]) as reference:
        errors = worst(captured, reference)
    print(", ".join(f"{k} {e:.2e}" for k, e in errors.items()), f"(tolerance {tolerance:g})")
    return 0 if max(errors.values()) <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
