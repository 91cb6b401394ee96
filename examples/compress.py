# SPDX-License-Identifier: Apache-2.0
"""What presets do to a dump, then the dump as a container, a layer of it back, and all of it in a store.

  compress.py DUMP PROFILE OUT.tkv"""
import sys

import numpy as np
import tierkv
from tierkv.kv_store import KvStore, StoreConfig, preset


def fill(store, container):
    """A sequence of the store with what a container holds, which is compressed again."""
    id = store.add_sequence()
    store.begin(id, container.sequences[0].tokens.size)
    for number in range(container.info.num_layers):
        layer = container.decode_layer(number)
        k, v = (np.ascontiguousarray(x.swapaxes(0, 1)[None], np.float16) for x in (layer.k, layer.v))
        store.append(id, number, k, v)                  # [1, tokens, kv_heads, head_dim]
    return id


def main(dump, profile, out):
    for r in tierkv.analyze(dump, ["small", "k4v4+rot"], profile=profile):      # all sequences together, then each
        print(f"{r.preset}, {r.seq}: {r.ratio:.2f} times as many tokens, error {r.attention_pooled_error:.3f}")
    done = tierkv.compress(dump, out, "small", profile=profile, without_queries=True, overwrite=True)
    with tierkv.Container(out) as container:
        layer = container.decode_layer(3)               # layer.k, layer.v: float32 [kv_heads, tokens, head_dim]
        info, tokens = container.info, container.sequences[0].tokens.size
        config = StoreConfig(num_layers=info.num_layers, num_q_heads=info.num_q_heads, num_kv_heads=info.num_kv_heads,
                             head_dim=info.head_dim, max_sequences=1, max_tokens=tokens + 64, format=preset("k8v4"))
        with KvStore(config) as store:
            id = fill(store, container)
            keys = store.decode_range(id, 3, 0, tokens)[0].swapaxes(0, 1)
            assert np.abs(keys - layer.k).max() < 0.02 * np.abs(layer.k).max()
    print(layer.k.shape, f"{done.file_ratio:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
