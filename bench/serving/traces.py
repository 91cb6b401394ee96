# SPDX-License-Identifier: Apache-2.0
"""Requests of a serving benchmark: when they come, how long prompts and answers are. All from a seed."""
import math
import random
from dataclasses import dataclass, field
from typing import List, Optional


@dataclass
class Request:
    number: int
    arrival: float  # seconds from the start
    prompt: List[int]  # token ids
    answer_tokens: int
    answer: List[int] = field(default_factory=list)  # so far; a preempted request keeps it
    token_times: List[float] = field(default_factory=list)  # seconds from the start, of each answer token
    started: Optional[float] = None  # when its prompt was first taken up
    preemptions: int = 0

    @property
    def known(self) -> List[int]:
        """The tokens that must be in the cache before the next one comes."""
        return self.prompt + self.answer

    @property
    def is_done(self) -> bool:
        return len(self.answer) >= self.answer_tokens

    @property
    def most_tokens(self) -> int:
        """The last token is never written."""
        return len(self.prompt) + self.answer_tokens - 1


@dataclass(frozen=True)
class Lengths:
    """Log-normal, cut off: most are short, a few long."""

    mean: int
    spread: float = 0.5  # of the logarithm; 0: all alike
    least: int = 16
    most: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        drawn = self.mean if self.spread == 0 else rng.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return max(self.least, min(self.most, round(drawn)))


def ragged(mean: int, count: int, seed: int, spread: float = 0.5) -> List[int]:
    """Lengths between (1 - spread) and (1 + spread) times the mean, evenly drawn."""
    rng = random.Random(seed)
    return [max(1, round(mean * (1 + spread * (2 * rng.random() - 1)))) for _ in range(count)]


def poisson_trace(rate: float, count: int, seed: int, prompts: Lengths, answers: Lengths, vocabulary: int) -> List[Request]:
    """`rate` requests a second on average; 0: all come at once."""
    rng, now, found = random.Random(seed), 0.0, []
    for number in range(count):
        now += rng.expovariate(rate) if rate > 0 else 0.0
        ids = [rng.randrange(vocabulary) for _ in range(prompts.draw(rng))]
        found.append(Request(number, now, ids, max(1, answers.draw(rng))))
    return found
