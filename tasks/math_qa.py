"""Questions answered by computing in Python."""

from typing import TYPE_CHECKING

from common.turns import Question
from tasks import equality
from tasks.task import Task

if TYPE_CHECKING:
    from common.args import Sampling


class MathQA(Task):
    """Questions answered by computing in Python. The outcome is 1 if the answer has the value of a gold, else 0."""

    score_keeps_time = True  # a comparison that takes too long is ended
    unevaluated = False  # whether 17*23 is right for 391

    def __init__(self, args: "Sampling", *more):
        super().__init__(args, *more)
        self.unevaluated = args.unevaluated

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        return float(equality.equal(answer, question.golds, self.unevaluated)), {}
