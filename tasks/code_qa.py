"""Functions that the model writes, scored by tests."""

import contextlib
import re
import secrets
import textwrap
from pathlib import Path

from common.environment import Failed
from common.turns import Question
from tasks import templates
from tasks.math_qa import MathQA
from tools.python import Python

CHECK = Path(__file__).with_name("code_check.py").read_text(encoding="utf-8")


class CodeQA(MathQA):
    """Functions that the model writes. The outcome is 1 if the data set's tests pass in the sandbox, else 0.

    The answer is the whole function, or a continuation of the question's text. A whole function gets the code that the
    question has above its function (imports, helpers).
    """

    nonsense = ("pass",)  # each one takes a run of the sandbox
    question_format = "Complete this function, and answer with the whole function.\n{}"

    def __init__(self, python: Python, *args):
        super().__init__(*args)
        self.python = python

    def score(self, answer: str | None, question: Question) -> tuple[float, dict[str, float]]:
        prompt, name, test = (question.info[key] for key in ("prompt", "entry_point", "test"))
        code = templates.cleaned("python", answer or "")
        whole = re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE)
        above = prompt[: prompt.index(f"def {name}")]
        if not whole:
            # Code from a fence, or with a later line at the margin, lacks indentation; else only its first line does.
            bare = code != (answer or "").strip() or re.search(r"\n\S", code)
            code = textwrap.indent(code, "    ") if bare else f"    {code}"
        code = f"{above if whole else prompt}{code}"
        word = secrets.token_hex(16)
        if self.python.processes:
            words = (CHECK, above, code, test, name, word)
            program = f"{CHECK}\ncheck({', '.join(map(repr, words))})"
        else:  # an interpreter without processes and classes: the word comes after the tests
            program = f"{code}\n{test}\ncheck({name})\nprint({word!r})"
        with contextlib.suppress(Failed):
            return float(self.python(program).rstrip().endswith(word)), {}
        return 0.0, {}
