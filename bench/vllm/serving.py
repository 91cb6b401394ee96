#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast vLLM generates over compressed blocks and over its own caches: a model of Llama-3-8B's shape with random weights.

    python3 bench/vllm/serving.py [--formats bf16,fp8,int4,k8v4,k4v4,k4v2] [--seconds 75] [--out FILE]

For each format, in a process of its own: prompts of 4096 tokens, all prefilled once; then steps in which every sequence gets a token, for 64
sequences and for as many as 16 GiB of cache hold with their answers. The smaller batch is what is left when the other sequences are
aborted. bf16, fp8 and int4 (int4_per_token_head, Triton) are vLLM's own caches. A format whose prompts and steps take more than --seconds writes
what it has. An engine that takes more than --start-seconds to start is ended. All processes import vLLM at once and then wait for their turn.
Needs a GPU of 80 GB, vLLM 0.26 and the wheel."""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
          "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "bos_token_id": 1,
          "eos_token_id": 2, "hidden_act": "silu", "tie_word_embeddings": False}
# Bytes of a token of one kv_head, keys and values of 128 channels.
BYTES = {"bf16": 512, "fp8": 256, "int4": 136, "k8v4": 200, "k4v4": 136, "k4v2": 104}
# vLLM's own: (attention backend, kv_cache_dtype).
OWN = {"bf16": ("FLASH_ATTN", "auto"), "fp8": ("FLASH_ATTN", "fp8"), "int4": ("TRITON_ATTN", "int4_per_token_head")}
SEQUENCES, CONTEXT, ANSWER, BUDGET, BLOCK = 64, 4096, 160, 16 << 30, 64
CHUNK = 16384  # tokens of a prefill step
STEPS, WARM = 32, 4
SPARE_SECONDS = 15  # of a process, for the step that runs over and for its end


def plan(format):
    """Blocks of a sequence at its end, sequences that fit into the budget, and the bytes of a cache for them and for SEQUENCES."""
    block_bytes = BYTES[format] * CONFIG["num_key_value_heads"] * CONFIG["num_hidden_layers"] * BLOCK
    blocks = -(-(CONTEXT + ANSWER) // BLOCK)
    fit = BUDGET // (block_bytes * blocks)
    return {"blocks": blocks, "fit": fit, "cache_bytes": block_bytes * (blocks * max(fit, SEQUENCES) + 2)}


class TimeIsUp(Exception):
    pass


class Run:
    """Requests that are prefilled once and then generate."""

    def __init__(self, engine, params, deadline):
        self.engine, self.params, self.deadline = engine, params, deadline
        self.names = []
        self.begun = set()

    def step(self):
        """Tokens that it made."""
        if time.monotonic() > self.deadline:
            raise TimeIsUp
        tokens = 0
        for o in self.engine.step():
            if o.finished and o.request_id in self.names:
                raise RuntimeError("an answer ended before its steps were timed")
            self.begun.add(o.request_id)
            tokens += len(o.outputs[0].token_ids)
        return tokens

    def prefill(self, prompts):
        for number, prompt in enumerate(prompts):
            self.names.append(str(number))
            self.engine.add_request(self.names[-1], {"prompt_token_ids": prompt}, self.params)
        begin, steps = time.perf_counter(), 0
        while len(self.begun) < len(self.names):
            self.step()
            steps += 1
        return {"prefill_s": time.perf_counter() - begin, "prefill_steps": steps}

    def keep(self, count):
        """Aborts all but the first `count` sequences."""
        if count < len(self.names):
            self.engine.abort_request(self.names[count:])
            self.names = self.names[:count]

    def time_steps(self):
        for _ in range(WARM):
            self.step()
        calls, tokens = [], 0
        begin = time.perf_counter()
        try:
            for _ in range(STEPS):
                before = time.perf_counter()
                tokens += self.step()
                calls.append(time.perf_counter() - before)
        except TimeIsUp:
            if tokens == 0:
                raise
        seconds = time.perf_counter() - begin
        calls.sort()
        at = {name: 1e3 * calls[int(share * (len(calls) - 1))] for name, share in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))}
        return {"sequences": len(self.names), "steps": len(calls), "call_ms": at, "step_ms": 1e3 * seconds * len(self.names) / tokens,
                "tokens_per_s": tokens / seconds}


def serve(folder, format, seconds, out):
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm import LLM, SamplingParams, __version__
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    sys.stdin.readline()  # its turn
    started = time.monotonic()
    made, result = plan(format), {"format": format}

    def write(**found):
        result.update(found)
        pathlib.Path(out).write_text(json.dumps(result))

    most = max(made["fit"], SEQUENCES)
    backend, cache_dtype = OWN.get(format, ("CUSTOM", "auto"))
    llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=CONTEXT + ANSWER + BLOCK,
              block_size=BLOCK, max_num_seqs=most, max_num_batched_tokens=CHUNK, kv_cache_memory_bytes=made["cache_bytes"],
              gpu_memory_utilization=0.5, enable_prefix_caching=False, kv_cache_dtype=cache_dtype,
              compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted({made["fit"], SEQUENCES})},
              attention_backend=AttentionBackendEnum[backend],
              additional_config={"tierkv": {"format": format}} if backend == "CUSTOM" else {})
    # What fits is a matter of the blocks that the engine made of its bytes.
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    fit = min(made["fit"], int(BUDGET / (made["cache_bytes"] / blocks) // made["blocks"]))
    ready = time.monotonic()
    write(gpu=torch.cuda.get_device_name(), vllm=__version__, start_s=ready - started, fits_in_16_gib=fit, block_bytes=made["cache_bytes"] / blocks)
    rng = random.Random(1)
    prompts = [rng.choices(range(3, 100000), k=CONTEXT) for _ in range(max(fit, SEQUENCES))]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
    run = Run(llm.llm_engine, params, ready + seconds)
    try:
        write(**run.prefill(prompts))
        for count in sorted({fit, SEQUENCES}, reverse=True):
            run.keep(count)
            write(**{f"batch_{count}": run.time_steps()})
    except TimeIsUp:
        write(stopped=f"after {seconds} s")
    write(took_s=time.monotonic() - ready)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(BYTES))
    parser.add_argument("--seconds", type=float, default=75, help="of a format, once its engine has started")
    parser.add_argument("--start-seconds", type=float, default=120, help="of an engine's start; the first reads files that no cache holds")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", default="vllm_serving.json")
    options = parser.parse_args()
    formats, results = options.formats.split(","), []
    for name in formats:
        if name not in BYTES:
            parser.error(f"--formats: {name!r} is not one of {', '.join(BYTES)}")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        outs = [pathlib.Path(folder) / f"{name}.json" for name in formats]
        children = [subprocess.Popen([sys.executable, "-B", __file__, "--serve", folder, name, str(options.seconds), out], stdin=subprocess.PIPE)
                    for name, out in zip(formats, outs)]
        try:
            for name, out, child in zip(formats, outs, children):
                try:
                    child.communicate(b"go\n", timeout=options.start_seconds + options.seconds + SPARE_SECONDS)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                found = json.loads(out.read_text()) if out.exists() else {"format": name}
                results.append(found if child.returncode == 0 else {**found, "failure": f"exit status {child.returncode}"})
                print(json.dumps(results[-1]), flush=True)
                ran_on = {key: next((r[key] for r in results if key in r), "unknown") for key in ("gpu", "vllm")}
                text = json.dumps({"schema": "tierkv.bench.vllm/3", **ran_on, "commit": options.commit, "sequences": SEQUENCES,
                                   "context": CONTEXT, "budget_bytes": BUDGET, "results": results}, indent=1)
                pathlib.Path(options.out).write_text(text + "\n")
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
    return int(any("failure" in r for r in results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _, _, model, which, most_seconds, target = sys.argv
        serve(model, which, float(most_seconds), target)
    else:
        sys.exit(main())
