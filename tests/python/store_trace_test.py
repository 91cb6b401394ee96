"""tierkv.Store on the host: a random trace has the results of the C++ host store, errors and stale ids included."""
import struct
import subprocess
import sys
import unittest

import numpy as np
from store_case import KV_HEADS, LAYERS, MAX_TOKENS, StoreTest, config, tierkv
from tierkv import errors

TRACE = sys.argv[2]
(ADD, BEGIN_PROMPT, APPEND, SCORE_PROMPT, END_PROMPT, BEGIN_STEP, ATTEND, UPDATE_SCORES, FORK, TRUNCATE, RELEASE, EXPORT, IMPORT,
 NUM_TOKENS, STATS) = range(15)


class Trace(StoreTest):
    """Calls are played on a Python store and recorded; the C++ store then plays the record and must answer the same."""

    def setUp(self):
        super().setUp()
        self.store = tierkv.Store(config())
        self.ids, self.record, self.answers = [], [], []

    def tearDown(self):
        self.store.close()

    def play(self, op, which=-1, layer=0, n=0, payload=b"", call=None):
        self.record.append(struct.pack("<5i", op, which, layer, n, len(payload)) + payload)
        try:
            result = call(self.ids[which] if which >= 0 else 0)
            self.answers.append((0, "", op, result))
            if op in (ADD, FORK, IMPORT):
                self.ids.append(result)
            return result
        except tierkv.TierkvError as e:
            code = next(number for number, kind in errors._CLASSES.items() if kind is type(e))
            self.answers.append((code, str(e), op, None))
            return None

    def tokens(self, which, n):
        """A layer's tokens for every layer."""
        for layer in range(LAYERS):
            k, v = self.values(n), self.values(n)
            self.play(APPEND, which, layer, n, k.tobytes() + v.tobytes(), lambda id: self.store.append(id, layer, k, v))
            yield layer

    def prompt(self, which, n):
        self.play(BEGIN_PROMPT, which, 0, n, call=lambda id: self.store.begin_prompt(id, n))
        for layer in self.tokens(which, n):
            x = self.scores(n)
            self.play(SCORE_PROMPT, which, layer, 0, x.tobytes(), lambda id: self.store.score_prompt(id, layer, x))
        self.play(END_PROMPT, which, call=self.store.end_prompt)

    def step(self, which, n):
        self.play(BEGIN_STEP, which, 0, n, call=lambda id: self.store.begin_step(id, n))
        for layer in self.tokens(which, n):
            q_len = int(self.rng.integers(1, n + 1))
            q = self.query() if q_len == 1 else self.queries(q_len)
            into = tierkv.Attention(np.empty(q.shape, np.float16), np.empty(q.shape[:-1], np.float32),
                                    np.zeros((*((q_len,) if q_len > 1 else ()), 1, KV_HEADS, MAX_TOKENS), np.float32))
            count_query = bool(self.rng.random() < 0.5)
            self.play(ATTEND, which, layer, count_query, q.tobytes(),
                      lambda id: self.store.attend(id, layer, q, into=into, count_query=count_query))
            if count_query:
                continue
            back = int(self.rng.integers(n)) if q_len == 1 else 0
            last = into.probabilities[-1] if q_len > 1 else into.probabilities
            self.play(UPDATE_SCORES, which, layer, back, last.tobytes(), lambda id: self.store.update_scores(id, layer, last, back))

    def move(self, which):
        data = self.play(EXPORT, which, call=self.store.export_sequence)
        if data is not None:
            if self.rng.random() < 0.3:
                at = int(self.rng.integers(len(data)))
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]
            self.play(IMPORT, -1, 0, 0, data, lambda _: self.store.import_sequence(data))

    def test_a_trace(self):
        for _ in range(80):
            what = self.rng.random()
            which = int(self.rng.integers(-1, len(self.ids)))
            if what < 0.12:
                if self.play(ADD, call=lambda _: self.store.add_sequence()) is not None:
                    self.prompt(len(self.ids) - 1, int(self.rng.integers(1, 60)))
            elif what < 0.2:
                self.play(FORK, which, call=self.store.fork)
            elif what < 0.3:
                n = int(self.rng.integers(40))
                self.play(TRUNCATE, which, 0, n, call=lambda id: self.store.truncate(id, n))
            elif what < 0.38:
                self.play(RELEASE, which, call=self.store.release)
            elif what < 0.48:
                self.move(which)
            else:
                self.step(which, int(self.rng.integers(1, 9)))
            self.play(NUM_TOKENS, which, call=self.store.num_tokens)
            self.play(STATS, call=lambda _: self.store.stats())
        for which in range(len(self.ids)):
            self.play(EXPORT, which, call=self.store.export_sequence)
        told = subprocess.run([TRACE], input=b"".join(self.record), capture_output=True, check=True).stdout
        for i, answer in enumerate(self.answers):
            told = self.compare(answer, told, f"seed {self.seed}, call {i}")
        self.assertEqual(told, b"")
        codes = {code for code, *_ in self.answers}
        self.assertIn(0, codes)
        self.assertIn(8, codes, "stale ids are part of every trace")

    def compare(self, answer, told, where):
        code, message, op, result = answer

        def take(n):
            nonlocal told
            part, told = told[:n], told[n:]
            return part

        self.assertEqual(struct.unpack("<i", take(4))[0], code, f"{where}: {message}")
        self.assertEqual(take(struct.unpack("<i", take(4))[0]).decode(), message, where)
        data = take(struct.unpack("<i", take(4))[0])
        if code != 0 or op in (ADD, FORK, IMPORT):
            return told
        if op == ATTEND:
            self.assertEqual(result.out.tobytes() + result.lse.tobytes() + result.probabilities.tobytes(), data, where)
        elif op == EXPORT:
            self.assertEqual(result, data, where)
        elif op == NUM_TOKENS:
            self.assertEqual(struct.pack("<i", result), data, where)
        elif op == STATS:
            ours = [result.window_tokens, result.high_tokens, result.low_tokens, result.pruned_tokens, result.sequences, result.pages,
                    result.pages_free, result.pages_shared, result.page_bytes, result.raw_bytes, result.nominal_bytes]
            self.assertEqual(struct.pack("<11q", *ours), data, where)
        return told


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"])
