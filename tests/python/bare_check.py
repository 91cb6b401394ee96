# SPDX-License-Identifier: Apache-2.0
"""bare_check.py DUMP: uses an installed tierkv, package and command, on a system that has nothing else."""
import importlib.metadata
import pathlib
import subprocess
import sys

import numpy as np
import tierkv

dump = pathlib.Path(sys.argv[1])
assert "site-packages" in tierkv.__file__, tierkv.__file__
assert importlib.metadata.version("tierkv") == tierkv.__version__
points = importlib.metadata.entry_points()
group = points.select(group="vllm.general_plugins") if hasattr(points, "select") else points["vllm.general_plugins"]
assert [p.value for p in group if p.name == "tierkv"] == ["tierkv.vllm:register"]

x = np.random.default_rng().normal(size=(8, 64)).astype(np.float32)
assert np.abs(tierkv.dequantize(tierkv.quantize(x, 8)) - x).max() < 0.1
loaded = pathlib.Path("/proc/self/maps")
if loaded.exists():  # a chroot may lack /proc
    assert "libtierkv.so" in loaded.read_text() and "libtierkv_dumps" not in loaded.read_text()
result = tierkv.analyze(dump, ["step"])[0]
tierkv.compress(dump, "package.tkv", "step")
with tierkv.Container("package.tkv") as container:
    container.verify()
    assert container.decode_layer(0).k.shape == (2, 1024, 128)
subprocess.run(["tierkv", "compress", "--preset", "step", dump, "command.tkv"], check=True, stdout=subprocess.DEVNULL)
assert pathlib.Path("command.tkv").read_bytes() == pathlib.Path("package.tkv").read_bytes()
with tierkv.KvStore(tierkv.StoreConfig(1, 4, 2, 64, max_sequences=1, max_tokens=128)) as store:
    id = store.add_sequence()
    store.begin(id, 100)
    k, v = (np.random.default_rng().normal(size=(1, 100, 2, 64)).astype(np.float16) for _ in range(2))
    store.append(id, 0, k, v)
    assert np.isfinite(store.attend(id, 0, np.ones((1, 1, 4, 64), np.float16)).out).all()
print(f"package and command work: ratio {result.ratio:.2f}, {len(list(pathlib.Path(tierkv.__file__).parent.rglob('*.so')))} libraries")
