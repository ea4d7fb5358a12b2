"""Whether an answer to a mathematical question has the value of a gold: exact numbers at once, all else by math-verify (LaTeX, sympy).

    numbers      integers, decimals, fractions, mixed and scientific ones, in plain text or LaTeX, are compared exactly: 0.5 is 1/2, and
                 0.333 is not 1/3
    percent      50% is 50, as most golds have it, and it is 0.5; 50% is not 0.5%
    units        a common one that only one side has does not matter: 12 cm is 12, but it is not 12 m
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
WRAPPED = re.compile(r"\\(?:left|right|displaystyle)\b|\\[()\[\]]")
NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
VALUE = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>\d+)\s+)?(?P<top>{NUMBER})(?:\s*/\s*(?P<bottom>{NUMBER}))?"
    r"(?:e(?P<e>[+-]?\d{1,3})|\s*(?:\\times|\\cdot|×|\*)\s*10\^(?P<power>[+-]?\d{1,3}|\{\s*[+-]?\d{1,3}\s*\}))?"
    r"(?P<unit>\s*%|\s*°|(?:\s+[a-z]+(?:\^?\{?[23]\}?|[²³])?){1,3})?",
    re.IGNORECASE,
)
# What may follow a number without changing it (each also with an s). Any other word makes the whole an expression or a sentence.
UNITS = set(
    "mm cm dm m km inch inche foot ft feet yard yd mile mi mg g kg gram kilogram ton tonne lb pound oz ounce ml l liter litre gallon cup "
    "second sec s minute min hour h hr day week month year degree deg celsius fahrenheit radian rad meter metre kilometer kilometre "
    "centimeter centimetre millimeter millimetre square sq cubic unit dollar cent euro usd eur mph kmh hz volt watt joule newton "
    "person people student apple book box boxe ball marble coin point game item piece step per".split()
)
SENTENCE = re.compile(r"(?<!\\)\b(?!(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty|frac|min|max)\b)[a-zA-Z]{2,}\b")
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
            unsettled.append(gold)
        elif same(value, other):
            return True
    unsettled = [gold for gold in unsettled if formula(gold) and ("=" in gold) == ("=" in answer)]
    return bool(unsettled) and formula(answer) and WORKER.ask(answer.translate(SUPERSCRIPTS), unsettled)


def formula(text):
    """Whether a text is one formula that can be computed, and not a sentence, several formulas, or a tower of powers."""
    bare = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf|begin|end)\s*\{[^{}]*\}", "", text)
    towers = len(re.findall(r"\^|\*\*", bare)) > 1 and re.search(r"(?:\^|\*\*)\s*[{(]?[^{}()^*]*(?:\^|\*\*)", bare)
    return not (towers or SENTENCE.search(bare) or bare.count("$") > 2 or re.search(r"[-+*/^_=]\s*\$?$", bare))


def caseless(text):
    """A word without its case, which matters in formulas only."""
    return text.casefold() if SENTENCE.search(text) and "\\" not in text else text


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
    text = text if inner is None else inner
    text = WRAPPED.sub(" ", SPACES.sub(" ", text.replace("{,}", ",").replace("\\!", "")))
    text = text.strip().removesuffix(".").strip()
    text = text.replace("$$", "$")
    if text.count("$") == 2:  # one formula, perhaps in a sentence that does not say the contrary
        before, inner, after = text.split("$")
        text = text if re.search(r"\b(?:not|no|nor|or|never|neither)\b|n't", before + after) else inner
    text = re.sub(r"^\\(?:text|mbox)\s*\{([^{}]*)\}$", r"\1", text.strip())
    text = re.sub(r"^\\?[a-zA-Z]\w?\s*=(?!=)\s*", "", text)  # x = 5
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
    unit = (found["unit"] or "").split()
    top, bottom = (Fraction((found[part] or "1").replace(",", "")) for part in ("top", "bottom"))
    known = {word.lower().rstrip("^{}23²³") for word in unit} - {"%", "°"}
    if bottom == 0 or not all(word in UNITS or word.removesuffix("s") in UNITS for word in known):
        return None
    value = int(found["whole"] or 0) + top / bottom
    value *= Fraction(10) ** int((found["e"] or found["power"] or "0").strip("{ }"))
    value = -value if found["sign"] == "-" else value
    return ((value, value / 100) if unit == ["%"] else (value,)), " ".join(unit).lower().rstrip("s")


def same(one, other):
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
        from common import run

        self.process = subprocess.Popen(
            [sys.executable, "-m", "common.verify"],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends it
        )
        if not self.known:
            self.known = True
            run.at_end(self._kill)
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
        """What math-verify reads in a text: between its dollars if there are any, else all of it is a formula."""
        return parse(text if "$" in text else f"${text}$", parsing_timeout=None)

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
