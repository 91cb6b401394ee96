#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What compressed blocks change in the predictions of a real model that vLLM serves, in nats, against vLLM's own bf16 cache.

    python3 bench/vllm/quality.py --model FOLDER --items FILE [--profile FILE] [--formats "raw k8v4 k4v4 k4v2 k4v4,7=k8v4,18=k8v4"] [--out FILE]

FILE is of bench/answers/items.py. Each prompt is cached first; then its continuation is read behind the cached prefix ("hit"), and once more
as a new prompt in chunks of 256 ("chunks"). KL is the mean over the continuation's tokens. A format may name others for single layers. Needs a GPU, vLLM 0.26 and the wheel."""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

CHUNK = 256


def settings_of(format, profile=""):
    """The settings of tierkv's backend for a format such as "k4v4" or "k4v4,7=k8v4,18-20=k8v4"."""
    format, *layers = format.split(",")
    wrong = [x for x in layers if x.count("=") != 1]
    if wrong:
        raise ValueError(f"--formats: {wrong[0]!r} is not LAYER=FORMAT")
    return {"format": format, "layers": dict(x.split("=") for x in layers), **({"profile": profile} if profile else {})}


def serve(folder, format, profile, items, out):
    """log-probabilities [way][item], float16 tensors of [tokens, vocabulary]."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = format != "bf16"
    llm = LLM(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, block_size=64, max_num_seqs=4,
              max_num_batched_tokens=CHUNK, kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.1, enforce_eager=True,
              enable_prefix_caching=True,
              attention_backend=AttentionBackendEnum.CUSTOM if ours else AttentionBackendEnum.FLASH_ATTN,
              additional_config={"tierkv": settings_of(format, profile)} if ours else {})
    hidden = []

    def record(model):
        forward = model.forward

        def recorded(*args, **kwargs):
            result = forward(*args, **kwargs)
            hidden.append(result.clone())
            return result
        model.forward = recorded
        return model

    model = llm.apply_model(record)[0]
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def predictions(tokens, last):
        hidden.clear()
        llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        rows = torch.cat(hidden)[-last:-1]
        return torch.log_softmax(model.compute_logits(rows).float(), -1).half().cpu()

    found = {"hit": [], "chunks": []}
    for item in json.loads(pathlib.Path(items).read_text()):
        prompt, continuation = item["prompt"], item["continuation"]
        llm.reset_prefix_cache()
        found["chunks"].append(predictions(prompt + continuation, len(continuation)))
        llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)
        found["hit"].append(predictions(prompt + continuation, len(continuation)))
    torch.save(found, out)


def kl(exact, got):
    p, q = exact.float(), got.float()
    return float((p.exp() * (p - q)).sum(-1).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--items", required=True)
    parser.add_argument("--profile", default="")
    parser.add_argument("--formats", default="raw k8v4 k4v4 k4v2")
    parser.add_argument("--out", default="vllm_quality.json")
    options = parser.parse_args()
    for format in options.formats.split():
        settings_of(format)
    import torch

    results, tasks = [], [i["task"] for i in json.loads(pathlib.Path(options.items).read_text())]
    with tempfile.TemporaryDirectory() as folder:
        formats = ["bf16", *options.formats.split()]
        files = {f: pathlib.Path(folder) / f"{i}.pt" for i, f in enumerate(formats)}
        children = [subprocess.Popen([sys.executable, "-B", __file__, "--serve", options.model, f, options.profile, options.items, files[f]])
                    for f in formats]
        failed = [f for f, child in zip(formats, children) if child.wait() != 0]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")
        exact = torch.load(files["bf16"])
        for f in options.formats.split():
            got = torch.load(files[f])
            for way in ("hit", "chunks"):
                values = [kl(e, g) for e, g in zip(exact[way], got[way])]
                by_task = {t: sum(v for v, x in zip(values, tasks) if x == t) / tasks.count(t) for t in dict.fromkeys(tasks)}
                results.append({"format": f, "way": way, "kl": by_task, "prompts": len(values)})
            values = [kl(e, g) for e, g in zip(got["hit"], got["chunks"])]
            results.append({"format": f, "way": "hit against chunks", "kl": {"all": sum(values) / len(values)}, "prompts": len(values)})
        for r in results:
            print(json.dumps(r))
    text = json.dumps({"schema": "tierkv.bench.vllm_quality/1", "profile": bool(options.profile), "results": results}, indent=1)
    pathlib.Path(options.out).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
