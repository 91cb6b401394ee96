# SPDX-License-Identifier: Apache-2.0
"""Code in the pages for users is tried: C, C++, Python and CMake are quotes of examples, JSON parses, and every line of shell is known.

A line of shell is `build/tierkv ...`, which cli.docs runs, `./dev COMMAND`, or a program of the world that gets files of the repository.
"""
import json
import pathlib
import re
import sys
import textwrap

from quotes import quotes

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
QUOTED = {"c", "cpp", "cmake", "python"}
OF_THE_WORLD = {".venv/bin/python", "cmake", "python3", "vllm"}
# Run by a test of its own: tests/datasets/h5py_test.py.
RUN_ELSEWHERE = {"docs/reference/kv-dump.md"}
# What a line of shell names below these folders is in the repository.
NAMED = re.compile(r"(?<![\w/])(?:bench|datasets|examples|tests)/[\w./-]+")


def user_pages(root):
    folders = ("getting-started", "guides", "reference")
    return [root / "README.md", *(page for folder in folders for page in sorted((root / "docs" / folder).glob("*.md")))]


def wrong_shell(line, root, commands):
    words = line.split()
    if words[0] == "./dev":
        return None if words[1] in commands else f"./dev has no command {words[1]}"
    if words[0] != "build/tierkv" and words[0] not in OF_THE_WORLD:
        return f"nothing tries {words[0]}"
    missing = [name for name in NAMED.findall(line) if not (root / name).exists()]
    return f"there is no {missing[0]}" if missing else None


def violations(name, text, root, commands):
    quoted = {code for _, code in quotes(text)}
    for language, code in BLOCK.findall(text):
        if language in QUOTED and name not in RUN_ELSEWHERE:
            if textwrap.dedent(code).strip() not in quoted:
                yield f"no example has:\n{code}"
        elif language == "json":
            try:
                json.loads(code)
            except ValueError as e:
                yield f"{e}:\n{code}"
        elif language == "sh":
            for line in code.strip().split("\n"):
                if why := wrong_shell(line, root, commands):
                    yield f"{why}: {line}"
        elif language not in QUOTED | {"", "text"}:
            yield f"nothing tries {language}"


def main():
    root = pathlib.Path(sys.argv[1])
    commands = set(re.findall(r"^  ([a-z-]+)(?: |$)", (root / "dev").read_text().split("<<'TEXT'")[1].split("TEXT")[0], re.M))
    # The check itself must be able to fail.
    for bad in ("```python\nf()\n```\n", "```json\n{\n```\n", "```sh\n./dev no\n```\n", "```sh\ncurl x\n```\n", "```sh\npython3 examples/no.py\n```\n",
                "```rust\n```\n"):
        assert len(list(violations("page", bad, root, commands))) == 1, bad
    pages = user_pages(root)
    wrong = [f"{page.relative_to(root)}: {why}" for page in pages for why in violations(page.relative_to(root).as_posix(), page.read_text(), root, commands)]
    print("\n".join(wrong) or f"{len(pages)} pages: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
