# SPDX-License-Identifier: Apache-2.0
"""Every relative link of a Markdown page leads to a file of the repository, and its anchor to a heading of that file."""
import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def anchors(text):
    """As GitHub makes them: lower case, words and hyphens alone, spaces as hyphens, repeated ones numbered."""
    found, count = set(), {}
    for heading in re.findall(r"^#+ (.*?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        found.add(f"{name}-{count[name]}" if name in count else name)
        count[name] = count.get(name, 0) + 1
    return found


def broken(page, text, root, files):
    for target in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_dir() and (file.relative_to(root).as_posix() if file.is_relative_to(root) else "") not in files:
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{target}: no such heading"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, text=True)
    if listed.returncode != 0:
        print("no git checkout")
        return 77
    files = {name for name in listed.stdout.split("\0") if name and (root / name).exists()}
    # The check itself must be able to fail.
    page = root / "README.md"
    assert list(broken(page, "[a](CONTRIBUTING.md) `[b](no.md)`", root, files)) == []
    assert len(list(broken(page, "[a](no.md) [b](CONTRIBUTING.md#no) [c](#no)", root, files))) == 3
    pages = sorted(name for name in files if name.endswith(".md"))
    wrong = [f"{name}: {what}" for name in pages for what in broken(root / name, (root / name).read_text(), root, files)]
    print("\n".join(wrong) or f"{len(pages)} pages: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
