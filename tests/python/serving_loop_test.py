# SPDX-License-Identifier: Apache-2.0
"""bench/serving: traces, the scheduler, budgets and accounts, over a tiny model in NumPy and a store in host memory. No torch."""
import math
import os
import pathlib
import sys
import types
import unittest

import numpy as np

sys.path.insert(0, sys.argv.pop(1))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "serving"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "vllm"))
import accounting  # noqa: E402
import budget  # noqa: E402
import quality  # noqa: E402
import serving  # noqa: E402
from scheduler import Clock, Scheduler, Served, serve  # noqa: E402
from tierkv.errors import OutOfPagesError  # noqa: E402
from tierkv.kv_store import KvStore  # noqa: E402
from tierkv.vllm.settings import read_settings, slot_bytes  # noqa: E402
from traces import Lengths, Request, poisson_trace, ragged  # noqa: E402

SEED = int.from_bytes(os.urandom(4), "little")
SHAPE = budget.TINY
MOST = 300  # tokens of a sequence


class Simulated:
    """A clock that moves when somebody says so."""

    def __init__(self):
        self.time = 0.0
        self.clock = Clock(lambda: self.time, self.wait_until)

    def wait_until(self, t):
        self.time = max(self.time, t)


class TinyModel:
    """One token depends on the attention of all that came before; NumPy over a host store, and the engine that scheduler.py wants."""

    def __init__(self, format, slots, memory_bytes, time=None, prompt_s=0.01, step_s=0.001):
        self.store = KvStore(budget.store_config(SHAPE, format, slots, MOST, memory_bytes, dtype="float16"))
        self.slots = [self.store.add_sequence() for _ in range(slots)]
        self.next = [0] * slots
        self.time, self.prompt_s, self.step_s = time, prompt_s, step_s
        self.room_of = budget.Room(self.store, SHAPE)
        rng = np.random.default_rng(7)  # a model is no random input
        s = SHAPE
        # Not one matrix twice: a model that repeats its last token would answer alike whatever was forgotten.
        self.embedding, self.head = rng.normal(size=(2, s.vocabulary, s.hidden))
        self.layers = [rng.normal(size=(s.hidden, (s.q_heads + 2 * s.kv_heads) * s.head_dim)) / math.sqrt(s.hidden) for _ in range(s.layers)]
        self.outs = [rng.normal(size=(s.q_heads * s.head_dim, s.hidden)) / math.sqrt(s.q_heads * s.head_dim) for _ in range(s.layers)]

    def forward(self, sequences, tokens):
        """The next token of each sequence after tokens [sequences, n] have come."""
        s, x = SHAPE, self.embedding[np.asarray(tokens)]
        self.store.begin(sequences, x.shape[1])
        for layer in range(s.layers):
            heads = (x @ self.layers[layer]).reshape(*x.shape[:2], -1, s.head_dim).astype(np.float16)
            q, k, v = heads[:, :, :s.q_heads], heads[:, :, s.q_heads:s.q_heads + s.kv_heads], heads[:, :, s.q_heads + s.kv_heads:]
            self.store.append(sequences, layer, np.ascontiguousarray(k), np.ascontiguousarray(v))
            seen = self.store.attend(sequences, layer, np.ascontiguousarray(q)).out
            x = x + 8 * seen.reshape(*x.shape[:2], -1).astype(np.float64) @ self.outs[layer]
        return (x[:, -1] @ self.head.T).argmax(-1).tolist()

    def room(self):
        return self.room_of.tokens()

    def prompt(self, slot, tokens):
        self.pass_time(self.prompt_s)
        try:
            self.next[slot] = self.forward([self.slots[slot]], [tokens])[0]
        except OutOfPagesError:
            self.clear(slot)
            raise
        return self.next[slot]

    def step(self, slots):
        found = self.forward([self.slots[slot] for slot in slots], [[self.next[slot]] for slot in slots])
        for slot, token in zip(slots, found):
            self.next[slot] = token
        self.pass_time(self.step_s)
        return found

    def clear(self, slot):
        self.store.truncate(self.slots[slot], 0)

    def pass_time(self, seconds):
        if self.time is not None:
            self.time.time += seconds


