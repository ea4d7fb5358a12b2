"""Scores of answers against golds."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable

KEPT = {  # signs that own_form keeps, by where they are; all other punctuation is dropped
    "between digits": re.compile(r"(?<=\d)[^\w\s](?=\d)"),  # 3.14, 5/3, 3:00, 1990-2000, but no thousands separator
    "before a number": re.compile(r"(?<!\w)-(?=[$€£¥]?\.?\d)|[<>](?=[\s=-]*\.?\d)"),  # -5, > 5, p<0.05
    "between names": re.compile(r"(?<=\w)[<>](?=\w)"),  # a<b
    "in an exponent": re.compile(r"(?<=\de)-(?=\d)"),  # 1e-5
    "after a name": re.compile(  # C++, C#, C++11, A-, 18+
        r"(?<=[^\W\d_])[+#]+|(?<=\d)[+#]+(?!\w)|(?<![^\W\d_]{3})(?<=[^\W\d_])-(?![\w-])"
    ),
    "a power": re.compile(r"\^(?=\w)"),
}
ALIKE = str.maketrans("‘’ʼ′´`“”„″«»⁄∕٫٬", "''''''\"\"\"\"\"\"//.,", "™®©")
PIECE = re.compile("|".join(f"({pattern.pattern})" for pattern in KEPT.values()))


def normal_form(text: str) -> str:
    """Return the text in SQuAD's normal form: lower case, no punctuation, no articles, single spaces; accents composed."""
    text = "".join(c for c in unicodedata.normalize("NFC", text).lower() if c not in string.punctuation)
    return " ".join(w for w in text.split() if w not in ("a", "an", "the"))


def own_form(text: str) -> str:
    """Return the text in the normal form for files of one's own: SQuAD's, for all of Unicode, with numbers kept.

    Compatible characters are one (NFKC: full-width digits), and so are all dashes and minus signs. Punctuation of all
    scripts is dropped, except where it changes a number or a name: 3.14, -5, 1990-2000, > 5, C++ and A- keep it.
    """
    text = text.translate(ALIKE).replace("!=", "≠")
    text = unicodedata.normalize("NFKC", "".join(map(plain_character, text))).lower().strip()
    text = re.sub(r" ?([<>]) ?", r"\1", " ".join(text.split()))
    text = re.sub(r"(?<!\d)(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"^-\s+(?=[$€£¥]?\.?\d)", "-", re.sub(r"(?<=\d)\s*-\s*(?=\d)", "-", text))
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    kept = {place for found in PIECE.finditer(text) for place in range(*found.span())}
    text = "".join(c for place, c in enumerate(text) if place in kept or not dropped(c))
    words = text.split()
    return " ".join([w for w in words if w not in ("a", "an", "the")] or words)  # blood type A


def plain_character(c: str) -> str:
    """Return a character in its plainest form: digits of all scripts as 0-9, each dash as -, ² as ^2, ½ as 1/2."""
    kind = unicodedata.category(c)
    if kind == "Nd":
        return str(unicodedata.decimal(c))
    if kind == "Pd" or c == "\u2212":
        return "-"
    if kind == "Cf":
        return ""
    if kind == "No":
        mark, _, digits = unicodedata.decomposition(c).partition(" ")
        plain = "".join(chr(int(digit, 16)) for digit in digits.split()).replace("\u2044", "/")
        return {"<super>": f"^{plain}", "<fraction>": f" {plain}"}.get(mark, c)
    return c


def dropped(c: str) -> bool:
    """Return whether own_form drops a character: ASCII punctuation, as SQuAD does, and that of other scripts but ‰."""
    return c in string.punctuation or (unicodedata.category(c)[0] == "P" and c not in "‰‱")


def visible(text: str) -> bool:
    """Return whether a text has a sign to read: zero-width spaces, fillers and marks alone are none."""
    return any(unicodedata.category(c)[0] in "LNPS" and c not in "\u115f\u1160\u2800\u3164\uffa0" for c in text)


def exact_match(answer: str | None, golds: list[str], form: Callable[[str], str] = normal_form) -> float:
    """Return 1.0 if the answer equals one of the golds in normal form, else 0.0. An empty answer is never right."""
    answer = form(answer or "")
    return float(bool(answer) and any(answer == form(gold) for gold in golds))


def f1(answer: str | None, golds: list[str], form: Callable[[str], str] = normal_form) -> float:
    """Return the word-level F1 in normal form, the best over the golds."""
    words = Counter(form(answer or "").split())
    best = 0.0
    for gold in golds:
        gold = Counter(form(gold).split())
        common = sum((words & gold).values())
        if common:
            precision, recall = common / sum(words.values()), common / sum(gold.values())
            best = max(best, 2 * precision * recall / (precision + recall))
    return best
