# SPDX-License-Identifier: Apache-2.0
"""What a report is made from: the JSON of `tierkv analyze` or `sweep` with --json --details, and KL of bench/answers/quality.py."""
from __future__ import annotations

import json
import math
import os
import pathlib
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from .errors import TierkvError

Path = Union[str, "os.PathLike[str]"]
Json = Dict[str, Any]
TIERS = ("window", "high", "low", "pruned")
COMPONENTS = ("key", "value")
SENSITIVITIES = ("joint_sensitivity", "key_sensitivity", "value_sensitivity")


class ReportError(TierkvError):
    """A file that a report cannot be made from; the message names file and field."""


# ---- Shapes: a name, {field: shape} with "field?" where it may be null or missing, or [shape] for a list of any length ----

COUNTS: List[Any] = [("count",)]
MATRIX: List[Any] = [["number?"]]
SPREAD: Json = {"mean": MATRIX, "layer_mean": ["number?"], "layer_deviation": ["number?"]}
DETAIL: Json = {"tiers": {t: [["number"]] for t in TIERS}, "rel_error_by_place": {c: ["number?"] for c in COMPONENTS},
          "codes": {c: {"high": COUNTS, "low": COUNTS} for c in COMPONENTS}, "exponents": {c: COUNTS for c in COMPONENTS},
          "classes?": [["integer"]]}
ERRORS = ("attention_pooled_error", "attention_weighted_error", "attention_rel_error_online", "key_rel_error", "value_rel_error")
RESULT: Json = {"file": "text", "preset": "text", "seq": "text", "bits_per_value": "positive", "ratio": "positive", "page_ratio?": "number",
          "window?": "number", "sinks?": "number", "tiers": {t: "number" for t in TIERS}, **{e + "?": "number" for e in ERRORS},
          "key_coded_bits?": "number", "value_coded_bits?": "number", "encode_gbps?": "number", "decode_gbps?": "number",
          "detail?": DETAIL}
SURVEY: Json = {"num_layers": "positive", "num_kv_heads": "positive", "first_decade": "integer", "bins_per_decade": "positive",
          "significance": [COUNTS], "value_norm": [COUNTS], "key_norm": [COUNTS], "critical_of_query": SPREAD, "critical_received": SPREAD,
          "trace?": {"file": "text", "seq": "text", "layer": "number", "kv_head": "number", "tokens": "positive", "first": ["number"],
                     "median": ["number"], "max": ["number"]}}
FILE: Json = {"file": "text", "model_id": "text", "num_layers": "positive", "num_q_heads": "positive", "num_kv_heads": "positive",
        "head_dim": "positive", "dtype": "text", "num_sequences": "number", "num_tokens": "number"}
RESULTS: Json = {"schema": "text", "files": [FILE], "results": [RESULT], "skipped?": [{"reason": "text"}],
           "profile?": {"model_id": "text", **{s + "?": [["number"]] for s in SENSITIVITIES}}, "surveys?": [SURVEY]}
QUALITY: Json = {"schema": "text", "model": "text",
           "sizes": [{"tokens": "positive", "prompts": [{"task": "text"}],
                      "schemes": [{"name": "text", "memory": ["number?"], "kl": ["number?"]}]}]}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


NAMED: Dict[str, Callable[[Any], bool]] = {"text": lambda v: isinstance(v, str), "integer": lambda v: is_number(v) and v == int(v), "number": lambda v: is_number(v) and v >= 0,
         "positive": lambda v: is_number(v) and v > 0}
WORDS = {"text": "a text", "integer": "a whole number", "number": "a number of 0 or more", "positive": "a number above 0"}


def check(value: Any, shape: Any, where: str) -> None:
    """ReportError, naming the field, unless the value has the shape."""
    if isinstance(shape, str):
        name = shape.rstrip("?")
        if not (value is None and name != shape) and not NAMED[name](value):
            raise ReportError(f"{where}: expected {WORDS[name]}, found {json.dumps(value)[:40]}")
    elif isinstance(shape, tuple):
        if not (isinstance(value, list) and len(value) == 2 and NAMED["integer"](value[0]) and NAMED["number"](value[1])):
            raise ReportError(f"{where}: expected a pair of a whole number and a count")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ReportError(f"{where}: expected a list")
        for i, item in enumerate(value):
            check(item, shape[0], f"{where}[{i}]")
        if isinstance(shape[0], list) and shape is not COUNTS and shape[0] is not COUNTS and len({len(row) for row in value}) > 1:
            raise ReportError(f"{where}: its rows differ in length")
    else:
        if not isinstance(value, dict):
            raise ReportError(f"{where}: expected an object")
        for key, part in shape.items():
            name = key.rstrip("?")
            if value.get(name) is None and name == key:
                raise ReportError(f"{where}: {name} is missing")
            if value.get(name) is not None:
                check(value[name], part, f"{where}: {name}" if where.count(":") < 1 else f"{where}.{name}")


