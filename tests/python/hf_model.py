# SPDX-License-Identifier: Apache-2.0
"""The small random model of the tests of tierkv.hf. Needs torch and transformers 5; without them the process ends with 77."""
import os
import sys

sys.path.insert(0, sys.argv.pop(1))
try:
    import torch
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError("transformers is older than 5")
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

SEED = int.from_bytes(os.urandom(4), "little")
VOCABULARY = 97
SHAPE = dict(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None, bos_token_id=None)
# A store rounds to fp16 what is float32 here: 2^-11 of keys, values and outputs, over two layers. Logits are of order 1.
RAW = 0.02


def interrupt(*args):
    raise KeyboardInterrupt


def model_of(kind, config):
    torch.manual_seed(SEED)
    return kind(config(**SHAPE)).eval()
