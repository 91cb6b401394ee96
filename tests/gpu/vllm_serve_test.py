"""vLLM serves a small random model over compressed blocks: log-probabilities beside those of vLLM's own cache.

Prompts come in chunks over cached prefixes, share prefixes, and are generated from in eager mode and with CUDA graphs. Needs a GPU, vLLM
0.26 and the wheel installed, so that vLLM finds the plugin.
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
          "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 4096,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
          "tie_word_embeddings": False, "initializer_range": 0.08}  # so wide that attention is not even
GENERATED = 24
# Largest mean difference of a log-probability from vLLM's own cache.
BOUNDS = {"raw": 0.02, "k8v4": 0.1, "k4v4": 0.2, "k4v2": 0.4}


def serve(folder, format, mode, requests):
    """In a process of its own. The log-probabilities of each request's tokens: of the prompt's, then of the forced ones behind it."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = format != "vllm"
    llm = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=1, max_model_len=2048, block_size=64,
              max_num_seqs=16, max_num_batched_tokens=256, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, enforce_eager=mode == "eager",
              enable_prefix_caching=True,
              attention_backend=AttentionBackendEnum.CUSTOM if ours else AttentionBackendEnum.FLASH_ATTN,
              additional_config={"tierkv": {"format": format, "slice_tokens": 128}} if ours else {})
    prompts = [{"prompt_token_ids": r} for r in requests]
    scored = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False))
    prompt = [[p[t].logprob for p, t in list(zip(o.prompt_logprobs, r))[1:]] for o, r in zip(scored, requests)]
    # Now from cached prefixes, and on.
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=GENERATED, logprobs=0, detokenize=False, ignore_eos=True))
    generated = [[(t, step[t].logprob) for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)] for o in found]
    return {"prompt": prompt, "generated": generated}


def served(folder, requests, cases):
    """What each (format, mode) found; all at once, each in a process of its own."""
    given = pathlib.Path(folder) / "requests.json"
    given.write_text(json.dumps(requests))
    outs = [pathlib.Path(folder) / f"{format}_{mode}.json" for format, mode in cases]
    children = [subprocess.Popen([sys.executable, "-B", __file__, "--serve", folder, format, mode, given, out])
                for (format, mode), out in zip(cases, outs)]
    failed = [case for case, child in zip(cases, children) if child.wait() != 0]
    if failed:
        sys.exit(f"no answer from {failed}")
    return {case: json.loads(out.read_text()) for case, out in zip(cases, outs)}


def mean_difference(a, b):
    pairs = [(x, y) for p, q in zip(a, b) for x, y in zip(p, q)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


def main():
    try:
        import torch
        import transformers
        import vllm  # noqa: F401
        if not torch.cuda.is_available():
            raise ImportError("no GPU")
    except ImportError as e:
        print(f"skipped: needs a GPU and vLLM 0.26: {e}")
        return 77
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    shared = [rng.randrange(3, 1000) for _ in range(200)]
    requests = [[rng.randrange(3, 1000) for _ in range(n)] for n in (5, 64, 300, 700, 1, 129)]
    requests += [shared + [rng.randrange(3, 1000) for _ in range(n)] for n in (3, 60, 200)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)
        cases = [(f, "eager") for f in BOUNDS] + [("raw", "graphs"), ("k4v4", "graphs")]
        results = served(folder, requests, [("vllm", "eager"), *cases])
        base = results["vllm", "eager"]
        for format, mode in cases:
            got = results[format, mode]
            prompt = mean_difference(base["prompt"], got["prompt"])
            first = sum(a[0][0] == b[0][0] for a, b in zip(base["generated"], got["generated"]))
            same = sum(x[0] == y[0] for a, b in zip(base["generated"], got["generated"]) for x, y in zip(a, b))
            print(f"{format} {mode}: prompts differ by {prompt:.4f}, {first} of {len(requests)} first tokens and {same} of "
                  f"{len(requests) * GENERATED} tokens are vLLM's, seed {seed}")
            wrong += prompt > BOUNDS[format]
            if mode == "graphs":
                eager = results[format, "eager"]
                agree = sum(x[0] == y[0] for a, b in zip(eager["generated"], got["generated"]) for x, y in zip(a, b))
                print(f"  {agree} tokens are those of eager mode")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _, _, model, cache, how, source, target = sys.argv
        pathlib.Path(target).write_text(json.dumps(serve(model, cache, how, json.loads(pathlib.Path(source).read_text()))))
    else:
        sys.exit(main())
