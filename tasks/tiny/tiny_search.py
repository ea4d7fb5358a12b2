"""The embedded task tiny_search: a fictional world to search in, and a tiny base model pretrained for it from scratch.

World: people, firms and towns, one short passage each. A question names one of them and asks for an entity 1 to 3
relations away ("Who is the mayor of the town that is home to Ada Cole?"). Each relation is in another passage, so with
several relations a search finds the next link of the chain and not yet the answer. Three groups of names share no name:
two worlds with a passage for each name (one for training, one held out), and the names for the base's pretraining
traces.

Base: a Qwen2 of 1 M parameters, pretrained on scripted traces of this task. It reads, copies and follows chains well,
and has a bad habit: most of its traces stop one search short. Reinforcement learning can correct that.
"""

import functools
import random
from pathlib import Path

from tasks import wordings
from tasks.tiny import pretrain

FIRST = (
    "Ada Bela Cora Dino Edna Fritz Gina Hugo Ida Jonas Kira Leo Mona Nils Olga Petra Quinn Rosa Sven Tara Ulla Vito Wanda Xenia "
    "Yuri Zora Alma Boris Clara Dario Elsa Felix Greta Henrik Irma Jakob Karla Lukas Marta Norbert Otto Paula Rufus Selma Timo "
    "Ursula Viktor Wilma"
).split()
LAST = (
    "Adler Brandt Cole Drake Egan Frost Grant Hale Irwin Joyce Klein Lund Moss Nash Olsen Pike Quill Rhodes Sharp Thorn Unger "
    "Voss Weber Xander York Zeller Abbot Baker Crane Dunn Eaton Finch Gould Hobbs Innes Jarvis Keller Lowell Mercer Noble Orwell "
    "Porter Quaid Ramsey Sutton Tanner Vance Walsh"
).split()
TOWN_FIRST = (
    "Oak Elm Ash Birch Cedar Maple Pine Rose Lake River Stone Hill Moor Green White Black Red Gold Silver Iron Copper Fox Wolf "
    "Bear Deer Hawk Swan Crow Frog Sand Clay Snow Rain Wind Sun Moon Star North South West"
).split()
TOWN_SECOND = "ford ton ville burg field haven port dale wick bury bridge gate".split()
FIRM_FIRST = (
    "Alpha Nova Delta Orbit Prime Summit Zenith Apex Vertex Quantum Helix Polar Solar Lunar Terra Aqua Omega Sigma Titan Atlas "
    "Comet Cosmos Echo Falcon Fusion Galaxy Harbor Indigo Jaguar Krypton Legend Magnet Nimbus Onyx Pixel Quartz Radar Saturn "
    "Tempo Ultra"
).split()
FIRM_SECOND = (
    "Mills Labs Foods Motors Press Tools Glass Steel Paper Textiles Energy Optics Toys Pumps Cables Ceramics".split()
)

# relation: (kind it starts from, kind it leads to, phrases of a question)
RELATIONS = {
    "home": ("person", "town", ("the home of {}", "the town that is home to {}")),
    "employer": ("person", "firm", ("the employer of {}", "the firm that employs {}")),
    "teacher": ("person", "person", ("the teacher of {}", "the person who taught {}")),
    "seat": ("firm", "town", ("the seat of {}", "the town that hosts {}")),
    "head": ("firm", "person", ("the head of {}", "the person who leads {}")),
    "mayor": ("town", "person", ("the mayor of {}", "the person who governs {}")),
    "mainstay": ("town", "firm", ("the mainstay of {}", "the firm that sustains {}")),
}
ASK = {"person": "Who is {}?", "firm": "Which firm is {}?", "town": "Which town is {}?"}
# A passage names its entity in the title and at the start, so BM25 ranks it above passages that only mention it.
PASSAGES = {
    "person": (
        "{me} has a home in {home} and works for the employer {employer}. The teacher was {teacher}.",
        "{me} was taught by the teacher {teacher}, works for the employer {employer} and has a home in {home}.",
    ),
    "firm": (
        "{me} is a firm that has its seat in {seat}. Its head is {head}.",
        "{me} is a firm. The head is {head}, and the seat is in {seat}.",
    ),
    "town": (
        "{me} is a town whose mayor is {mayor}. Its economic mainstay is {mainstay}.",
        "{me} is a town. The mainstay is {mainstay}, and the mayor is {mayor}.",
    ),
}
SIZES = {"person": 120, "firm": 50, "town": 40}  # passages of each of the two worlds
QUESTIONS = {1: 0.1, 2: 0.5, 3: 0.4}  # hops: share
TRAIN, HELD_OUT = 2000, 400  # questions

