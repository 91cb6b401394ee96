# SPDX-License-Identifier: Apache-2.0
"""Runs examples/chat.py with a small random model: chat_test.py PACKAGE. Exit code 77 names what is missing."""
import importlib.util
import pathlib
import runpy
import sys
import tempfile

for name in ("torch", "transformers", "tokenizers"):
    if importlib.util.find_spec(name) is None:
        print(f"skipped: {name} is missing")
        sys.exit(77)
sys.path.insert(0, sys.argv[1])

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"


def make_model(folder):
    words = ["<unk>", "<eos>", "user", "assistant", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", chat_template=TEMPLATE).save_pretrained(folder)
    config = LlamaConfig(vocab_size=len(words), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=64, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder)


with tempfile.TemporaryDirectory() as name:
    make_model(pathlib.Path(name))
    for kind in ("k4v4", "small"):
        sys.argv = ["chat.py", "--model", name, "--format", kind, "--reply-tokens", "4", "--max-tokens", "400",
                    "--say", " ".join(f"w{i}" for i in range(60)) * 3, "w1 w2 w3"]
        runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "chat.py"), run_name="__main__")
