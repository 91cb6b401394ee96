# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a fixed number of slots: who waits, who runs, who gives way. No tensors, no clock of its own.

An engine serves slots 0 to slots - 1. It has
    room()                 tokens that the pool takes besides those that it holds, an estimate
    prompt(slot, tokens)   takes these tokens up in an empty slot; the next token's id
    step(slots)            the next token's id for each of these slots
    clear(slot)            forgets what a slot holds
prompt() and step() raise OutOfPagesError, and then nothing has changed.
"""
from collections import deque
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Sequence

from traces import Request


class Clock(NamedTuple):
    now: Callable[[], float]  # seconds from the start
    wait_until: Callable[[float], None]


class Served(NamedTuple):
    requests: List[Request]
    seconds: float
    steps: int
    batch: List[int]  # running requests of each step
    preemptions: int
    refused_prompts: int  # the pool said no though room() had said yes
    longest_queue: int


class Scheduler:
    """First come, first served. A prompt is taken up where its tokens and the watermark fit into the pool's room; one between two steps, so that
    those who run are not held up for long. When a step does not fit, the youngest request gives way: it waits at the head of the queue and
    is taken up again with all tokens that it has."""

    def __init__(self, engine: Any, slots: int, watermark_tokens: int, out_of_pages: type, prompts_between_steps: int = 1) -> None:
        self.engine, self.watermark, self.out_of_pages = engine, watermark_tokens, out_of_pages
        self.prompts_between_steps = prompts_between_steps
        self.free = list(range(slots))[::-1]
        self.queue: Deque[Request] = deque()
        self.running: Dict[int, Request] = {}  # by slot, oldest first
        self.preemptions = self.refused_prompts = self.longest_queue = 0

    def arrive(self, request: Request) -> None:
        self.queue.append(request)
        self.longest_queue = max(self.longest_queue, len(self.queue))

    def admit(self, now: Callable[[], float]) -> None:
        for _ in range(self.prompts_between_steps):
            if not self.queue or not self.free:
                return
            request = self.queue[0]
            # An empty pool takes whatever comes: who does not fit then never will.
            if self.running and self.engine.room() < len(request.known) + self.watermark:
                return
            slot = self.free[-1]
            begun = now()
            try:
                token = self.engine.prompt(slot, request.known)
            except self.out_of_pages:
                if not self.running:
                    raise
                self.refused_prompts += 1
                return
            self.queue.popleft()
            self.free.pop()
            if request.started is None:
                request.started = begun
            self.running[slot] = request
            self._got(slot, token, now())

    def step(self, now: Callable[[], float]) -> int:
        """A token for all that run; how many these are."""
        while self.running:
            slots = list(self.running)
            try:
                tokens: Sequence[int] = self.engine.step(slots)
            except self.out_of_pages:
                if len(self.running) == 1:
                    raise
                self.preempt()
                continue
            at = now()
            for slot, token in zip(slots, tokens):
                self._got(slot, token, at)
            return len(slots)
        return 0

    def preempt(self) -> None:
        slot, request = list(self.running.items())[-1]
        del self.running[slot]
        self.engine.clear(slot)
        self.free.append(slot)
        request.preemptions += 1
        self.preemptions += 1
        self.queue.appendleft(request)
        self.longest_queue = max(self.longest_queue, len(self.queue))

    def _got(self, slot: int, token: int, at: float) -> None:
        request = self.running[slot]
        request.answer.append(token)
        request.token_times.append(at)
        if request.is_done:
            del self.running[slot]
            self.engine.clear(slot)
            self.free.append(slot)


def serve(requests: List[Request], scheduler: Scheduler, clock: Clock, most_seconds: float = float("inf")) -> Served:
    """Until all are answered or the time is up."""
    coming = deque(sorted(requests, key=lambda r: r.arrival))
    batch: List[int] = []
    while (coming or scheduler.queue or scheduler.running) and clock.now() < most_seconds:
        while coming and coming[0].arrival <= clock.now():
            scheduler.arrive(coming.popleft())
        if coming and not scheduler.queue and not scheduler.running:
            clock.wait_until(coming[0].arrival)
            continue
        scheduler.admit(clock.now)
        ran = scheduler.step(clock.now)
        if ran:
            batch.append(ran)
    return Served(requests, clock.now(), len(batch), batch, scheduler.preemptions, scheduler.refused_prompts, scheduler.longest_queue)
