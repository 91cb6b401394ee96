# SPDX-License-Identifier: Apache-2.0
"""What is counted of a model's predictions."""
import numpy as np


def log_probabilities(logits):
    """[tokens, vocabulary] in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kl_by_position(exact, log_p):
    return (np.exp(exact) * (exact - log_p)).sum(-1)


def right_answers(item, log_p):
    """How many; log_p[i] predicts continuation[i + 1]."""
    best = log_p.argmax(-1)
    return sum(int((best[a - 1:b - 1] == item.continuation[a:b]).all()) for a, b in item.answers)
