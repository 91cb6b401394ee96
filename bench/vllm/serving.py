#!/usr/bin/env python3
"""How fast vLLM generates over compressed blocks and over its own cache: a model of Llama-3-8B's shape with random weights.

    python3 bench/vllm/serving.py [--formats bf16,fp8,k8v4,k4v4,k4v2] [--out FILE]

For each format, in a process of its own: the time of a step of 64 sequences of 4096 tokens, and the tokens per second of as many sequences
as fit into 16 GiB of cache. A time is that of a step in which every sequence gets a token. Needs a GPU of 80 GB, vLLM 0.26 and the wheel."""
import argparse
import itertools
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
BYTES = {"bf16": 512, "fp8": 256, "k8v4": 200, "k4v4": 136, "k4v2": 104}
SEQUENCES, CONTEXT, BUDGET = 64, 4096, 16 << 30
STEPS, WARM = 80, 5  # steps of a run; the first and last of them that are not counted


def that_fit():
    """Sequences in the budget at the end of the long generation."""
    token = CONFIG["num_key_value_heads"] * CONFIG["num_hidden_layers"]
    blocks = -(-(CONTEXT + STEPS) // 64)
    return {name: BUDGET // (size * token * blocks * 64) for name, size in BYTES.items()}


def serve(folder, format, out):
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    started = time.time()
    ours, fit = format not in ("bf16", "fp8"), that_fit()[format]
    largest = max(SEQUENCES, fit)
    cache = BYTES[format] * CONFIG["num_key_value_heads"] * CONFIG["num_hidden_layers"] * (largest * (CONTEXT + STEPS + 128) + 64)
    llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=CONTEXT + 256,
              block_size=64, max_num_seqs=largest, max_num_batched_tokens=8192, kv_cache_memory_bytes=cache, gpu_memory_utilization=0.5,
              enable_prefix_caching=True, kv_cache_dtype="fp8" if format == "fp8" else "auto",
              compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted({fit, SEQUENCES})},
              attention_backend=AttentionBackendEnum.CUSTOM if ours else AttentionBackendEnum.FLASH_ATTN,
              additional_config={"tierkv": {"format": format}} if ours else {})
    ready = time.time()
    rng = random.Random(1)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 100000) for _ in range(CONTEXT)]} for _ in range(largest)]

    engine, numbers = llm.llm_engine, itertools.count()

    def decode_steps(count):
        """Seconds of each step in which all of `count` sequences got a token."""
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
        waiting = {str(next(numbers)): prompt for prompt in prompts[:count]}
        for name, prompt in waiting.items():
            engine.add_request(name, prompt, params)
        steps, got = [], dict.fromkeys(waiting, 0)
        while engine.has_unfinished_requests():
            begin = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - begin
            grown = sum(len(o.outputs[0].token_ids) > got[o.request_id] for o in outputs)
            got.update({o.request_id: len(o.outputs[0].token_ids) for o in outputs})
            if grown == count:
                steps.append(seconds)
        return steps[WARM:-WARM]

    decode_steps(largest)
    filled = time.time()
    results = {"format": format, "start_s": ready - started, "prefill_s": filled - ready, "fits_in_16_gib": fit}
    for count in sorted({SEQUENCES, fit}):
        steps = sorted(x for _ in range(2) for x in decode_steps(count))
        at = {name: 1e3 * steps[int(share * (len(steps) - 1))] for name, share in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))}
        results[f"batch_{count}"] = {"step_ms": at, "steps": len(steps), "tokens_per_s": 1e3 * count / at["median"]}
    pathlib.Path(out).write_text(json.dumps(results))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(BYTES))
    parser.add_argument("--out", default="vllm_serving.json")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for format in options.formats.split(","):
            out = pathlib.Path(folder) / f"{format}.json"
            subprocess.run([sys.executable, "-B", __file__, "--serve", folder, format, out], check=True)
            results.append(json.loads(out.read_text()))
            print(json.dumps(results[-1]), flush=True)
            text = json.dumps({"schema": "tierkv.bench.vllm/1", "sequences": SEQUENCES, "context": CONTEXT, "results": results}, indent=1)
            pathlib.Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
