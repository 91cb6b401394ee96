# SPDX-License-Identifier: Apache-2.0
"""An engine's cache through the Python package with PyTorch's tensors: the GPU against the host, also in a CUDA graph."""
import random
import sys
import unittest

sys.path.insert(0, sys.argv.pop(1))
try:
    import torch
    if not torch.cuda.is_available():
        raise ImportError("no GPU")
except ImportError as e:
    print(f"skipped: needs PyTorch and a GPU: {e}")
    sys.exit(77)
from tierkv import _engine as lib  # noqa: E402

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
BLOCKS, COLUMNS, KV_HEADS, Q_HEADS, DIM = 40, 9, 2, 8, 128


class Side:
    """The same engine, blocks and tables on one side."""

    def __init__(self, device, bits, means):
        self.device = device
        config = lib.EngineConfigStruct(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, k_bits=bits[0], v_bits=bits[1], dtype=1,
                                        max_sequences=4, max_queries=3, max_blocks=COLUMNS)
        self.page = lib.page_bytes(config)
        raw = torch.full((BLOCKS * KV_HEADS * self.page + 128,), 0xff, dtype=torch.uint8, device=device)
        self.cache = raw[-raw.data_ptr() % 128:][:BLOCKS * KV_HEADS * self.page]
        self.engine = lib.Engine(config, on_host=device == HOST)
        self.workspace = torch.zeros(max(1, self.engine.workspace_bytes()), dtype=torch.uint8, device=device)
        self.errors = torch.zeros(4, dtype=torch.int32, device=device)
        reflection = torch.empty(KV_HEADS, DIM)
        self.engine.key_reflections(means.data_ptr(), reflection.data_ptr())
        self.reflection = reflection.to(device)
        self.layer = lib.EngineLayerStruct(blocks=self.cache.data_ptr(), num_blocks=BLOCKS, key_reflection=self.reflection.data_ptr())

    def stream(self):
        return torch.cuda.current_stream().cuda_stream if self.device == GPU else 0

    def encode(self, k, v, slots):
        kept = [x.to(self.device) for x in (k, v, slots)]
        tokens = lib.EngineTokensStruct(k=kept[0].data_ptr(), v=kept[1].data_ptr(), slots=kept[2].data_ptr(), count=len(slots),
                                        errors=self.errors.data_ptr())
        self.engine.encode(self.layer, tokens, self.stream(), on_host=self.device == HOST)
        return kept

    def batch(self, table, lens, starts):
        self.kept = [x.to(self.device) for x in (table, lens, starts)]
        return lib.EngineBatchStruct(block_table=self.kept[0].data_ptr(), table_columns=COLUMNS, num_sequences=len(lens),
                                     seq_lens=self.kept[1].data_ptr(), query_start_loc=self.kept[2].data_ptr(), count=len(lens), queries=3,
                                     num_blocks=BLOCKS, workspace=self.workspace.data_ptr(), workspace_bytes=self.workspace.numel())

    def attend(self, batch, q):
        self.q = q.to(self.device)
        out = torch.zeros_like(self.q)
        lse = torch.zeros(Q_HEADS, len(q), device=self.device)
        queries = lib.EngineQueriesStruct(q=self.q.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(), lse_token_stride=1,
                                          lse_head_stride=len(q), num_tokens=len(q), errors=self.errors.data_ptr())
        self.engine.plan(batch, self.stream())
        self.engine.attend(batch, self.layer, queries, self.stream())
        return out, lse

    def decode(self, table, sequence, tokens):
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=self.device)
        which = torch.tensor([sequence], dtype=torch.int32, device=self.device)
        table = table.to(self.device)
        k = torch.zeros(tokens, KV_HEADS, DIM, dtype=torch.bfloat16, device=self.device)
        v = torch.zeros_like(k)
        ranges = lib.EngineRangesStruct(block_table=table.data_ptr(), table_stride=COLUMNS, num_sequences=len(table), count=1,
                                        sequences=which.data_ptr(), starts=starts.data_ptr(), max_tokens=tokens, num_rows=tokens,
                                        k=k.data_ptr(), v=v.data_ptr(), errors=self.errors.data_ptr())
        self.engine.decode(self.layer, ranges, self.stream(), on_host=self.device == HOST)
        return k.cpu(), v.cpu()


