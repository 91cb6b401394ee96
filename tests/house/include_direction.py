"""Dependencies point one way: include/tierkv <- codec, allocator <- attention <- store <- tools, bench, tests.

Public headers are C++17 without CUDA, fmt or JSON; fmt and JSON stay out of .cu files.
"""
import pathlib
import re
import sys

ALLOWED = {
    "include": {"include"},
    "codec": {"include", "codec"},
    "allocator": {"include", "allocator"},
    "attention": {"include", "codec", "allocator", "attention"},
    "store": {"include", "codec", "allocator", "attention", "store"},
    "datasets": {"include", "codec", "datasets"},
    "capi": {"include", "codec", "datasets", "tools", "capi"},
}
FOLDERS = {"tierkv": "include", "codec": "codec", "allocator": "allocator", "attention": "attention", "store": "store",
           "datasets": "datasets", "tools": "tools", "tests": "tests", "bench": "bench", "capi": "capi"}
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.M)


def violations(root):
    for folder, allowed in ALLOWED.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in {".h", ".cc", ".cu", ".cuh"}:
                continue
            for target in INCLUDE.findall(path.read_text()):
                owner = FOLDERS.get(target.split("/")[0]) if "/" in target else None
                if owner and owner not in allowed:
                    yield f"{path}: {folder} must not include {target}"
                outside = target.startswith(("fmt/", "nlohmann/"))
                if outside and (folder == "include" or path.suffix in {".cu", ".cuh"}):
                    yield f"{path}: {target} does not belong here"
                if folder == "include" and target.startswith("cuda") and path.name != "half.h":
                    yield f"{path}: public headers are free of CUDA"


def main():
    root = pathlib.Path(sys.argv[1])
    # The check itself must be able to fail.
    assert INCLUDE.findall('#include "codec/bits.h"\n') == ["codec/bits.h"]
    found = list(violations(root))
    print("\n".join(found) or "include direction: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
