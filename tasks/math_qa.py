"""Questions answered by computing in Python."""

from tasks import equality
from tasks.task import Task


class MathQA(Task):
    """Questions answered by computing in Python. The outcome is whether the answer has the value of a gold."""

    def score(self, answer, question):
        return float(equality.equal(answer, question.golds)), {}
