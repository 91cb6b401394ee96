# SPDX-License-Identifier: Apache-2.0
"""The vLLM backend against vLLM's own classes, on a GPU or else on the host: a small engine's way from the layers' specs to their caches,
and its steps, with FlashAttention written out in torch."""
import ast
import contextlib
import gc
import importlib
import pathlib
import random
import sys
import types
import unittest
from unittest import mock

try:
    import torch
    import vllm
    from vllm import forward_context
    from vllm.model_executor.layers.attention import attention
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.gpu import attn_utils
except ImportError as e:
    print(f"skipped: needs torch and vLLM: {e}")
    sys.exit(77)
try:
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")  # of 0.33
except ImportError:
    planning = importlib.import_module("vllm.v1.core.kv_cache_utils")

sys.path.insert(0, sys.argv.pop(1))
import tierkv.vllm  # noqa: E402
from tierkv.vllm import backend  # noqa: E402
from tierkv.vllm.faults import STEPS  # noqa: E402
from tierkv.vllm.settings import FORMATS, slot_bytes  # noqa: E402

NEW = backend.BYTES_FIELD == "state_content_bytes"  # vLLM 0.33
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
    c = dict(block_size=64, drafts=0, additional={}, layers=2, max_num_seqs=8, dtype=torch.bfloat16, parallel_drafting=False)
    c.update(changes)
    cache = N(block_size=c["block_size"], num_gpu_blocks_override=None, prefix_cache_retention_interval=None, kv_sharing_fast_prefill=False,
              get_resolved_kv_cache_layout=lambda: backend.TierkvBackend.supported_kv_cache_layouts()[0])
    drafts = N(num_speculative_tokens=c["drafts"], parallel_drafting=c["parallel_drafting"]) if c["drafts"] else None
    return N(cache_config=cache, additional_config=c["additional"], speculative_config=drafts, use_v2_model_runner=True,
             parallel_config=N(decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False),
             scheduler_config=N(max_num_seqs=c["max_num_seqs"], max_num_batched_tokens=2048, disable_hybrid_kv_cache_manager=False),
             model_config=N(dtype=c["dtype"], max_model_len=2048, hf_config=N(model_type="llama"), is_mm_prefix_lm=False,
                            hf_text_config=N(num_hidden_layers=c["layers"])),
             compilation_config=N(static_forward_context={}, max_cudagraph_capture_size=16), device_config=N(device=DEVICE),
             attention_config=N(hisparse_config=None), kv_transfer_config=None)


def layer_of(config, index, heads=4, kv_heads=2, dim=64):
    name = f"model.layers.{index}.self_attn.attn"
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with mock.patch.object(attention, "get_current_vllm_config", lambda: config), mock.patch.object(backend, "TierkvImpl", TorchImpl):
            return attention.Attention(heads, dim, dim**-0.5, kv_heads, prefix=name, attn_backend=backend.TierkvBackend).to(DEVICE)
    finally:
        torch.set_default_dtype(torch.float32)


def aligned_ones(size, dtype, device):
    raw = torch.full((size + 128,), 0xff, dtype=torch.uint8, device=device)
    return raw[-raw.data_ptr() % 128:][:size].view(dtype)


def start(config, blocks):
    """What vLLM's worker does with the layers before the first step; specs, groups of layers, support of graphs."""
    layers = config.compilation_config.static_forward_context
    with mock.patch.object(attn_utils, "set_current_vllm_config", lambda config: contextlib.nullcontext(), create=True):
        specs = attn_utils.get_kv_cache_spec(config)
    memory = blocks * sum(spec.page_size_bytes for spec in specs.values())
    caches = planning.get_kv_cache_config_from_groups(config, planning.get_kv_cache_groups(config, specs), memory)
    groups, support, block_sizes = attn_utils.init_attn_backend(caches, config, DEVICE)
    flat = [group for of_table in groups for group in of_table]
    with mock.patch.object(torch, "zeros", aligned_ones):
        if NEW:
            attn_utils.init_kv_cache(layers, caches, DEVICE, block_sizes, config, attn_groups=flat)
        else:
            attn_utils.init_kv_cache([], layers, caches, groups, DEVICE, "auto", block_sizes, config)
    return specs, flat, support


