# SPDX-License-Identifier: Apache-2.0
"""The hand-written pages for users stay short: README at most 100 lines, all together at most 1,200. Generated tables do not count."""
import pathlib
import re
import sys

from snippets import user_pages

README, ALL = 100, 1200


def lines(text):
    return len(re.sub(r"<!-- table .*?<!-- end -->\n", "", text, flags=re.S).splitlines())


def violations(count):
    if count["README.md"] > README:
        yield f"README.md has {count['README.md']} lines, more than {README}"
    if sum(count.values()) > ALL:
        yield f"the pages for users have {sum(count.values())} lines, more than {ALL}"


def main():
    root = pathlib.Path(sys.argv[1])
    # The check itself must be able to fail.
    assert lines("a\n<!-- table x -->\nb\n<!-- end -->\nc\n") == 2
    assert len(list(violations({"README.md": README + 1, "docs/a.md": ALL}))) == 2
    count = {page.relative_to(root).as_posix(): lines(page.read_text()) for page in user_pages(root)}
    wrong = list(violations(count))
    print("\n".join([*(f"{n:5} {name}" for name, n in count.items()), f"{sum(count.values()):5} of {ALL}", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
