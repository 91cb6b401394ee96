# SPDX-License-Identifier: Apache-2.0
"""The vLLMs that the backend serves, told apart by what they offer.

    0.26   asks the backend class for a cache's shape; TQFullAttentionSpec holds the bytes of a token and kv_head
    0.33   shapes caches [blocks, kv_heads, tokens, bytes] in one of the class's layouts; FullAttentionSpec holds those bytes
"""
from __future__ import annotations

import sys
from typing import Any, Tuple

from ..errors import UnsupportedError

# (class of a spec, its field of bytes, what the backend class is asked)
_CACHES = (("TQFullAttentionSpec", "tq_slot_size", "get_kv_cache_shape"),
           ("FullAttentionSpec", "state_content_bytes", "supported_kv_cache_layouts"))


def unserved(reason: str) -> UnsupportedError:
    """No ImportError: vLLM keeps the text of those to itself."""
    version = getattr(sys.modules.get("vllm"), "__version__", "of no known version")
    return UnsupportedError(f"tierkv serves vLLM 0.26 and 0.33, this is vLLM {version}: {reason}")


def cache_spec(backend: Any, specs: Any) -> Tuple[Any, str]:
    """The class of specs of caches of bytes, and its field of bytes of a token and kv_head.

    `backend` is vLLM's AttentionBackend, `specs` its module kv_cache_interface.
    """
    for name, field, hook in _CACHES:
        spec = getattr(specs, name, None)
        if field in getattr(spec, "__dataclass_fields__", ()) and hasattr(backend, hook):
            return spec, field
    raise unserved("its layers cannot ask for caches of bytes in a way that is known here")


def draft_tokens(attention: Any, vllm_config: Any) -> int:
    """Tokens that a decode has beside its first. `attention` is vLLM's module v1.attention.backend."""
    widest = getattr(attention, "max_decode_query_len", None)
    if widest is not None:
        return int(widest(vllm_config)) - 1
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.num_speculative_tokens:
        return 0
    return int(speculative.num_speculative_tokens) * (2 if getattr(speculative, "parallel_drafting", False) else 1)
