# SPDX-License-Identifier: Apache-2.0
"""One CUDA graph for every step of a generation: captured once, replayed while sequences grow.

  graph.py

Needs PyTorch, a GPU and a tierkv built with CUDA. The model is a stand-in: random keys, values and queries."""
import torch
from tierkv.kv_store import KvStore, StoreConfig, preset

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS = 2, 8, 2, 128, 1000, 20


def random(*shape):
    return torch.randn(shape, dtype=torch.float16, device="cuda")


def main():
    stream = torch.cuda.Stream()
    config = StoreConfig(num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_sequences=4,
                         max_tokens=4096, format=preset("k4v4"))
    store = KvStore(config, stream=stream)
    with torch.cuda.stream(stream):
        ids = [store.add_sequence(), store.add_sequence()]
        store.begin(ids, PROMPT)
        for layer in range(LAYERS):
            store.append(ids, layer, random(2, PROMPT, KV_HEADS, HEAD_DIM), random(2, PROMPT, KV_HEADS, HEAD_DIM))
        # The graph reads these tensors in every replay.
        k, v = random(2, 1, KV_HEADS, HEAD_DIM), random(2, 1, KV_HEADS, HEAD_DIM)
        q = random(2, 1, Q_HEADS, HEAD_DIM)

    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        store.begin(ids, 1)
        for layer in range(LAYERS):
            store.append(ids, layer, k, v)
            outs.append(store.attend(ids, layer, q).out)
    with torch.cuda.stream(stream):
        graph.replay()                                  # the captured step itself
        for _ in range(STEPS - 1):
            for x in (k, v, q):
                x.normal_()                             # the next token's
            store.note_replay(ids)                      # one more step; OutOfPagesError where it does not fit
            graph.replay()
    store.take_status()                                 # waits; raises what the GPU found
    print(f"{store.num_tokens(ids[0])} tokens, outputs {[tuple(out.shape) for out in outs]}")
    assert store.num_tokens(ids[0]) == PROMPT + STEPS and all(bool(out.isfinite().all()) for out in outs)


if __name__ == "__main__":
    main()
