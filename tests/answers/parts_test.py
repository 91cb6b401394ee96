# SPDX-License-Identifier: Apache-2.0
"""bench/answers without a model: the tasks ask what their prompts say, the summary finds what was put into it.

parts_test.py SOURCE_DIR"""
import json
import math
import random
import re
import sys
import unittest

sys.path[:0] = (lambda source: [f"{source}/bench/answers", f"{source}/bench"])(sys.argv.pop(1))
import run
import summary
import tasks
from result_tables import quality

SEED = random.SystemRandom().getrandbits(32)


class Bytes:
    """Stands for a tokenizer: a token is a byte."""

    def encode(self, text):
        return [1 + b for b in text.encode()]

    def decode(self, ids):
        return bytes(i - 1 for i in ids if i).decode()


class FakeModel:
    opening, tokenizer = [0], Bytes()


class Tasks(unittest.TestCase):
    def setUp(self):
        self.decode = FakeModel.tokenizer.decode
        r = random.Random(SEED)
        self.texts = [" ".join(tasks.syllables(r, 3) for _ in range(6000))]

    def made(self, task):
        return tasks.TASKS[task][0](random.Random(f"{SEED} {task}"), FakeModel, self.texts).item(task)

    def answers(self, item):
        return [self.decode(item.continuation[a:b]).strip() for a, b in item.answers]

    def test_same_seed_same_items(self):
        first, again, other = (tasks.make_items(FakeModel, self.texts, seed, False) for seed in (SEED, SEED, SEED + 1))
        self.assertEqual(first, again, f"seed {SEED}")
        for a, b in zip(first, other):
            self.assertNotEqual(a, b, f"seed {SEED}")
        for task, (_, count, _) in tasks.TASKS.items():
            self.assertEqual(sum(item.task == task for item in first), count)

    def test_needles_are_in_the_prompt_and_not_in_the_questions(self):
        item = self.made("needle 4K")
        prompt, rest = self.decode(item.prompt), self.decode(item.continuation)
        hidden = dict(re.findall(r"The secret number of (\w+) is (\d{5})\.", prompt + rest[0]))
        asked = re.findall(r"Question: What is the secret number of (\w+)\?\nAnswer: (\d{5})\n", rest)
        self.assertEqual(hidden, dict(asked), f"seed {SEED}")
        self.assertEqual([number for _, number in asked], self.answers(item))
        self.assertNotIn("Question", prompt)

    def test_recall_asks_for_entries_of_the_table(self):
        item = self.made("recall 64")
        table = dict(re.findall(r"(\w+): (\d{4})", self.decode(item.prompt)))
        asked = re.findall(r"(\w+) -> (\d{4})", self.decode(item.continuation))
        self.assertEqual((len(table), len(asked)), (64, 16))
        self.assertEqual([table[key] for key, _ in asked], self.answers(item), f"seed {SEED}")

    def test_chains_are_right(self):
        for i in range(200):
            question, chain = tasks.word_problem(random.Random(f"{SEED} {i}"))
            count = int(re.search(r"has (\d+) ", question)[1])
            for a, sign, b, c in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", chain):
                self.assertEqual(int(a), count, f"seed {SEED}: {question}{chain}")
                count = {"+": count + int(b), "-": count - int(b), "*": count * int(b)}[sign]
                self.assertEqual(int(c), count)
                self.assertIn(b, re.findall(r"\d+", question))
            self.assertTrue(chain.endswith(f" The answer is {count}."))

    def test_copies_are_the_list(self):
        item = self.made("copying")
        listed = (self.decode(item.prompt) + self.decode(item.continuation[:1])).split()
        self.assertEqual(listed[1:], self.answers(item), f"seed {SEED}")

    def test_text_goes_on(self):
        item = self.made("text")
        self.assertIn(self.decode(item.prompt + item.continuation), self.texts[0])
        self.assertEqual(len(item.continuation), tasks.TEXT_TOKENS + 1)


