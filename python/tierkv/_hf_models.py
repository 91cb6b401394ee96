# SPDX-License-Identifier: Apache-2.0
"""Which models of transformers a TierCache serves, and their rotation."""
from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from .errors import InvalidArgumentError, UnsupportedError
from .profile import Rope

# Types are checked where neither is installed.
torch: Any = importlib.import_module("torch")
rope_utils: Any = importlib.import_module("transformers.modeling_rope_utils")

# Types of models, by which dims of a head their RoPE turns together.
HALVES = ("apertus", "arcee", "gemma", "gpt_neox", "granite", "granitemoe", "hunyuan_v1_dense", "llama", "mistral", "mixtral", "nemotron", "olmo2",
          "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "stablelm", "starcoder2")
NEIGHBOURS = ("cohere", "ernie4_5", "glm", "glm4", "helium")
HEAD_DIMS = (64, 96, 128, 256)


def check_model(config: Any, head_dim: int) -> Rope:
    """The rotation of a model that TierCache serves; UnsupportedError says what it does not."""
    if config.model_type not in HALVES + NEIGHBOURS:
        raise UnsupportedError(f"TierCache: model type {config.model_type!r} is not one of {', '.join(sorted(HALVES + NEIGHBOURS))}")
    kinds = getattr(config, "layer_types", None)
    windows = [kind for kind in kinds or [] if kind != "full_attention"]
    if windows or (not kinds and getattr(config, "sliding_window", None)):
        raise UnsupportedError(f"TierCache: {config.model_type} with {windows[0] if windows else 'a sliding window'}")
    if head_dim not in HEAD_DIMS:
        raise UnsupportedError(f"TierCache: head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dims = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, dims, 2, dtype=torch.float) / dims)
    elif kind in ("linear", "llama3", "yarn"):
        inv_freq, _ = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    else:
        raise UnsupportedError(f"TierCache: RoPE of type {kind!r}, whose frequencies change with the length")
    return Rope("halves" if config.model_type in HALVES else "neighbours", 2 * len(inv_freq), inv_freq.float().numpy())


def profile_rope(ours: Rope, model: Rope) -> Rope:
    """The profile's, which was found in keys and may differ from the model's in the last bits."""
    if ours.pairing != model.pairing or ours.dims != model.dims or not np.allclose(ours.inv_freq, model.inv_freq, rtol=1e-5, atol=1e-12):
        raise InvalidArgumentError("profile: its rotation is not this model's")
    return ours