def tight_memory(format, slots, tokens=5 * MOST // 2):
    """Bytes that hold the sequences' slots and pages for about so many tokens."""
    config = budget.store_config(SHAPE, format, slots, MOST, 0, dtype="float16").with_memory()
    low, high = 0, config.memory_bytes
    while high - low > 1024:
        middle = (low + high) // 2
        config = budget.store_config(SHAPE, format, slots, MOST, middle, dtype="float16")
        low, high = (low, middle) if budget.fits(config, [tokens // slots] * slots) else (middle, high)
    return high


def run(format, requests, slots, memory_bytes, watermark=0):
    time = Simulated()
    engine = TinyModel(format, slots, memory_bytes, time)
    scheduler = Scheduler(engine, slots, watermark, OutOfPagesError)
    served = serve(requests, scheduler, time.clock)
    usage = engine.store.usage()
    engine.store.close()
    return served, usage, scheduler


class Traces(unittest.TestCase):
    def test_a_seed_gives_one_trace(self):
        a, b = (poisson_trace(5.0, 50, SEED, Lengths(100), Lengths(20), 97) for _ in range(2))
        self.assertEqual(a, b)
        self.assertNotEqual(a, poisson_trace(5.0, 50, SEED + 1, Lengths(100), Lengths(20), 97))

    def test_rates_and_means(self):
        count = 4000
        trace = poisson_trace(5.0, count, SEED, Lengths(100, least=1), Lengths(20, least=1), 97)
        # Five standard deviations of a mean: 1 / sqrt(count) of an exponential one, less of these lengths (spread 0.53).
        near = 5 / math.sqrt(count)
        self.assertAlmostEqual(trace[-1].arrival * 5.0 / count, 1.0, delta=near, msg=f"seed {SEED}")
        self.assertAlmostEqual(sum(len(r.prompt) for r in trace) / count / 100, 1.0, delta=near, msg=f"seed {SEED}")
        self.assertAlmostEqual(sum(r.answer_tokens for r in trace) / count / 20, 1.0, delta=near + 0.02, msg=f"seed {SEED}")

    def test_bounds(self):
        drawn = poisson_trace(0, 200, SEED, Lengths(100, least=90, most=110), Lengths(3, spread=0, least=1), 97)
        self.assertTrue(all(90 <= len(r.prompt) <= 110 and r.answer_tokens == 3 and r.arrival == 0.0 for r in drawn))
        self.assertTrue(all(50 <= n <= 150 for n in ragged(100, 500, SEED)))
        self.assertGreater(len(set(ragged(100, 500, SEED))), 20)


class Scheduling(unittest.TestCase):
    def trace(self, count=8, answer=90):
        """Prompts of about 150 tokens, all at once."""
        return poisson_trace(0, count, SEED, Lengths(150, spread=0.1, most=200), Lengths(answer, spread=0), SHAPE.vocabulary)

    def tight(self):
        """Windows and sinks of eight sequences (68 tokens each) and pages for 450 tokens: five prompts, but three at their ends."""
        return tight_memory("raw", 8, 8 * 68 + 450)

    def test_all_are_answered_and_all_pages_come_back(self):
        requests = poisson_trace(30.0, 12, SEED, Lengths(120, most=200), Lengths(20, most=90), SHAPE.vocabulary)
        served, usage, _ = run("k4v4", requests, 4, 0)
        self.assertTrue(all(len(r.answer) == r.answer_tokens == len(r.token_times) for r in requests))
        self.assertEqual(usage.pages_free, usage.pages)
        self.assertEqual(served.preemptions, 0)
        self.assertLessEqual(max(served.batch), 4)
        for r in requests:
            self.assertLessEqual(r.arrival, r.started)
            self.assertEqual(r.token_times, sorted(r.token_times))
        # First come, first served.
        started = [r.started for r in requests]
        self.assertEqual(started, sorted(started))

    def test_a_full_pool_preempts_and_answers_stay(self):
        free, tight = self.trace(), self.trace()
        run("raw", free, 8, 0)
        served, usage, _ = run("raw", tight, 8, self.tight())
        self.assertGreater(served.preemptions, 0, f"seed {SEED}")
        self.assertEqual(usage.pages_free, usage.pages)
        self.assertTrue(all(r.is_done for r in tight))
        # Pages of 16 bits lose nothing; but a prompt's sums come in another order than steps', which turns a token where two are near.
        same = [a.answer == b.answer for a, b in zip(free, tight)]
        self.assertTrue(all(s for s, r in zip(same, tight) if r.preemptions == 0), f"seed {SEED}")
        turned = [s for s, r in zip(same, tight) if r.preemptions > 0]
        self.assertGreaterEqual(2 * sum(turned), len(turned), f"seed {SEED}")

    def test_a_watermark_spares_preemptions(self):
        without, _, _ = run("raw", self.trace(), 8, self.tight())
        with_it, _, _ = run("raw", self.trace(), 8, self.tight(), watermark=200)  # two at once, whose ends fit
        self.assertLess(with_it.preemptions, without.preemptions, f"seed {SEED}")

    def test_coded_rows_serve_as_well(self):
        requests = self.trace(6, answer=10)
        _, usage, _ = run("small", requests, 3, 0)
        self.assertTrue(all(r.is_done for r in requests))
        self.assertEqual(usage.pages_free, usage.pages)

    def test_what_never_fits_is_told(self):
        with self.assertRaises(OutOfPagesError):
            requests = [Request(0, 0.0, [1] * 280, 10)]
            run("raw", requests, 2, tight_memory("raw", 2, 200))

    def test_time_is_up(self):
        requests = poisson_trace(1000.0, 50, SEED, Lengths(50), Lengths(20), SHAPE.vocabulary)
        time = Simulated()
        engine = TinyModel("k4v4", 2, 0, time)
        served = serve(requests, Scheduler(engine, 2, 0, OutOfPagesError), time.clock, most_seconds=0.25)
        self.assertLess(served.seconds, 0.25 + 0.012)  # a prompt and a step later
        found = accounting.summary(served)
        self.assertLess(found["finished"], 50)
        self.assertEqual(found["tokens"], sum(len(r.answer) for r in requests))
        engine.store.close()


class Budgets(unittest.TestCase):
    def test_what_fits_is_taken_and_no_more_is(self):
        lengths = [200 + SEED % 64] * 64
        for format in ("raw", "k4v4"):
            def config_of(count):
                return budget.store_config(SHAPE, format, count, MOST, 2 << 20, dtype="float16")
            count = budget.sequences_that_fit(config_of, lengths)
            self.assertGreater(count, 1)
            self.assertTrue(budget.fits(config_of(count), lengths[:count]))
            self.assertFalse(budget.fits(config_of(count + 1), lengths[:count + 1]))
            rng = np.random.default_rng(SEED)
            with KvStore(config_of(count)) as store:
                for n in lengths[:count]:
                    id = store.add_sequence()
                    store.begin(id, n)
                    for layer in range(SHAPE.layers):
                        k, v = (rng.normal(size=(1, n, SHAPE.kv_heads, SHAPE.head_dim)).astype(np.float16) for _ in range(2))
                        store.append(id, layer, k, v)
                u = store.usage()
                self.assertLessEqual(u.held_bytes, 2 << 20)

    def test_compression_multiplies_sequences(self):
        shape, lengths = budget.Shape(), [4096] * 2048
        counts = {format: budget.sequences_that_fit(lambda n: budget.store_config(shape, format, n, 4224, 16 << 30), lengths)
                  for format in ("raw", "small", "k4v2")}
        self.assertAlmostEqual(counts["raw"], budget.raw_sequences(shape, lengths, 16 << 30), delta=4)
        self.assertGreater(counts["small"], 3.5 * counts["raw"])
        self.assertGreater(counts["k4v2"], 3.5 * counts["raw"])

    def test_a_better_count(self):
        # 10 slots of 2 pages beside 100 pages; 20 tokens a page.
        usage = types.SimpleNamespace(pages=100, page_bytes=50, slot_bytes=100)
        self.assertEqual(budget.better_count(usage, 10, [160] * 50, 20.0, 0), 12)
        self.assertEqual(budget.better_count(usage, 10, [160] * 50, 20.0, 25), 9)
        self.assertEqual(budget.better_count(usage, 10, [160] * 5, 20.0, 0), 5)
        self.assertEqual(budget.better_count(usage, 10, [9999] * 5, 20.0, 0), 1)

    def test_a_reserve_for_steps(self):
        layers = 5 * SHAPE.layers
        wants = {f: budget.step_pages(budget.store_config(SHAPE, f, 5, 64, 0)) for f in ("raw", "pair", "small", "channel")}
        self.assertEqual(wants, {"raw": layers * SHAPE.kv_heads, "pair": 2 * layers * SHAPE.kv_heads, "small": 3 * layers // 4,
                                 "channel": 3 * layers // 4})
        with KvStore(budget.store_config(SHAPE, "raw", 1, MOST, 0, dtype="float16")) as store:
            pages = store.usage().pages_free
            whole, half = budget.Room(store, SHAPE).tokens(), budget.Room(store, SHAPE, pages - pages // 2).tokens()
            self.assertGreater(whole, half)
            self.assertGreater(half, 0)
            self.assertEqual(budget.Room(store, SHAPE, pages + 1).tokens(), 0)

    def test_which_formats_want_significances(self):
        wants = {f: budget.has_two_tiers(budget.store_config(SHAPE, f, 1, 64, 0)) for f in ("raw", "k4v4", "pair", "small", "fast")}
        self.assertEqual(wants, {"raw": False, "k4v4": False, "pair": True, "small": False, "fast": True})


class Accounts(unittest.TestCase):
    def test_percentiles(self):
        values = np.random.default_rng(SEED).normal(size=101)
        for p in (0, 1, 50, 90, 99, 100):
            self.assertAlmostEqual(accounting.percentile(values.tolist(), p), np.percentile(values, p), places=12)
        self.assertIsNone(accounting.percentile([], 50))

    def test_a_summary(self):
        a = Request(0, 1.0, [1], 3, answer=[4, 5, 6], token_times=[2.0, 2.5, 3.5], started=1.5)
        b = Request(1, 1.0, [1], 3, answer=[4], token_times=[4.0], started=3.0, preemptions=1)
        found = accounting.summary(Served([a, b], 8.0, 3, [1, 1, 2], 1, 0, 2))
        self.assertEqual(found["tokens"], 4)
        self.assertEqual(found["tokens_per_s"], 0.5)
        self.assertEqual(found["finished"], 1)
        self.assertEqual(found["first_token_s"]["p50"], 2.0)
        self.assertEqual(found["queued_s"]["p50"], 1.25)
        self.assertEqual(found["token_ms"]["p50"], 750.0)
        self.assertAlmostEqual(found["gap_ms"]["p90"], 950.0)
        self.assertEqual(found["preempted_requests"], 1)

    def test_kernels_have_their_parts(self):
        anon = "void tierkv::(anonymous namespace)::"
        for name, part in {
                "void tierkv::coded_attention_kernel<128, tierkv::Traits<1> >(tierkv::CodedAttendCall)": "attention",
                "tierkv::store::raw_attend_kernel(tierkv::store::RawAttendCall)": "attention",
                "tierkv::store::raw_count_kernel(tierkv::store::RawAttendCall)": "attention",
                "tierkv::join_lse(tierkv::ScoreTask)": "significance",
                "void tierkv::plan_kernel<2>(tierkv::PlanCall)": "attention",
                "void tierkv::store::(anonymous namespace)::run_body<tierkv::store::MakeAttentionRows>(tierkv::store::MakeAttentionRows)": "attention",
                anon + "plan_kernel(tierkv::OpView)": "management",
                anon + "take_kernel(tierkv::OpView)": "management",
                "tierkv::store::commit_kernel(tierkv::store::DeviceWorks)": "management",
                "void tierkv::store::(anonymous namespace)::page_copy_kernel(int)": "management",
                "void tierkv::store::(anonymous namespace)::run_body<tierkv::store::Encode>(tierkv::store::Encode)": "compression",
                "void tierkv::store::count_channel_kernel<4>(int)": "compression",
                "void tierkv::store::raw_append_kernel<8>(tierkv::store::RawAppendCall, tierkv::RawAttendCall)": "compression",
                anon + "encode_kernel<128>(int)": "compression",
                "void tierkv::wgmma_scores<tierkv::SignificanceTaker<128>, (tierkv::DType)0>(tierkv::ScoreTask)": "significance",
                "Memset (Device)": "copies", "Memcpy DtoD (Device -> Device)": "copies",
                "nvjet_tst_128x64_coopA": "model", "void at::native::vectorized_elementwise_kernel<4>(int)": "model",
                "void pytorch_flash::flash_fwd_kernel<int>(int)": "attention",
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention"}.items():
            self.assertEqual(accounting.part_of(name), part, name)

    def test_shares(self):
        # The commit begins before a kernel of the model ends; the count ends before the commit does.
        found = accounting.kernel_shares([("tierkv::store::commit_kernel(int)", 13.5, 15.0), ("nvjet", 10.0, 13.0), ("nvjet", 13.0, 14.0),
                                          ("tierkv::store::count_kernel(int)", 14.2, 14.8)])
        self.assertEqual(found["us"], {"model": 4.0, "management": 1.0})
        self.assertEqual(found["share"]["management"], 0.2)
        self.assertEqual(accounting.kernel_shares([])["share"], {})


class VllmBenches(unittest.TestCase):
    def test_formats_of_layers(self):
        given = quality.settings_of("k4v4,7=k8v4,18=k8v4,20-21=raw", "model.h5")
        settings = read_settings({"tierkv": given})
        self.assertEqual([settings.format_of(layer) for layer in (6, 7, 18, 19, 20, 21, 22)],
                         ["k4v4", "k8v4", "k8v4", "k4v4", "raw", "raw", "k4v4"])
        self.assertEqual(settings.profile, "model.h5")
        self.assertEqual(quality.settings_of("k8v4"), {"format": "k8v4", "layers": {}})
        for wrong in ("k4v4,7", "k4v4,7=k8v4=raw"):
            with self.assertRaisesRegex(ValueError, "LAYER=FORMAT"):
                quality.settings_of(wrong)

    def test_caches_hold_what_is_asked(self):
        rows = serving.CONFIG["num_key_value_heads"] * serving.CONFIG["num_hidden_layers"]
        for format, token_bytes in serving.BYTES.items():
            if format not in serving.OWN:
                self.assertEqual(token_bytes, slot_bytes(format, 128))
            made = serving.plan(format)
            sequence = made["blocks"] * serving.BLOCK * rows * token_bytes
            self.assertLessEqual(made["fit"] * sequence, serving.BUDGET)
            self.assertGreater((made["fit"] + 1) * sequence, serving.BUDGET)
            self.assertGreater(made["cache_bytes"], max(made["fit"], serving.SEQUENCES) * sequence)
            # An answer lasts until all prompts are prefilled and both batches are timed.
            prompts = max(made["fit"], serving.SEQUENCES)
            prefill = -(-prompts * serving.CONTEXT // (serving.CHUNK - prompts))
            self.assertGreaterEqual(serving.ANSWER, prefill + 2 * (serving.WARM + serving.STEPS) + 4)


if __name__ == "__main__":
    unittest.main()
