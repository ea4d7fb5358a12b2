"""The data sets of the package reasoning_gym."""

import contextlib
import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import run
from common.turns import Question
from tasks import equality
from tasks.files import TEST, single_spaced
from tasks.math_qa import MathQA

if TYPE_CHECKING:
    from common.args import Sampling

GYM = "reasoning_gym:"  # prefix of --task for a data set of that package
GYM_TRAIN = 2000  # training questions generated from a data set
RUNS_ANSWERS = re.compile(r"\b(eval|exec|parse_expr|sympify|simplify|parse_latex)\(")  # in the source of a scorer


class GymQA(MathQA):
    """Questions of a reasoning_gym data set, answered by computing in Python. The data set's scorer decides: 0 or 1.

    Where the gold is a number, the answer must be one too.
    """

    score_keeps_time = False

    def __init__(self, score_answer: Callable[[str, dict], float], *args):
        super().__init__(*args)
        self.score_answer = score_answer

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        with contextlib.suppress(Exception, SystemExit):  # some scorers raise on a malformed answer
            paid = answer is not None and self.score_answer(answer, question.info["entry"]) == 1.0
            if paid and not self.unevaluated:
                paid = all(equality.evaluated(answer, gold) for gold in question.golds)
            return float(paid), {}
        return 0.0, {}


def gym_questions(args: "Sampling") -> tuple:
    """Return (family, train, held_out, test) of `reasoning_gym:<name>`. The parts share no text."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SystemExit(
            f"--task {args.task}: {error}. Run: .venv/bin/pip install reasoning-gym==0.1.25 (parts need a C compiler)"
        ) from None
    name = args.task.removeprefix(GYM)
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise SystemExit(f"--task {args.task}: reasoning_gym has no such data set. Similar names: {', '.join(close)}.")
    scorer = sys.modules[DATASETS[name][0].__module__]
    if RUNS_ANSWERS.search(inspect.getsource(scorer)) and not args.unsafe_python:
        raise SystemExit(
            f"--task {args.task}: this data set may run an answer as code without a sandbox. --unsafe_python allows it."
        )
    taken, parts = set(), []
    train = min(GYM_TRAIN, args.limit or GYM_TRAIN)
    for number, (part, count) in enumerate((("test", TEST), ("held_out", args.eval_questions), ("train", train))):
        # Seed s and index i give the same question as seed s - 1 and index i + 1, so the seeds are far apart.
        try:
            dataset = reasoning_gym.create_dataset(name, size=count, seed=number * 10**7)
        except Exception as error:
            raise SystemExit(
                f"--task {args.task}: this data set cannot be created without a configuration ({error})."
            ) from None
        made = {}
        for entry in run.progress(dataset, desc=f"{args.task} {part}", leave=False):
            made.setdefault(single_spaced(entry["question"]), entry)
        fresh = [entry for text, entry in made.items() if text not in taken]
        # No gold: several answers are right, and only the scorer knows them.
        golds = [[] if entry["answer"] is None else [str(entry["answer"])] for entry in fresh]
        questions = [
            Question(f"{part}-{i}", entry["question"], gold, info={"entry": entry})
            for i, (entry, gold) in enumerate(zip(fresh, golds))
        ]
        parts.insert(0, questions)
        taken |= made.keys()
    if not parts[0] or not parts[1]:
        raise SystemExit(f"--task {args.task}: it has too few different questions for training and evaluation.")
    return functools.partial(GymQA, dataset.score_answer), *parts
