"""Questions answered by computing in Python."""

from common.turns import Question
from tasks import equality
from tasks.task import Task


class MathQA(Task):
    """Questions answered by computing in Python. The outcome is 1 if the answer has the value of a gold, else 0."""

    score_keeps_time = True  # a comparison that takes too long is ended

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        return float(equality.equal(answer, question.golds)), {}
