# SPDX-License-Identifier: Apache-2.0
"""How much memory a store needs, and how many tokens fit into what there is.

  pool_size.py"""
from tierkv.kv_store import StoreConfig, preset

SHAPE = dict(num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128)   # Llama 3 8B


def main():
    raw = 4 * SHAPE["num_layers"] * SHAPE["num_kv_heads"] * SHAPE["head_dim"]
    for name in ("small", "k8v4", "k4v4", "channel"):
        wanted = StoreConfig(**SHAPE, max_sequences=64, max_tokens=4096, format=preset(name)).with_memory()
        share = 100 * wanted.memory_bytes / (64 * 4096 * raw)
        given = StoreConfig(**SHAPE, max_sequences=64, max_tokens=8192, format=preset(name), memory_bytes=16 << 30)
        typical, least = given.tokens_that_fit()
        print(f"{name}: 64 x 4096 tokens want {wanted.memory_bytes / 2**30:.1f} GiB, {share:.0f} % of fp16; "
              f"16 GiB hold {typical} tokens, {least} whatever the values are")
        assert share < 60 and least <= typical


if __name__ == "__main__":
    main()
