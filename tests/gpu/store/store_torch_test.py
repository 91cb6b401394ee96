"""tierkv.Store on a GPU with PyTorch's tensors: the states of the host store, byte for byte, also through a captured step.

  store_torch_test.py PACKAGE     (a build/python of a build with CUDA; exits 77 without PyTorch or a GPU)"""
import dataclasses
import os
import random
import sys
import tempfile
import unittest

sys.path.insert(0, sys.argv[1])
import tierkv  # noqa: E402
from tierkv import _device  # noqa: E402

try:
    import torch
except ImportError:
    sys.exit(77)
if not torch.cuda.is_available():
    sys.exit(77)

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, PROMPT, STEPS = 2, 8, 2, 128, 150, 12
TOLERANCE = 2e-3  # docs/internals/attention.md, "Error"
HERE = os.path.dirname(os.path.abspath(__file__))
SAMPLES = [p for p in (os.path.join(HERE, folder, "sample_1k.h5") for folder in (".", "../../datasets")) if os.path.exists(p)]


def config(**changes):
    fields = dict(num_layers=LAYERS, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_pages=200, max_sequences=4,
                  max_tokens=PROMPT + STEPS, policy=tierkv.TierPolicy(alpha_low=0.3, window_tokens=16))
    return tierkv.StoreConfig(**{**fields, **changes})


def relative_error(a, b):
    a, b = a.double().cpu(), torch.as_tensor(b).double()
    return ((a - b).norm() / b.norm()).item()