class World:
    """Two layers, of which the second is used, a pool of blocks and requests whose keys and values are known."""

    def __init__(self, rng, format, drafts=0, dim=64, blocks=60, block_size=64, **settings):
        self.rng, self.dim = rng, dim
        additional = {"format": format, "layers": {"0": rng.choice(list(FORMATS))}, "slice_tokens": 100, **settings}
        self.config = config_of(drafts=drafts, additional={"tierkv": additional}, block_size=block_size)
        self.other, self.layer = (layer_of(self.config, i, dim=dim) for i in range(2))
        _, groups, _ = start(self.config, blocks)
        assert self.layer.kv_cache.shape == (blocks * block_size // 64, 2, 64, slot_bytes(format, dim)) and self.layer.kv_cache.is_contiguous()
        self.builder = next(g for g in groups if self.layer.layer_name in g.layer_names).get_metadata_builder(0)
        self.free = list(range(self.layer.kv_cache.shape[0]))
        rng.shuffle(self.free)
        self.requests = []
        self.faults = [0, 0, 0, 0]

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
        name = self.layer.layer_name
        with forward_context.override_forward_context(types.SimpleNamespace(
                attn_metadata={name: metadata}, slot_mapping={name: slot_mapping}, no_compile_layers={name: self.layer})):
            attention.unified_kv_cache_update(key, value, name)
            attention.unified_attention_with_output(query, key, value, output.view(-1, 4, self.dim), name)
        assert (output[tokens:] == 7).all() and (self.other.kv_cache == 255).all()
        found = []
        for row, i in enumerate(order):
            r = self.requests[i]
            a, b = starts[row:row + 2]
            right, _ = exact(query[a:b], r.k, r.v, self.dim**-0.5, True)
            kind = "direct" if b - a <= 8 and (r.computed or b - a == 1) else "prefix" if r.computed else "fresh"
            found.append((kind, output[a:b].view(b - a, 4, self.dim).float(), right))
            r.computed += b - a - min((refuse or {}).get(i, 0), b - a - 1)
        assert metadata.faults.counts.tolist() == self.faults
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
            w = World(self.rng, format, drafts=drafts, block_size=self.rng.choice([64, 128]))
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

    def test_faults_are_logged(self):
        """Once each, some steps late."""
        w = World(self.rng, "k4v4")
        w.add(70)
        w.step([70])
        with self.assertNoLogs("vllm.tierkv"):
            for _ in range(2 * STEPS):
                w.step([1])
        normal = w.normal
        w.normal = lambda *shape: normal(*shape).index_fill_(-1, torch.tensor([3], device=DEVICE), torch.nan)
        w.faults = [0, 2, 0, 0]  # a token of two heads
        w.step([1])
        w.normal = normal
        with self.assertLogs("vllm.tierkv", "ERROR") as logs:
            for _ in range(3 * STEPS):
                w.step([1])
        self.assertEqual([r.getMessage() for r in logs.records], ["tierkv: 2 keys or values that are not finite: their tokens count as zeros"])

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
        specs, groups, support = start(config, 10)
        for layer, format in zip(layers, ("k8v4", "k4v2")):
            spec = specs[layer.layer_name]
            self.assertIsInstance(spec, FullAttentionSpec)
            self.assertEqual(spec.page_size_bytes, 2 * 64 * slot_bytes(format, 128))
            self.assertEqual(layer.kv_cache.shape, (10, 2, 64, slot_bytes(format, 128)))
            self.assertEqual((layer.kv_cache.dtype, layer.kv_cache.stride(0)), (torch.uint8, spec.page_size_bytes))
            self.assertEqual(layer.attn_backend.get_builder_cls().format, format)
            self.assertEqual(layer.attn_backend.get_name(), "CUSTOM")
        self.assertNotEqual(layers[0].attn_backend.full_cls_name(), layers[1].attn_backend.full_cls_name())
        self.assertEqual([g.kv_cache_group_id for g in groups], [0, 0], "one block table for both")
        self.assertEqual(support.min_cg_support, AttentionCGSupport.UNIFORM_BATCH)

    def test_the_class_says_what_it_supports(self):
        b = backend.TierkvBackend
        self.assertTrue(b.supports_head_size(96) and not b.supports_head_size(80))
        self.assertTrue(b.supports_block_size(64) and b.supports_block_size(128) and not b.supports_block_size(16))
        self.assertEqual(b.get_preferred_block_size(16), 64)
        self.assertFalse(b.supports_sliding_window() or b.supports_sink() or b.is_mla())
        self.assertEqual(b.get_builder_cls().get_cudagraph_support(None, None), AttentionCGSupport.UNIFORM_BATCH)
        hopper, ada = types.SimpleNamespace(major=9, minor=0), types.SimpleNamespace(major=8, minor=9)
        for head_dim, device, window, count in ((128, hopper, False, 0), (128, ada, False, 1), (80, hopper, True, 2)):
            asked = AttentionSelectorConfig(head_dim, torch.bfloat16, "auto", 64, has_sliding_window=window)._asdict()
            reasons = b.validate_configuration(device_capability=device, **asked)
            self.assertEqual(len(reasons), count, reasons)
        asked.update(head_size=128, has_sliding_window=False)
        for feature in {"use_adaptive_verification", "use_dcp", "use_pcp"} & set(asked):
            self.assertEqual(len(b.validate_configuration(device_capability=hopper, **{**asked, feature: True})), 1, feature)

    def test_vllm_finds_the_class(self):
        tierkv.vllm.register()
        self.assertEqual(AttentionBackendEnum.CUSTOM.get_class().full_cls_name(), ("tierkv.vllm.backend", "TierkvBackend"))

    def test_a_vllm_of_other_modules_is_refused_by_name(self):
        with mock.patch.dict(sys.modules, {"vllm.v1.attention.backends.fa_utils": None}):
            with self.assertRaisesRegex(ValueError, f"0.26 and 0.33, this is vLLM {vllm.__version__}: .*fa_utils"):
                importlib.reload(backend)

    def test_calls_of_flash_attention_and_of_its_join(self):
        """They name arguments that vLLM's functions have."""
        from vllm.v1.attention.backends import fa_utils
        from vllm.v1.attention.ops import merge_attn_states as merge

        source = pathlib.Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"  # it may be without its libraries
        known = next(x.args for x in ast.parse(source.read_text()).body if getattr(x, "name", "") == "flash_attn_varlen_func")
        impl = backend.TierkvImpl.__new__(backend.TierkvImpl)
        impl.scale, impl.flash_version = 0.1, 3
        x, cu = torch.zeros(2, 4, 64), torch.tensor([0, 2])
        with mock.patch.object(fa_utils, "flash_attn_varlen_func", create=True, return_value=(x, x)) as flash:
            impl.attend_raw(x, x, x, x, (cu, cu), (2, 2), causal=True)
        self.assertEqual((flash.call_args.args, set(flash.call_args.kwargs) - {a.arg for a in known.args}), ((), set()))
        with mock.patch.object(merge, "merge_attn_states", autospec=True) as join:
            impl.join("out", "part", "part_lse", "lse", "joined")
        given = dict(zip(("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse"), join.call_args.args))
        join.assert_called_once_with(**given)
        self.assertEqual((given["output"], given["suffix_output"], given["output_lse"]), ("out", "out", "joined"))

    def test_drafts_made_in_parallel(self):
        """vLLM 0.26 verifies as many more tokens at a time."""
        for drafts, served in ((3, True), (4, NEW), (8, False)):
            config = config_of(drafts=drafts, parallel_drafting=True)
            layer_of(config, 0)
            if served:
                _, groups, _ = start(config, 4)
                self.assertEqual(groups[0].get_metadata_builder(0).decode_queries, 1 + drafts * (1 if NEW else 2))
            else:
                with self.assertRaisesRegex(ValueError, "draft tokens"):
                    start(config, 4)

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

    def test_layers_that_are_not_causal_are_refused(self):
        """Of prefix language models, whose class derives a backend of its own; and any batch that says so."""
        config = config_of()
        layer = layer_of(config, 0)
        before, layer.attn_backend = layer.attn_backend, type("PrefixBackend", (backend.TierkvBackend,), {})
        with self.assertRaisesRegex(ValueError, "model.layers.0.*PrefixBackend"):
            backend.get_kv_cache_spec(layer, config)
        layer.attn_backend = before
        _, groups, _ = start(config, 4)
        lens = torch.tensor([4], dtype=torch.int32)
        cam = CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 4], dtype=torch.int32), query_start_loc_cpu=torch.tensor([0, 4], dtype=torch.int32), seq_lens=lens,
            seq_lens_cpu_upper_bound=lens, num_reqs=1, num_actual_tokens=4, max_query_len=4, max_seq_len=4,
            block_table_tensor=torch.zeros(1, 1, dtype=torch.int32), slot_mapping=torch.arange(4), causal=False)
        with self.assertRaisesRegex(ValueError, "not causal"):
            groups[0].get_metadata_builder(0).build(0, cam)

    def test_values_of_another_width_are_refused(self):
        config = config_of()
        layer = layer_of(config, 0)
        layer.head_size_v = 32
        with self.assertRaisesRegex(ValueError, "model.layers.0.*32 channels beside keys of 64"):
            backend.get_kv_cache_spec(layer, config)

    def test_buffers_end_with_their_engine(self):
        config = config_of()
        for i in range(2):
            layer_of(config, i)
        _, groups, _ = start(config, 4)
        shared = {g.get_metadata_builder(0).slices.data_ptr() for g in groups}
        self.assertEqual((len(shared), len(backend._slices)), (1, 1))
        del config, groups
        gc.collect()
        self.assertEqual(len(backend._slices), 0)

    def test_other_backends_keep_their_specs(self):
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
