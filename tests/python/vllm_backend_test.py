# SPDX-License-Identifier: Apache-2.0
"""The vLLM backend against vLLM's own classes, on a GPU or else on the host: steps of a small engine, with FlashAttention written out
in torch."""
import random
import sys
import types
import unittest

try:
    import torch
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import TQFullAttentionSpec, UniformTypeKVCacheSpecs
except ImportError as e:
    print(f"skipped: needs torch and vLLM 0.26: {e}")
    sys.exit(77)

sys.path.insert(0, sys.argv.pop(1))
from tierkv.vllm import backend  # noqa: E402
from tierkv.vllm.settings import FORMATS, slot_bytes  # noqa: E402

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# Errors of outputs over their norm: rounding to bf16; codes of 8 and 4, 4 and 4, 4 and 2 bits.
BOUNDS = {"raw": 0.02, "k8v4": 0.2, "k4v4": 0.3, "k4v2": 0.6}


class TorchImpl(backend.TierkvImpl):
    def attend_raw(self, q, k, v, out, cu, longest, causal):
        lse = torch.empty(self.num_heads, q.shape[0], device=q.device)
        for s in range(cu[0].numel() - 1):
            (a, b), (c, d) = cu[0][s:s + 2].tolist(), cu[1][s:s + 2].tolist()
            assert b - a <= longest[0] and d - c <= longest[1]
            o, part = exact(q[a:b], k[c:d], v[c:d], self.scale, causal)
            out[a:b], lse[:, a:b] = o.to(out.dtype), part.T
        return lse

    def join(self, out, part, part_lse, lse, joined):
        joined.copy_(torch.logaddexp(part_lse, lse))
        a, b = ((x - joined).exp().T[..., None] for x in (part_lse, lse))
        out.copy_((a * part.float() + b * out.float()).to(out.dtype))


