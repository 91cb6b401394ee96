# SPDX-License-Identifier: Apache-2.0
"""A prompt's cache through the library: a dump, `compress`, `decode_layer`; bytes and attention error as `tierkv analyze` counts them."""
import dataclasses
import pathlib
import shutil
import tempfile

import h5py
import numpy as np
import tierkv

from dump import write_dump
from model import LayerCache

QUERIES = 48  # of a dump, spread over the second half of the prompt
OWN_MEAN_BYTES = 2  # of a channel, in float16
ERRORS = ("attention_weighted_error", "attention_pooled_error", "attention_rel_error_online", "attention_rel_error", "key_rel_error",
          "value_rel_error")
FACTS = (*ERRORS, "key_entropy_bits", "value_entropy_bits", "key_coded_bits", "value_coded_bits")


@dataclasses.dataclass(frozen=True)
class Scheme:
    family: str
    preset: str
    profile: str = "even"
    own_means: bool = False  # the prompt's channel means in place of the profile's, billed to the prompt


def spread_positions(tokens):
    return np.unique(np.linspace(tokens // 2, tokens - 1, QUERIES).astype(np.int32))


def decoded(container, layers):
    """The cache that a container holds, a LayerCache for each layer."""
    with tierkv.Container(container) as cache:
        out = [cache.decode_layer(i, threads=1) for i in range(layers)]
    if any(layer.pruned.any() for layer in out):
        raise ValueError("the preset prunes: the continuation would attend to zeros")
    return [LayerCache(layer.k, layer.v) for layer in out]


def through_library(folder, model, prompt, preset, profile):
    """([LayerCache], facts) of a prompt (quality.py) that the library compressed by a preset. Facts: its share of fp16, and what
    `tierkv analyze` says of it: errors, bits a code, shares of fp16 of the parts of blocks."""
    options = {} if profile is None else {"profile": profile}
    with tempfile.TemporaryDirectory(dir=folder) as part:
        dump, container = pathlib.Path(part) / "prompt.h5", pathlib.Path(part) / "prompt.tkv"
        write_dump(dump, model, prompt.ids, prompt.layers, prompt.q_positions, queries=[layer.q for layer in prompt.layers])
        total = next(r for r in tierkv.analyze(dump, [preset], threads=1, **options) if r.seq == "all")
        tierkv.compress(dump, container, preset, threads=1, **options)
        facts = {"memory": 1 / total.ratio} | {name: getattr(total, name) for name in FACTS if getattr(total, name) is not None}
        facts |= {f"part_{name}": size / (2 * total.values) for name, size in (total.parts or {}).items()}
        return decoded(container, model.layers), facts


def write_own_profile(source, path, cache):
    """A profile with the means of this cache and everything else of `source`."""
    shutil.copyfile(source, path)
    with h5py.File(path, "r+") as f:
        f["key_mean"][...] = np.concatenate([layer.k.mean(1) for layer in cache])
        f["value_mean"][...] = np.concatenate([layer.v.mean(1) for layer in cache])


class PromptCodec:
    """One prompt in `folder`, compressed by many schemes. profiles: {name: path}."""

    def __init__(self, folder, model, ids, cache, profiles):
        self.folder, self.model = pathlib.Path(folder), model
        self.dump = self.folder / "prompt.h5"
        write_dump(self.dump, model, ids, cache, spread_positions(len(ids)))
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
        return decoded(container, self.model.layers)
