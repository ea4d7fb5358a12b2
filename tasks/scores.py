"""Scores of answers against golds."""

import string
from collections import Counter


def normal_form(text: str) -> str:
    """Return the text in SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(w for w in text.split() if w not in ("a", "an", "the"))


def exact_match(answer: str | None, golds: list[str]) -> float:
    """Return 1.0 if the answer equals one of the golds in normal form, else 0.0. An empty answer is never right."""
    answer = normal_form(answer or "")
    return float(bool(answer) and any(answer == normal_form(gold) for gold in golds))


def f1(answer: str | None, golds: list[str]) -> float:
    """Return the word-level F1 in normal form, the best over the golds."""
    words = Counter(normal_form(answer or "").split())
    best = 0.0
    for gold in golds:
        gold = Counter(normal_form(gold).split())
        common = sum((words & gold).values())
        if common:
            precision, recall = common / sum(words.values()), common / sum(gold.values())
            best = max(best, 2 * precision * recall / (precision + recall))
    return best
