# SPDX-License-Identifier: Apache-2.0
"""Every `build/tierkv` line of the pages for users runs, page by page, in a folder that has what the repository has.

usage: docs_test.py TIERKV SOURCE_DIR
"""
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "house"))
from snippets import user_pages  # noqa: E402

# A dump that a guide has the reader capture; a small one of ours stands for it.
STANDS_FOR = {"dump.h5": "datasets/smollm2_1k.h5"}


def commands(text):
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M):
        yield from (line for line in block.splitlines() if line.startswith("build/tierkv "))


def main():
    tool, root = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    ran = 0
    for page in user_pages(root):
        with tempfile.TemporaryDirectory() as folder:
            here = pathlib.Path(folder)
            (here / "build").mkdir()
            (here / "build/tierkv").symlink_to(tool)
            (here / "datasets").symlink_to(root / "datasets")
            for name, other in STANDS_FOR.items():
                (here / name).symlink_to(root / other)
            for line in commands(page.read_text()):
                done = subprocess.run(["bash", "-c", line], cwd=here, capture_output=True, text=True)
                assert done.returncode == 0, f"{page.name}: {line}\n{done.stdout}{done.stderr}"
                ran += 1
    assert ran > 10, ran
    print(f"{ran} commands")


main()
