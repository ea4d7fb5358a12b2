"""Compare mathematical answers with golds by value: numbers exactly, all else with math-verify (LaTeX, sympy).

    numbers      integers, decimals, fractions, mixed numbers and scientific notation, in plain text or LaTeX, are
                 compared exactly: 0.5 equals 1/2, and 0.333 does not equal 1/3
    percent      50% equals 50, as in most golds, and 0.5; 50% does not equal 0.5%
    units        a common unit on only one side is ignored: 12 cm equals 12 and 12 centimeters, but not 12 m
    unevaluated  where the gold is a number, the answer must be one: 17*23 does not equal 391, nor does 84/7 equal 12
    formulas     are compared by value, as in math-verify: 1+x equals x+1; a bound is no number: > 5 does not equal 5. Only
                 formulas of known macros and signs: math-verify reads others in part
    forms        sets, tuples, intervals, assignments and lines are compared as such: tasks/forms.py
    Markdown     emphasis and the label "Answer:" are ignored: **84** equals 84
    words        all others are compared as text: "3 quarters" does not equal 3
    \\boxed       if there are several boxed answers, the last one counts

Formulas are compared in other processes, under a limit of time: tasks/worker.py. Powers, factorials, sums and products
that are too large to compute are compared as text and never get there.
"""

import math
import re
from fractions import Fraction

from tasks import forms
from tasks.worker import Pool

