"""Compare mathematical answers with golds by value: numbers exactly, all else with math-verify (LaTeX, sympy).

    numbers      integers, decimals, fractions, mixed numbers and scientific notation, in plain text or LaTeX, are
                 compared exactly: 0.5 equals 1/2, and 0.333 does not equal 1/3
    percent      50% equals 50, as in most golds, and 0.5; 50% does not equal 0.5%
    units        a common unit on only one side is ignored: 12 cm equals 12 and 12 centimeters, but not 12 m
    formulas     are compared by value, as in math-verify: 12+13 equals 25; a bound is no number: > 5 does not equal 5. Only
                 formulas of known macros and signs: math-verify reads others in part
    Markdown     emphasis and the label "Answer:" are ignored: **84** equals 84
    words        all others are compared as text: "3 quarters" does not equal 3
    \\boxed       if there are several boxed answers, the last one counts

math-verify can compute forever (10^{10^{10}}) and limits its time by signals, which only work in the main thread. So it
runs in a separate process, which is started on first use and killed when it takes too long: the answer then counts as
wrong.
"""

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

SECONDS = 5.0  # timeout of a comparison
START = 60.0  # timeout of the start of the process, which loads sympy
MEMORY = 2 * 2**30  # limit of its address space in bytes
DIGITS = 60  # of a number that is not rational
LONGEST = 1000  # characters; a longer answer counts as wrong
SPACES = re.compile(r"(?<!\\)\\[,;:!\s]|\\q?quad\b|~")
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
SENTENCE = re.compile(r"(?<!\\)\b(?!(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty|frac|min|max)\b)[a-zA-Z]{2,}\b")
# Words of two or three letters that are not products of variables.
NOT_PRODUCTS = set("or to of in is if by at as on no not nor and for per out but mod vs am pm".split())
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|begin|end)\s*\{[^{}]*\}")
# Formulas with any other macro or sign are compared as text: math-verify may read only a part of them.
MACROS = set(
    "frac dfrac tfrac sqrt pi cdot times div pm sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp le leq ge geq lt "
    "gt ne neq infty cup cap in circ degree alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Delta Gamma Lambda Omega Phi Pi Psi Sigma Theta binom dbinom tbinom lfloor rfloor lceil rceil sum "
    "prod text mbox mathrm textbf mathbf begin end lbrace rbrace leqslant geqslant".split()
)
MACRO = re.compile(r"\\(?:([a-zA-Z]+)|[{}%\\])")
SIGNS = re.compile(r"[\w\s+\-*/^=<>≤≥≠()\[\]{},.|!&°%π∞∪∩'$]*")
BOUND = re.compile(r"[<>≤≥≠]|\\(?:[lg]e(?:q|qslant)?|[lg]t|neq?)(?![a-zA-Z])")
BARE_BOX = re.compile(r"\\boxed\s+([^\s${][^\s$]*)")  # \boxed 5
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")  # an escaped brace is text
SUPERSCRIPTS = str.maketrans({c: f"^{n}" for n, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


def equal(answer: str | None, golds: list[str]) -> bool:
    """Return whether the answer has the value of one of the golds; False for an empty answer or None. Never raises."""
    answer = plain(answer or "")
    golds = [gold for gold in map(plain, golds) if gold]
    if not answer or len(answer) > LONGEST:
        return False
    if caseless(answer) in map(caseless, golds):
        return True
    value, unsettled = exact(answer), []
    for gold in golds:
        other = exact(gold)
        if not value or not other:
            unsettled.append(latex(gold))
        elif same_value(value, other):
            return True
    answer = latex(answer)
    unsettled = [gold for gold in unsettled if formula(gold) and comparable(answer, gold)]
    return bool(unsettled) and formula(answer) and WORKER.ask(answer, unsettled)


def latex(text: str) -> str:
    """Convert a formula from Python or Unicode to LaTeX, without dollars and unit: 2*pi**2 cm becomes 2*\\pi^{2}."""
    text = re.sub(r"\\?\$", "", text.translate(SUPERSCRIPTS)).replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"\*\*\s*(?:\(([^()]*)\)|(-?[\w.]+))", r"^{\1\2}", text).replace("**", "^")
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi\b", r"\\pi", text)
    ends = re.search(r"\s([a-z]{2,}(?:\^?[23]|\^\{[23]\})?)$", text)
    return text[: ends.start()] if ends and measure(ends[1]) else text


def formula(text: str) -> bool:
    """Return whether a text is one formula to compute, and not a sentence, several formulas, or a tower of powers."""
    bare = re.sub(r"\^\s*(-?\w|\\[a-zA-Z]+)", r"^{\1}", TEXT.sub("", text))  # without braces the exponent is one token
    towers = re.search(r"\^\s*(?:\{[^{}]*\}\s*|[{(]*[^{}()^]*)\^", bare)
    words = SENTENCE.findall(bare)
    products = all(
        re.fullmatch("[a-z]{2,3}", word) and word not in NOT_PRODUCTS and not measure(word) for word in words
    )
    whole = {name for name in MACRO.findall(text) if name} <= MACROS and SIGNS.fullmatch(MACRO.sub(" ", text))
    partial = not whole or ".." in text or words == [bare.strip()] or re.search(r"[-+*/^_=.?]\s*$", bare)
    return not (towers or not products or partial)


def comparable(answer: str, gold: str) -> bool:
    """Return whether two formulas can be equal: both are equations or neither is, and likewise for bounds.

    If one of them has products of variables, both must have the same variables.
    """
    signs = [("=" in text, bool(BOUND.search(text))) for text in (answer, gold)]
    interval = signs == [(False, False), (False, True)] and re.search(r"[(\[]", answer)  # (5, oo) is x > 5
    bare = [TEXT.sub("", text) for text in (answer, gold)]
    letters = [set(re.sub(r"\\[a-zA-Z]+|[^a-zA-Z]", "", text)) for text in bare]
    return (signs[0] == signs[1] or interval) and (letters[0] == letters[1] or not any(map(SENTENCE.search, bare)))


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
    text = re.sub(r"^\\(?:text|mbox)\s*\{([^{}]*)\}$", r"\1", text).strip()
    if LEFT.match(text) and len(set(LEFT.findall(text))) == 1:
        text = LEFT.sub("", text).strip()
    while text[:1] + text[-1:] in ("()", "{}") and VALUE.fullmatch(text[1:-1].strip()):
        text = text[1:-1].strip()
    return " ".join(text.split())


def exact(text: str) -> tuple[tuple[Fraction, ...], str] | None:
    """Return (values, unit) of a text that is one number, else None. A percentage has two values."""
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\[dt]?frac\s*(?:\{\s*([\d.]+)\s*\}|(\d))\s*(?:\{\s*([\d.]+)\s*\}|(\d))", r" \1\2/\3\4", text)
    text = REPEATING.sub(repeating, text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree", "°", text).replace("\\%", "%").replace("percent", "%")
    found = VALUE.fullmatch(re.sub(r"^([+-]?)\s*\\?[$€£]", r"\1", text.strip()).strip())
    if not found or (found["whole"] and not found["bottom"]):
        return None
    unit = measure(found["unit"] or "")
    top, bottom = (Fraction((found[part] or "1").replace(",", "")) for part in ("top", "bottom"))
    if bottom == 0 or unit is None:
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
    return f"{value.numerator}/{value.denominator}"


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


class Worker:
    """The trainer's side of the process that runs math-verify. Any thread may call it; calls run one at a time."""

    def __init__(self):
        self.lock, self.process, self.known = threading.Lock(), None, False

    def ask(self, answer: str, golds: list[str]) -> bool:
        """Return whether math-verify finds the answer equal to a gold; False also if it fails or takes too long."""
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                self.process.stdin.write(json.dumps([answer, golds]).encode() + b"\n")
                self.process.stdin.flush()
                return self._answer(SECONDS) == b"1"
            except (OSError, ValueError):  # the process has ended, or did not start
                self._kill()
                return False

    def _start(self):
        from common import ending

        self.process = subprocess.Popen(
            [sys.executable, "-m", "tasks.equality"],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach the trainer only, which then ends this process
        )
        if not self.known:
            self.known = True
            ending.at_end(self._kill)
        if self._answer(START) != b"r":
            raise OSError("math-verify does not start")

    def _answer(self, seconds):
        """Return the next byte of the process; b"" if it has ended, or took longer than `seconds` and was killed."""
        out = self.process.stdout.fileno()
        if select.select([out], [], [], seconds)[0]:
            return os.read(out, 1)
        self._kill()
        return b""

    def _kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self.process = None


WORKER = Worker()


def same_number(one, other) -> bool:
    """Return whether two numbers of sympy are equal: rationals exactly, others to DIGITS, those with decimals to 12."""
    from sympy import Float

    if not (one.is_finite and other.is_finite):  # 1/0 equals nothing
        return bool(one == other and one.is_extended_real)
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    inexact = any(number.has(Float) for number in (one, other))
    size = max(abs(one.evalf(DIGITS)), abs(other.evalf(DIGITS)))
    return bool(abs((one - other).evalf(DIGITS)) <= size * 10 ** -(12 if inexact else DIGITS - 10))


def serve() -> None:
    """Run the worker process: for each line of stdin write `1` or `0` to stdout, until the trainer has ended."""
    import resource
    import signal

    from math_verify import parse, verify
    from sympy import Expr

    out = os.dup(1)
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def parsed(text):
        return parse(f"${text}$", parsing_timeout=None)

    def right(answer, gold):
        numbers = [found[0] for found in (answer, gold) if found and getattr(found[0], "is_number", None)]
        if len(numbers) == 2 and all(isinstance(number, Expr) for number in numbers):
            return same_number(*numbers)
        return verify(gold, answer, float_rounding=12, timeout_seconds=None)

    os.write(out, b"r")
    for line in sys.stdin.buffer:
        signal.alarm(int(SECONDS) + 1)  # SIGALRM ends this process if the trainer is no longer there to kill it
        found = False
        with contextlib.suppress(Exception):
            answer, golds = json.loads(line)
            answer = parsed(answer)
            found = any(right(answer, parsed(gold)) for gold in golds)
        signal.alarm(0)
        os.write(out, b"1" if found else b"0")


if __name__ == "__main__":
    serve()
