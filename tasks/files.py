"""JSONL files of questions."""

import json
import os
import random
from collections.abc import Callable

from common.turns import Question
from tasks.scores import normal_form, visible

TEST = 500  # test questions of a file, for eval.py


def read_question(line: bytes, number: int, normal: Callable[[str], str] = normal_form) -> Question:
    """Return the Question of one line of a file; `number` becomes info["line"]. Raises ValueError with the reason.

    normal: the normalisation after which at least one gold must not be empty.
    """
    try:
        item = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}: {error.reason})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(item, dict):
        raise ValueError('not an object {"question": ..., "answers": [...]}')
    for key in ("question", "answers"):
        if key not in item:
            raise ValueError(f"{key} is missing; it has {', '.join(item) or 'nothing'}")
    text, golds, name = item["question"], item["answers"], item.get("id")
    if not isinstance(text, str) or not visible(text):
        raise ValueError("question must be a non-empty string")
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) and visible(gold) for gold in golds):
        raise ValueError("answers must be a non-empty list of non-empty strings")
    if not any(visible(normal(gold)) for gold in golds):  # a single alias may be empty, such as "the"
        raise ValueError("every answer is empty after normalisation")
    if any("\ud800" <= c <= "\udfff" for c in "".join((text, *golds))):
        raise ValueError("question and answers must be valid Unicode, without lone surrogates")
    return Question(f"line-{number}" if name is None else str(name), text, golds, info={"line": number})


def read_questions(path: str | os.PathLike, normal: Callable[[str], str] = normal_form) -> list[Question]:
    """Read a JSONL file of {"question", "answers"[, "id"]}. Raises SystemExit with file and line of the first error."""
    questions, seen = [], {}  # id -> line
    try:
        lines = open(path, "rb")  # decoded line by line, to report the line that is not UTF-8
    except OSError as error:
        raise SystemExit(f"--task {path}: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            try:
                question = read_question(line, number, normal)
                if question.id in seen:
                    raise ValueError(f"id {question.id} occurs twice, first in line {seen[question.id]}")
            except ValueError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from None
            seen[question.id] = number
            questions.append(question)
    if not questions:
        raise SystemExit(f"{path}: no questions")
    return questions


def single_spaced(text: str) -> str:
    """Return the text with single spaces. For mathematics, where signs and case matter."""
    return " ".join(text.split())


def split(
    questions: list[Question], held_out: int, key: Callable[[str], str] = normal_form
) -> tuple[list[Question], list[Question], list[Question]]:
    """Return (train, held-out, test), fixed pseudo-random parts of a file.

    held-out has `held_out` questions and test has TEST, each at most a quarter of the file. The test questions do not
    depend on `held_out`. No text is in two parts; texts with the same key count as the same.
    """
    order = sorted(questions, key=lambda q: random.Random(q.text).random())
    quarter = max(1, len(order) // 4)
    parts, taken = [], set()
    for count, candidates in ((TEST, order[::-1]), (held_out, order)):
        parts.insert(0, [q for q in candidates if key(q.text) not in taken][: min(count, quarter)])
        taken |= {key(q.text) for q in parts[0]}
    train = [q for q in questions if key(q.text) not in taken]
    if not train:
        raise SystemExit(
            f"{len(questions)} question(s) are too few: training, evaluation during training and testing need "
            "at least 3 different ones."
        )
    return train, *parts
