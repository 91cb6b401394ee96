"""Packs build/python/tierkv into a wheel; also the PEP 517 backend of `pip install ./python`, which builds it first.

Nothing but the standard library; the same package gives the same bytes.
"""
import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
# PEP 600, as auditwheel's policies have it: what a manylinux_2_34 wheel may need of the system.
POLICY = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (11, 0)}
CALIBRATION = ("torch>=2.5", "transformers>=5")  # as in pyproject.toml
ENTRY_POINTS = "[vllm.general_plugins]\ntierkv = tierkv.vllm:register\n"  # as in pyproject.toml
LICENSES = ("libhdf5-dev", "libaec0", "zlib1g", "libdeflate0", "libzstd1", "libhwy1")


def needs(library):
    """The newest version of each of the system's symbol families that the library asks for."""
    found = {}
    for family, version in re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)+)(?=\0)", library.read_bytes()):
        key = tuple(int(x) for x in version.split(b"."))
        found[family.decode()] = max(found.get(family.decode(), ()), key)
    return found


def platform_tag(package):
    for library in sorted((package / "lib").glob("*.so*")):
        for family, version in needs(library).items():
            if version > POLICY[family]:
                return f"linux_{platform.machine()}"
    return f"manylinux_2_34_{platform.machine()}"


def metadata(version):
    return (f"Metadata-Version: 2.1\nName: tierkv\nVersion: {version}\n"
            "Summary: Lossy KV-cache compression: codec, containers and analysis\nLicense: Apache-2.0\n"
            "Requires-Python: >=3.9\nRequires-Dist: numpy>=1.22\n"
            "Provides-Extra: calibration\n" + "".join(f"Requires-Dist: {p}; extra == 'calibration'\n" for p in CALIBRATION))


def files_of(package, version, tag):
    info = f"tierkv-{version}.dist-info"
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"tierkv/{path.relative_to(package)}", path.read_bytes()
    yield f"{info}/METADATA", metadata(version).encode()
    yield f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tierkv\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    yield f"{info}/entry_points.txt", ENTRY_POINTS.encode()
    yield f"{info}/licenses/LICENSE", (HERE.parent / "LICENSE").read_bytes()
    for name in LICENSES:
        yield f"{info}/licenses/{name}", pathlib.Path(f"/usr/share/doc/{name}/copyright").read_bytes()


def write_wheel(package, version, folder):
    tag = f"py3-none-{platform_tag(package)}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("tierkv-*.whl"):
        old.unlink()
    path = folder / f"tierkv-{version}-{tag}.whl"
    record = f"tierkv-{version}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        def add(name, data):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if ".so" in name else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
        for name, data in files_of(package, version, tag):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
            add(name, data)
        add(record, "".join(lines) + f"{record},,\n")
    return path


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517: needs CMake, a C++20 compiler and the library's dependencies (./dev setup)."""
    with tempfile.TemporaryDirectory() as build:
        subprocess.run(["cmake", "-S", HERE.parent, "-B", build, "-DTIERKV_CUDA=OFF", "-DTIERKV_TESTS=OFF", "-DTIERKV_BENCH=OFF"],
                       check=True)
        subprocess.run(["cmake", "--build", build, "--parallel", "--target", "tierkv_wheel"], check=True)
        wheel = next(pathlib.Path(build).glob("python/dist/*.whl"))
        target = pathlib.Path(wheel_directory) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target.name


if __name__ == "__main__":
    print(write_wheel(pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])))