def exact(q, k, v, scale, causal):
    """Outputs [tokens, heads, channels] and lse [tokens, heads]; the queries are the newest tokens where causal."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        keys, queries = (torch.arange(x.shape[0], device=q.device) for x in (k, q))
        behind = keys[None] > queries[:, None] + k.shape[0] - q.shape[0]
        logits = logits.masked_fill(behind, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v), logits.logsumexp(-1).T


def config_of(**changes):
    N = types.SimpleNamespace
    c = dict(block_size=64, drafts=0, additional={}, layers=2, max_num_seqs=8, dtype=torch.bfloat16)
    c.update(changes)
    return N(cache_config=N(block_size=c["block_size"]), additional_config=c["additional"],
             parallel_config=N(decode_context_parallel_size=1, prefill_context_parallel_size=1),
             speculative_config=N(num_speculative_tokens=c["drafts"], parallel_drafting=False) if c["drafts"] else None,
             scheduler_config=N(max_num_seqs=c["max_num_seqs"], max_num_batched_tokens=2048),
             model_config=N(dtype=c["dtype"], max_model_len=2048, hf_text_config=N(num_hidden_layers=c["layers"])),
             compilation_config=N(static_forward_context={}, max_cudagraph_capture_size=16), device_config=N(device=DEVICE))


def layer_of(config, index, heads=4, kv_heads=2, dim=64):
    torch.set_default_dtype(config.model_config.dtype)
    try:
        impl = TorchImpl(heads, dim, dim**-0.5, kv_heads)
    finally:
        torch.set_default_dtype(torch.float32)
    layer = types.SimpleNamespace(attn_backend=backend.TierkvBackend, num_heads=heads, num_kv_heads=kv_heads, head_size=dim, impl=impl,
                                  layer_name=f"model.layers.{index}.self_attn.attn")
    config.compilation_config.static_forward_context[layer.layer_name] = layer
    return layer


class World:
    """One layer, a pool of blocks and requests whose keys and values are known."""

    def __init__(self, rng, format, drafts=0, dim=64, blocks=60, **settings):
        self.rng, self.dim = rng, dim
        self.config = config_of(drafts=drafts, additional={"tierkv": {"format": format, "slice_tokens": 100, **settings}})
        self.layer = layer_of(self.config, 1, dim=dim)
        self.spec = backend.get_kv_cache_spec(self.layer, self.config)
        shape = self.layer.attn_backend.get_kv_cache_shape(blocks, 64, 2, dim)
        raw = torch.full((self.spec.page_size_bytes * blocks + 128,), 0xff, dtype=torch.uint8, device=DEVICE)
        offset = -raw.data_ptr() % 128
        self.layer.kv_cache = raw[offset:offset + self.spec.page_size_bytes * blocks].view(shape)
        self.builder = self.layer.attn_backend.get_builder_cls()(self.spec, [self.layer.layer_name], self.config, DEVICE)
        self.free = list(range(blocks))
        rng.shuffle(self.free)
        self.requests = []

    def normal(self, *shape):
        return torch.randn(*shape).to(DEVICE, torch.bfloat16)

    def add(self, prompt):
        means = 2 * self.mean if hasattr(self, "mean") else 0
        self.requests.append(types.SimpleNamespace(k=self.normal(0, 2, self.dim), v=self.normal(0, 2, self.dim), blocks=[], computed=0,
                                                   prompt=prompt, means=means))

    def step(self, query_lens, refuse=None, pad=0):
        """Runs the queries of each request, in the order of vLLM's reordered batch; returns outputs, exact ones and classes."""
        order = sorted(range(len(self.requests)), key=lambda i: (query_lens[i] > self.builder.decode_queries or not self.requests[i].computed,
                                                                 not self.requests[i].computed))
        order = [i for i in order if query_lens[i]]
        table = torch.full((len(order) + pad, 33), 0, dtype=torch.int32)
        slots, starts, lens, k, v = [], [0], [], [], []
        for row, i in enumerate(order):
            r, n = self.requests[i], query_lens[i]
            r.k = torch.cat([r.k[:r.computed], self.normal(n, 2, self.dim) + r.means])
            r.v = torch.cat([r.v[:r.computed], self.normal(n, 2, self.dim)])
            while len(r.blocks) * 64 < r.computed + n:
                r.blocks.append(self.free.pop())
            table[row, :len(r.blocks)] = torch.tensor(r.blocks, dtype=torch.int32)
            slots += [r.blocks[t // 64] * 64 + t % 64 for t in range(r.computed, r.computed + n)]
            starts.append(starts[-1] + n)
            lens.append(r.computed + n)
            k.append(r.k[-n:])
            v.append(r.v[-n:])
        tokens = starts[-1]
        padding = 3
        key, value = (torch.cat([*x, self.normal(padding, 2, self.dim)]) for x in (k, v))
        query = self.normal(tokens + padding, 4, self.dim)
        starts += [tokens] * pad
        lens += [0] * pad
        qsl, seq_lens = torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        slot_mapping = torch.tensor(slots + [-1] * padding, device=DEVICE)
        cam = CommonAttentionMetadata(
            query_start_loc=qsl.to(DEVICE), query_start_loc_cpu=qsl, seq_lens=seq_lens.to(DEVICE), seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(lens), num_actual_tokens=tokens, max_query_len=max(query_lens), max_seq_len=max(lens),
            block_table_tensor=table.to(DEVICE), slot_mapping=slot_mapping)
        metadata = self.builder.build(0, cam)
        output = torch.full((tokens + padding, 4 * self.dim), 7.0, dtype=torch.bfloat16, device=DEVICE)
        self.layer.impl.do_kv_cache_update(self.layer, key, value, self.layer.kv_cache, cam.slot_mapping)
        self.layer.impl.forward(self.layer, query, key, value, self.layer.kv_cache, metadata, output.view(-1, 4, self.dim))
        assert (output[tokens:] == 7).all()
        found = []
        for row, i in enumerate(order):
            r = self.requests[i]
            a, b = starts[row:row + 2]
            right, _ = exact(query[a:b], r.k, r.v, self.dim**-0.5, True)
            kind = "direct" if b - a <= 8 and (r.computed or b - a == 1) else "prefix" if r.computed else "fresh"
            found.append((kind, output[a:b].view(b - a, 4, self.dim).float(), right))
            r.computed += b - a - min((refuse or {}).get(i, 0), b - a - 1)
        assert metadata.errors.tolist() == [0, 0, 0, 0]
        return metadata, found


def error(found, kind=None):
    pairs = [(x, y) for k, x, y in found if kind in (None, k)]
    return (sum(((x - y)**2).sum() for x, y in pairs) / sum((y**2).sum() for _, y in pairs)).sqrt().item()


class Steps(unittest.TestCase):
    def setUp(self):
        self.seed = random.SystemRandom().randrange(2**32)
        self.rng = random.Random(self.seed)
        torch.manual_seed(self.seed)

    def test_mixed_batches(self):
        """Prompts in chunks, prefixes behind decodes with longer contexts, tails, decodes."""
        for format in FORMATS:
            for dim in (64, 128):
                w = World(self.rng, format, dim=dim)
                w.add(300)
                w.add(200)
                found = w.step([250, 90])[1]
                self.assertLess(error(found), 0.01, self.seed)
                w.add(150)
                metadata, mixed = w.step([1, 60, 150])
                self.assertEqual((len(metadata.direct), len(metadata.chunks)), (1, 1))
                self.assertLess(error(mixed, "fresh"), 0.01, f"fresh prompts attend to raw keys; seed {self.seed}")
                self.assertGreater(sum(len(c.rounds) for c in metadata.chunks), 0)
                metadata, more = w.step([1, 6, 120])
                self.assertEqual(len(metadata.direct), 2)
                for kind in ("direct", "prefix"):
                    self.assertLess(error(found + mixed + more, kind), BOUNDS[format], f"{format} {kind} seed {self.seed}")

    def test_uniform_batches_of_drafts(self):
        """Refused drafts are written over; rows of padding are nobody's."""
        w = World(self.rng, "raw", drafts=3)
        for prompt in (70, 10, 130):
            w.add(prompt)
        w.step([70, 10, 130])
        found = []
        for _ in range(12):
            metadata, step = w.step([4, 4, 4], refuse={i: self.rng.randrange(4) for i in range(3)}, pad=self.rng.randrange(3))
            self.assertEqual((len(metadata.direct), metadata.chunks, metadata.direct[0].batch.queries), (1, [], 4))
            found += step
        self.assertLess(error(found), BOUNDS["raw"], self.seed)

    def test_any_steps(self):
        for _ in range(4):
            format, drafts = self.rng.choice(list(FORMATS)), self.rng.choice([0, 0, 2, 7])
            w = World(self.rng, format, drafts=drafts)
            found = []
            for _ in range(10):
                if len(w.requests) < 5 and self.rng.random() < 0.6:
                    w.add(0)
                if not w.requests:
                    continue
                lens = [self.rng.choice([0, 1, 1, 1 + drafts, 5, 8, 9, 70, 130]) if r.computed < 500 else 1 for r in w.requests]
                if any(lens):
                    found += w.step(lens, refuse={i: self.rng.randrange(3) for i in range(len(lens)) if lens[i] == 1 + drafts})[1]
            self.assertLess(error(found), BOUNDS[format], f"{format} {drafts} drafts, seed {self.seed}")

    def test_key_means(self):
        """Keys far from zero: without a reflection by their means the codes are coarse."""
        errors = {}
        means = 6 * torch.randn(2, 2, 64)
        before, backend.key_means = backend.key_means, lambda path: means.numpy()
        import vllm.distributed as d
        ranks = d.get_tensor_model_parallel_rank, d.get_tensor_model_parallel_world_size
        d.get_tensor_model_parallel_rank, d.get_tensor_model_parallel_world_size = lambda: 0, lambda: 1
        try:
            for settings in ({}, {"profile": "p"}):
                w = World(self.rng, "k4v4", rotate=False, **settings)
                w.mean = means[1].to(DEVICE, torch.bfloat16) / 2
                w.add(200)
                w.step([200])
                errors[bool(settings)] = error([x for _ in range(5) for x in w.step([1])[1]] + w.step([30])[1])
            config = config_of(layers=3, additional={"tierkv": {"profile": "p"}})
            with self.assertRaisesRegex(ValueError, "2 layers of 64 channels for a model with 3"):
                backend.get_kv_cache_spec(layer_of(config, 0), config)
        finally:
            backend.key_means = before
            d.get_tensor_model_parallel_rank, d.get_tensor_model_parallel_world_size = ranks
        self.assertLess(errors[True], 0.35, self.seed)
        self.assertGreater(errors[False], 1.3 * errors[True], self.seed)


class Specs(unittest.TestCase):
    def test_each_layer_has_its_format(self):
        config = config_of(additional={"tierkv": {"format": "k4v2", "layers": {"0": "k8v4"}}})
        layers = [layer_of(config, i, dim=128) for i in range(2)]
        specs = {x.layer_name: backend.get_kv_cache_spec(x, config) for x in layers}
        for layer, format in zip(layers, ("k8v4", "k4v2")):
            spec = specs[layer.layer_name]
            self.assertIsInstance(spec, TQFullAttentionSpec)
            self.assertEqual(spec.page_size_bytes, 2 * 64 * slot_bytes(format, 128))
            shape = layer.attn_backend.get_kv_cache_shape(10, 64, 2, 128)
            self.assertEqual(torch.Size(shape).numel(), 10 * spec.page_size_bytes)
            self.assertEqual(layer.attn_backend.get_kv_cache_block_dim(64, 2, 128), 0)
            self.assertEqual(layer.attn_backend.get_builder_cls().format, format)
            self.assertEqual(layer.attn_backend.get_name(), "CUSTOM")
        self.assertNotEqual(layers[0].attn_backend.full_cls_name(), layers[1].attn_backend.full_cls_name())
        # vLLM puts both into one group, with a tensor of its own size for each.
        try:
            group = UniformTypeKVCacheSpecs.from_specs(specs)
        except ImportError as e:
            self.skipTest(f"part of vLLM is missing: {e}")
        self.assertEqual(group.page_size_bytes, 2 * 64 * (200 + 104))
        from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache
        for layer in layers:
            spec = specs[layer.layer_name]
            raw = torch.zeros(10 * spec.page_size_bytes, dtype=torch.int8)
            shape = layer.attn_backend.get_kv_cache_shape(10, 64, 2, 128)
            cache = _reshape_attention_kv_cache(raw, spec, shape, layer.attn_backend.get_kv_cache_stride_order(), 10, None)
            self.assertEqual((cache.data_ptr(), cache.stride(0), cache.dtype), (raw.data_ptr(), spec.page_size_bytes, torch.uint8))

    def test_the_class_says_what_it_supports(self):
        b = backend.TierkvBackend
        self.assertTrue(b.supports_head_size(96) and not b.supports_head_size(80))
        self.assertTrue(b.supports_block_size(64) and b.supports_block_size(128) and not b.supports_block_size(16))
        self.assertEqual(b.get_preferred_block_size(16), 64)
        self.assertTrue(b.indexes_kv_by_block_stride())
        self.assertFalse(b.supports_sliding_window() or b.supports_sink() or b.is_mla())
        self.assertEqual(b.get_builder_cls().get_cudagraph_support(None, None), AttentionCGSupport.UNIFORM_BATCH)
        hopper, turing = types.SimpleNamespace(major=9, minor=0), types.SimpleNamespace(major=7, minor=5)
        for head_dim, device, window, count in ((128, hopper, False, 0), (128, turing, False, 1), (80, hopper, True, 2)):
            reasons = b.validate_configuration(head_dim, torch.bfloat16, "auto", 64, False, False, False, False, False, device, "decoder",
                                               has_sliding_window=window)
            self.assertEqual(len(reasons), count, reasons)

    def test_layers_are_refused_when_they_are_made(self):
        torch.set_default_dtype(torch.bfloat16)
        try:
            backend.TierkvImpl(32, 128, 0.1, 8)
            for change, word in ((dict(sliding_window=4096), "4096"), (dict(logits_soft_cap=50.0), "50"), (dict(alibi_slopes=[1.0]), "ALiBi"),
                                 (dict(sinks=torch.zeros(1)), "sinks"), (dict(kv_sharing_target_layer_name="x"), "share"),
                                 (dict(kv_cache_dtype="fp8"), "fp8"), (dict(strange=1), "strange")):
                with self.assertRaisesRegex(ValueError, word):
                    backend.TierkvImpl(32, 128, 0.1, 8, **change)
            with self.assertRaisesRegex(ValueError, "head_dim 80"):
                backend.TierkvImpl(32, 80, 0.1, 8)
        finally:
            torch.set_default_dtype(torch.float32)

    def test_layers_of_other_classes_are_refused(self):
        """Their specs do not come from ours: chunked local attention, for one."""
        config = config_of()
        layer = layer_of(config, 0)
        with self.assertRaisesRegex(ValueError, "model.layers.0.*own kind"):
            backend.TierkvMetadataBuilder(None, [layer.layer_name], config, DEVICE)

    def test_other_backends_keep_their_specs(self):
        import importlib

        config, given = config_of(), object()
        from vllm.model_executor.layers.attention.attention import Attention
        original = Attention.get_kv_cache_spec.tierkv_wraps
        self.assertEqual(original.__module__, Attention.__module__)
        importlib.reload(backend)
        self.assertIs(Attention.get_kv_cache_spec.tierkv_wraps, original)
        before, backend._original_get_kv_cache_spec = backend._original_get_kv_cache_spec, lambda layer, config: given
        try:
            layer = types.SimpleNamespace(attn_backend=object)
            self.assertIs(Attention.get_kv_cache_spec(layer, config), given)
        finally:
            backend._original_get_kv_cache_spec = before

    def test_engines_are_refused_when_they_start(self):
        for change, word in ((dict(block_size=16), "block_size 16"), (dict(drafts=8), "8 draft"),
                             (dict(additional={"tierkv": {"layers": {"5": "raw"}}}), "layer 5"),
                             (dict(additional={"tierkv": {"formt": "raw"}}), "formt")):
            config = config_of(**change)
            with self.assertRaisesRegex(ValueError, word):
                backend.get_kv_cache_spec(layer_of(config, 0), config)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
