# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Rate and distortion of a real cache
# What each scheme keeps of a cache, and what it costs: memory against the error of the attention output. Run it as a script
# (`python3 examples/rate_distortion.py DUMP.h5 OUT.png`) or cell by cell; every `# %%` begins a cell.

# %%
import pathlib
import sys

import matplotlib
import tierkv

script = len(sys.argv) == 3 and sys.argv[1].endswith(".h5")
sample = pathlib.Path("datasets/sample_1k.h5")
dump, picture = (pathlib.Path(a) for a in sys.argv[1:]) if script else (sample, pathlib.Path("rate_distortion.png"))
if script:
    matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

# %% [markdown]
# The schemes, family by family: a family is a curve over its own knob. All keep the newest 64 tokens, so that they can be compared.

# %%
families = {
    "min-max": ("o", [f"{f}:window=64" for f in ("k8v8", "k8v4", "k4v4", "k4v2")]),
    "DiffKV tiers": ("s", [f"diffkv:alpha_h={a}" for a in (0.25, 1, 4)]),
    "KIVI": ("^", ["kivi4:group=64,residual=64", "kivi2:residual=64"]),
    "KVComp": ("D", [f"kvcomp:rel_k={k},rel_v={v}" for k, v in ((0.02, 0.06), (0.05, 0.15), (0.1, 0.25))]),
    "global step": ("*", [f"step:k={k},v={v}" for k, v in ((0.1, 0.1), (0.2, 0.18), (0.3, 0.25), (0.4, 0.3))]),
}
presets = [p for _, members in families.values() for p in members]
results = {r.preset: r for r in tierkv.analyze(dump, presets) if r.seq == "all"}

# %% [markdown]
# The error to compare by is the online one: the window moves with each query, so a window of raw tokens hides nothing.

# %%
figure, axes = plt.subplots(figsize=(7, 4.5))
for name, (marker, members) in families.items():
    rate = [results[p].bits_per_value for p in members]
    error = [results[p].attention_rel_error_online for p in members]
    axes.plot(rate, error, marker=marker, label=name)
axes.set(xlabel="bits per value (fp16: 16)", ylabel="relative error of the attention output", yscale="log",
         title=f"{dump.name}: rate and distortion")
axes.grid(True, which="both", alpha=0.3)
axes.legend()
figure.tight_layout()
figure.savefig(picture, dpi=150)

# %% [markdown]
# The presets that no other beats in both memory and error:

# %%
best = float("inf")
for r in sorted(results.values(), key=lambda r: r.bits_per_value):
    if r.attention_rel_error_online is not None and r.attention_rel_error_online < best:
        best = r.attention_rel_error_online
        print(f"{r.preset:28} {r.bits_per_value:6.2f} bits {r.ratio:6.2f} x  error {best:.4f}")
