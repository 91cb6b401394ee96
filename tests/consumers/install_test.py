# SPDX-License-Identifier: Apache-2.0
"""Installs the build tree, then builds and runs examples/consumer against it as a stranger would: CMake and pkg-config,
shared and static, C99 and C++17. Also what the installed libraries export, need and promise."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np

BUILD, ROOT, CMAKE = map(pathlib.Path, sys.argv[1:4])
FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
CONSUMER = ROOT / "examples" / "consumer"
SAMPLE = ROOT / "datasets" / "sample_1k.h5"


def run(*command, **options):
    result = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=500, **options)
    if result.returncode:
        raise AssertionError(f"{command}: exit {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result.stdout


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(cls.folder.name)
        run(CMAKE, "--install", BUILD, "--prefix", folder / "first")
        cls.prefix = folder / "moved"  # the packages must not remember where they were installed
        (folder / "first").rename(cls.prefix)
        cls.lib = next(cls.prefix.rglob("libtierkv.so")).parent
        cls.dir = folder
        cls.tierkv = cls.prefix / "bin" / "tierkv"

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def configure(self, name, *options):
        build = self.dir / name
        run(CMAKE, "-G", "Ninja", "-S", CONSUMER, "-B", build, f"-DCMAKE_PREFIX_PATH={self.prefix}", "-DCMAKE_BUILD_TYPE=Release", *options)
        run(CMAKE, "--build", build, "-j2")
        return build

    def check_programs(self, build, env=None):
        self.assertRegex(run(build / "page", env=env), r"^tierkv \d+\.\d+\.\d+: page of \d+ bytes")
        cache, back = self.dir / "cache.tkv", self.dir / "back.h5"
        for path in (cache, back):
            path.unlink(missing_ok=True)
        analysis = json.loads(run(build / "compress", SAMPLE, cache, "diffkv", env=env))
        self.assertEqual(analysis["schema"], "tierkv.analyze/1")
        self.assertEqual([r["preset"] for r in analysis["results"] if r["seq"] == "all"], ["diffkv", "k4v2"])
        # The library reads what the command makes of the same container.
        run(self.tierkv, "decompress", cache, back, "--dtype", "float32")
        header, *lines = run(build / "open_cache", cache, env=env).splitlines()
        with h5py.File(back) as f:
            seq = next(iter(f["seq"].values()))
            self.assertEqual(len(lines), len(seq["layer"]))
            for i, line in enumerate(lines):
                k, v = (float(x) for x in re.findall(r"[0-9.]+(?:e[-+]\d+)?", line.split(":", 1)[1]))
                self.assertAlmostEqual(k, np.linalg.norm(np.asarray(seq[f"layer/{i}/k"], np.float64)), delta=1e-5 * k)
                self.assertAlmostEqual(v, np.linalg.norm(np.asarray(seq[f"layer/{i}/v"], np.float64)), delta=1e-5 * v)
        self.assertIn("diffkv: 6 layers", header)
        bad = self.dir / "bad.tkv"
        bad.write_bytes(cache.read_bytes()[:-1])
        result = subprocess.run([build / "open_cache", bad], capture_output=True, text=True, env=env)
        self.assertEqual((result.returncode, result.stderr.split(":")[0]), (1, "corrupt"))

    def test_cmake_shared(self):
        build = self.configure("shared")
        self.check_programs(build)
        self.assertIn("libtierkv.so.0.2", run("readelf", "-d", build / "open_cache"))

    def test_cmake_static(self):
        build = self.configure("static", "-DCONSUMER_STATIC=ON")
        self.check_programs(build)
        self.assertNotIn("libtierkv", run("readelf", "-d", build / "open_cache"))

    def test_pkg_config(self):
        env = dict(os.environ, PKG_CONFIG_PATH=str(self.lib / "pkgconfig"))
        self.assertEqual(run("pkg-config", "--modversion", "tierkv-dumps", env=env), run("pkg-config", "--modversion", "tierkv", env=env))
        for static in ([], ["--static"]):
            build = self.dir / "-".join(["pkg", *static])
            build.mkdir()
            for source, compiler, package in (("page.c", ["cc", "-std=c99"], "tierkv"), ("compress.c", ["cc", "-std=c99"], "tierkv-dumps"),
                                              ("open_cache.cc", ["c++", "-std=c++17"], "tierkv")):
                flags = run("pkg-config", "--cflags", "--libs", *static, package, env=env).split()
                if static:
                    flags = [re.sub(r"^-l(tierkv\w*)$", r"-l:lib\1.a", flag) for flag in flags]
                run(*compiler, *FLAGS, CONSUMER / source, "-o", build / source.split(".")[0], *flags, "-lm")
            self.assertEqual("libtierkv" in run("readelf", "-d", build / "compress"), not static)
            self.check_programs(build, dict(os.environ, LD_LIBRARY_PATH=str(self.lib)))

    def test_examples_need_the_installed_tree_alone(self):
        env = dict(os.environ, PKG_CONFIG_PATH=str(self.lib / "pkgconfig"), LD_LIBRARY_PATH=str(self.lib))
        flags = run("pkg-config", "--cflags", "--libs", "tierkv", env=env).split()
        for pattern, compiler in (("*.cc", ["c++", "-std=c++17"]), ("*.c", ["cc", "-std=c99"])):
            for source in sorted((ROOT / "examples").glob(pattern)):
                run(*compiler, "-O1", *FLAGS, source, "-o", self.dir / source.stem, *flags)
                run(self.dir / source.stem, env=env)

    def test_another_version_is_refused(self):
        for version in ("0.1", "1.0"):
            project = self.dir / f"version{version}"
            project.mkdir()
            (project / "CMakeLists.txt").write_text(
                f"cmake_minimum_required(VERSION 3.20)\nproject(p CXX)\nfind_package(tierkv {version} REQUIRED)\n")
            result = subprocess.run([CMAKE, "-G", "Ninja", "-S", project, "-B", project / "b", f"-DCMAKE_PREFIX_PATH={self.prefix}"],
                                    capture_output=True, text=True)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("0.2.0", result.stderr)

    def test_a_component_that_is_missing_is_named(self):
        project = self.dir / "component"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.20)\nproject(p CXX)\nfind_package(tierkv 0.2 REQUIRED COMPONENTS dumps nonsense)\n")
        result = subprocess.run([CMAKE, "-G", "Ninja", "-S", project, "-B", project / "b", f"-DCMAKE_PREFIX_PATH={self.prefix}"],
                                capture_output=True, text=True)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("this build of tierkv has no component nonsense", " ".join(result.stderr.split()))

    def test_licences(self):
        docs = self.prefix / "share" / "doc" / "tierkv"
        for name in ("LICENSE", "NOTICE", *(f"licenses/{path.name}" for path in (ROOT / "licenses").iterdir())):
            self.assertEqual((docs / name).read_bytes(), (ROOT / name).read_bytes())

    def test_every_header_stands_alone(self):
        include = self.prefix / "include"
        for header in sorted((include / "tierkv").glob("*.h")):
            text = f"#include <tierkv/{header.name}>\n#include <tierkv/{header.name}>\n"
            run("c++", "-std=c++17", *FLAGS, "-fsyntax-only", f"-I{include}", "-xc++", "-", input=text)
            if header.name.endswith("_c.h"):
                run("cc", "-std=c99", *FLAGS, "-fsyntax-only", f"-I{include}", "-xc", "-", input=text)

    def exported(self, library):
        text = run("nm", "-DC", "--defined-only", self.lib / library)
        return [line.split(maxsplit=2)[2] for line in text.splitlines() if " A " not in line]

    def declared(self, header):
        return set(re.findall(r"TKV_API [^(;]*?\b(tkv_\w+)\(", (self.prefix / "include/tierkv" / header).read_text()))

    def test_exports(self):
        names = self.exported("libtierkv.so")
        self.assertEqual({n.split("@")[0] for n in names if n.startswith("tkv_")},
                         set().union(*(self.declared(f"tierkv_{h}.h") for h in ("c", "attention_c", "kv_c", "engine_c"))))
        strangers = [n for n in names if not n.startswith(("tkv_", "tierkv::"))]
        self.assertEqual(strangers, [])
        self.assertFalse([n for n in names if "capi" in n or "analysis" in n])
        self.assertEqual({n.split("@")[0] for n in self.exported("libtierkv_dumps.so")}, self.declared("tierkv_dumps_c.h"))

    def test_soname_and_needs(self):
        header = (self.prefix / "include/tierkv/tierkv_c.h").read_text()
        version = [re.search(rf"TKV_VERSION_{part} (\d+)", header).group(1) for part in ("MAJOR", "MINOR", "PATCH")]
        for name in ("libtierkv", "libtierkv_dumps"):
            dynamic = run("readelf", "-d", self.lib / f"{name}.so")
            self.assertIn(f"soname: [{name}.so.{'.'.join(version[:2])}]", dynamic)
            self.assertTrue((self.lib / f"{name}.so.{'.'.join(version)}").exists())
        self.assertNotIn("hdf5", run("readelf", "-d", self.lib / "libtierkv.so"))

    def test_no_path_of_the_build_is_left(self):
        for path in self.prefix.rglob("*"):
            if path.suffix in {".cmake", ".pc", ".h"}:
                for place in (str(BUILD), str(ROOT), str(self.dir / "first")):
                    self.assertNotIn(place, path.read_text(), path)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
