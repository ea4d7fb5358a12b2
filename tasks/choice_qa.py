"""Questions with lettered options."""

import re

from tasks import equality
from tasks.math_qa import MathQA

DRESS = re.compile(r"\\(?:text|math|mbox)[a-z]*|\\[()\[\]]|[*${}\[\]]")  # what may stand around a letter
OPTION = re.compile(r"\b[A-D]\b|\b[a-d](?=\))")  # a letter that may stand for an option
LETTER = re.compile(  # (letter of an option, what follows it)
    r"(?:(?:the|correct|right|answer|option|choice|is)\b[\s:]*)*\(?([a-z])(?=\s*[).:,;\n]|\s+[-–—]|\s*$)(.*)",
    re.IGNORECASE | re.DOTALL,
)


class ChoiceQA(MathQA):
    """Questions with lettered options. The outcome is whether the answer names the right letter, and no other one."""

    question_format = "{}\nAnswer with the letter of the right option."

    def score(self, answer, question):
        answer = DRESS.sub("", equality.boxed(answer or "") or answer or "")
        said = LETTER.match(answer.strip())
        if not said:
            return 0.0, {}
        letter = said[1].upper()
        # Who names a second option has not decided; but an option may have such letters in its own text.
        option = " ".join([letter, *re.findall(rf"^{letter}\) (.*)", question.text, re.MULTILINE)])
        named, own = ({name.upper() for name in OPTION.findall(text)} for text in (said[2], option))
        return float(letter in question.golds and named <= own), {}
