"""Scores of answers against golds."""

import string
from collections import Counter


def normalise(text):
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(w for w in text.split() if w not in ("a", "an", "the"))


def exact_match(answer, golds):
    """1.0 if the answer equals one of the golds in normal form, else 0.0. An empty answer is never right."""
    answer = normalise(answer or "")
    return float(bool(answer) and any(answer == normalise(gold) for gold in golds))


def f1(answer, golds):
    """Word-level F1 in normal form, the best over the golds."""
    words = Counter(normalise(answer or "").split())
    best = 0.0
    for gold in golds:
        gold = Counter(normalise(gold).split())
        common = sum((words & gold).values())
        if common:
            precision, recall = common / sum(words.values()), common / sum(gold.values())
            best = max(best, 2 * precision * recall / (precision + recall))
    return best
