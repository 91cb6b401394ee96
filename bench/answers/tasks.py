# SPDX-License-Identifier: Apache-2.0
"""Prompts with questions that come after them, from a seed: retrieval, recall, arithmetic, copying, and running text.

The prompt is what gets compressed; the continuation is read afterwards, teacher-forced, and opens with the prompt's last token, so that
its first prediction sees the compressed cache too. Formats are those that the model was trained on, but for copying."""
import dataclasses
import random

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
NAMES = "Amy Anna Ben Dan Eva Ivy Joy Kim Lee Leo Max Mia Ned Pam Ray Roy Sam Sue Tom Zoe".split()
THINGS = "apples books cards coins cups marbles pens plums shells stamps".split()
LOOKUP_NAMES = """Alice Oliver Emma James Sophia Henry Laura Daniel Julia Peter Maria Thomas Sarah David Helen George Clara Martin Ruth Simon
    Diana Frank Irene Walter Nora Victor Paula Hugo Edith Oscar Rosa Arthur Grace Louis Ellen Robert""".split()
LOOKUP_ENTRIES, LOOKUPS, LOOKUP_TOKENS = 24, 10, 12
LOOKUP_SENTENCE = "The account is {}"  # the number follows at once: looking it up takes one step of copying
CONTINUED = 128  # tokens, of going_on; at most, of lookup
TEXT_PROMPT_TOKENS, TEXT_TOKENS = (1985, 2112), 192  # of any length: KIVI keeps an incomplete group raw


@dataclasses.dataclass
class Item:
    task: str
    prompt: list  # token ids
    continuation: list  # token ids; the first is the prompt's last
    answers: list  # [begin, end) of each answer in the continuation


class Builder:
    """Texts in turn, some of them answers; `ask` ends the prompt."""

    def __init__(self, model, ids=()):
        self.encode, self.ids = model.tokenizer.encode, [*model.opening, *ids]
        self.cut, self.answers = 0, []

    def add(self, text):
        self.ids += self.encode(text)

    def ask(self):
        self.cut = len(self.ids) - 1

    def answer(self, text):
        begin = len(self.ids) - self.cut
        self.add(text)
        self.answers.append((begin, len(self.ids) - self.cut))

    def item(self, task):
        return Item(task, self.ids[:self.cut], self.ids[self.cut:], self.answers)


def syllables(r, count):
    return "".join(r.choice(CONSONANTS) + r.choice(VOWELS) for _ in range(count))


def distinct_words(r, count, least, most):
    words = {}
    while len(words) < count:
        words[syllables(r, r.randint(least, most))] = None
    return list(words)


def digits(r, count):
    return "".join(r.choice("0123456789") for _ in range(count))


def passage(r, texts, characters):
    """A piece of a text that is long enough, from the beginning of a word."""
    text = r.choice([t for t in texts if len(t) > 1.2 * characters])
    start = text.index(" ", r.randrange(len(text) - int(1.1 * characters))) + 1
    return text[start:start + characters].rstrip()


def needle(r, model, texts, characters):
    """Four numbers hidden in a text, asked for in random order."""
    names, numbers = distinct_words(r, 4, 2, 3), [digits(r, 5) for _ in range(4)]
    words = passage(r, texts, characters).split(" ")
    places = sorted(r.sample(range(1, len(words)), 4))
    for place, name, number in reversed(list(zip(places, names, numbers))):
        words.insert(place, f"The secret number of {name} is {number}.")
    b = Builder(model)
    b.add(" ".join(words))
    b.ask()
    b.add("\n\n")
    for i in r.sample(range(4), 4):
        b.add(f"Question: What is the secret number of {names[i]}?\nAnswer:")
        b.answer(f" {numbers[i]}")
        b.add("\n")
    return b


def recall(r, model, entries, lookups):
    keys = distinct_words(r, entries, 3, 4)
    table = {key: digits(r, 4) for key in keys}
    b = Builder(model)
    b.add("Table:\n" + "".join(f"{key}: {value}\n" for key, value in table.items()))
    b.ask()
    b.add("Lookup:\n")
    for key in r.sample(keys, lookups):
        b.add(f"{key} ->")
        b.answer(f" {table[key]}")
        b.add("\n")
    return b


def word_problem(r):
    """(question, chain): two to four steps from a number of things to another."""
    who, thing = r.choice(NAMES), r.choice(THINGS)
    count = r.randint(5, 60)
    question, chain = f"Q: {who} has {count} {thing}.", ""
    for _ in range(r.randint(2, 4)):
        other, kind, n = r.choice(NAMES), r.choice("bgnm"), r.randint(2, 40)
        if (kind == "m" and count > 100) or (kind == "g" and count < 3):
            kind = "b"
        if kind == "m":
            n = r.randint(2, 4)
            told, sign, result = f"Then the number of {thing} is multiplied by {n}.", "*", count * n
        elif kind == "g":
            n = r.randint(1, count - 1)
            told, sign, result = f"{who} gives {n} to {other}.", "-", count - n
        elif kind == "b":
            told, sign, result = f"{who} buys {n} more.", "+", count + n
        else:
            told, sign, result = f"{other} brings {n} {thing}.", "+", count + n
        question += " " + told
        chain += f" {count} {sign} {n} = {result}."
        count = result
    return f"{question} How many {thing} does {who} have?\n", f"{chain} The answer is {count}."