class StoreOnDevice(unittest.TestCase):
    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        torch.manual_seed(self.seed)
        self.stream = torch.cuda.Stream()
        previous = torch.cuda.current_stream()
        torch.cuda.set_stream(self.stream)
        self.addCleanup(torch.cuda.set_stream, previous)

    def tokens(self, count, dtype=torch.float16):
        scale = 2 ** (8 * torch.rand(2, count, KV_HEADS, 1) - 4)
        return (scale * torch.randn(2, count, KV_HEADS, HEAD_DIM)).to(dtype)

    def scores(self):
        n = PROMPT + STEPS
        return 2 ** (6 * torch.rand(2, KV_HEADS, n) - 4) / (n + 1)

    def stores(self, scored=True, **changes):
        """A host and a device store with two sequences each, in the same state past their prompts."""
        dtype = getattr(torch, changes.get("dtype", "float16"))
        host, device = tierkv.Store(config(**changes)), tierkv.Store.on_device(config(**changes), self.stream)
        self.addCleanup(host.close)
        self.addCleanup(device.close)
        self.assertTrue(device.is_on_device)
        ids = [[s.add_sequence(), s.add_sequence()] for s in (host, device)]
        for s, i in zip((host, device), ids):
            s.begin_prompt(i, PROMPT)
        for layer in range(LAYERS):
            k, v, x = self.tokens(PROMPT, dtype), self.tokens(PROMPT, dtype), self.scores()
            host.append(ids[0], layer, k, v)
            device.append(ids[1], layer, k.cuda(), v.cuda())
            if scored:
                host.score_prompt(ids[0], layer, x)
                device.score_prompt(ids[1], layer, x.cuda())
        for s, i in zip((host, device), ids):
            s.end_prompt(i)
        device.take_status()
        return host, device, ids[0], ids[1]

    def assert_same(self, host, device, host_ids, device_ids):
        for a, b in zip(host_ids, device_ids):
            self.assertEqual(host.num_tokens(a), device.num_tokens(b))
            self.assertTrue(host.export_sequence(a) == device.export_sequence(b), f"seed {self.seed}")
        self.assertEqual(host.stats(), device.stats())

    def test_prompts_and_transfers(self):
        for dtype in ("float16", "bfloat16", "float32"):
            host, device, host_ids, device_ids = self.stores(dtype=dtype)
            self.assert_same(host, device, host_ids, device_ids)
            host_ids.append(host.fork(host_ids[0]))
            device_ids.append(device.fork(device_ids[0]))
            host_ids.append(host.import_sequence(device.export_sequence(device_ids[1])))
            device_ids.append(device.import_sequence(host.export_sequence(host_ids[1])))
            host.truncate(host_ids[0], 100)
            device.truncate(device_ids[0], 100)
            self.assert_same(host, device, host_ids, device_ids)
            device.release(device_ids[0])
            self.assertRaises(tierkv.StaleSequenceError, device.num_tokens, device_ids[0])

    def test_a_captured_step(self):
        host, device, host_ids, device_ids = self.stores()
        k, v = ([torch.empty(2, 1, KV_HEADS, HEAD_DIM, dtype=torch.float16, device="cuda") for _ in range(LAYERS)] for _ in range(2))
        q = torch.empty(2, Q_HEADS, HEAD_DIM, dtype=torch.float16, device="cuda")
        # Given scores: what attention sees differs in its last bits between host and device.
        seen = torch.empty(2, KV_HEADS, PROMPT + STEPS, device="cuda")
        into = [tierkv.Attention(torch.empty_like(q), torch.empty(2, Q_HEADS, device="cuda"), torch.zeros_like(seen))
                for _ in range(LAYERS)]

        def fill():
            for x in (*k, *v):
                x.copy_(self.tokens(1))
            q.normal_()
            seen.copy_(self.scores())
            for x in into:
                x.out.fill_(float("nan"))

        def step(store, ids, arrays):
            keys, vals, queries, scores, results = arrays
            store.begin_step(ids)
            for layer in range(LAYERS):
                store.append(ids, layer, keys[layer], vals[layer])
                results[layer] = store.attend(ids, layer, queries, probabilities=True, into=results[layer])
                store.update_scores(ids, layer, scores)

        def step_on_host():
            results = [None] * LAYERS
            step(host, host_ids, ([x.cpu() for x in k], [x.cpu() for x in v], q.cpu(), seen.cpu(), results))
            for layer in range(LAYERS):
                self.assertLess(relative_error(into[layer].out, results[layer].out), TOLERANCE, f"seed {self.seed}")
                self.assertLess(relative_error(into[layer].lse, results[layer].lse), 1e-3)
                n = results[layer].probabilities.shape[2]
                self.assertLess(relative_error(into[layer].probabilities[..., :n], results[layer].probabilities), TOLERANCE)

        fill()
        step(device, device_ids, (k, v, q, seen, into))  # loads the kernels
        step_on_host()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step(device, device_ids, (k, v, q, seen, into))
        for replay in range(STEPS - 1):
            fill()
            graph.replay()
            if replay > 0:
                device.note_replay(device_ids)
            step_on_host()
        device.take_status()
        self.assert_same(host, device, host_ids, device_ids)
        self.assertRaises(tierkv.OutOfRangeError, device.note_replay, device_ids)

    def test_counted_queries_in_a_graph(self):
        """Counting is attend()'s own, and what it makes of scores is the C++ tests' affair: here it must run, captured too, change the
        state, and change no result by more than rounding: kernels that leave scores add them in another order."""
        _, device, _, ids = self.stores()
        forks = [device.fork(id) for id in ids]
        k, v = ([torch.randn(2, 1, KV_HEADS, HEAD_DIM, device="cuda").half() for _ in range(LAYERS)] for _ in range(2))
        q = torch.randn(2, Q_HEADS, HEAD_DIM, device="cuda").half()
        counted, plain = (tierkv.Attention(torch.empty_like(q), torch.empty(2, Q_HEADS, device="cuda")) for _ in range(2))

        def step(sequences, into, count_query):
            device.begin_step(sequences)
            for layer in range(LAYERS):
                device.append(sequences, layer, k[layer], v[layer])
                device.attend(sequences, layer, q, into=into, count_query=count_query)

        step(ids, counted, True)
        step(forks, plain, False)
        self.assertLess(relative_error(counted.out, plain.out.cpu()), TOLERANCE, f"seed {self.seed}")
        # Sums of 150 fp32 exponentials, of scores that are sums of 128 products: some 2^-24 of each.
        self.assertLess(relative_error(counted.lse, plain.lse.cpu()), 1e-5, f"seed {self.seed}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step(ids, counted, True)
        graph.replay()
        step(forks, plain, False)
        device.take_status()
        self.assertTrue(all(device.num_tokens(id) == PROMPT + 2 for id in ids + forks))
        self.assertNotEqual(device.export_sequence(ids[0]), device.export_sequence(forks[0]))

    def test_bfloat16_queries(self):
        host, device, host_ids, device_ids = self.stores(dtype="bfloat16")
        q = torch.randn(2, Q_HEADS, HEAD_DIM).bfloat16()
        ours = device.attend(device_ids, 0, q.cuda())
        self.assertEqual(ours.out.dtype, torch.bfloat16)
        theirs = host.attend(host_ids, 0, q.half())
        # Outputs are rounded to 8 bits.
        self.assertLess(relative_error(ours.out, theirs.out), 2**-8, f"seed {self.seed}")
        self.assertLess(relative_error(ours.lse, theirs.lse), 1e-3)
        with self.assertRaisesRegex(TypeError, "into"):
            host.attend(host_ids, 0, q)

    def test_coded_pages(self):
        steps = torch.full((LAYERS, KV_HEADS), 0.5)
        coded = tierkv.CodedConfig(steps, steps)
        host, device, host_ids, device_ids = self.stores(scored=False, coded=coded, policy=tierkv.TierPolicy(window_tokens=16))
        self.assert_same(host, device, host_ids, device_ids)
        q = torch.randn(2, Q_HEADS, HEAD_DIM).half()
        ours, theirs = device.attend(device_ids, 1, q.cuda()), host.attend(host_ids, 1, q)
        self.assertLess(relative_error(ours.out, theirs.out), TOLERANCE, f"seed {self.seed}")
        self.assertLess(relative_error(ours.lse, theirs.lse), 1e-3)

    def test_bases(self):
        """At 16 bits, so that a coordinate that differs in its last bit changes no code."""
        raw = tierkv.TierFormat(16, 16)
        u = torch.randn(LAYERS, KV_HEADS, HEAD_DIM, 1)
        reflection = (torch.eye(HEAD_DIM) - 2 * u @ u.transpose(2, 3) / (u * u).sum(2, keepdim=True)).float()
        means = torch.randn(LAYERS, KV_HEADS, HEAD_DIM)
        host, device, host_ids, device_ids = self.stores(
            window_format=raw, high_format=raw, low_format=raw, key_basis=tierkv.Basis("hadamard", means),
            value_basis=tierkv.Basis("matrix", None, reflection, reflection))
        q = torch.randn(2, Q_HEADS, HEAD_DIM).half()
        ours, theirs = device.attend(device_ids, 1, q.cuda()), host.attend(host_ids, 1, q)
        self.assertLess(relative_error(ours.out, theirs.out), TOLERANCE, f"seed {self.seed}")
        self.assertLess(relative_error(ours.lse, theirs.lse), 1e-3)

    @unittest.skipUnless(SAMPLES, "needs sample_1k.h5")
    def test_bases_of_a_profile_file(self):
        """A dump, its profile on disk, a store in the profile's basis: what one who calibrates a model does."""
        def basis(component, kind):
            whole = component.basis(kind)
            return dataclasses.replace(whole, **{field: getattr(whole, field)[:LAYERS] for field in ("means", "forward", "inverse")
                                                 if getattr(whole, field) is not None})

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "profile.h5")
            tierkv.calibrate(SAMPLES[0], path, matrix_basis=True, thresholds=False)
            profile = tierkv.read_profile(path)
        self.assertEqual((profile.num_kv_heads, profile.head_dim), (KV_HEADS, HEAD_DIM))
        raw = tierkv.TierFormat(16, 16)
        q = torch.randn(2, Q_HEADS, HEAD_DIM).half()
        for kind, formats in (("mean", {}), ("hadamard", {}), ("matrix", dict(window_format=raw, high_format=raw, low_format=raw))):
            with self.subTest(kind):
                host, device, host_ids, device_ids = self.stores(
                    key_basis=basis(profile.key, kind), value_basis=basis(profile.value, kind), **formats)
                if kind != "matrix":  # products of tensor cores are within a bound of the host's, the other maps are the host's bits
                    self.assert_same(host, device, host_ids, device_ids)
                for layer in range(LAYERS):
                    ours, theirs = device.attend(device_ids, layer, q.cuda()), host.attend(host_ids, layer, q)
                    self.assertLess(relative_error(ours.out, theirs.out), TOLERANCE, f"seed {self.seed}")
                    self.assertLess(relative_error(ours.lse, theirs.lse), 1e-3)

    def test_results_are_made_beside_q(self):
        _, device, _, ids = self.stores()
        q = torch.randn(2, Q_HEADS, HEAD_DIM, device="cuda").half()
        seen = device.attend(ids, 1, q, probabilities=True)
        again = device.attend(ids, 1, q)
        self.assertEqual((seen.out.shape, seen.out.dtype, seen.out.device), (q.shape, torch.float16, q.device))
        self.assertEqual((seen.lse.shape, seen.lse.dtype), ((2, Q_HEADS), torch.float32))
        self.assertEqual(seen.probabilities.shape, (2, KV_HEADS, PROMPT))
        self.assertTrue(torch.equal(seen.out, again.out))
        self.assertIsNone(again.probabilities)

    def test_other_streams_are_waited_for(self):
        host, device, host_ids, device_ids = self.stores()
        k, v = self.tokens(1), self.tokens(1)
        late, values = torch.zeros_like(k, device="cuda"), v.cuda()
        torch.cuda.synchronize()
        host.begin_step(host_ids)
        device.begin_step(device_ids)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            late.copy_(k)
            for layer in range(LAYERS):
                device.append(device_ids, layer, late, values)
        for layer in range(LAYERS):
            host.append(host_ids, layer, k, v)
        device.take_status()
        self.assert_same(host, device, host_ids, device_ids)

    def test_tensors_are_taken_where_they_are(self):
        for dtype in ("float16", "bfloat16", "float32"):
            x = torch.randn(3, 5, device="cuda").to(getattr(torch, dtype))
            self.assertEqual(_device.device_array(x, "x", (dtype,), (3, 5), self.stream.cuda_stream).address, x.data_ptr())

    def test_what_is_refused(self):
        _, device, _, ids = self.stores()
        device.begin_step(ids)
        x = self.tokens(1)
        good, wide = x.cuda(), torch.cat((x, x), -1).cuda()
        for bad, error, words in ((x, TypeError, "not in GPU memory"), (x.numpy(), TypeError, "not in GPU memory"),
                                  (wide[..., :HEAD_DIM], ValueError, "contiguous"), (good.float(), TypeError, "dtype"),
                                  (good.requires_grad_(), TypeError, "gradient"), (good.detach()[:1], ValueError, "shape")):
            with self.assertRaises(error) as caught:
                device.append(ids, 0, bad, x.cuda())
            self.assertIn(words, str(caught.exception))
        device.append(ids, 0, torch.full_like(x, float("inf"), device="cuda"), x.cuda())
        with self.assertRaisesRegex(tierkv.NonFiniteError, "append"):
            device.take_status()
        device.append(ids, 0, x.cuda(), x.cuda())
        device.take_status()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
