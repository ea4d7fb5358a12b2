"""Questions answered by searching."""

from common.turns import Question
from tasks import wordings
from tasks.scores import exact_match, f1
from tasks.task import Task


class SearchQA(Task):
    """Questions answered by searching a corpus. The outcome is exact match; F1 goes into the trajectory's info."""

    examples = tuple(wordings.worked_example(example) for example in wordings.EXAMPLES)

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        return exact_match(answer, question.golds), {"f1": f1(answer, question.golds)}
