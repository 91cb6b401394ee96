"""The wheel installs with pip and works where there is no compiler, no HDF5 and nothing of the build tree."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

DIST, ROOT = map(pathlib.Path, sys.argv[1:3])
# What PEP 600 lets a manylinux wheel expect, and what lies beside it.
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
PROGRAM = """
import pathlib, sys
import numpy as np
import tierkv
assert "site" in tierkv.__file__, tierkv.__file__
x = np.random.default_rng().normal(size=(8, 64)).astype(np.float32)
assert np.abs(tierkv.dequantize(tierkv.quantize(x, 8)) - x).max() < 0.1
loaded = pathlib.Path("/proc/self/maps").read_text()
assert "libtierkv.so" in loaded and "libtierkv_dumps" not in loaded
result = tierkv.analyze(sys.argv[1], ["step"])[0]
tierkv.compress(sys.argv[1], "cache.tkv", "step")
print(result.ratio, tierkv.Container("cache.tkv").decode_layer(0).k.shape)
"""


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        wheels = list(DIST.glob("*.whl"))
        assert len(wheels) == 1, wheels
        cls.wheel = wheels[0]
        cls.folder = tempfile.TemporaryDirectory()
        cls.site = pathlib.Path(cls.folder.name) / "site"
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", cls.site, cls.wheel],
                       check=True)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_it_works_without_a_compiler(self):
        result = subprocess.run([sys.executable, "-B", "-c", PROGRAM, ROOT / "datasets/sample_1k.h5"], capture_output=True, text=True,
                                cwd=self.folder.name, env={"PYTHONPATH": str(self.site), "PATH": "/nonexistent"})
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("(2, 1024, 128)", result.stdout)

    def test_it_needs_nothing_but_the_c_library(self):
        for library in (self.site / "tierkv/lib").iterdir():
            dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
            needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line}
            self.assertLessEqual(needed, SYSTEM | {"libhwy.so.1"}, library)
            if "RUNPATH" in dynamic or "RPATH" in dynamic:
                self.assertIn("[$ORIGIN]", dynamic)
            names = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True).stdout
            self.assertNotIn(" H5", names)

    def test_it_keeps_the_promise_of_its_name(self):
        promised = re.search(r"manylinux_(\d+)_(\d+)_", self.wheel.name)
        self.assertIsNotNone(promised, self.wheel.name)
        for library in (self.site / "tierkv/lib").iterdir():
            symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
            for line in symbols.splitlines():
                needed = re.search(r"GLIBC_(\d+)\.(\d+)", line)
                if needed:
                    self.assertLessEqual(tuple(map(int, needed.groups())), tuple(map(int, promised.groups())), line)

    def test_it_is_small_and_carries_its_licenses(self):
        self.assertLess(self.wheel.stat().st_size, 16 << 20)
        with zipfile.ZipFile(self.wheel) as z:
            names = [n.rsplit("/", 1)[1] for n in z.namelist() if "/licenses/" in n]
            self.assertIn("tierkv/py.typed", z.namelist())
            self.assertIn("tierkv/vllm/backend.py", z.namelist())
            self.assertTrue(all(z.read(n).strip() for n in z.namelist() if "/licenses/" in n))
        self.assertLessEqual({"LICENSE", "libhdf5-dev", "libzstd1", "zlib1g", "libdeflate0", "libaec0", "libhwy1"}, set(names))

    def test_vllm_finds_its_plugin(self):
        program = ("import importlib.metadata as m\n"
                   "points = [p for p in m.entry_points()['vllm.general_plugins']] if isinstance(m.entry_points(), dict) else "
                   "list(m.entry_points(group='vllm.general_plugins'))\n"
                   "print([p.load().__module__ for p in points if p.name == 'tierkv'])")
        result = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, cwd=self.folder.name,
                                env={"PYTHONPATH": str(self.site)})
        self.assertIn("['tierkv.vllm']", result.stdout, result.stderr)

    def test_the_same_package_gives_the_same_bytes(self):
        sys.path.insert(0, str(ROOT / "python"))
        import build_wheel
        again = build_wheel.write_wheel(DIST.parent / "tierkv", self.wheel.name.split("-")[1], pathlib.Path(self.folder.name) / "dist")
        self.assertEqual(again.name, self.wheel.name)
        self.assertEqual(again.read_bytes(), self.wheel.read_bytes())


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    unittest.main(argv=[sys.argv[0], "-v"])
