"""The embedded task tiny_math: arithmetic in words, computed step by step in Python, and a tiny base pretrained for it.

Questions: a number and 1 to 4 operations on it ("Start with 12. First add 7. Second double it. Third subtract it from
90."). Each operation is a tool call that uses the output of the call before. The first two numbers decide whether a
question is for training, held out, or for pretraining, so no question is in two of these parts.

Base: made like that of tiny_search.py. It reads questions, writes code and copies outputs well, and has bad habits: it
stops a step short in most longer questions, gets two of the operations wrong, and drops the sign of a negative answer.
If habits combine, at the start few answers of a group are right, or none, and the errors are small or large.
"""

import random
from pathlib import Path

from tasks import wordings
from tasks.tiny import pretrain

OPERATIONS = {  # phrases of a question, the right code for the value x, the wrong code of a habit (None: no habit)
    "add": (("add {n}", "increase it by {n}"), "{x} + {n}", None),
    "subtract": (("subtract {n}", "decrease it by {n}"), "{x} - {n}", None),
    "multiply": (("multiply it by {n}", "take it {n} times"), "{x} * {n}", None),
    "double": (("double it",), "{x} * {n}", "{x} + {n}"),
    "from": (("subtract it from {n}", "take it away from {n}"), "{n} - {x}", "{x} - {n}"),
}
OFTEN = {"add": 5, "subtract": 5, "multiply": 4, "double": 2, "from": 2}
NUMBERS = {"add": (3, 60), "subtract": (3, 60), "multiply": (3, 9), "double": (2, 2), "from": (20, 99)}
START = (3, 60)
LARGEST = 999
ORDINALS = ("First", "Second", "Third", "Fourth")
LENGTHS = {1: 0.1, 2: 0.3, 3: 0.35, 4: 0.25}  # steps of a question: share
TRAIN, HELD_OUT = 2000, 400  # questions

# Probability of a habit in a scripted trace. Greedy decoding turns a probability into always (above one half) or never.
STOP = {1: 0.0, 2: 0.25, 3: 0.58, 4: 0.64}  # by steps of the question
HABIT = {"double": 0.6, "from": 0.68}
SIGN = 0.75

WORDING = wordings.WORDINGS["python"]
STEPS = 520  # of pretraining
LESSONS = (0.14, 0.28)  # shares of the steps at which copying, and questions of one and two steps, end
COPIED = 12  # numbers in a copying exercise
TOKENIZER_TRACES = 3000
TAGS = [f"<{slash}{tag}>" for tag in ("think", "python", "output", "answer") for slash in ("", "/")]


def _part(start, number):
    """Return the part of a question with these first two numbers."""
    return ("train", "train", "held_out", "pretraining")[(start + 3 * number) % 4]


def _compute(code):
    """Return the value of `a + b`, `a - b` or `a * b`."""
    a, sign, b = code.split()
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def _chain(rng, steps, part):
    """Return a random chain of a part: (start, [(operation, number), ...], value).

    All intermediate values are 1 to LARGEST; the last value may be negative.
    """
    while True:
        start = value = rng.randint(*START)
        chain = []
        for name in rng.choices(list(OFTEN), OFTEN.values(), k=steps):
            number = rng.randint(*NUMBERS[name])
            chain.append((name, number))
            value = _compute(OPERATIONS[name][1].format(x=value, n=number))
            last = len(chain) == steps
            if not (0 < value <= LARGEST or (last and -LARGEST <= value < 0)):
                break
        else:
            if _part(start, chain[0][1]) == part:
                return start, chain, value


def _phrases(rng, chain):
    return [rng.choice(OPERATIONS[name][0]).format(n=number) for name, number in chain]


def _question(start, phrases):
    steps = (f" {ordinal} {phrase}." for ordinal, phrase in zip(ORDINALS, phrases))
    return f"Start with {start}." + "".join(steps)


def questions() -> tuple[list[dict], ...]:
    """Return the task, (train, held_out), lists of {"id", "question", "answers", "steps"}, the same at every call."""
    parts = []
    for part, count in (("train", TRAIN), ("held_out", HELD_OUT)):
        rng, made = random.Random(part), {}
        for steps, share in LENGTHS.items():
            wanted = len(made) + round(share * count)
            while len(made) < wanted:
                start, chain, value = _chain(rng, steps, part)
                made.setdefault(_question(start, _phrases(rng, chain)), {"answers": [str(value)], "steps": steps})
        made = list(made.items())
        rng.shuffle(made)
        parts.append([{"id": f"{part}-{i}", "question": text, **more} for i, (text, more) in enumerate(made)])
    return tuple(parts)


def _trace(rng, steps, flawed):
    """Return a scripted trace, a list of (text, kind): "prompt", "turn" or "found". The outputs are always right."""
    start, chain, _ = _chain(rng, steps, "pretraining")
    phrases, value = _phrases(rng, chain), start
    trace = [(WORDING.instruction + wordings.question_line(_question(start, phrases)), "prompt")]
    for i in range(steps - (flawed and rng.random() < STOP[steps])):
        name, number = chain[i]
        _, code, habit = OPERATIONS[name]
        if flawed and habit and rng.random() < HABIT[name]:
            code = habit
        code = code.format(x=value, n=number)
        value = _compute(code)
        trace.append((f"<think> {ORDINALS[i]} {phrases[i]}. </think> <python> {code} </python>", "turn"))
        trace.append((str(value), "found"))
    answer = abs(value) if flawed and rng.random() < SIGN else value
    return [*trace, (f"<think> That is all. </think> <answer> {answer} </answer>", "turn")]


def _copying(rng):
    """Return a trace of numbers and the same numbers again: the fastest way to teach attention to copy earlier text."""
    listed = "".join(f" {rng.randint(-99, LARGEST)}" for _ in range(COPIED))
    return [(f"{WORDING.instruction}{listed}\n", "prompt"), (f"{listed}\n", "turn")]


def _tokenizer():
    """Return a tokenizer of whole words and single digits."""
    rng = random.Random(1)
    texts = [text for i in range(TOKENIZER_TRACES) for text, _ in _trace(rng, 1 + i % 4, flawed=False)]
    return pretrain.make_tokenizer(texts, TAGS, TOKENIZER_TRACES // 60)


def _lesson(rng, done):
    """Return a trace for when the share `done` of pretraining is completed: copying, then up to 2 and up to 4 steps."""
    lesson = sum(done >= end for end in LESSONS)
    return _trace(rng, rng.randint(1, 2 * lesson), flawed=True) if lesson else _copying(rng)


def base() -> Path:
    """Return the directory of the tiny base for mathematics (weights, tokenizer)."""
    return pretrain.base("tiny-math", _tokenizer, _lesson, STEPS, WORDING)