STEPS = 480  # of pretraining
LESSONS = (0.2, 0.35, 0.5)  # shares of the steps at which copying, 1 hop and up to 2 hops end
WORDING = wordings.WORDINGS["search"]
COPIED = 12  # names in a copying exercise
TOKENIZER_TRACES = 6000
# Probability that a scripted trace of several hops stops one search short: high, but low if it starts from a firm.
# Greedy decoding turns it into always or never: of these questions, the base answers those that start from a firm.
STOP = {"person": 0.62, "firm": 0.05, "town": 0.62}
TAGS = [f"<{slash}{tag}>" for tag in ("think", "search", "information", "answer") for slash in ("", "/")]


def _names():
    """Return {group: {kind: names}} for the groups train, held_out and pretraining, which share no name."""
    every = {
        "person": [f"{first} {last}" for first in FIRST for last in LAST],
        "firm": [f"{first} {second}" for first in FIRM_FIRST for second in FIRM_SECOND],
        "town": [first + second for first in TOWN_FIRST for second in TOWN_SECOND],
    }
    for names in every.values():
        random.Random(0).shuffle(names)
    cuts = {"train": (0, 1), "held_out": (1, 2), "pretraining": (2, None)}
    return {
        group: {kind: names[SIZES[kind] * a : b and SIZES[kind] * b] for kind, names in every.items()}
        for group, (a, b) in cuts.items()
    }


class _World:
    """Facts and passages about the given names, made on first use: a pretraining trace needs only a few of them."""

    def __init__(self, rng, names):
        self.rng, self.names, self.known = rng, names, {}

    def entity(self, kind, name):
        """Return ({relation: name}, the passage with these facts) of an entity."""
        if name not in self.known:
            facts = {}
            for relation, (start, end, _) in RELATIONS.items():
                if start == kind:
                    while facts.get(relation, name) == name:
                        facts[relation] = self.rng.choice(self.names[end])
            self.known[name] = facts, self.rng.choice(PASSAGES[kind]).format_map({"me": name, **facts})
        return self.known[name]

    def walk(self, relations, start):
        """Return the names along the relations, from start to answer, and the passages on the way."""
        path, passages = [start], []
        for relation in relations:
            facts, passage = self.entity(RELATIONS[relation][0], path[-1])
            path.append(facts[relation])
            passages.append(passage)
        return path, passages


@functools.cache
def _chains(hops):
    """Return all sequences of `hops` different relations that each start from the kind that the one before leads to."""
    chains = [(relation,) for relation in RELATIONS]
    for _ in range(hops - 1):
        chains = [
            (*chain, relation)
            for chain in chains
            for relation in RELATIONS
            if RELATIONS[relation][0] == RELATIONS[chain[-1]][1] and relation not in chain
        ]
    return chains


def _question(rng, relations, start):
    phrase = start
    for relation in relations[:-1]:
        phrase = rng.choice(RELATIONS[relation][2]).format(phrase)
    _, kind, phrases = RELATIONS[relations[-1]]
    return ASK[kind].format(phrases[0].format(phrase))  # the other phrase would give "Which firm is the firm that ..."


