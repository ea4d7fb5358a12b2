"""Questions answered by searching."""

from common.turns import Question
from tasks import wordings
from tasks.scores import exact_match, f1, normal_form, own_form
from tasks.task import Task


class SearchQA(Task):
    """Questions answered by searching a corpus. The outcome is exact match; F1 goes into the trajectory's info."""

    examples = tuple(wordings.worked_example(example) for example in wordings.EXAMPLES)
    form = staticmethod(normal_form)  # the published one, for figures that can be compared with those of papers

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        return exact_match(answer, question.golds, self.form), {"f1": f1(answer, question.golds, self.form)}


class FileQA(SearchQA):
    """Questions of a file of one's own, answered by searching: numbers and Unicode are read with more care."""

    form = staticmethod(own_form)
