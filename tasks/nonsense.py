"""Refuse a data set whose scorer pays for nonsense: a policy finds such an answer in a few steps, and learns nothing else."""

from tasks.task import Task

ASKED = 20  # questions
PAID = 0.25  # of them: more is beyond the luck of a guess


def refuse_generous(task: Task, name: str) -> None:
    """Ask the task's scorer some nonsense answers. Raises SystemExit if one is paid on over a quarter of the questions.

    Questions that have the answer as a gold do not count, so that yes, no, a digit or a letter may be right by chance.
    The texts of the questions are asked too.
    """
    questions = (task.train or task.held_out or task.test)[:ASKED]
    for nonsense in (*task.nonsense, None):
        asked = [(question.text if nonsense is None else nonsense, question) for question in questions]
        wrong = [(answer, q) for answer, q in asked if not any(same(answer, gold) for gold in q.golds)]
        paid = [(answer, q, score) for answer, q in wrong if (score := task.score(answer, q)[0]) > 0]
        if sum(score for *_, score in paid) > max(1, PAID * len(questions)):
            what = "the question's own text" if nonsense is None else repr(nonsense)
            question = paid[0][1]
            golds = f"not {question.golds[0]!r}" if question.golds else "without a gold"
            raise SystemExit(
                f"--task {name}: its scorer pays for nonsense. The answer {what} is right for {len(paid)} of "
                f"{len(questions)} questions, such as {question.id} ({golds}). Use another data set or scorer."
            )


def same(answer: str, gold: str) -> bool:
    """Return whether an answer is a gold as text or as a number, without asking the scorer."""
    try:
        return float(answer) == float(gold)
    except ValueError:
        return " ".join(answer.split()).casefold() == " ".join(gold.split()).casefold()
