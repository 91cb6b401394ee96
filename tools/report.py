#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""python3 -m tierkv.report out of a source tree: tools/report.py RESULTS -o PAGE. The page needs none of the library, so none is built."""
import pathlib
import runpy
import sys
import types

package = sys.modules["tierkv"] = types.ModuleType("tierkv")
package.__path__ = [str(pathlib.Path(__file__).resolve().parent.parent / "python" / "tierkv")]
runpy.run_module("tierkv.report", run_name="__main__", alter_sys=True)
