# SPDX-License-Identifier: Apache-2.0
"""kv-dumps (HDF5): analysis, calibration, compression. Files from strangers belong in a sandbox: HDF5 is not hardened."""
from __future__ import annotations

import ctypes
import json
import os
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from . import _library as lib
from ._arrays import DTYPES
from .errors import ArgumentTypeError, InvalidArgumentError

Progress = Callable[[float], None]
Files = Union[lib.Path, Sequence[lib.Path]]


@dataclass(frozen=True)
class AnalysisResult:
    """What a preset does to a file ("all") or one of its sequences; definitions: docs/reference/presets-and-metrics.md.
    None: does not apply."""

    file: str
    preset: str
    seq: str
    window: Optional[int]  # newest and first tokens that the preset keeps apart
    sinks: Optional[int]
    values: int
    bits_per_value: float
    ratio: float
    page_ratio: Optional[float]
    tiers: Dict[str, float]
    key_rel_error: Optional[float]
    value_rel_error: Optional[float]
    attention_rel_error: Optional[float]
    attention_rel_error_online: Optional[float]
    attention_pooled_error: Optional[float]
    attention_weighted_error: Optional[float]  # with a profile's sensitivities
    attention_cosine: Optional[float]
    key_entropy_bits: Optional[float]
    value_entropy_bits: Optional[float]
    key_coded_bits: Optional[float]
    value_coded_bits: Optional[float]
    parts: Optional[Dict[str, float]]  # weighted steps: bytes of blocks by what they hold
    encode_gbps: Optional[float]
    decode_gbps: Optional[float]


@dataclass(frozen=True)
class TierThresholds:
    """Where the tiers of a profile begin: position (from 1) times significance."""

    alpha_high: float
    alpha_low: float


@dataclass(frozen=True)
class CompressionResult:
    """What compress() wrote."""

    values: int
    file_bytes: int
    carried_bytes: int  # of file_bytes, queries and significance that were carried over
    tokens: Dict[str, int]  # (row, token) pairs in window, high, low, pruned

    @property
    def bits_per_value(self) -> float:
        return 8 * (self.file_bytes - self.carried_bytes) / self.values

    @property
    def ratio(self) -> float:
        """Keys and values as fp16 against what is stored of them."""
        return 16 / self.bits_per_value

    @property
    def file_ratio(self) -> float:
        """Keys and values as fp16 against the whole file."""
        return 2 * self.values / self.file_bytes


class _ProgressCall:
    """A callback that the library may call; what it raises is kept, and raised when the call has returned."""

    def __init__(self, progress: Optional[Progress]) -> None:
        self._error: Optional[BaseException] = None
        self._struct: Optional[lib.ProgressStruct] = None
        if progress is not None:
            self._progress = progress
            self._struct = lib.ProgressStruct(update=lib.PROGRESS(self._update))

    def _update(self, user: Any, fraction: float) -> None:
        if self._error is None:
            try:
                self._progress(fraction)
            except BaseException as e:  # not across C
                self._error = e

    @property
    def pointer(self) -> Any:
        return None if self._struct is None else ctypes.pointer(self._struct)

    def call(self, function: str, *arguments: Any) -> None:
        lib.dumps().call(function, *arguments)
        if self._error is not None:
            raise self._error


def _strings(items: Sequence[bytes]) -> Any:
    return (ctypes.c_char_p * len(items))(*items)


def _items(given: Any, kinds: Tuple[type, ...], name: str) -> List[Any]:
    """One or several of a type, as a list."""
    items = [given] if isinstance(given, kinds) or not isinstance(given, Iterable) else list(given)
    for item in items:
        if not isinstance(item, kinds):
            raise ArgumentTypeError(f"{name}: {item!r} is no {' or '.join(k.__name__ for k in kinds)}")
    return items


def _files(files: Files) -> List[bytes]:
    return [lib.encode_path(f) for f in _items(files, (str, os.PathLike), "files")]


def _optional_path(path: Optional[lib.Path]) -> Optional[bytes]:
    return None if path is None else lib.encode_path(path)


