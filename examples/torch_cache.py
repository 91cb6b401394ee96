# SPDX-License-Identifier: Apache-2.0
"""A compressed KV cache on PyTorch's tensors: on the GPU where there is one, else in host memory.

  torch_cache.py

The model is a stand-in: random keys, values and queries."""
import torch
from tierkv import UnsupportedError
from tierkv.kv_store import KvStore, StoreConfig, preset

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS = 2, 8, 2, 128, 1000, 4


def make_store(config):
    """On the GPU's current stream; in host memory without a GPU, or where the library was built without CUDA."""
    if torch.cuda.is_available():
        try:
            return KvStore(config, stream=torch.cuda.current_stream())
        except UnsupportedError:
            pass
    return KvStore(config)


def main():
    config = StoreConfig(num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16",
                         max_sequences=4, max_tokens=4096, format=preset("k4v4"))
    store = make_store(config)
    device = "cuda" if store.is_on_device else "cpu"
    ids = [store.add_sequence(), store.add_sequence()]

    def random(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    for tokens in [PROMPT] + STEPS * [1]:
        store.begin(ids, tokens)
        for layer in range(LAYERS):
            store.append(ids, layer, random(2, tokens, KV_HEADS, HEAD_DIM), random(2, tokens, KV_HEADS, HEAD_DIM))
            out = store.attend(ids, layer, random(2, 1, Q_HEADS, HEAD_DIM)).out     # [sequences, queries, q heads, head_dim]
    store.take_status()                                                             # waits; raises what kernels found: NaN, values beyond fp16
    print(f"{device}: {out.shape} from {store.usage().held_bytes} bytes, fp16 takes {store.usage().raw_bytes}")
    assert store.num_tokens(ids[0]) == PROMPT + STEPS and bool(out.isfinite().all())


if __name__ == "__main__":
    main()
