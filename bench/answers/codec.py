"""A prompt's cache through the library: a dump, `compress`, `decode_layer`; bytes and attention error as `tierkv analyze` counts them."""
import dataclasses
import pathlib
import shutil

import h5py
import numpy as np
import tierkv

from model import LayerCache

QUERIES = 48  # of a dump, spread over the second half of the prompt
OWN_MEAN_BYTES = 2  # of a channel, in float16


@dataclasses.dataclass(frozen=True)
class Scheme:
    family: str
    preset: str
    profile: str = "even"  # or "balanced"
    own_means: bool = False  # the prompt's channel means in place of the profile's, billed to the prompt


def write_dump(path, model, ids, cache):
    n = len(ids)
    positions = np.unique(np.linspace(n // 2, n - 1, QUERIES).astype(np.int32))
    with h5py.File(path, "w") as f:
        f.attrs.update(format="kv-dump", format_version=1, num_layers=model.layers, num_q_heads=model.q_heads,
                       num_kv_heads=model.kv_heads, head_dim=model.head_dim, dtype="float16", rope_applied=True,
                       rope_theta=model.theta, sm_scale=model.sm_scale)
        f["seq/prompt/tokens"] = np.asarray(ids, np.int32)
        for i, layer in enumerate(cache):
            group = f.create_group(f"seq/prompt/layer/{i}")
            group["k"], group["v"] = layer.k.astype(np.float16), layer.v.astype(np.float16)
            group["q"], group["q_positions"] = layer.q[:, positions].astype(np.float16), positions
            group["significance"] = layer.significance


def write_own_profile(source, path, cache):
    """A profile with the means of this cache and everything else of `source`."""
    shutil.copyfile(source, path)
    with h5py.File(path, "r+") as f:
        f["key_mean"][...] = np.concatenate([layer.k.mean(1) for layer in cache])
        f["value_mean"][...] = np.concatenate([layer.v.mean(1) for layer in cache])


class PromptCodec:
    """One prompt in `folder`, compressed by many schemes. profiles: {"even": path, "balanced": path}."""

    def __init__(self, folder, model, ids, cache, profiles):
        self.folder, self.model = pathlib.Path(folder), model
        self.dump = self.folder / "prompt.h5"
        write_dump(self.dump, model, ids, cache)
        self.profiles = {}
        for name, path in profiles.items():
            own = self.folder / f"{name}.h5"
            write_own_profile(path, own, cache)
            self.profiles[name, False], self.profiles[name, True] = path, own
        rows = 2 * model.layers * model.kv_heads
        self.mean_share = rows * model.head_dim * OWN_MEAN_BYTES / (2 * rows * len(ids) * model.head_dim)

    def measured(self, schemes):
        """{scheme: (share of fp16, online attention error)}"""
        out = {}
        for (name, own), profile in self.profiles.items():
            chosen = [s for s in schemes if (s.profile, s.own_means) == (name, own)]
            if not chosen:
                continue
            results = tierkv.analyze(self.dump, [s.preset for s in chosen], profile=profile, threads=1)
            found = {r.preset: r for r in results if r.seq == "all"}
            for s in chosen:
                r = found[s.preset]
                out[s] = (1 / r.ratio + own * self.mean_share, r.attention_rel_error_online)
        return out

    def decoded(self, scheme):
        """The cache that the scheme leaves."""
        container = self.folder / "prompt.tkv"
        tierkv.compress(self.dump, container, scheme.preset, profile=self.profiles[scheme.profile, scheme.own_means], threads=1,
                        overwrite=True)
        with tierkv.open(container) as cache:
            layers = [cache.decode_layer(i, threads=1) for i in range(self.model.layers)]
        if any(layer.pruned.any() for layer in layers):
            raise ValueError(f"{scheme.preset} prunes: the continuation would attend to zeros")
        return [LayerCache(layer.k, layer.v) for layer in layers]
