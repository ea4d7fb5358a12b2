"""Questions with lettered options."""

import re

from common.turns import Question
from tasks import equality
from tasks.math_qa import MathQA

DRESS = re.compile(r"\\(?:text|math|mbox)[a-z]*|\\[()\[\]]|[*$`{}\[\]]")  # markup that may surround a letter
OPTION = re.compile(r"\b[A-D]\b|\b[a-d](?=\))")  # a letter that may name an option
LETTER = re.compile(  # (letter of an option, text after it)
    r"(?:(?:the|my|final|correct|right|best|answer|option|choice|is|it)\b[\s:]*)*\(?([a-z])"
    r"(?=\s*[).:,;\n]|\s+[-–—]|\s*$|\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b)(.*)",
    re.IGNORECASE | re.DOTALL,
)


class ChoiceQA(MathQA):
    """Questions with lettered options. The outcome is 1 if the answer names the right letter and no other, else 0."""

    question_format = "{}\nAnswer with the letter of the right option."

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        answer = DRESS.sub("", equality.boxed(answer or "") or answer or "")
        match = LETTER.match(answer.strip())
        if not match:
            return 0.0, {}
        letter = match[1].upper()
        # An answer that names a second option is wrong, unless that letter is part of the right option's own text.
        option = " ".join([letter, *re.findall(rf"^{letter}\) (.*)", question.text, re.MULTILINE)])
        named, own = ({name.upper() for name in OPTION.findall(text)} for text in (match[2], option))
        return float(letter in question.golds and named <= own), {}
