# SPDX-License-Identifier: Apache-2.0
"""Runs an example: run_example.py PACKAGE NEEDS EXAMPLE [ARGUMENT...]. NEEDS is numpy, torch or cuda; exit code 77 names what is missing."""
import importlib.util
import runpy
import sys

package, needs, example, *arguments = sys.argv[1:]
sys.path.insert(0, package)


def skip(what):
    print(f"skipped: {what} is missing")
    sys.exit(77)


if importlib.util.find_spec("torch" if needs == "cuda" else needs) is None:
    skip("torch" if needs == "cuda" else needs)
if needs == "cuda":
    import tierkv
    import torch
    if not torch.cuda.is_available():
        skip("a GPU")
    try:
        runpy.run_path(example, run_name="__main__")
    except tierkv.UnsupportedError as e:
        skip(str(e))
else:
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")
