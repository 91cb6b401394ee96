#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A profile of a model that model.py can run, without PyTorch: the model as calibration wants it (python/tierkv/_calibration.py).

    PYTHONPATH=build/python python3 bench/answers/numpy_calibration.py --model FOLDER --text FILE... -o profile.h5
"""
import multiprocessing
import sys

import numpy as np

import tierkv
from model import LayerCache, Model
from tierkv import _calibration_command as command
from tierkv._calibration import CalibrationError, Facts


def log_probabilities(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Worker:
    """What a process inherits when it is forked."""
    divergence = None

    @classmethod
    def of(cls, i):
        return cls.divergence(i)


class NumpyModel:
    def __init__(self, model, model_id, processes=1):
        self.model, self.model_id, self.processes = model, model_id, processes

    def facts(self):
        m = self.model
        rope = tierkv.Rope(m.rope.pairing, m.rope.dims, m.rope.inv_freq)
        return Facts(self.model_id, m.layers, m.q_heads, m.kv_heads, m.head_dim, m.sm_scale, rope)

    def encode(self, text):
        return self.model.tokenizer.encode(text)

    def opening(self):
        return list(self.model.opening)

    def prefill(self, ids):
        return self.model.prefill(ids)

    def read(self, ids, cache):
        states = self.model.hidden_states(ids, cache)
        return cache, states, log_probabilities(self.model.logits(states[-1]))

    def divergences(self, reading, layer, changes):
        cache, states, exact = reading
        p = np.exp(exact)

        def divergence(i):
            changed = list(cache)
            changed[layer] = LayerCache(*changes[i])
            coarse = log_probabilities(self.model.continued_from(layer, states[layer], changed))
            return float((p * (exact - coarse)).sum(-1, dtype=np.float64).mean())
        if self.processes == 1:
            return [divergence(i) for i in range(len(changes))]
        Worker.divergence = divergence
        with multiprocessing.get_context("fork").Pool(self.processes) as pool:
            return pool.map(Worker.of, range(len(changes)), chunksize=1)


def read_model(args):
    try:
        return NumpyModel(Model(args.model), args.model_id, args.processes)
    except (OSError, ValueError, KeyError) as e:
        raise CalibrationError(f"{args.model}: not a model that model.py runs: {e}") from e


if __name__ == "__main__":
    parser = command.options(__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    sys.exit(command.main(parser.parse_args(), read_model))