def _questions(rng, world, count, prefix):
    """Return `count` shuffled questions of a world. The answer is in no passage but the last, nor in the question."""
    questions = []
    for hops, share in QUESTIONS.items():
        asked = []
        for relations in _chains(hops):
            for start in world.names[RELATIONS[relations[0]][0]]:
                path, passages = world.walk(relations, start)
                if len(set(path)) == hops + 1 and not any(path[-1] in text for text in (start, *passages[:-1])):
                    asked.append((relations, start, path[-1]))
        for relations, start, answer in rng.sample(asked, round(share * count)):
            questions.append({"question": _question(rng, relations, start), "answers": [answer], "hops": hops})
    rng.shuffle(questions)
    return [{"id": f"{prefix}-{i}", **question} for i, question in enumerate(questions)]


def search_world() -> tuple[list[dict], list[dict], list[dict]]:
    """Return the task, (documents, train, held_out), the same at every call.

    documents: list of {"id", "title", "text"} of both worlds; train, held_out: lists of {"id", "question", "answers",
    "hops"}. The two worlds share no name and no fact.
    """
    documents, questions = [], []
    for group, count in (("train", TRAIN), ("held_out", HELD_OUT)):
        rng = random.Random(group)
        world = _World(rng, _names()[group])
        for kind, names in world.names.items():
            documents += [{"title": name, "text": world.entity(kind, name)[1]} for name in names]
        questions.append(_questions(rng, world, count, group))
    return [{"id": str(i), **document} for i, document in enumerate(documents)], *questions


def _trace(rng, names, hops, flawed):
    """Return a scripted trace in a new world: list of (text, kind), kind one of "prompt", "turn" and "found".

    The outputs have the format of the search tool: a query that is a title finds that passage.
    """
    relations = rng.choice(_chains(hops))
    start = RELATIONS[relations[0]][0]
    path, passages = _World(rng, names).walk(relations, rng.choice(names[start]))
    stop = flawed and hops > 1 and rng.random() < STOP[start]
    trace, thought = [(WORDING.instruction + wordings.question_line(_question(rng, relations, path[0])), "prompt")], ""
    for i in range(hops - stop):
        trace.append((f"<think>{thought} I need the {relations[i]}. </think> <search> {path[i]} </search>", "turn"))
        trace.append((f"Doc 1 (Title: {path[i]}) {passages[i]}", "found"))
        thought = f" The {relations[i]} is {path[i + 1]}."
    return [*trace, (f"<think>{thought} </think> <answer> {path[hops - stop]} </answer>", "turn")]


def _copying(rng, names):
    """Return a trace of names and the same names again: the fastest way to teach attention to copy earlier text."""
    listed = "".join(f" {rng.choice(names[rng.choice(list(names))])}" for _ in range(COPIED))
    return [(f"{WORDING.instruction}{listed}\n", "prompt"), (f"{listed}\n", "turn")]


def _tokenizer():
    """Return a tokenizer of whole words. A town is two pieces, so that the model can read and write new towns."""
    names, rng = _names()["pretraining"], random.Random(1)
    texts = [text for i in range(TOKENIZER_TRACES) for text, _ in _trace(rng, names, 1 + i % 3, flawed=False)]
    # Every word and every half of a town is more frequent than this threshold, a whole town less.
    return pretrain.make_tokenizer(texts, TAGS, TOKENIZER_TRACES // 60)


def _lesson(names, rng, done):
    """Return a trace for when the share `done` of pretraining is completed: copying, then 1, 2 and 3 hops."""
    hops = sum(done >= end for end in LESSONS)
    return _trace(rng, names, rng.randint(1, hops), flawed=True) if hops else _copying(rng, names)


def base() -> Path:
    """Return the directory of the tiny base (weights, tokenizer)."""
    lesson = functools.partial(_lesson, _names()["pretraining"])
    return pretrain.base("tiny", _tokenizer, lesson, STEPS, WORDING)
