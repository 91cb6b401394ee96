# SPDX-License-Identifier: Apache-2.0
"""What presets do to a dump, then the dump as a container and a layer of it back.

  compress.py DUMP PROFILE OUT.tkv"""
import sys

import tierkv


def main(dump, profile, out):
    for r in tierkv.analyze(dump, ["small", "k4v4+rot"], profile=profile):      # all sequences together, then each
        print(f"{r.preset}, {r.seq}: {r.ratio:.2f} times as many tokens, error {r.attention_pooled_error:.3f}")
    done = tierkv.compress(dump, out, "small", profile=profile, without_queries=True, overwrite=True)
    with tierkv.Container(out) as container:
        layer = container.decode_layer(3)               # layer.k, layer.v: float32 [kv_heads, tokens, head_dim]
    print(layer.k.shape, f"{done.file_ratio:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
