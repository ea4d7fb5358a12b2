"""Read answers that are sets, ordered tuples, intervals or assignments, and compare them part by part.

    set          1, 2    \\{2, 1\\}    x = 1 or x = 2    x \\in \\{1, 2\\}    \\pm 2    in any order, each as often as in the gold
    tuple        (1, 2)    (x, y) = (1, 2)    in this order; [1, 2, 3] is another one
    interval     (3, 9]    3 < x \\le 9    x > 3    x \\ne 3    (0, 1) \\cup (2, 5)    \\{x : x > 3\\}    \\mathbb{R}
    assignment   x = 1, y = 2    in any order

A set is no tuple: 1, 2 does not equal (1, 2). Two numbers in parentheses equal an interval only if the other side can be
nothing but an interval, and the first number is the smaller one. Where both sides name a variable, it must be the same.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

LETTER = r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|sigma|tau|rho))(?:_(?:\{\w+\}|\w))?"
ASSIGNED = re.compile(rf"\s*({LETTER})\s*=\s*([^=]+)")
ELEMENT = re.compile(rf"\s*({LETTER})\s*(?:\\in(?![a-zA-Z])|∈)\s*(.+)", re.DOTALL)
REALS = r"(?:\\mathbb\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])|ℝ)"
BUILDER = re.compile(
    rf"\\?\{{\s*({LETTER})\s*(?:(?:\\in|∈)\s*{REALS}\s*)?(?:\\mid(?![a-zA-Z])|\\colon|\||:)(.+?)\\?\}}"
)
PLACES = re.compile(r"\(\s*([a-z](?:\s*,\s*[a-z])+)\s*\)\s*=\s*(?=\()")  # (x, y) = (1, 2)
OR = re.compile(
    r",?\s*(?:(?<![a-zA-Z\\])or(?![a-zA-Z])|\\(?:text|mbox|textrm)\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-zA-Z]))\s*"
)
CUP = re.compile(r"\s*(?:\\cup(?![a-zA-Z])|∪)\s*")
COMMA = re.compile(r",(?!\d{3}(?!\d))")  # and not the one of 1,000
WITHOUT = re.compile(rf"{REALS}\s*(?:\\setminus|\\backslash|-|\\)\s*(?=\\?\{{)")
RELATIONS = (
    ("≤", re.compile(r"\\le(?:q|qslant)?(?![a-zA-Z])|<=|⩽")),
    ("≥", re.compile(r"\\ge(?:q|qslant)?(?![a-zA-Z])|>=|⩾")),
    ("<", re.compile(r"\\lt(?![a-zA-Z])")),
    (">", re.compile(r"\\gt(?![a-zA-Z])")),
    ("≠", re.compile(r"\\neq?(?![a-zA-Z])|!=")),
)
RELATION = re.compile("[<>≤≥≠]")
INFINITE = re.compile(r"([+-]?)\s*(?:\\infty|∞|oo|infinity|inf)")
EMPTY = re.compile(r"\\(?:emptyset|varnothing)|∅|\\?\{\s*\\?\}")


@dataclass
class Form:
    """A set, tuple or union of intervals, or assignments.

    name      the variable, or the variables of a tuple; None: not named
    items     set and tuple: texts. intervals: (closed, text, text, closed). assignment: texts, with their names in `names`
    choice    values between "or" without a variable: "2 or 3" may also be a guess at one value
    """

    kind: str
    items: list
    name: str | None = None
    names: list[str] = field(default_factory=list)
    choice: bool = False
    braces: bool = False

    def texts(self) -> list[str]:
        """Return the texts of all parts that are compared."""
        ends = [end for piece in self.items for end in piece[1:3]] if self.kind == "intervals" else self.items
        return [text for text in ends if not INFINITE.fullmatch(text)]


def split(text: str, pattern: re.Pattern) -> list[str]:
    """Return the parts of a text between matches of the pattern outside of all brackets."""
    depth, parts, start, position = 0, [], 0, 0
    while position < len(text):
        if depth == 0 and (found := pattern.match(text, position)) and found[0]:
            parts.append(text[start : found.start()].strip())
            start = position = found.end()
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    return [*parts, text[start:].strip()]


def inside(text: str) -> list[str] | None:
    """Return the parts between commas of a text in brackets, whatever their kinds; None if it is not in one pair."""
    left, right = (2 if text[:2] == "\\{" else 1), (2 if text[-2:] == "\\}" else 1)
    if text[left - 1 : left] not in ("(", "[", "{") or text[-1:] not in (")", "]", "}") or len(text) < left + right:
        return None
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and place < len(text) - 1 and place >= left - 1:
            return None
    parts = split(text[left:-right], COMMA)
    return parts if depth == 0 and all(parts) else None


def read(text: str) -> Form | None:
    """Return the form of an answer in LaTeX, None if it is one value, a formula or a sentence."""
    text = text.strip()
    for sign, pattern in RELATIONS:
        text = pattern.sub(sign, text)
    if len(parts := split(text, OR)) > 1:
        return alternatives(parts)
    if found := BUILDER.fullmatch(text):
        form = read(found[2])
        return Form(form.kind, form.items, braces=True) if form and form.name == found[1] else None
    if found := ELEMENT.fullmatch(text):
        form = read(found[2])
        form = as_intervals(form) if form and form.kind == "tuple" else form
        known = form and not form.name and not form.choice
        return Form(form.kind, form.items, found[1], braces=form.braces) if known else None
    if found := PLACES.match(text):
        form, names = read(text[found.end() :]), found[1].replace(" ", "").split(",")
        ordered = form and form.kind == "tuple" and names == sorted(set(names)) and len(names) == len(form.items)
        return Form("tuple", form.items, ",".join(names)) if ordered else None
    if EMPTY.fullmatch(text):
        return Form("set", [], braces=True)
    if len(parts := split(text, CUP)) > 1:
        forms = [as_intervals(read(part)) for part in parts]
        return Form("intervals", [piece for form in forms for piece in form.items]) if all(forms) else None
    return relation(text) or brackets(text) or values(split(text, COMMA))


def alternatives(parts: list[str]) -> Form | None:
    """Return the form of texts between "or": x < 1 or x > 2, a = 2 or a = -7, x = 2 or 3."""
    forms = [read(part) or assigned(part) or Form("set", [part]) for part in parts]
    if all(form.kind == "tuple" for form in forms):
        forms = [Form("set", [f"({','.join(form.items)})"], form.name) for form in forms]
    names = {form.name for form in forms if form.name}
    if len(names) > 1 or not all(forms) or any(form.choice or form.kind not in ("set", "intervals") for form in forms):
        return None
    name = names.pop() if names and forms[0].name else None
    if any(form.name is None for form in forms[1:]) and name and any(form.kind != "set" for form in forms):
        return None
    if any(form.kind == "intervals" for form in forms):
        if not name:
            return None
        forms = [as_intervals(form) for form in forms]
        return Form("intervals", [piece for form in forms for piece in form.items], name)
    return Form("set", [item for form in forms for item in form.items], name, choice=name is None)


def assigned(text: str) -> Form | None:
    """Return the form of one assignment, x = 2."""
    found = ASSIGNED.fullmatch(text)
    return Form("set", signed(found[2].strip()), found[1]) if found and not RELATION.search(text) else None


def signed(text: str) -> list[str]:
    """Return the values of a text with \\pm: 2-\\sqrt{3} and 2+\\sqrt{3}. Others are one value."""
    if len(re.findall(r"\\pm(?![a-zA-Z])|±", text)) != 1 or "\\mp" in text:
        return [text]
    return [re.sub(r"\\pm(?![a-zA-Z])\s*|±\s*", sign, text).strip().removeprefix("+") for sign in "+-"]


def relation(text: str) -> Form | None:
    """Return the form of a bound, x > 3, 3 < x < 9 or x != 3. An empty side is a variable without a name."""
    sides, signs = [side.strip() for side in RELATION.split(text)], RELATION.findall(text)
    if not signs or "=" in text or len(signs) > 2 or "," in text:
        return None
    variables = [
        place for place, side in enumerate(sides) if not side or (re.fullmatch(LETTER, side) and side not in "ei")
    ]
    if len(variables) != 1:
        return None
    name = sides[variables[0]] or None
    if signs == ["≠"]:
        end = sides[1 - variables[0]]
        return Form("intervals", [(False, "-oo", end, False), (False, end, "oo", False)], name)
    ascending = all(sign in "<≤" for sign in signs)
    if not ascending:
        sides, signs = sides[::-1], ["<" if sign == ">" else "≤" if sign == "≥" else "" for sign in signs[::-1]]
    place = sides.index(name or "")
    if not all(signs) or (len(signs) == 2 and place != 1):
        return None
    closed = [sign == "≤" for sign in signs]
    if len(signs) == 2:
        return Form("intervals", [(closed[0], sides[0], sides[2], closed[1])], name)
    piece = (False, "-oo", sides[1], closed[0]) if place == 0 else (closed[0], sides[0], "oo", False)
    return Form("intervals", [piece], name)


def brackets(text: str) -> Form | None:
    """Return the form of a set in braces, an interval, a tuple, or the real numbers."""
    if re.fullmatch(REALS, text) or text.lower() in ("all real numbers", "all reals", "\\text{all real numbers}"):
        return Form("intervals", [(False, "-oo", "oo", False)])
    if found := WITHOUT.match(text):
        form = brackets(text[found.end() :])
        try:
            ends = sorted(form.items, key=float) if form and form.kind == "set" else []
        except ValueError:
            return None
        ends = ["-oo", *ends, "oo"]
        return Form("intervals", [(False, a, b, False) for a, b in zip(ends, ends[1:])]) if len(ends) > 2 else None
    parts = inside(text)
    if not parts:
        return None
    left, right = text.lstrip("\\")[0], text[-1]
    if left == "{" and right == "}":
        items = [value for part in parts for value in signed(part)]
        plain = text[0] != "\\" and len(parts) == 1  # braces of LaTeX around one formula
        return (
            None
            if plain or any("=" in part or RELATION.search(part) for part in parts)
            else Form("set", items, braces=True)
        )
    if "{" in left or "}" in right or len(parts) < 2:
        return None
    if len(parts) == 2 and (left + right != "()" or any(map(INFINITE.fullmatch, parts))):
        return Form("intervals", [(left == "[", *map(infinite, parts), right == "]")])
    return Form("tuple" if left + right == "()" else f"tuple {left}{right}", parts)


def infinite(text: str) -> str:
    """Return oo or -oo for an infinite end of an interval, and any other end as it is."""
    found = INFINITE.fullmatch(text)
    return text if not found else "-oo" if found[1] == "-" else "oo"


def values(parts: list[str]) -> Form | None:
    """Return the form of texts between commas: values of one variable, or assignments to several."""
    if not all(parts) or any(map(RELATION.search, parts)):
        return None
    found = [ASSIGNED.fullmatch(part) for part in parts]
    names = [match[1] for match in found if match]
    if any("=" in part for part, match in zip(parts, found) if not match):
        return None
    items = [match[2].strip() if match else part for part, match in zip(parts, found)]
    if len(names) > 1 and len(set(names)) == len(names) == len(parts):
        return Form("assignment", items, names=names)
    if len(set(names)) > 1 or (names and not found[0]):
        return None
    items = [value for item in items for value in signed(item)]
    return Form("set", items, names[0] if names else None) if len(items) > 1 else None


def as_intervals(form: Form | None) -> Form | None:
    """Return a form as a union of intervals: a pair is an open interval, a set consists of points."""
    if form is None or form.kind == "intervals":
        return form
    if form.kind == "set" and (form.braces or form.name):
        return Form("intervals", [(True, item, item, True) for item in form.items], form.name)
    pair = form.kind == "tuple" and len(form.items) == 2 and not form.name
    return Form("intervals", [(False, *form.items, False)]) if pair else None


def matches(answers: list, golds: list, same: Callable[[object, object], bool]) -> bool:
    """Return whether each item of one list equals an item of the other, each used once."""
    left = list(golds)
    for answer in answers if len(answers) == len(golds) else ():
        place = next((place for place, gold in enumerate(left) if same(answer, gold)), None)
        if place is None:
            return False
        del left[place]
    return len(answers) == len(golds)


def compare(
    answer: Form, gold: Form, same: Callable[[str, str], bool], ascends: Callable[[str, str], bool | None]
) -> bool:
    """Return whether two forms are equal. same: of two values. ascends: whether two values ascend, None if unknown."""
    if answer.name and gold.name and answer.name != gold.name:
        return False
    if any(one.choice and not (other.choice or other.name) for one, other in ((answer, gold), (gold, answer))):
        return False
    if "intervals" in (answer.kind, gold.kind):
        pieces = [as_intervals(form) for form in (answer, gold)]
        if not all(pieces) or any(not f.name and f.kind == "set" and not f.braces for f in (answer, gold)):
            return False
        if any(ascends(*form.items) is False for form in (answer, gold) if form.kind == "tuple"):
            return False

        def end(one, other):
            return one == other if INFINITE.fullmatch(one) or INFINITE.fullmatch(other) else same(one, other)

        def piece(one, other):
            return (one[0], one[3]) == (other[0], other[3]) and end(one[1], other[1]) and end(one[2], other[2])

        return matches(*(form.items for form in pieces), piece)
    if answer.kind != gold.kind:
        return False
    if answer.kind == "set":
        return matches(answer.items, gold.items, same)
    if answer.kind == "assignment":
        given = dict(zip(answer.names, answer.items))
        return given.keys() == set(gold.names) and all(same(given[n], item) for n, item in zip(gold.names, gold.items))
    return len(answer.items) == len(gold.items) and all(map(same, answer.items, gold.items))
