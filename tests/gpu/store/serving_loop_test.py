# SPDX-License-Identifier: Apache-2.0
"""bench/serving on a GPU: a tiny model generates in a captured graph as it does eagerly and over dense keys and values, also when the pool is
full. `serving_loop_test.py PACKAGE cpu` runs all but the graphs on the CPU."""
import os
import pathlib
import sys
import unittest

sys.path.insert(0, sys.argv.pop(1))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "bench" / "serving"))
DEVICE = sys.argv.pop(1) if sys.argv[1:2] == ["cpu"] else "cuda"
try:
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise ImportError("no GPU")
except ImportError as e:
    print(f"skipped: needs PyTorch and a GPU: {e}")
    sys.exit(77)
import budget  # noqa: E402
import rotation  # noqa: E402
from llama import DenseCache, Llama, StoreCache  # noqa: E402
from scheduler import Clock, Scheduler, serve  # noqa: E402
from tierkv.errors import OutOfPagesError  # noqa: E402
from traces import Lengths, poisson_trace  # noqa: E402

SEED = int.from_bytes(os.urandom(4), "little")
SHAPE, MOST, STEPS = budget.TINY, 1024, 40
# Near tokens turn by the order of sums, and then the rest of a sequence differs.
COMMON = 0.7


class ServingLoop(unittest.TestCase):
    def setUp(self):
        self.stream = None
        if DEVICE == "cuda":
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)
        torch.manual_seed(SEED)
        self.model = Llama(SHAPE, DEVICE, MOST, seed=SEED % 1000)

    def tokens(self, cache, prompts, captured, by_batches=False):
        """[prompts, 1 + STEPS]. by_batches: the prompts lie in slots of random order, and steps are of a part of the slots."""
        if captured and DEVICE == "cuda":
            cache.prompt(0, prompts[0])  # a store of coded rows finds its codebooks
            cache.clear(0)
            cache.capture()
            if by_batches:
                cache.capture_batches()
            for slot in range(cache.slots):
                cache.clear(slot)
        slots = list(range(len(prompts)))
        if by_batches:
            slots = torch.randperm(cache.slots)[:len(prompts)].tolist()
        found = [[cache.prompt(slot, p) for slot, p in zip(slots, prompts)]]
        found += [cache.step(slots) for _ in range(STEPS)]
        if DEVICE == "cuda":
            cache.store.take_status()
        cache.close()
        return list(zip(*found))

    def store_cache(self, format, slots, memory_bytes=0):
        """0: what the slots need."""
        return StoreCache(self.model, budget.store_config(SHAPE, format, slots, MOST, memory_bytes), self.stream)

    def common(self, a, b):
        same = 0
        for p, q in zip(a, b):
            same += next((i for i, (s, t) in enumerate(zip(p, q)) if s != t), len(p))
        return same / sum(map(len, a))

    def prompts(self, lengths):
        return [torch.randint(0, SHAPE.vocabulary, (n,)).tolist() for n in lengths]

    def test_graphs_generate_what_eager_steps_do(self):
        prompts = self.prompts((400, 37, 290))
        with torch.no_grad():
            for format in ("raw", "small", "fast", "k4v2", "channel"):
                eager = self.tokens(self.store_cache(format, 4), prompts, False)
                graph = self.tokens(self.store_cache(format, 4), prompts, True)
                batches = self.tokens(self.store_cache(format, 11), prompts, True, by_batches=True)
                common = [self.common(eager, graph), self.common(eager, batches)]
                print(f"{format}: {common[0]:.3f} and {common[1]:.3f} of the tokens alike")
                self.assertGreaterEqual(min(common), COMMON, f"{format}, seed {SEED}")

    def test_raw_pages_generate_what_dense_caches_do(self):
        prompt = self.prompts((300,))[0]
        with torch.no_grad():
            stored = self.tokens(self.store_cache("raw", 1), [prompt], True)
            dense = DenseCache(self.model, 1, len(prompt), len(prompt), self.stream)
            kv = []

            def attend(layer, q, k, v):
                from llama import causal

                kv.append((k[0], v[0]))
                return causal(q, k, v)
            logits = self.model.forward(torch.tensor([prompt], device=DEVICE), torch.arange(len(prompt), device=DEVICE)[None], attend)
            dense.fill(*(torch.stack(x) for x in zip(*kv)), len(prompt))
            dense.tokens.copy_(logits.argmax(-1))
            found = [int(dense.tokens[0])]
            for token in stored[0][:STEPS]:
                dense.tokens.fill_(token)  # which may differ where two are nearly as likely
                # Room for one token more: a dense cache reads all of its positions.
                for name in ("keys", "values"):
                    x = getattr(dense, name)
                    setattr(dense, name, torch.cat((x, x[:, :, :, :1]), 3))
                dense.run()
                found.append(int(dense.tokens[0]))
        alike = sum(s == t for s, t in zip(stored[0], found)) / len(found)
        self.assertGreaterEqual(alike, COMMON, f"seed {SEED}")

    def test_sequences_move_through_memory_of_the_caller(self):
        prompt = self.prompts((400,))[0]
        with torch.no_grad():
            for format in ("raw", "small", "fast", "channel"):
                cache = self.store_cache(format, 2)
                cache.prompt(0, prompt)
                store = cache.store
                data = store.export_sequence(cache.ids[0])
                room = torch.full((len(data) + 16,), 0xa5, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
                self.assertEqual(store.export_sequence(cache.ids[0], out=room), len(data))
                self.assertEqual(bytes(room[:-16].numpy()), data, f"{format}, seed {SEED}")
                store.release(cache.ids[1])
                cache.ids[1] = store.import_sequence(room[:-16])
                self.assertEqual(store.export_sequence(cache.ids[1]), data, f"{format}, seed {SEED}")
                cache.close()

    def test_many_queries_and_their_probabilities(self):
        """Against attention over what decode_range() gives."""
        with torch.no_grad():
            for format in ("raw", "small", "fast", "channel"):
                cache = self.store_cache(format, 1)
                cache.prompt(0, self.prompts((400,))[0])
                store, count = cache.store, 23
                c = store.config
                q = torch.randn(1, count, c.num_q_heads, c.head_dim, device=DEVICE).to(torch.bfloat16 if c.dtype == "bfloat16" else torch.float16)
                seen = store.attend([cache.ids[0]], 1, q, probabilities=True)
                k, v = (torch.as_tensor(x, device=DEVICE).float() for x in store.decode_range(cache.ids[0], 1, 0, 400, dtype="float16"))
                logits = torch.einsum("qhgd,thd->qhgt", torch.as_tensor(q, device=DEVICE)[0].float().unflatten(1, (c.num_kv_heads, -1)), k)
                logits = logits * c.head_dim**-0.5 + torch.full((count, 400), -torch.inf, device=DEVICE).triu(401 - count)[:, None, None]
                p = logits.softmax(-1)
                out = torch.einsum("qhgt,thd->qhgd", p, v).flatten(1, 2)
                for name, got, want in (("out", seen.out, out), ("lse", seen.lse, logits.logsumexp(-1).flatten(1)),
                                        ("probabilities", seen.probabilities, p.amax(2))):
                    got = torch.as_tensor(got, device=DEVICE).float().reshape(want.shape)
                    self.assertLess(float((got - want).abs().max()), 0.02 * float(want.abs().max()), f"{name} of {format}, seed {SEED}")
                cache.close()

    def test_a_full_pool_preempts(self):
        slots, time = 8, [0.0]
        requests = poisson_trace(0, 12, SEED, Lengths(300, spread=0.1, most=400), Lengths(120, spread=0), SHAPE.vocabulary)
        with torch.no_grad():
            probe = self.store_cache("raw", slots)
            usage = probe.store.usage()
            beside = probe.store.config.memory_bytes - usage.pages * usage.page_bytes
            probe.close()
            # Pages for 2000 tokens, where eight requests end with 2800 behind their windows.
            cache = self.store_cache("raw", slots, beside + 2000 * SHAPE.raw_token_bytes)
            if DEVICE == "cuda":
                cache.capture()
                for slot in range(slots):
                    cache.clear(slot)
            cache.room = budget.Room(cache.store, SHAPE).tokens

            def now():
                time[0] += 1e-3
                return time[0]
            served = serve(requests, Scheduler(cache, slots, 0, OutOfPagesError), Clock(now, lambda t: None))
            if DEVICE == "cuda":
                cache.store.take_status()
            print(f"{served.preemptions} preemptions, {served.refused_prompts} prompts refused")
            self.assertGreater(served.preemptions, 0, f"seed {SEED}")
            self.assertTrue(all(r.is_done for r in requests))
            for slot in range(slots):
                cache.clear(slot)
            usage = cache.store.usage()
            self.assertEqual(usage.pages_free, usage.pages)
            cache.close()

    @unittest.skipIf(DEVICE == "cpu" or rotation.triton is None, "needs Triton and a GPU")
    def test_the_rotation(self):
        qkv = torch.randn(3, 5, 8, 64, device=DEVICE, dtype=torch.bfloat16)
        positions = torch.randint(0, MOST, (3, 5), device=DEVICE)
        got = rotation.rotate_and_split(qkv, positions, self.model.cos, self.model.sin, 4, 2)
        want = rotation.reference(qkv, positions, self.model.cos, self.model.sin, 4, 2)
        for x, y in zip(got, want):
            # An ulp of bfloat16: a product is fused or not.
            self.assertTrue(torch.allclose(x.float(), y.float(), rtol=2**-7, atol=2**-7), f"seed {SEED}")


if __name__ == "__main__":
    unittest.main()