def read_json(path: Path, shape: Any, schemas: Tuple[str, ...]) -> Json:
    try:
        with open(path, encoding="utf-8") as f:
            data = json.load(f)
    except OSError as e:
        raise ReportError(f"{path}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ReportError(f"{path}: is not JSON: {e}") from e
    found = data.get("schema") if isinstance(data, dict) else None
    if found not in schemas:
        raise ReportError(f"{path}: schema is {json.dumps(found)[:40]}, not {' or '.join(schemas)}")
    check(data, shape, str(path))
    assert isinstance(data, dict)
    return data


def check_alike(path: Path, data: Json) -> None:
    """What belongs together has the same length."""
    def same(lengths: List[int], where: str) -> None:
        if len(set(lengths)) > 1 or 0 in lengths:
            raise ReportError(f"{path}: {where}: lengths that differ, or nothing: {lengths}")

    for i, r in enumerate(data["results"]):
        d = r.get("detail")
        if d is not None:
            grids = [*d["tiers"].values(), *([d["classes"]] if d.get("classes") else [])]
            same([len(g) for g in grids], f"results[{i}].detail.tiers")
            same([len(g[0]) for g in grids], f"results[{i}].detail.tiers")
            same([len(d["rel_error_by_place"][c]) for c in COMPONENTS], f"results[{i}].detail.rel_error_by_place")
    for i, s in enumerate(data.get("surveys") or []):
        layers = [int(s["num_layers"]), *(len(s[k]) for k in ("significance", "value_norm", "key_norm"))]
        for k in ("critical_of_query", "critical_received"):
            layers += [len(v) for v in s[k].values()]
            same([int(s["num_kv_heads"]), *(len(row) for row in s[k]["mean"])], f"surveys[{i}].{k}.mean")
        same(layers, f"surveys[{i}]")
        if s.get("trace"):
            same([len(s["trace"][k]) for k in ("first", "median", "max")], f"surveys[{i}].trace")


@dataclass(frozen=True)
class Scheme:
    """A preset over one file, or over all of them."""

    number: int  # in the table of its subject
    result: Json
    front: bool  # no other has both less memory and less error

    @property
    def name(self) -> str:
        return str(self.result["preset"])

    @property
    def memory(self) -> float:
        """Percent of fp16."""
        return 100 / float(self.result["ratio"])


@dataclass(frozen=True)
class Subject:
    file: str
    error: Optional[str]  # the field that schemes are ranked by
    schemes: List[Scheme]  # smallest memory first


def subjects(data: Json) -> List[Subject]:
    """The totals, by file in the order of the results."""
    out = []
    for file in dict.fromkeys(r["file"] for r in data["results"]):
        results = sorted((r for r in data["results"] if r["file"] == file and r["seq"] == "all"), key=lambda r: float(r["bits_per_value"]))
        measured = [r for r in results if r.get("attention_pooled_error") is not None]
        weighted = measured and all(r.get("attention_weighted_error") is not None for r in measured)
        error = ("attention_weighted_error" if weighted else "attention_pooled_error") if measured else None

        def best(r: Json, error: Optional[str] = error, measured: List[Json] = measured) -> bool:
            if error is None or r.get(error) is None:
                return False
            mine = (r["bits_per_value"], r[error])
            return not any(o["bits_per_value"] <= mine[0] and o[error] <= mine[1] and (o["bits_per_value"], o[error]) != mine for o in measured)

        out.append(Subject(file, error, [Scheme(i + 1, r, best(r)) for i, r in enumerate(results)]))
    return out


def read_results(path: Path) -> Json:
    data = read_json(path, RESULTS, ("tierkv.analyze/1", "tierkv.sweep/1"))
    check_alike(path, data)
    if not any(r["seq"] == "all" for r in data["results"]):
        raise ReportError(f"{path}: results: holds no totals (seq \"all\")")
    return data


@dataclass(frozen=True)
class Kl:
    """KL of a scheme on a model's own predictions, means over the prompts that every scheme of the file was measured on."""

    name: str
    memory: float  # percent of fp16
    kl: Dict[str, float]  # by task, nats


@dataclass(frozen=True)
class KlTable:
    model: str
    tokens: int
    prompts: Dict[str, int]  # by task
    schemes: List[Kl]


def read_kl(path: Path) -> List[KlTable]:
    """One for each size of prompts in the file."""
    data, out = read_json(path, QUALITY, ("tierkv.bench.quality/2",)), []
    for i, size in enumerate(data["sizes"]):
        tasks, where = [p["task"] for p in size["prompts"]], f"{path}: sizes[{i}]"
        common = set(range(len(tasks)))
        for s in size["schemes"]:
            if len(s["kl"]) != len(s["memory"]) or len(s["kl"]) > len(tasks):
                raise ReportError(f"{where}: {s['name']}: kl and memory are not of the same prompts")
            common &= {p for p, x in enumerate(zip(s["kl"], s["memory"])) if None not in x}
        if not common:
            raise ReportError(f"{where}: no prompt has the kl of all schemes")

        def mean(values: List[float], places: List[int]) -> float:
            return math.fsum(values[p] for p in places) / len(places)

        by_task = {t: [p for p in sorted(common) if tasks[p] == t] for t in dict.fromkeys(tasks[p] for p in sorted(common))}
        schemes = [Kl(s["name"], 100 * mean(s["memory"], sorted(common)), {t: mean(s["kl"], at) for t, at in by_task.items()})
                   for s in size["schemes"]]
        out.append(KlTable(data["model"], int(size["tokens"]), {t: len(at) for t, at in by_task.items()}, schemes))
    if not out:
        raise ReportError(f"{path}: sizes: is empty")
    return out


def writable(path: Path, force: bool, inputs: List[Path]) -> pathlib.Path:
    """Where the page goes: never over an input, over another file with force alone. Links are followed."""
    out = pathlib.Path(path)
    for given in inputs:
        if out.exists() and os.path.exists(given) and out.samefile(given):
            raise ReportError(f"{out}: is the same file as the input {given}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ReportError(f"{out}: cannot be written: {'Is a directory' if out.is_dir() else 'its folder does not exist'}")
    if out.is_file() and not force:
        raise ReportError(f"{out}: exists; give --force to replace it")
    return out
