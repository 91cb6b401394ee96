# SPDX-License-Identifier: Apache-2.0
"""Runs an example of transformers with a small random model: hf_examples_test.py PACKAGE NAME [SEED]. Exit code 77 names what is missing."""
import importlib.util
import pathlib
import random
import runpy
import sys
import tempfile

for name in ("torch", "transformers", "tokenizers"):
    if importlib.util.find_spec(name) is None:
        print(f"skipped: {name} is missing")
        sys.exit(77)
sys.path.insert(0, sys.argv[1])

import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
WORDS = [f"w{i}" for i in range(60)]


def make_model(folder, **shape):
    words = ["<unk>", "<eos>", "user", "assistant", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", chat_template=TEMPLATE).save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), intermediate_size=128, head_dim=64, eos_token_id=1, **shape)).save_pretrained(folder)


def chat(script, folder):
    make_model(folder, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    for kind in ("k4v4", "small"):
        sys.argv = ["chat.py", "--model", folder, "--format", kind, "--reply-tokens", "4", "--max-tokens", "400",
                    "--say", " ".join(WORDS) * 3, "w1 w2 w3"]
        runpy.run_path(script, run_name="__main__")


def smollm2_store(script, folder):
    """A model of SmolLM2's layers and heads, which its profile fits, with weights so large that attention decides the predictions."""
    make_model(folder, hidden_size=72, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, rope_theta=100000.0,
               initializer_range=0.2)
    main = runpy.run_path(script)["main"]
    text, kl = pathlib.Path(folder) / "text", []
    for tokens in (20, 300):  # with the answer all raw; most of them compressed
        text.write_text(" ".join(WORDS[i * i % 59] for i in range(tokens)))
        kl.append(main(folder, ROOT / "datasets/smollm2_profile.h5", text))
    # Raw tokens are rounded to fp16, which moves logits of order 1 by some 2^-11: KL of 1e-5. A position beside the right one gives 0.4 or more.
    assert kl[0] < 1e-3 < kl[1], kl


name = sys.argv[2]
seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(2**32)
print(f"seed {seed}", flush=True)
torch.manual_seed(seed)
with tempfile.TemporaryDirectory() as folder:
    {"chat": chat, "smollm2_store": smollm2_store}[name](str(ROOT / "examples" / f"{name}.py"), folder)