def analyze(files: Files, presets: Union[None, str, Sequence[str]] = None, *, profile: Optional[lib.Path] = None,
            sequence: Optional[str] = None, layers: Optional[Tuple[int, int]] = None, threads: int = 0,
            progress: Optional[Progress] = None) -> List[AnalysisResult]:
    """What each preset would do to the dumps, as `tierkv analyze`: for every file and preset the total, then each sequence.

    presets: one or several; None for a comparison with equal windows of all schemes that a file can serve. profile: of calibrate(). layers: first and last.
    """
    names, chosen = _files(files), [] if presets is None else [lib.text(p, "presets") for p in _items(presets, (str,), "presets")]
    if presets is not None and not chosen:
        raise InvalidArgumentError("presets is empty; None compares all schemes")
    first, last = 0, -1
    if layers is not None:
        try:
            first, last = layers
        except (TypeError, ValueError):
            raise ArgumentTypeError(f"layers: {layers!r} is not (first, last)") from None
        if not 0 <= lib.integer(first, "layers") <= lib.integer(last, "layers"):
            raise InvalidArgumentError(f"layers {layers}: first and last, both inclusive")
    bar = _ProgressCall(progress)
    options = lib.AnalyzeOptions(files=_strings(names), num_files=len(names), presets=_strings(chosen), num_presets=len(chosen),
                                 profile=_optional_path(profile), sequence=None if sequence is None else lib.text(sequence, "sequence"),
                                 first_layer=first, num_layers=last - first + 1, threads=threads, progress=bar.pointer)
    text = ctypes.c_void_p()
    try:
        bar.call("tkv_analyze", options, text)
        report = json.loads(lib.dumps().dll.tkv_text_data(text))
    finally:
        lib.dumps().dll.tkv_text_destroy(text)
    return [AnalysisResult(**r) for r in report["results"]]


def calibrate(files: Files, profile: lib.Path, *, thresholds: bool = True, error_budget: float = 0.25, prune_budget: float = 0.0,
              model_id: Optional[str] = None, threads: int = 0, progress: Optional[Progress] = None,
              overwrite: bool = False) -> TierThresholds:
    """Writes a profile of what dumps can tell: means, energies and tier thresholds. The dumps need q.

    error_budget: share of the way from the error of all tokens high to that of all low; prune_budget: see docs/guides/choose-a-format.md.
    model_id: the model's name in the profile; None: that of the dumps. Sensitivities need the model: python -m tierkv.calibrate_model.
    overwrite: replaces a profile that exists, which is InputOutputError otherwise.
    """
    if not 0 < error_budget <= 1:
        raise InvalidArgumentError("error_budget must be above 0 and at most 1")
    names, bar = _files(files), _ProgressCall(progress)
    options = lib.CalibrateOptions(files=_strings(names), num_files=len(names), no_thresholds=not thresholds,
                                   error_budget=error_budget, prune_budget=prune_budget,
                                   model_id=None if model_id is None else lib.text(model_id, "model_id"), threads=threads,
                                   progress=bar.pointer, overwrite=overwrite)
    bar.call("tkv_calibrate", options, lib.encode_path(profile))
    return TierThresholds(options.alpha_high, options.alpha_low)


def compress(dump: lib.Path, container: lib.Path, preset: str, *, profile: Optional[lib.Path] = None, threads: int = 0,
             progress: Optional[Progress] = None, overwrite: bool = False, without_queries: bool = False) -> CompressionResult:
    """A kv-dump into a container, written whole or not at all. InputOutputError where the container exists and is not to be
    overwritten, or is the dump. without_queries: the dump's queries and significance are left out."""
    bar = _ProgressCall(progress)
    options = lib.CompressOptions(preset=lib.text(preset, "preset"), profile=_optional_path(profile), threads=threads, overwrite=overwrite,
                                  without_queries=without_queries, progress=bar.pointer)
    bar.call("tkv_compress", lib.encode_path(dump), lib.encode_path(container), options)
    tiers = dict(zip(("window", "high", "low", "pruned"), options.tokens))
    return CompressionResult(options.values, options.file_bytes, options.carried_bytes, tiers)


def decompress(container: lib.Path, dump: lib.Path, *, dtype: Optional[str] = None, gzip_level: int = 0, threads: int = 0,
               progress: Optional[Progress] = None, overwrite: bool = False) -> None:
    """A container back into a kv-dump. dtype: float16, bfloat16 or float32; None: as before it was compressed. InputOutputError where
    the dump exists and is not to be overwritten, or is the container."""
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    bar = _ProgressCall(progress)
    options = lib.DecompressOptions(convert=dtype is not None, dtype=0 if dtype is None else DTYPES[dtype], threads=threads,
                                    gzip_level=gzip_level, progress=bar.pointer, overwrite=overwrite)
    bar.call("tkv_decompress", lib.encode_path(container), lib.encode_path(dump), options)