def arithmetic(r, model, shots):
    """The last question belongs to the prompt: all of its numbers are read from the cache."""
    b = Builder(model)
    for _ in range(shots):
        question, chain = word_problem(r)
        b.add(f"{question}A:{chain}\n")
    question, chain = word_problem(r)
    b.add(f"{question}A:")
    b.ask()
    b.answer(chain)
    b.add("\n")
    return b


def copying(r, model, words):
    """Each word is an answer."""
    listed = distinct_words(r, words, 2, 4)
    b = Builder(model)
    b.add("List: " + " ".join(listed) + "\n")
    b.ask()
    b.add("Copy:")
    for word in listed:
        b.answer(f" {word}")
    b.add("\n")
    return b


def running_text(r, model, texts):
    """No answers: what the text itself goes on with."""
    prompt = r.randint(*TEXT_PROMPT_TOKENS)
    tokens = prompt + TEXT_TOKENS
    ids = model.tokenizer.encode(passage(r, texts, 5 * tokens))[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"a passage has only {len(ids)} tokens")
    b = Builder(model, ids)
    b.cut = prompt
    return b


def going_on(r, model, text, tokens):
    """Exactly `tokens` of a prompt from a place of the text, and what it goes on with."""
    count = tokens + CONTINUED - len(model.opening)
    for attempt in range(100):
        start = text.find(" ", r.randrange(max(1, len(text) - 2 * count))) + 1
        ids = model.tokenizer.encode(text[start:start + 8 * count])[:count]
        if len(ids) == count:
            b = Builder(model, ids)
            b.cut = tokens
            return b.item("text")
    raise ValueError(f"a text is too short for {tokens + CONTINUED} tokens")


def lookup(r, model, texts, tokens):
    """Exactly `tokens` of text with names and numbers in it; some of the names are asked for. Answers are the numbers."""
    encode = model.tokenizer.encode
    names, room = r.sample(LOOKUP_NAMES, LOOKUP_ENTRIES), tokens - len(model.opening)
    numbers = [digits(r, 4) for _ in names]
    filler = room - LOOKUP_ENTRIES * LOOKUP_TOKENS
    words = passage(r, texts, 8 * tokens).split(" ")
    words = words[:len(words) * filler // len(encode(" ".join(words)))]  # about; what is too much is cut at the front,
    first = len(words) // 8  # where there are no entries
    for place, name, number in sorted(zip(r.sample(range(first, len(words)), len(names)), names, numbers), reverse=True):
        words.insert(place, LOOKUP_SENTENCE.format(name) + number + ".")
    ids = encode(" ".join(words))
    b = Builder(model)
    b.ids += (encode(passage(r, texts, 8 * tokens)) + ids)[-room:]
    b.cut = len(b.ids)
    b.add("\n")
    for i in r.sample(range(len(names)), LOOKUPS):
        b.add("\n" + LOOKUP_SENTENCE.format(names[i]))
        b.answer(numbers[i])
        b.add(".")
    item = b.item("lookup")
    if len(item.prompt) != tokens or len(item.continuation) > CONTINUED:
        raise ValueError(f"{len(item.prompt)} and {len(item.continuation)} tokens")
    return item


# task -> (maker, prompts in a run, prompts in a quick run)
TASKS = {
    "text": (running_text, 24, 0),
    "needle 4K": (lambda r, m, t: needle(r, m, t, 4000), 8, 0),
    "needle 16K": (lambda r, m, t: needle(r, m, t, 16000), 6, 0),
    "recall 64": (lambda r, m, t: recall(r, m, 64, 16), 8, 1),
    "recall 160": (lambda r, m, t: recall(r, m, 160, 16), 6, 0),
    "arithmetic": (lambda r, m, t: arithmetic(r, m, 7), 32, 1),
    "copying": (lambda r, m, t: copying(r, m, 48), 8, 1),
}


def make_items(model, texts, seed, quick):
    """The tasks in turn, so that a run which ends early has some of each."""
    placed = []
    for task, (make, full, few) in TASKS.items():
        count = few if quick else full
        for i in range(count):
            item = make(random.Random(f"{seed} {task} {i}"), model, texts).item(task)
            placed.append(((i + 0.5) / count, item))
    return [item for _, item in sorted(placed, key=lambda p: p[0])]
