"""Functions to be written, judged by tests."""

import contextlib
import hashlib
import re
import textwrap

from common.environment import Failed
from tasks import templates
from tasks.math_qa import MathQA


class CodeQA(MathQA):
    """Functions to be written. The outcome is whether the data set's own tests pass, in the sandbox of the Python tool.

    The answer is the whole function, or what follows the question's text. What the question has above its function (imports, helpers)
    is put before a whole one.
    """

    question_format = "Complete this function, and answer with the whole function.\n{}"

    def __init__(self, python, *args):
        super().__init__(*args)
        self.python = python

    def score(self, answer, question):
        prompt, name, test = (question.info[key] for key in ("prompt", "entry_point", "test"))
        code = templates.cleaned("python", answer or "")
        whole = re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE)
        before = prompt[: prompt.index(f"def {name}")] if whole else prompt
        if not whole:
            # Out of a fence, or with a later line at the margin, none is indented; else only the first one has lost that.
            bare = code != (answer or "").strip() or re.search(r"\n\S", code)
            code = textwrap.indent(code, "    ") if bare else f"    {code}"
        # An answer that ends the process early would look like one that passed: so the last words must be these.
        passed = hashlib.sha256(f"{question.id} {test}".encode()).hexdigest()
        program = f"{before}{code}\n{test}\ncheck({name})\nprint('{passed}')"
        with contextlib.suppress(Failed):
            return float(self.python(program).rstrip().endswith(passed)), {}
        return 0.0, {}
