"""Whether an answer to a mathematical question has the value of a gold: exact numbers at once, all else by math-verify (LaTeX, sympy).

    numbers      integers, decimals, fractions, mixed and scientific ones, in plain text or LaTeX, are compared exactly: 0.5 is 1/2, and
                 0.333 is not 1/3
    percent      50% is 50, as most golds have it, and it is 0.5; 50% is not 0.5%
    units        a common one that only one side has does not matter: 12 cm is 12 and 12 centimeters, but it is not 12 m
    formulas     count by their value: 12+13 is 25, as for math-verify; a bound is no number: > 5 is not 5
    words        any others are compared as they stand: "3 quarters" is not 3
    \\boxed       of several boxed answers the last one counts

math-verify can compute for ever (10^{10^{10}}) and limits its time by signals, which only work in a main thread. So it runs in a
process of its own, started when first needed, and killed when it takes too long: the answer then counts as wrong.
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

SECONDS = 5.0  # for one comparison
START = 60.0  # for the process to start: it loads sympy
MEMORY = 2 * 2**30  # bytes of its address space
LONGEST = 1000  # characters of an answer that are looked at
SPACES = re.compile(r"(?<!\\)\\[,;:!\s]|\\q?quad\b|~")
WRAPPED = re.compile(r"\\(?:left|right|displaystyle)\b")
LEAD = re.compile(  # what may stand before the dollars of an answer
    r"(?:.*(?:\b(?:is|are|that|answer|get|have|so|thus|therefore|hence),?|[a-z]\s*:)[\s*]*)?", re.DOTALL | re.IGNORECASE
)
LEFT = re.compile(r"(?:^|(?<=,))\s*(\\?[a-zA-Z]+\d?(?:_\{?\w+\}?)?|[a-zA-Z]\(\w\))\s*=(?!=)")  # x = 5, f(x) = x^2
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
UNIT = r"[a-z]+(?:\^?\{?[23]\}?|[²³])?"
VALUE = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+)?(?P<top>{NUMBER})(?:\s*/\s*(?P<bottom>{NUMBER}))?"
    r"(?:e(?P<e>[+-]?\d{1,3})|\s*(?:\\times|\\cdot|×|\*)\s*10\^(?P<power>[+-]?\d{1,3}|\{\s*[+-]?\d{1,3}\s*\}))?"
    rf"(?P<unit>\s*%|\s*°|\s+{UNIT}(?:(?:\s+|\s*/\s*){UNIT}){{0,2}})?",
    re.IGNORECASE,
)
# What may follow a number without changing it (each also with an s or es); between two bars, the names of one unit.
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
NOT_PRODUCTS = set("or to of in is if by at as on no not nor and for per out but mod vs am pm".split())  # no products
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|begin|end)\s*\{[^{}]*\}")
BOUND = re.compile(r"[<>≤≥≠]|\\(?:[lg]e(?:q|qslant)?|[lg]t|neq?)(?![a-zA-Z])")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BARE_BOX = re.compile(r"\\boxed\s+([^\s${][^\s$]*)")  # \boxed 5
BRACE = re.compile(r"(?<!\\)[{}]")  # an escaped one is text
SUPERSCRIPTS = str.maketrans({c: f"^{n}" for n, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


def equal(answer, golds):
    """Whether the answer has the value of one of the golds. An empty one (or None) has not. Never raises."""
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


def latex(text):
    """A formula as Python or Unicode prints it in LaTeX, without dollars and a unit: 2*pi**2 cm is 2*\\pi^{2}."""
    text = re.sub(r"\\?\$", "", text.translate(SUPERSCRIPTS)).replace("<=", r"\le ").replace(">=", r"\ge ")
    text = re.sub(r"\*\*\s*(?:\(([^()]*)\)|(-?[\w.]+))", r"^{\1\2}", text).replace("**", "^")
    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+|\w))", r"\\sqrt{\1\2}", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi\b", r"\\pi", text)
    ends = re.search(r"\s([a-z]{2,}(?:\^?[23]|\^\{[23]\})?)$", text)
    return text[: ends.start()] if ends and measure(ends[1]) else text


def formula(text):
    """Whether a text is one formula that can be computed, and not a sentence, several formulas, or a tower of powers."""
    bare = re.sub(r"\^\s*(-?\w|\\[a-zA-Z]+)", r"^{\1}", TEXT.sub("", text))  # a bare caret takes one token
    towers = re.search(r"\^\s*(?:\{[^{}]*\}\s*|[{(]*[^{}()^]*)\^", bare)
    words = SENTENCE.findall(bare)
    products = all(
        re.fullmatch("[a-z]{2,3}", word) and word not in NOT_PRODUCTS and not measure(word) for word in words
    )
    return not (towers or not products or words == [bare.strip()] or re.search(r"[-+*/^_=.?]\s*$", bare))


def comparable(answer, gold):
    """Whether two formulas can mean the same: equations or bounds both, and the same variables where some are multiplied."""
    signs = [("=" in text, bool(BOUND.search(text))) for text in (answer, gold)]
    interval = signs == [(False, False), (False, True)] and re.search(r"[(\[]", answer)  # (5, oo) is x > 5
    bare = [TEXT.sub("", text) for text in (answer, gold)]
    letters = [set(re.sub(r"\\[a-zA-Z]+|[^a-zA-Z]", "", text)) for text in bare]
    return (signs[0] == signs[1] or interval) and (letters[0] == letters[1] or not any(map(SENTENCE.search, bare)))


def caseless(text):
    """A text without the spaces that say nothing; a formula with one kind of fraction, a word without its case."""
    text = text.casefold() if SENTENCE.search(text) and "\\" not in text else re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", text)


def boxed(text):
    r"""What the last complete \boxed (or \fbox, as in MATH) of a text holds, braces inside kept; None without one.

    >>> boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for found in reversed(list(BOX.finditer(text))):
        depth = 1
        for brace in BRACE.finditer(text, found.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[found.end() : brace.start()].strip()
    bare = BARE_BOX.findall(text)
    return bare[-1].rstrip(".,") if bare else None


def plain(text):
    """A text without what only dresses an answer: the last box, dollars around it, spaces, \\text, a final point."""
    text = text.replace("−", "-").strip()
    inner = boxed(text)
    text = " ".join((text if inner is None else inner).replace("{,}", ",").split())
    text = re.sub(r", ?\\! ?(?=\d{3})", ",", text)  # thousands as MATH spaces them
    text = re.sub(r"(?<=\d)\\,(?=\d{3}\b)", "", text).replace("\\!", "")
    text = WRAPPED.sub(" ", SPACES.sub(" ", re.sub(r"(?<!\\)\\[()\[\]]", "$", text)))
    text = text.strip().removesuffix(".").strip()
    parts = re.split(r"(?<!\\)\$+", text)
    if len(parts) > 2:  # formulas, perhaps in a sentence that does not say the contrary
        said = LEAD.fullmatch(parts[0]) and not re.search(r"\b(?:not|no|nor|or|never|neither)\b|n't", parts[0])
        text = " ".join(parts[1:] if said else parts).strip()
    text = re.sub(r"(?<=.),? ?(?:\band\b|\\text ?\{ ?and ?\})(?=.)", ", ", text)
    text = re.sub(r"^\\(?:text|mbox)\s*\{([^{}]*)\}$", r"\1", text).strip()
    if LEFT.match(text) and len(set(LEFT.findall(text))) == 1:
        text = LEFT.sub("", text).strip()
    while text[:1] + text[-1:] in ("()", "{}") and VALUE.fullmatch(text[1:-1].strip()):
        text = text[1:-1].strip()
    return " ".join(text.split())


def exact(text):
    """(values, unit) of a text that is one number, else None; values has two entries for a percentage."""
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\[dt]?frac\s*(?:\{\s*([\d.]+)\s*\}|(\d))\s*(?:\{\s*([\d.]+)\s*\}|(\d))", r" \1\2/\3\4", text)
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


def measure(text):
    """A unit by one of its names, as in foot^2 for square feet and ft²; None with a word that may change what it follows."""
    names = []
    for word in text.lower().replace("/", " per ").split():
        name, power = re.fullmatch(r"(.*?)[\^{]*([23²³]?)\}?", word).groups()
        known = [UNITS[one] for one in (name, name.removesuffix("s"), name.removesuffix("es")) if one in UNITS]
        if not known:
            return None
        names.append(known[0] + (power and "^" + power.translate(SUPERSCRIPTS).strip("^")))
    unit = " ".join(names).replace("mph", "mile per hour").replace("kmh", "km per hour")
    return re.sub(r"\bsquare (\S+)", r"\1^2", re.sub(r"\bcubic (\S+)", r"\1^3", unit))


def same_value(one, other):
    (values, unit), (others, other_unit) = one, other
    if unit and other_unit:
        return unit == other_unit and values[0] == others[0]
    return bool(set(values) & set(others))


class Worker:
    """The process that runs math-verify, seen from the trainer. One question at a time; to be asked from any thread."""

    def __init__(self):
        self.lock, self.process, self.known = threading.Lock(), None, False

    def ask(self, answer, golds):
        """Whether math-verify takes the answer for one of the golds; False as well when it fails or does not come to an end."""
        with self.lock:
            try:
                if self.process is None or self.process.poll() is not None:
                    self._start()
                self.process.stdin.write(json.dumps([answer, golds]).encode() + b"\n")
                self.process.stdin.flush()
                return self._answer(SECONDS) == b"1"
            except (OSError, ValueError):  # it has ended, or did not start
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
            start_new_session=True,  # Ctrl-C is for the trainer, which ends it
        )
        if not self.known:
            self.known = True
            ending.at_end(self._kill)
        if self._answer(START) != b"r":
            raise OSError("math-verify does not start")

    def _answer(self, seconds):
        """The next byte it writes; b"" when it has ended. One that takes longer is killed."""
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


def serve():
    """The worker process: a line in, `1` or `0` out, until the trainer has gone."""
    import resource
    import signal

    from math_verify import parse, verify

    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def found(text):
        return parse(f"${text}$", parsing_timeout=None)

    os.write(out, b"r")
    for line in sys.stdin.buffer:
        signal.alarm(int(SECONDS) + 1)  # it ends itself should the trainer have gone: the kernel sees to that
        right = False
        with contextlib.suppress(Exception):
            answer, golds = json.loads(line)
            said = found(answer)
            right = any(verify(found(gold), said, float_rounding=12, timeout_seconds=None) for gold in golds)
        signal.alarm(0)
        os.write(out, b"1" if right else b"0")


if __name__ == "__main__":
    serve()