LONGEST = 1000  # characters; a longer answer counts as wrong
LARGEST = 3_000  # exponent; powers above it are compared as text
DEEPEST = 12  # brackets in brackets; and twice as many bars
SPACES = re.compile(r"(?<!\\)\\[,;:!\s]|\\q?quad\b|(?<=\S)~")  # ~2 is about 2
WRAPPED = re.compile(r"\\(?:left|right|displaystyle)\b")
LEAD = re.compile(  # text that may precede the dollars of an answer
    r"(?:.*(?:\b(?:is|are|that|answer|get|have|so|thus|therefore|hence),?|[a-z]\s*:)[\s*]*)?", re.DOTALL | re.IGNORECASE
)
LEFT = re.compile(r"(?:^|(?<=,))\s*(\\?[a-zA-Z]+\d?(?:_(?:\{\w+\}|\w))?|[a-zA-Z]\(\w\))\s*=(?!=)")  # x = 5, f(x) = x^2
# Emphasis of Markdown at the bounds of words: 2**3 and a*b*c have none.
EMPHASIS = re.compile(r"(?<![^\s(])(\*\*|\*|__|`+)(?=[^\s*_`])([^*`]*[^\s*`])\1(?![^\s.,:;!?)])")
LABEL = re.compile(r"(?:(?:the|my|final)\s+)*answer\s*(?:is)?\s*:\s*", re.IGNORECASE)  # Answer: 84
LETTER = re.compile(r"\\(?:mathrm|text|textrm|rm)\{([ie])\}|\\(?:mathbf|mathit|boldsymbol|bm)\{([a-zA-Z])\}")
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))")  # 0.1\overline{6}
SIGNED = re.compile(r"\s*([+-]?)\s*(\\[dt]?frac)\s*\{\s*(-?)\s*([\d.]+)\s*\}\s*\{\s*(-?)\s*([\d.]+)\s*\}")
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
UNIT = r"[a-z]+(?:\^?\{?[23]\}?|[²³])?"
VALUE = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+)?(?P<top>{NUMBER})(?:\s*/\s*(?P<bottom>{NUMBER}))?"
    r"(?:e(?P<e>[+-]?\d{1,3})|\s*(?:\\times|\\cdot|×|\*)\s*10\^(?P<power>[+-]?\d{1,3}|\{\s*[+-]?\d{1,3}\s*\}))?"
    rf"(?P<unit>\s*%|\s*°|\s+{UNIT}(?:(?:\s+|\s*/\s*){UNIT}){{0,2}})?",
    re.IGNORECASE,
)
# Words that may follow a number without changing its value, also with -s or -es. Between two bars: names of one unit.
UNITS = {
    name: names.split()[0]
    for names in "mm millimeter millimetre|cm centimeter centimetre|dm|m meter metre|km kilometer kilometre|inch in|foot feet ft|"
    "yard yd|mile mi|mg milligram|g gram|kg kilogram|ton|tonne|pound lb|ounce oz|ml milliliter|l liter litre|gallon|cup|"
    "ms millisecond|s second sec|minute min|hour hr h|day|week|month|year|degree deg °|celsius|fahrenheit|radian rad|square sq|"
    "cubic|unit|dollar usd|cent|euro eur|mph|kmh kph|hz|volt|watt|joule|newton|person people|student|apple|book|box|ball|"
    "marble|coin|point|game|item|piece|step|per|%".split("|")
    for name in names.split()
}
CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling"}
SENTENCE = re.compile(r"(?<!\\)\b(?!(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty|frac|min|max)\b)[a-zA-Z]{2,}\b")
# Words of two or three letters that are not products of variables.
NOT_PRODUCTS = set("or to of in is if by at as on no not nor and for per out but mod vs am pm".split())
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|begin|end)\s*\{[^{}]*\}")
# Formulas with any other macro or sign are compared as text: math-verify may read only a part of them.
GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega "
    "Delta Gamma Lambda Omega Phi Pi Psi Sigma Theta".split()
)
MACROS = GREEK | set(
    "frac dfrac tfrac sqrt pi cdot times div pm sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp le leq ge geq lt "
    "gt ne neq infty cup cap circ degree binom dbinom tbinom lfloor rfloor lceil rceil sum prod begin end lbrace rbrace leqslant "
    "geqslant".split()
)
FUNCTION = r"(?:sqrt|sin|cos|tan|log|ln|exp)(?![a-zA-Z])"
MACRO = re.compile(r"\\(?:([a-zA-Z]+)|[{}%\\])")
SIGNS = re.compile(r"[\w\s+\-*/^=<>≤≥≠()\[\]{},.|!&°%π∞∪∩$]*")
ENDING = re.compile(  # what may be a unit at the end of a formula
    r"\s*\\(?:text|mbox|mathrm)\s*\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?[23]\}?)?$|\s([a-z]{2,})(\^?\{?[23]\}?)?$"
)
# What math-verify reads in part, or in one of two ways: commas (forms.py reads lists), 1 000, plain text, a base (101_2), a
# root of parentheses, x2, 1/2x, a/bc.
UNCLEAR = re.compile(
    r",|(?<![_^\d])\d+\s+\d|\\(?:text|mbox|mathrm|textbf|mathbf)(?![a-zA-Z])|[\d)}\]]\s*_|\\sqrt\s*\(|(?<![\\a-zA-Z])[a-zA-Z]\d|"
    rf"/\s*\d+\s*(?:[a-zA-Z(]|\\(?:pi|[dt]?frac|{FUNCTION}))|/\s*(?!{FUNCTION})[a-zA-Z]\s*[a-zA-Z(]"
)
ANGLE = re.compile(r"\\circ|\\degree|°")
TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?!h)")
BOUND = re.compile(r"[<>≤≥≠]|\\(?:[lg]e(?:q|qslant)?|[lg]t|neq?)(?![a-zA-Z])")
BARE_BOX = re.compile(r"\\boxed\s+([^\s${][^\s$]*)")  # \boxed 5
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")  # an escaped brace is text
SUPERSCRIPTS = str.maketrans({c: f"^{n}" for n, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


def equal(answer: str | None, golds: list[str], unevaluated: bool = False) -> bool:
    """Return whether the answer has the value of one of the golds; False for an empty answer or None. Never raises.

    unevaluated: where a gold is a number, sums, powers and other formulas of that value are right too.
    """
    answer = plain(answer or "")
    if not answer or len(answer) > LONGEST:
        return False
    undecided = []
    for gold in filter(None, map(plain, golds)):
        found = alike(answer, gold, unevaluated)
        if found is True:
            return True
        if found:
            undecided.append(found)
    return bool(undecided) and POOL.ask(undecided)


def alike(answer: str, gold: str, unevaluated: bool) -> bool | tuple[str, str]:
    """Return whether two plain texts are equal, or the pair of formulas that math-verify has to compare."""
    if caseless(answer) == caseless(gold):
        return True
    answer, gold = without_sides(answer, gold)
    if caseless(answer) == caseless(gold):
        return True
    value, other = exact(answer, unevaluated), exact(gold)
    if value and other:
        return same_value(value, other)
    formulas = latex(answer), latex(gold)
    shapes = [None if number else form_of(text) for number, text in zip((value, other), formulas)]
    if any(shapes):

        def same(one, two):
            found = alike(unwrapped(one), unwrapped(two), unevaluated)
            return found if isinstance(found, bool) else POOL.ask([found])

        if all(shapes):
            return forms.compare(*shapes, same, ascends)
        form, text = (shapes[0], gold) if shapes[0] else (shapes[1], answer)
        single = form.kind == "set" and form.braces and len(form.items) == 1
        return single and (same(form.items[0], text) if shapes[0] else same(text, form.items[0]))
    if other and not unevaluated:
        return False
    units = unit_of(answer), unit_of(gold)
    if all(units) and units[0] != units[1]:
        return False
    return all(map(formula, formulas)) and comparable(*formulas) and formulas


def evaluated(answer: str, gold: str) -> bool:
    """Return whether an answer has the form that a gold asks for: that of a number where the gold is a number."""
    answer, gold = without_sides(plain(answer), plain(gold))
    return not exact(gold) or bool(exact(answer, quotients=False)) or caseless(answer) == caseless(gold)


def without_sides(answer: str, gold: str) -> tuple[str, str]:
    """Return both texts without a left side that only names the answer, f(x) = x^2: cut from both or from none."""
    names = [
        set(LEFT.findall(text)) if LEFT.match(text) and not forms.OR.search(text) else set() for text in (answer, gold)
    ]
    cut = len(names[0] | names[1]) == 1 and all(name or "=" not in text for name, text in zip(names, (answer, gold)))
    return tuple(unwrapped(LEFT.sub("", text).strip()) if cut else text for text in (answer, gold))


def form_of(text: str, depth: int = 3) -> forms.Form | None:
    """Return the form of a text whose parts are all numbers, formulas or forms again (to a depth), else None."""
    form = forms.read(text) if depth else None
    whole = form and all(exact(part) or formula(part) or form_of(part, depth - 1) for part in form.texts())
    return form if whole else None


def ascends(one: str, other: str) -> bool | None:
    """Return whether the first of two numbers is the smaller one, None if one of them is another formula."""
    values = [found and found[0][0] for found in map(exact, (one, other))]
    return None if None in values else values[0] < values[1]


def latex(text: str) -> str:
    """Convert a formula from Python or Unicode to LaTeX, without dollars and unit: 2*pi**2 cm becomes 2*\\pi^{2}."""
    text = re.sub(r"\\?\$", "", text.translate(SUPERSCRIPTS)).replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"\*\*\s*(?:\(([^()]*)\)|(-?[\w.]+))", r"^{\1\2}", text).replace("**", "^")
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi\b", r"\\pi", text)
    text = re.sub(r"(?<![\d.])(\d+)/(\d+) (?=[a-zA-Z](?![a-zA-Z])|\\pi)", r"\\frac{\1}{\2} ", text)  # 1/3 x
    return text[: ending.start()] if (ending := ENDING.search(text)) and unit_of(text) else text


def unit_of(text: str) -> str | None:
    """Return the unit at the end of a formula in LaTeX, None without one."""
    found = ENDING.search(text)
    return measure((found[1] or found[3]) + (found[2] or found[4] or "")) if found else None


def formula(text: str) -> bool:
    """Return whether a text is one formula to compute, and not a sentence, several formulas, or a tower of powers."""
    bare = re.sub(r"\^\s*(-?\w|\\[a-zA-Z]+)", r"^{\1}", TEXT.sub("", text))  # without braces the exponent is one token
    towers = re.search(r"\^\s*(?:\{[^{}]*\}\s*|[{(]*[^{}()^]*)\^", bare)
    words = SENTENCE.findall(bare)
    products = all(
        re.fullmatch("[a-z]{2,3}", word) and word not in NOT_PRODUCTS and not measure(word) for word in words
    )
    whole = {name for name in MACRO.findall(text) if name} <= MACROS and SIGNS.fullmatch(MACRO.sub(" ", text))
    partial = (
        not whole
        or UNCLEAR.search(text)
        or ".." in text
        or words == [bare.strip()]
        or re.search(r"[-+*/^_=.?]\s*$", bare)
    )
    return not (towers or not products or partial or nested(text) or endless(text))


def nested(text: str) -> bool:
    """Return whether brackets are not closed or are too deep for math-verify's parser, which slows down with each."""
    depths = [0]
    for character in text:
        depths.append(depths[-1] + (character in "([{") - (character in ")]}"))
    return depths[-1] != 0 or min(depths) < 0 or max(depths) > DEEPEST or text.count("|") > 2 * DEEPEST


def endless(text: str) -> bool:
    """Return whether a formula has powers, factorials, sums or products that are too large to compute."""
    text = text.replace(" ", "")

    def size(part):
        """Return an upper bound of the value of a formula without powers and factorials."""
        return math.prod(min(int(digits[:9]), LARGEST) + 1 for digits in re.findall(r"\d+", part)[:50])

    powers = [text[found.end() : closing(text, found.end())] for found in re.finditer(r"\^", text)]
    if any(size(power) > LARGEST or re.search(r"!|\\(?:binom|sum|prod)", power) for power in powers):
        return True
    grouped = [power for power, found in zip(powers, re.finditer(r"(.?)\^", text)) if found[1] in (")", "}", "]")]
    letters = re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", TEXT.sub("", text))
    if grouped and (math.prod(map(size, powers)) > LARGEST or (letters and max(map(size, grouped)) > 200)):
        return True
    if re.search(r"\\(?:sum|prod|d?t?binom)(?![a-zA-Z])", text) and any(
        int(n[:9]) > 1000 for n in re.findall(r"\d+", text)
    ):
        return True
    factorials = re.findall(r"(\d*)([)}\]]?)!", text)
    groups = any(group for _, group in factorials) and ("^" in text or text.count("!") > 1 or size(text) > 1000)
    return "!!" in text or groups or any(digits and int(digits[:9]) > 3000 for digits, _ in factorials)


def closing(text: str, start: int) -> int:
    """Return the end of the token or group that starts there."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "{(") - (text[place] in "})")
        if depth <= 0 and not text[place].isdigit():
            return place + 1
    return len(text)


def comparable(answer: str, gold: str) -> bool:
    """Return whether two formulas can be equal: both are equations or neither is, and likewise for bounds.

    Both must have the same variables. An equation in one variable that is solved (x = 5) equals no other one: 2x = 10 may
    be the question. No letter may occur in both cases: math-verify takes A and a for the same. It also ignores degrees.
    """
    both = answer, gold
    signs = [("=" in text, bool(BOUND.search(text))) for text in both]
    names = [variables(text) for text in both]
    solved = signs[0][0] and any(LEFT.match(text) and len(names[0]) < 2 for text in both)
    one = not any(signs[0]) or all(text.count("=") < 2 and "," not in text for text in both)
    cases = len({name.lower() for name in names[0]}) == len(names[0])
    angles = not any(map(TRIGONOMETRY.search, both)) or bool(ANGLE.search(answer)) == bool(ANGLE.search(gold))
    return signs[0] == signs[1] and names[0] == names[1] and one and cases and angles and not solved


def variables(text: str) -> set[str]:
    """Return the letters of a formula, Latin and Greek, without names of functions and environments."""
    rest = re.sub(rf"\\(?:begin|end)\s*\{{\w*\}}|\\[a-zA-Z]+|(?<![a-zA-Z]){FUNCTION}|[^a-zA-Z]", "", text)
    return set(rest) | (set(MACRO.findall(text)) & GREEK)


def caseless(text: str) -> str:
    """Return the text without meaningless spaces. A formula gets one kind of fraction, words become lower case."""
    text = text.casefold() if SENTENCE.search(text) and "\\" not in text else re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", text)


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed (or \fbox, as in MATH), with inner braces; None without one.

    >>> boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    opened, complete = [], None  # starts of what is open, None for a plain brace; (start, end) of a box
    for found in BRACES.finditer(text):
        if found[0] != "}":
            opened.append(None if found[0] == "{" else found.end())
        elif opened:
            start = opened.pop()
            if start is not None and (complete is None or start > complete[0]):
                complete = start, found.start()
    if complete:
        return text[slice(*complete)].strip()
    bare = BARE_BOX.findall(text)
    return bare[-1].rstrip(".,") if bare else None


def plain(text: str) -> str:
    """Return the text without the markup around an answer: the last box, dollars, spaces, \\text, a final period."""
    text = text.replace("−", "-").strip()
    inner = boxed(text)
    text = " ".join((text if inner is None else inner).replace("{,}", ",").split())
    text = EMPHASIS.sub(lambda found: found[2] if found[2].endswith(":") else f"${found[2]}$", text)
    text = LETTER.sub(lambda found: found[1] or found[2], LABEL.sub("", text, count=1) if LABEL.match(text) else text)
    text = re.sub(r", ?\\! ?(?=\d{3})", ",", text)  # thousands separators as in MATH
    text = re.sub(r"(?<=\d)\\,(?=\d{3}\b)", "", text).replace("\\!", "")
    text = WRAPPED.sub(" ", SPACES.sub(" ", re.sub(r"(?<!\\)\\[()\[\]]", "$", text)))
    text = text.strip().removesuffix(".").strip()
    parts = re.split(r"(?<!\\)\$+", text)
    if len(parts) > 2:  # formulas, perhaps in a sentence without a negation
        affirmed = LEAD.fullmatch(parts[0]) and not re.search(r"\b(?:not|no|nor|or|never|neither)\b|n't", parts[0])
        text = " ".join(parts[1:] if affirmed else parts).strip()
    text = re.sub(r"(?<=.),? ?(?:\band\b|\\text ?\{ ?and ?\})(?=.)", ", ", text)
    return unwrapped(re.sub(r"^\\(?:text|mbox)\s*\{([^{}]*)\}$", r"\1", text).strip())


def unwrapped(text: str) -> str:
    """Return the text with single spaces, and a number without parentheses or braces around it."""
    while text[:1] + text[-1:] in ("()", "{}") and VALUE.fullmatch(text[1:-1].strip()):
        text = text[1:-1].strip()
    return " ".join(text.split())


def exact(text: str, quotients: bool = True) -> tuple[tuple[Fraction, ...], str] | None:
    """Return (values, unit) of a text that is one number, else None. A percentage has two values.

    quotients: fractions that are no number's usual form count too: 84/7 (an integer), 1/2.5 (decimals in it).
    """
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r" \1", text)
    if found := SIGNED.match(text):  # a sign inside of the fraction
        minus = (found[1] + found[3] + found[5]).count("-") % 2
        text = ("-" if minus else "") + f"{found[2]}{{{found[4]}}}{{{found[6]}}}" + text[found.end() :]
    # A digit after the fraction multiplies it: it does not extend the denominator.
    fraction = r"\\[dt]?frac\s*(?:\{\s*([\d.]+)\s*\}|(\d))\s*(?:\{\s*([\d.]+)\s*\}|(\d))(?!\s*[\d.])"
    text = re.sub(fraction, r" \1\2/\3\4", text)
    text = REPEATING.sub(repeating, text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree", "°", text).replace("\\%", "%").replace("percent", "%")
    text, money = text.strip(), ""
    if signed := re.match(r"([+-]?)\s*\\?([$€£])", text):
        text, money = signed[1] + text[signed.end() :].strip(), CURRENCIES[signed[2]]
    found = VALUE.fullmatch(text)
    if not found or (found["whole"] and not found["bottom"]):
        return None
    unit = measure(found["unit"] or "")
    top, bottom = (Fraction((found[part] or "1").replace(",", "")) for part in ("top", "bottom"))
    if bottom == 0 or unit is None:
        return None
    unit = unit if money in ("", unit) else f"{money} {unit}".strip()
    if not quotients and found["bottom"] and ((top / bottom).denominator == 1 or "." in found["top"] + found["bottom"]):
        return None
    value = int(found["whole"] or 0) + top / bottom
    value *= Fraction(10) ** int((found["e"] or found["power"] or "0").strip("{ }"))
    value = -value if found["sign"] == "-" else value
    return ((value, value / 100) if unit == "%" else (value,)), unit


def repeating(found: re.Match) -> str:
    """Return the fraction of a repeating decimal, such as 1/6 for 0.1\\overline{6}."""
    whole, fixed, cycle = found[1] or "0", found[2], found[3] or found[4]
    bottom = 10 ** len(fixed) * (10 ** len(cycle) - 1)
    value = Fraction(int(whole + fixed + cycle) - int(whole + fixed), bottom)
    return str(value)


def measure(text: str) -> str | None:
    """Return the canonical name of a unit, such as foot^2 for square feet and ft²; None if a word is unknown."""
    names = []
    for word in text.lower().replace("/", " per ").split():
        name, power = re.fullmatch(r"(.*?)[\^{]*([23²³]?)\}?", word).groups()
        known = [UNITS[form] for form in (name, name.removesuffix("s"), name.removesuffix("es")) if form in UNITS]
        if not known:
            return None
        names.append(known[0] + (power and "^" + power.translate(SUPERSCRIPTS).strip("^")))
    unit = " ".join(names).replace("mph", "mile per hour").replace("kmh", "km per hour")
    return re.sub(r"\bsquare (\S+)", r"\1^2", re.sub(r"\bcubic (\S+)", r"\1^3", unit))


def same_value(one: tuple, other: tuple) -> bool:
    """Return whether two results of `exact` have a value in common, and the same unit if both have one."""
    (values, unit), (others, other_unit) = one, other
    if unit and other_unit:
        return unit == other_unit and values[0] == others[0]
    return bool(set(values) & set(others))


POOL = Pool()
