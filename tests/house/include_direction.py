# SPDX-License-Identifier: Apache-2.0
"""Dependencies point one way: include/tierkv <- gpu, codec, allocator <- attention <- store <- capi; tools stand on codec and
datasets, bench and tests on all.

A room is a folder with rules of its own. What libtierkv is made of includes no baselines, tools or tests, and links none.
Public headers are C++17 without CUDA, fmt or JSON; fmt and JSON stay out of .cu files.
"""
import pathlib
import re
import sys

FORMAT = {"include", "codec/format", "codec/host"}
CODEC = FORMAT | {"gpu", "codec/gpu", "codec/policy", "codec/file"}
STORE = CODEC | {"allocator", "attention", "store"}
HOST_TOOLS = FORMAT | {"codec/policy", "codec/file", "datasets", "tools"}
# What a room may include; rooms that are not here may include everything. The histogram that a codebook is built from lies
# in codec/host, which codec/format may include for it.
ALLOWED = {
    "include": {"include"},
    "gpu": {"include", "gpu"},
    "codec/format": FORMAT,
    "codec/host": FORMAT,
    "codec/gpu": FORMAT | {"gpu", "codec/gpu"},
    "codec/policy": {"include", "codec/format", "codec/policy"},
    "codec/file": FORMAT | {"codec/policy", "codec/file"},
    "allocator": {"include", "gpu", "allocator"},
    "attention": FORMAT | {"gpu", "codec/gpu", "allocator", "attention"},
    "store": STORE,
    "capi": STORE | {"capi"},
    "capi/dumps": STORE | {"capi", "capi/dumps", "datasets", "tools"},
    "datasets": FORMAT | {"codec/policy", "codec/file", "datasets"},
    "tools": HOST_TOOLS,
    "bench/baselines": STORE | {"bench/baselines"},
}
TOPS = {"tierkv": "include", **{room.split("/")[0]: room.split("/")[0] for room in ALLOWED}, "tests": "tests", "examples": "examples"}
LIBRARY = ("codec", "allocator", "attention", "store", "capi")
OUTSIDE_TARGET = re.compile(r"tierkv_(analysis|report|baselines)\b")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.M)


def room_of(path):
    """The room of a file, or of what an include names; None: neither ours nor a room."""
    parts = path.split("/")
    if len(parts) < 2 or parts[0] not in TOPS and parts[0] != "include":
        return None
    inner = "/".join(parts[:2])
    return inner if inner in ALLOWED else TOPS.get(parts[0], "include")


def file_violations(name, text):
    room = room_of(name)
    suffix = pathlib.PurePath(name).suffix
    for target in INCLUDE.findall(text):
        owner = room_of(target)
        if room in ALLOWED and owner and owner not in ALLOWED[room]:
            yield f"{name}: {room} must not include {target}"
        if target.startswith(("fmt/", "nlohmann/")) and (room == "include" or suffix in {".cu", ".cuh"}):
            yield f"{name}: {target} does not belong here"
        if room == "include" and target.startswith("cuda") and not name.endswith("/half.h"):
            yield f"{name}: public headers are free of CUDA"


def violations(root):
    for top in sorted({room.split("/")[0] for room in ALLOWED}):
        for path in sorted((root / top).rglob("*")):
            if path.suffix in {".h", ".cc", ".cu", ".cuh", ".in"} and path.is_file():
                yield from file_violations(path.relative_to(root).as_posix(), path.read_text())
    for folder in LIBRARY:
        # libtierkv_dumps, which lies in capi's file, links the dump readers by name of its own.
        text = (root / folder / "CMakeLists.txt").read_text()
        if folder != "capi" and OUTSIDE_TARGET.search(text):
            yield f"{folder}/CMakeLists.txt: libtierkv links no tools and no baselines"


def check_itself():
    """The check must be able to fail."""
    for name, include in (("codec/format/a.h", "codec/gpu/b.cuh"), ("codec/host/a.cc", "codec/file/b.h"), ("attention/core/a.cu", "store/b.h"),
                          ("attention/coded/a.cu.in", "bench/baselines/b.h"), ("store/a.cc", "tools/presets/b.h"), ("capi/a.cc", "tools/container/b.h"),
                          ("gpu/a.cuh", "codec/format/b.h"), ("tools/command/a.cc", "bench/host/b.h"), ("bench/baselines/a.cc", "tests/b.h"),
                          ("include/tierkv/a.h", "codec/format/b.h"), ("codec/gpu/a.cu", "fmt/core.h")):
        assert list(file_violations(name, f'#include "{include}"\n')), (name, include)
    for name, include in (("codec/gpu/a.cu", "gpu/b.cuh"), ("capi/dumps/a.cc", "tools/container/b.h"), ("bench/baselines/a.cu", "attention/b.cuh"),
                          ("tests/a.cc", "bench/baselines/b.h"), ("store/a.cc", "tierkv/kv_store.h"), ("bench/gpu/a.cu", "tools/b.h")):
        assert not list(file_violations(name, f'#include "{include}"\n')), (name, include)


def main():
    check_itself()
    found = list(violations(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "include direction: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
