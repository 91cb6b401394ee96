#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generation over a cache of a fixed budget: a Llama-3-8B with random weights, a decode step in one CUDA graph.

    PYTHONPATH=build-gpu/python python3 bench/serving/loop.py generate [--formats dense,raw,small,fast,k4v2,channel] [--budget-gib 16]
    PYTHONPATH=build-gpu/python python3 bench/serving/loop.py trace --rate 8 [--formats raw,small,fast] [--budget-gib 4]

generate  As many sequences as fit, of ragged lengths, get --steps tokens each: tokens a second, and the parts of a step and of a prompt.
          All sequences begin like one text, whose keys and values are found once; each is compressed on its own. "dense" is PyTorch's
          attention over equally long sequences, "raw" the same store with bf16 pages, the others are formats of tierkv.
trace     Requests arrive at random; the scheduler takes prompts up, queues, and preempts when the pool is full: throughput, time to the first
          token and per token.

Parts of a step: graphs with parts left out, and the sums of kernels by name where torch.profiler sees them. What runs is written to --out after
each format. --device cpu --shape tiny runs everything but graphs on a store in host memory. Needs PyTorch."""
import argparse
import gc
import json
import pathlib
import statistics
import sys
import time

import torch

from accounting import kernel_shares, spread, summary
from budget import FORMATS, SHAPES, Room, better_count, raw_sequences, sequences_that_fit, step_pages, store_config
from llama import DenseCache, Graph, Llama, StoreCache, causal, token_scores
from scheduler import Clock, Scheduler, serve
from tierkv.errors import OutOfPagesError, OutOfRangeError
from tierkv.kv_store import PRESETS
from traces import Lengths, poisson_trace, ragged

PRIMING = 384  # tokens of the first prompt, from which a store of coded rows makes its codebooks


class Bench:
    def __init__(self, options):
        self.options, self.on_gpu = options, options.device == "cuda"
        self.shape, self.budget = SHAPES[options.shape], int(options.budget_gib * (1 << 30))
        self.stream = torch.cuda.Stream() if self.on_gpu else None
        if self.on_gpu:
            torch.cuda.set_stream(self.stream)
        self.model = None
        self.results = []

    def wait(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, work):
        """On the GPU, of what `work` enqueues."""
        if not self.on_gpu:
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def time_steps(self, launch, sequences):
        """--steps steps, one behind the other: the host waits for the last alone, or where the store must know its free pages."""
        o, marks, stopped = self.options, [], None
        for _ in range(3):
            launch()
        self.wait()
        begin = time.perf_counter()
        try:
            for _ in range(o.steps + 1):
                marks.append(time.perf_counter())
                if self.on_gpu:
                    marks[-1] = torch.cuda.Event(enable_timing=True)
                    marks[-1].record()
                if len(marks) <= o.steps:
                    launch()
        except OutOfPagesError as error:
            stopped = str(error)
        self.wait()
        wall = time.perf_counter() - begin
        times = [a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in zip(marks, marks[1:])]
        return {"steps": len(times), "step_ms": spread(times), "mean_step_ms": statistics.mean(times) if times else None, "wall_s": wall,
                "tokens_per_s": sequences * len(times) / wall if times else None, "stopped": stopped}

    def run_steps(self, cache, sequences):
        """Captures a step of the store, then times it."""
        try:
            if self.on_gpu:
                cache.capture()
            cache.notes_s.clear()
            found = self.time_steps(cache.launch, sequences)
        except OutOfPagesError as error:
            found = {"steps": 0, "tokens_per_s": None, "stopped": str(error)}
        return {**found, "note_replay_us": spread(cache.notes_s, 1e6)}

    def kernels(self, work):
        """(name, begin, end), in us, of the kernels that `work` launches; none where the profiler is refused."""
        if not self.on_gpu or self.options.no_kernels:
            return []
        try:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as found:
                work()
                self.wait()
            return [(e.name, e.time_range.start, e.time_range.end) for e in found.events()
                    if e.device_type == torch.autograd.DeviceType.CUDA]
        except OutOfPagesError:
            raise
        except Exception as error:
            print(f"no times of kernels: {type(error).__name__}: {error}", file=sys.stderr)
            return []

    def write(self):
        o = self.options
        report = {"schema": f"tierkv.bench.serving_{o.mode}/1", "gpu": torch.cuda.get_device_name() if self.on_gpu else "none", "commit": o.commit,
                  "torch": torch.__version__, "shape": o.shape, "budget_bytes": self.budget, "context": o.context, "seed": o.seed,
                  **({"steps": o.steps} if o.mode == "generate" else {"rate": o.rate, "answer": o.answer, "requests": o.requests}),
                  "results": self.results}
        if o.out:
            pathlib.Path(o.out).write_text(json.dumps(report, indent=1) + "\n")

    # ---- caches ----

    def store_cache(self, format, sequences, max_tokens):
        """With so many slots, or as many as leave room for a device's workspaces."""
        while True:
            try:
                return StoreCache(self.model, store_config(self.shape, format, sequences, max_tokens, self.budget), self.stream)
            except OutOfRangeError:
                if sequences <= 1:
                    raise
                sequences -= max(1, sequences // 16)

    def prime(self, cache):
        """Codebooks, before anything is captured."""
        text = torch.randint(0, self.shape.vocabulary, (PRIMING,)).tolist()
        cache.prompt(0, text)
        cache.clear(0)

    def filled(self, format, lengths, sequences, max_tokens, text):
        """A cache whose sequences hold so many tokens of the text; those that do not fit stay empty."""
        cache = self.store_cache(format, sequences, max_tokens)
        self.prime(cache)
        full = 0
        try:
            for slot, n in enumerate(lengths[:cache.slots]):
                cache.fill(slot, *text, n, slot % self.shape.vocabulary)
                full += 1
        except OutOfPagesError:
            pass
        if self.on_gpu:
            cache.store.take_status()
        return cache, full


# ---- generate ----

def text_of(bench, tokens):
    """Keys, values [layers, tokens, kv_heads, head_dim] and significances [layers, kv_heads, tokens] of a text, and the milliseconds that the
    model took for it."""
    ids = torch.randint(0, bench.shape.vocabulary, (1, tokens), device=bench.options.device)
    positions, found = torch.arange(tokens, device=bench.options.device)[None], []

    def attend(layer, q, k, v):
        found.append((k[0], v[0], token_scores(q[0], k[0])))
        return causal(q, k, v)

    bench.model.forward(ids, positions, attend)
    ms = bench.milliseconds(lambda: bench.model.forward(ids, positions, lambda layer, q, k, v: causal(q, k, v)))
    return tuple(torch.stack(x) for x in zip(*found)), ms


def step_parts(bench, cache):
    """Milliseconds of graphs with parts left out. Each launch that begins a step adds a token to all sequences."""
    repeats, found = bench.options.repeats, {}
    parts = {"model": dict(begins=False, attends=False), "attend": dict(begins=False, model=False), "append": dict(attends=False, model=False),
             "model_and_append": dict(attends=False)}
    for name, left in parts.items():
        work = (lambda left=left: cache.run(**left))
        if bench.on_gpu:
            # Steps that append must come in all phases of a unit.
            work = Graph(cache, work, advances=left.get("begins", True)).launch
        times = [bench.milliseconds(work) for _ in range(max(repeats, 32) if left.get("begins", True) else repeats)]
        found[name] = {"mean": statistics.mean(times), **spread(times)}
        del work
    return found


def prompt_parts(bench, cache, slot, tokens):
    """A prompt with the model: its time and that of its kernels, and of the appends alone."""
    ids = torch.randint(0, bench.shape.vocabulary, (tokens,)).tolist()
    cache.prompt(slot, ids)
    times = [bench.milliseconds(lambda: cache.prompt(slot, ids)) for _ in range(3)]
    found = {"tokens": tokens, "ms": statistics.median(times), "kernels": kernel_shares(bench.kernels(lambda: cache.prompt(slot, ids)))}
    return found


def generate_store(bench, format, lengths, text):
    o = bench.options
    ends = [n + o.steps + 8 for n in lengths]
    most = max(ends) + 3 * max(o.repeats, 32) + 32  # what the parts of a step and the profiler add

    def config_of(count):
        return store_config(bench.shape, format, count, most, bench.budget)

    count = min(o.most_sequences, sequences_that_fit(config_of, ends))
    if count == 0:
        raise ValueError(f"{format}: not even one sequence fits into the budget")
    for attempt in range(2):
        cache, full = bench.filled(format, lengths, count, most, text)
        u = cache.store.usage()
        body = u.body_tokens / (bench.shape.layers * bench.shape.kv_heads)
        config, held = cache.store.config, u.pages - u.pages_free
        reserve = u.pages // 100 + (step_pages(config) if bench.on_gpu else 0)
        bodies = [max(0, n - config.window_tokens - config.sink_tokens) for n in ends]
        better = better_count(u, cache.slots, bodies, body / held, reserve) if body > 0 else full
        better = min(better, len(lengths), o.most_sequences)
        if attempt == 1 or abs(better - full) * 25 <= full:
            break
        cache.close()
        gc.collect()
        count = better
    fill = {"slots": cache.slots, "sequences": full, "context_tokens": sum(lengths[:full]), "pages": u.pages, "pages_free": u.pages_free,
            "page_bytes": u.page_bytes, "slot_bytes": u.slot_bytes, "held_of_raw": u.held_bytes / u.raw_bytes,
            "nominal_of_raw": u.nominal_bytes / u.raw_bytes, "memory_bytes": cache.store.config.memory_bytes}
    result = {"format": format, **fill, **bench.run_steps(cache, full)}
    try:
        if not o.no_parts:
            for slot in range(full - max(1, full // 25), full):  # room for the tokens that the parts add
                cache.clear(slot)
            cache.launch()  # attention alone needs a token of each
        if bench.on_gpu and not o.no_parts:
            result["kernels"] = kernel_shares(bench.kernels(lambda: [cache.launch() for _ in range(16)]))
            cache.graph = None
        if not o.no_parts:
            result["parts_ms"] = step_parts(bench, cache)
            if bench.on_gpu:
                cache.store.take_status()
            result["prompt"] = prompt_parts(bench, cache, full - 1, min(o.context, max(lengths)))
    except OutOfPagesError as error:
        result["parts_stopped"] = str(error)
    if bench.on_gpu:
        cache.store.take_status()
    cache.close()
    return result


def generate_dense(bench, lengths, text):
    """As many sequences of the mean length as the budget holds at their ends."""
    o = bench.options
    tokens = round(statistics.mean(lengths))
    end = tokens + o.steps + 8
    count = min(o.most_sequences, raw_sequences(bench.shape, [end] * 4096, bench.budget))
    cache = DenseCache(bench.model, count, tokens, end, bench.stream)
    cache.fill(*text[:2], tokens)
    backends = cache.choose_backend(bench.milliseconds) if bench.on_gpu else {}
    cache.run()
    launch, part = cache.run, None
    if bench.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=bench.stream, capture_error_mode="thread_local"):
            cache.run()
        launch = graph.replay
    steps = bench.time_steps(launch, count)
    if bench.on_gpu and not o.no_parts:
        cache.at.fill_(tokens)
        part = kernel_shares(bench.kernels(lambda: [launch() for _ in range(4)]))
    return {"format": "dense", "sequences": count, "slots": count, "context_tokens": count * tokens, "held_of_raw": 1.0, **steps,
            "attention_ms": backends, **({"kernels": part} if part else {})}


def generate(bench):
    o = bench.options
    lengths = ragged(o.context, 4096, o.seed)
    most = max(lengths)
    bench.model = Llama(bench.shape, o.device, most + o.steps + 512)
    text, prompt_ms = text_of(bench, most)
    print(json.dumps({"text_tokens": most, "model_ms": prompt_ms}), flush=True)
    for format in o.formats.split(","):
        bench.results.append(attempt(format, lambda: generate_dense(bench, lengths, text) if format == "dense" else
                                     generate_store(bench, format, lengths, text)))
        report(bench, ("format", "sequences", "tokens_per_s", "mean_step_ms", "failure"))


# ---- trace ----

def trace(bench):
    o = bench.options
    prompts, answers = Lengths(o.context, most=4 * o.context), Lengths(o.answer, most=4 * o.answer)
    requests = [poisson_trace(o.rate, o.requests, o.seed, prompts, answers, bench.shape.vocabulary) for _ in o.formats.split(",")]
    most = max(r.most_tokens for r in requests[0]) + 2
    bench.model = Llama(bench.shape, o.device, most)
    mean = statistics.mean(r.most_tokens for r in requests[0])
    for format, asked in zip(o.formats.split(","), requests):
        bench.results.append(attempt(format, lambda: trace_store(bench, format, asked, most, round(mean))))
        report(bench, ("format", "tokens_per_s", "first_token_s", "token_ms", "preemptions", "failure"))


def trace_store(bench, format, requests, most, mean):
    o = bench.options

    def config_of(count):
        return store_config(bench.shape, format, count, most, bench.budget)

    # More slots than sequences of mean length: whether a request fits is then a matter of pages.
    slots = max(1, min(o.most_sequences, round(1.2 * sequences_that_fit(config_of, [mean] * 4096))))
    cache = bench.store_cache(format, slots, most)
    slots = cache.slots
    bench.prime(cache)
    if bench.on_gpu:
        cache.capture()
        cache.capture_batches()
        for slot in range(slots):
            cache.clear(slot)
    room = Room(cache.store, bench.shape, step_pages(cache.store.config) if bench.on_gpu else 0)
    cache.room = room.tokens
    bench.wait()
    start = time.perf_counter()

    def now():
        return time.perf_counter() - start

    scheduler = Scheduler(cache, slots, watermark_tokens=o.watermark * slots, out_of_pages=OutOfPagesError)
    served = serve(requests, scheduler, Clock(now, lambda t: time.sleep(max(0.0, t - now()))), o.seconds)
    result = {"format": format, "slots": slots, **summary(served), "note_replay_us": spread(cache.notes_s, 1e6)}
    if bench.on_gpu:
        cache.store.take_status()
    cache.close()
    return result


# ---- both ----

def attempt(format, work):
    """The other formats are still worth their time."""
    begin = time.perf_counter()
    try:
        result = work()
    except Exception as error:
        result = {"format": format, "failure": f"{type(error).__name__}: {error}".splitlines()[0]}
        if not isinstance(error, (OutOfPagesError, ValueError)):
            import traceback

            traceback.print_exc()
    result["took_s"] = time.perf_counter() - begin
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def report(bench, names):
    print(json.dumps({name: bench.results[-1].get(name) for name in (*names, "took_s")}), flush=True)
    bench.write()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("generate", "trace"))
    parser.add_argument("--formats", default="dense,raw,small,fast,k4v2,channel")
    parser.add_argument("--budget-gib", type=float, default=16)
    parser.add_argument("--context", type=int, default=4096, help="mean tokens of a prompt")
    parser.add_argument("--steps", type=int, default=128, help="generate: tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=16, help="generate: launches of a part of a step")
    parser.add_argument("--most-sequences", type=int, default=1024)
    parser.add_argument("--no-parts", action="store_true", help="generate: tokens a second alone")
    parser.add_argument("--no-kernels", action="store_true", help="generate: without torch.profiler")
    parser.add_argument("--rate", type=float, default=8, help="trace: requests a second, 0: all at once")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--answer", type=int, default=256, help="trace: mean tokens of an answer")
    parser.add_argument("--watermark", type=int, default=16, help="trace: tokens a slot that a new prompt must leave free")
    parser.add_argument("--seconds", type=float, default=60, help="trace: stops after so many")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out")
    options = parser.parse_args()
    known = {"dense", *FORMATS, *PRESETS} - ({"dense"} if options.mode == "trace" else set())
    for name in options.formats.split(","):
        if name not in known:
            parser.error(f"--formats: {name!r} is not one of {', '.join(sorted(known))}")
    torch.manual_seed(options.seed)
    with torch.no_grad():
        bench = Bench(options)
        {"generate": generate, "trace": trace}[options.mode](bench)
    return int(any("failure" in r for r in bench.results))


if __name__ == "__main__":
    sys.exit(main())
