# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml says of the package holds for the one that the build made. `./dev wheel check` tests the wheel itself."""
import importlib
import pathlib
import re
import sys
import unittest

PACKAGE, ROOT = map(pathlib.Path, sys.argv[1:3])
sys.path.insert(0, str(PACKAGE))
import tierkv  # noqa: E402

try:
    import tomllib
except ImportError:  # before Python 3.11
    print("tomllib is missing: skipped")
    sys.exit(77)


class Project(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.toml = tomllib.loads((ROOT / "pyproject.toml").read_text())

    def test_the_version_is_cmakes(self):
        metadata = self.toml["tool"]["scikit-build"]["metadata"]["version"]
        found = re.search(metadata["regex"], (ROOT / metadata["input"]).read_text())
        self.assertEqual(found["value"], tierkv.__version__)

    def test_entry_points_lead_to_functions(self):
        points = [p for group in self.toml["project"]["entry-points"].values() for p in group.values()]
        self.assertIn("tierkv.vllm:register", points)
        for point in points:
            module, function = point.split(":")
            self.assertTrue(callable(getattr(importlib.import_module(module), function)), point)

    def test_what_messages_ask_to_install_are_extras(self):
        extras = set(self.toml["project"]["optional-dependencies"])
        self.assertEqual(extras, {"hf", "vllm", "calibrate", "report"})
        for path in PACKAGE.rglob("*.py"):
            for extra in re.findall(r"tierkv\[(\w+)\]", path.read_text()):
                self.assertIn(extra, extras, path)

    def test_licenses_of_what_is_inside(self):
        notice = (ROOT / "NOTICE").read_text()
        for pattern in self.toml["project"]["license-files"]:
            files = list(ROOT.glob(pattern))
            self.assertTrue(files, pattern)
            self.assertTrue(all(f.read_text().strip() for f in files))
        self.assertIn("licenses/", notice)

    def test_the_package_is_the_folder_and_two_libraries(self):
        folder = ROOT / self.toml["tool"]["scikit-build"]["wheel"]["packages"][0]
        modules = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        built = {p.relative_to(PACKAGE / "tierkv") for p in (PACKAGE / "tierkv").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
        self.assertEqual(built - modules, {pathlib.Path("lib/libtierkv.so"), pathlib.Path("lib/libtierkv_dumps.so")})
        self.assertEqual(modules - built, set())


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
