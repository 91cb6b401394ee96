# SPDX-License-Identifier: Apache-2.0
"""tierkv as an attention backend of vLLM 0.26 and 0.33: compressed KV blocks behind vLLM's own block tables.

    vllm serve MODEL --attention-backend CUSTOM --block-size 64 --additional-config '{"tierkv": {"format": "k4v4"}}'

vLLM loads register() from the entry point "vllm.general_plugins" in each of its processes. Settings are those of
tierkv.vllm.settings; what a model or a configuration needs and the backend lacks is refused by name when the engine starts.
"""
from __future__ import annotations

import importlib
import logging
from typing import Any

from ._versions import unserved

BACKEND = "tierkv.vllm.backend.TierkvBackend"


def register() -> None:
    """Names the backend to vLLM as CUSTOM; once or many times. Somebody else's CUSTOM is left alone, with a warning. So is a vLLM that tierkv
    does not serve: it may run another backend."""
    log = logging.getLogger(__name__)
    try:
        registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
    except ImportError as e:
        log.warning("%s", unserved(str(e)))
        return
    custom = registry.AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        registry.register_backend(custom, BACKEND)
    elif custom.get_path() != BACKEND:
        log.warning("vLLM's attention backend CUSTOM is %s already: it runs in place of tierkv's", custom.get_path())
