"""The embedded default for mathematics: arithmetic in words, to be done step by step in Python, and a tiny base pretrained on it.

Questions: a number and 1 to 4 things to do to it ("Start with 12. First add 7. Second double it. Third subtract it from 90."). Each
is a call of the tool that takes up what the call before gave. The first two numbers tell whether a question is trained on, held out, or
only seen in pretraining, so none is in two of these parts.

Base: made like the one of tiny_search.py. It reads the question, writes the code and copies what came back well, and it has bad habits: it
stops a step short in most longer questions, gets two of the wordings wrong, and drops the sign of a negative answer. Where habits
meet, hardly one answer in a group is right at the start, or none; and what is wrong is wrong by little or by much.
"""

import random

from tasks import wordings
from tasks.tiny import pretrain

OPERATIONS = {  # how a question says it, the code for it on the value x, and the code out of habit
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

# How likely a habit shows in a scripted trace. Greedy decoding turns a likelihood into always or never: above one half it is always.
STOP = {1: 0.0, 2: 0.25, 3: 0.58, 4: 0.64}  # by the steps of the question
HABIT = {"double": 0.6, "from": 0.68}
SIGN = 0.75

WORDING = wordings.WORDINGS["python"]
STEPS = 520  # of pretraining
LESSONS = (0.14, 0.28)  # shares of the steps at which copying, and questions of one and two steps, end
COPIED = 12  # numbers in a copying exercise
TOKENIZER_TRACES = 3000
TAGS = [f"<{slash}{tag}>" for tag in ("think", "python", "output", "answer") for slash in ("", "/")]


def _part(start, number):
    """Of a question with these first two numbers."""
    return ("train", "train", "held_out", "pretraining")[(start + 3 * number) % 4]


def _compute(code):
    """The value of `a + b`, `a - b` or `a * b`."""
    a, sign, b = code.split()
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def _chain(rng, steps, part):
    """A random chain of a part: (start, [(operation, number), ...], value). Its values are 1 to LARGEST; the last may be negative."""
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


def questions():
    """The task: (train, held_out), lists of {"id", "question", "answers", "steps"}, the same at every call."""
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
    """One scripted trace: list of (text, kind), kind one of "prompt", "turn" and "found". What its code gives is always true."""
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
    """A list of numbers and the same list again, as a trace: the quickest way to teach attention to copy what stands earlier."""
    listed = "".join(f" {rng.randint(-99, LARGEST)}" for _ in range(COPIED))
    return [(f"{WORDING.instruction}{listed}\n", "prompt"), (f"{listed}\n", "turn")]


def _tokenizer():
    """Of whole words and single digits."""
    rng = random.Random(1)
    texts = [text for i in range(TOKENIZER_TRACES) for text, _ in _trace(rng, 1 + i % 4, flawed=False)]
    return pretrain.make_tokenizer(texts, TAGS, TOKENIZER_TRACES // 60)


def _lesson(rng, done):
    """A trace to learn from when the share `done` of pretraining is over: copying, then up to 2 and up to 4 steps."""
    lesson = sum(done >= end for end in LESSONS)
    return _trace(rng, rng.randint(1, 2 * lesson), flawed=True) if lesson else _copying(rng)


def base():
    """Directory of the tiny base for mathematics (weights, tokenizer)."""
    return pretrain.base("tiny-math", _tokenizer, _lesson, STEPS, WORDING)
