# SPDX-License-Identifier: Apache-2.0
"""Code that a page says is quoted ("From [examples/x.c](examples/x.c)") is in that file, line for line."""
import pathlib
import re
import sys
import textwrap

QUOTE = re.compile(r"[Ff]rom\s+\[[^\]]+\]\(([^)]+)\)[^\n]*\n(?:[^\n`]+\n)*\n?```\w*\n(.*?)```", re.S)


def quotes(text):
    return [(target, textwrap.dedent(code).strip()) for target, code in QUOTE.findall(text)]


def main():
    root = pathlib.Path(sys.argv[1])
    # The check itself must be able to fail.
    assert quotes("From [a](x/a.c), which runs:\n\n```c\n  f();\n```\n") == [("x/a.c", "f();")]
    count, wrong = 0, []
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for target, code in quotes(page.read_text()):
            count += 1
            source = (page.parent / target).read_text()
            if not any(textwrap.indent(code, " " * spaces) in source for spaces in range(0, 16, 2)):
                wrong.append(f"{page.name}: not in {target}:\n{code}")
    print("\n".join(wrong) or f"{count} quotes: ok")
    return 1 if wrong or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