class Summary(unittest.TestCase):
    def setUp(self):
        """KL of a family is C s^2 (of a prompt: times its own factor), memory M - log2(s) / 16."""
        r = random.Random(SEED)
        factors = [r.uniform(0.5, 2) for _ in range(9)]
        self.result = {"prompts": [{"task": "text", "answers": 0} for _ in factors] + [{"task": "copying", "answers": 4}] * 3}

        def scheme(family, preset, memory, kl, right):
            return {"family": family, "preset": preset, "profile": "even", "own_means": False, "memory": [memory] * 12,
                    "kl": [kl * f for f in factors] + [kl] * 3, "error": [kl] * 12, "right": [0] * 9 + right}
        steps = [scheme("steps", f"step:{s}", 0.3 - math.log2(s) / 16, 1e-3 * s * s, [4, 4, 4]) for s in (1, 2, 4)]
        references = [scheme("fixed", p, 0.35, 4e-3, [4, 3, 4]) for p in summary.REFERENCES]
        self.result["schemes"] = [scheme("fixed", "fp16", 1.0, 0.0, [4, 4, 2]), *references, *steps]

    def test_equal_level(self):
        """At the reference's KL, s = 2: memory 0.3 - 1/16. All prompts agree, so nothing is uncertain."""
        at = summary.places(self.result, ["text"])
        memory, gain, error = summary.gain_with_error(self.result, self.result["schemes"][1], "steps", "kl", at)
        self.assertAlmostEqual(memory, 0.3 - 1 / 16, 9, f"seed {SEED}")
        self.assertAlmostEqual(gain, 0.35 / (0.3 - 1 / 16) - 1, 9)
        self.assertLess(error, 1e-9)

    def test_between_and_outside(self):
        points = [(0.3, 1e-3), (0.2, 1e-2)]
        self.assertAlmostEqual(summary.memory_at(points, math.sqrt(1e-5)), 0.25)
        self.assertIsNone(summary.memory_at(points, 2e-2))
        self.assertIsNone(summary.memory_at(points, 1e-4))

    def test_uncertainty_is_that_of_the_mean(self):
        """The jackknife of a mean is its standard error: the gain of a family whose memory does not depend on the level."""
        values = [0.31, 0.35, 0.33, 0.36, 0.3, 0.37, 0.34, 0.32, 0.38]
        for s in self.result["schemes"]:
            if s["family"] == "steps":
                s["memory"] = [0.25] * 12
        reference = dict(self.result["schemes"][1], memory=values + [0.35] * 3)
        _, _, error = summary.gain_with_error(self.result, reference, "steps", "kl", list(range(9)))
        self.assertAlmostEqual(error, summary.standard_error(values) / 0.25, 9)

    def test_change_is_paired(self):
        exact, reference = self.result["schemes"][0], self.result["schemes"][1]
        shift, error = summary.change(self.result, reference, exact)
        self.assertAlmostEqual(shift, (0 - 1 / 4 + 2 / 4) / 3)
        self.assertAlmostEqual(error, summary.standard_error([0, -1 / 4, 2 / 4]))


class Results(unittest.TestCase):
    def setUp(self):
        self.first = {"schema": "s", "runs": [{"seed": 1}], "texts": ["a"], "prompts": [{"task": "text"}],
                      "schemes": [{"preset": "p", "memory": [0.5], "error": [0.1], "kl": [0.2], "right": [0]}]}
        self.second = dict(self.first, runs=[{"seed": 2}], schemes=[dict(self.first["schemes"][0], memory=[0.25], kl=[0.3])])

    def test_written_as_it_is(self):
        self.assertEqual(json.loads(run.written(self.first)), self.first)

    def test_merged(self):
        both = run.merged(self.first, self.second)
        self.assertEqual([r["seed"] for r in both["runs"]], [1, 2])
        self.assertEqual(len(both["prompts"]), 2)
        self.assertEqual((both["schemes"][0]["memory"], both["schemes"][0]["kl"]), ([0.5, 0.25], [0.2, 0.3]))

    def test_what_does_not_fit(self):
        other_preset = dict(self.second, schemes=[dict(self.second["schemes"][0], preset="q")])
        for other in (self.first, dict(self.second, texts=["b"]), other_preset):
            self.assertRaises(SystemExit, run.merged, self.first, other)


class Ranks(unittest.TestCase):
    def test_correlation(self):
        self.assertEqual(quality.ranks([30, 10, 20, 10]), [3, 0.5, 2, 0.5])
        values = random.Random(SEED).sample(range(1000), 20)
        self.assertAlmostEqual(quality.rank_correlation(values, [v**3 for v in values]), 1)
        self.assertAlmostEqual(quality.rank_correlation(values, [-v for v in values]), -1)
        self.assertAlmostEqual(quality.rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]), 0.8)  # 1 - 6 * 4 / (5 * 24)

    def test_means_of_the_first_prompts_of_a_task(self):
        size = {"tokens": 9, "prompts": [{"task": t} for t in ("text", "lookup", "text", "lookup")]}
        scheme = {"kl": [1, 10, 3, 30]}
        self.assertEqual(quality.tasks_mean(size, scheme, "kl", "text"), 2)
        self.assertEqual(quality.tasks_mean(size, scheme, "kl", "lookup", 2), 10)
        self.assertEqual(quality.tasks_mean(size, {"kl": [1]}, "kl", "text"), 1)  # measured on the first prompt alone
        self.assertIsNone(quality.tasks_mean(size, {"kl": [1]}, "kl", "lookup"))


if __name__ == "__main__":
    unittest.main()