class EngineTorch(unittest.TestCase):
    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        torch.manual_seed(self.seed)
        blocks = torch.randperm(BLOCKS).to(torch.int32)
        self.table = blocks[:4 * COLUMNS].view(4, COLUMNS).contiguous()
        self.lens = torch.tensor([500, 70, 0, 3], dtype=torch.int32)
        self.starts = torch.tensor([0, 1, 4, 4, 6], dtype=torch.int32)

    def slots(self, sequence):
        t = torch.arange(int(self.lens[sequence]))
        return self.table[sequence, t // 64].long() * 64 + t % 64

    def normal(self, *shape):
        return torch.randn(*shape).to(torch.bfloat16)

    def test_both_sides_agree(self):
        for bits in ((16, 16), (8, 4), (4, 4), (4, 2)):
            means = torch.randn(KV_HEADS, DIM)
            sides = [Side(d, bits, means) for d in (HOST, GPU)]
            for s in range(4):
                k, v = self.normal(int(self.lens[s]), KV_HEADS, DIM), self.normal(int(self.lens[s]), KV_HEADS, DIM)
                for side in sides:
                    if len(k):
                        side.encode(k, v, self.slots(s))
            self.assertTrue(torch.equal(sides[0].cache, sides[1].cache.cpu()), f"{bits} seed {self.seed}")
            q = self.normal(6, Q_HEADS, DIM)
            (a, a_lse), (b, b_lse) = (side.attend(side.batch(self.table, self.lens, self.starts), q) for side in sides)
            self.assertLess(((a.float() - b.cpu().float()).norm() / a.float().norm()).item(), 8e-3, f"{bits} seed {self.seed}")
            self.assertLess((a_lse - b_lse.cpu()).abs().max().item(), 2e-3, f"{bits} seed {self.seed}")
            for x, y in zip(*(side.decode(self.table, 0, 500) for side in sides)):
                self.assertTrue(torch.equal(x, y), f"{bits} seed {self.seed}")
            for side in sides:
                self.assertEqual(side.errors.tolist(), [0, 0, 0, 0])

    def test_a_graph_of_a_step(self):
        """Captured once: encode, plan, attend; slots, tables and lengths change in their arrays."""
        side = Side(GPU, (4, 4), torch.zeros(KV_HEADS, DIM))
        k, v, q = self.normal(6, KV_HEADS, DIM), self.normal(6, KV_HEADS, DIM), self.normal(6, Q_HEADS, DIM)
        slots = torch.full((6,), -1)
        batch = side.batch(self.table, self.lens, self.starts)
        side.encode(k, v, slots)
        side.attend(batch, q)  # kernels are loaded before the capture
        q_there, slots_there = q.to(GPU), slots.to(GPU)
        k_there, v_there = k.to(GPU), v.to(GPU)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.encode(k_there, v_there, slots_there)
            out, _ = side.attend(batch, q_there)
        prompts = [self.normal(2, int(n), KV_HEADS, DIM) for n in self.lens]
        for s, prompt in enumerate(prompts):
            if prompt.shape[1]:
                side.encode(prompt[0], prompt[1], self.slots(s))
        for lens in ([500, 70, 0, 3], [20, 64, 0, 2]):
            lens = torch.tensor(lens, dtype=torch.int32)
            side.kept[1].copy_(lens)
            graph.replay()
            torch.cuda.synchronize()
            captured = out.clone()
            eager = Side.attend(side, batch, q)[0]
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(captured, eager), self.seed)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
