"""Data sets of the package reasoning_gym."""

import contextlib
import difflib
import functools
import inspect
import re
import sys

from tqdm import tqdm

from common import ranks
from common.turns import Question
from tasks.files import TEST, single_spaced
from tasks.math_qa import MathQA

GYM = "reasoning_gym:"  # how --task names a data set of that package
GYM_TRAIN = 2000  # questions made of it to train on
RUNS_ANSWERS = re.compile(r"\b(eval|exec|parse_expr|sympify|simplify|parse_latex)\(")  # in the source of a scorer


class GymQA(MathQA):
    """Questions of a reasoning_gym data set, answered by computing in Python and scored by the data set itself: right or wrong."""

    def __init__(self, score_answer, *args):
        super().__init__(*args)
        self.score_answer = score_answer

    def score(self, answer, question):
        with contextlib.suppress(Exception, SystemExit):  # some scorers raise on an answer that makes no sense
            return float(answer is not None and self.score_answer(answer, question.info["entry"]) == 1.0), {}
        return 0.0, {}


def gym_questions(args):
    """(family, train, held_out, test) of `reasoning_gym:<name>`. Questions come from seeds far apart, and no text is in two parts."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SystemExit(
            f"--task {args.task}: {error}. .venv/bin/pip install reasoning-gym==0.1.25 (a part of it needs a C compiler)"
        ) from None
    name = args.task.removeprefix(GYM)
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise SystemExit(f"--task {args.task}: reasoning_gym has no such data set. Close: {', '.join(close)}.")
    scorer = sys.modules[DATASETS[name][0].__module__]
    if RUNS_ANSWERS.search(inspect.getsource(scorer)) and not args.unsafe_python:
        raise SystemExit(
            f"--task {args.task}: this data set may run an answer as code to score it, outside any sandbox. --unsafe_python allows it."
        )
    taken, parts = set(), []
    train = min(GYM_TRAIN, args.limit or GYM_TRAIN)
    for number, (part, count) in enumerate((("test", TEST), ("held_out", args.eval_questions), ("train", train))):
        # The question of a seed and index is that of the seed before it and the next index.
        try:
            dataset = reasoning_gym.create_dataset(name, size=count, seed=number * 10**7)
        except Exception as error:
            raise SystemExit(f"--task {args.task}: not without a configuration of its own ({error}).") from None
        made = {}
        for entry in tqdm(dataset, desc=f"{args.task} {part}", leave=False, disable=ranks.rank() > 0):
            made.setdefault(single_spaced(entry["question"]), entry)
        fresh = [entry for text, entry in made.items() if text not in taken]
        golds = [
            [] if entry["answer"] is None else [str(entry["answer"])] for entry in fresh
        ]  # [] where many are right
        questions = [
            Question(f"{part}-{i}", entry["question"], gold, info={"entry": entry})
            for i, (entry, gold) in enumerate(zip(fresh, golds))
        ]
        parts.insert(0, questions)
        taken |= made.keys()
    if not parts[0] or not parts[1]:
        raise SystemExit(f"--task {args.task}: it has too few different questions to train on some and test on others.")
    return functools.partial(GymQA, dataset.score_answer), *parts
