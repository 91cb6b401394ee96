# SPDX-License-Identifier: Apache-2.0
"""Writes into vLLM's log what the kernels could not do."""
# torch is not installed where types are checked.
# mypy: disable-error-code=import
from __future__ import annotations

import logging
from typing import List, Optional

import torch

LOG = logging.getLogger("vllm.tierkv")  # vLLM's handler prints it
STEPS = 16  # between looks
# In the order of EngineError, include/tierkv/engine.h.
FAULTS = ("tokens whose slot lies outside the cache: they are not kept", "keys or values that are not finite: their tokens count as zeros",
          "keys or values that the format cannot hold: their tokens count as zeros", "blocks outside the cache: their tokens were left out")


class Faults:
    """Error counts of the calls of some layers. Looks do not wait for the GPU, so that a fault is logged up to two looks late."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(len(FAULTS), dtype=torch.int32, device=device)
        self.logged = [0] * len(FAULTS)
        self.steps = 0
        self.copied: Optional[torch.cuda.Event] = None
        self.copy = torch.zeros(len(FAULTS), dtype=torch.int32, pin_memory=True) if device.type == "cuda" else self.counts

    def step(self) -> None:
        """Logs what is new, once in STEPS calls."""
        self.steps += 1
        if self.steps % STEPS or (self.counts.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if self.copy is self.counts:
            self._log(self.counts.tolist())
            return
        if self.copied is None:
            self.copied = torch.cuda.Event()
        elif not self.copied.query():
            return
        self._log(self.copy.tolist())
        self.copy.copy_(self.counts, non_blocking=True)
        self.copied.record(torch.cuda.current_stream(self.counts.device))

    def _log(self, counts: List[int]) -> None:
        for what, now, before in zip(FAULTS, counts, self.logged):
            if now != before:
                LOG.error("tierkv: %d %s", now - before, what)
        self.logged = counts
