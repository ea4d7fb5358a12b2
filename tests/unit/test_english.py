"""Plain English: no comment, docstring, message or page contains certain unclear phrases."""

import ast
import io
import re
import tokenize
from pathlib import Path

import commands
import pytest

ROOT = Path(__file__).resolve().parents[2]
ODD = re.compile(r"\b(goes on|go on|is said|of its own|stands?|what (is|was) (kept|given|asked))\b", re.IGNORECASE)
# (file, phrase) of texts that a model reads, and of quotations: style must not change them.
QUOTED = {("tools/simulate.py", "stands on one line of its own")}


def files(*patterns):
    return [name for name in commands.known_to_git(*patterns) if not name.startswith("tests/old_run/")]


def prose(name):
    """Yield (line, text) of a file's prose. Python: comments, docstrings and, outside of tests, all other strings."""
    source = (ROOT / name).read_text(encoding="utf-8")
    if not name.endswith(".py"):
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not name.startswith("tests/"):
                yield node.lineno, node.value
        elif isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and name.startswith("tests/"):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def odd_phrases(name):
    for line, text in prose(name):
        for file, phrase in QUOTED:
            text = text.replace(phrase, "") if file == name else text
        # A phrase may contain a line break.
        for found in ODD.finditer(" ".join(text.split())):
            yield f"{name}:{line}: {found[0]}"


@pytest.mark.parametrize("pattern", ["*.py", "*.md", "*.sh", "*.html"])
def test_no_odd_phrase(pattern):
    found = [each for name in files(pattern) if name != "tests/unit/test_english.py" for each in odd_phrases(name)]
    assert found == []


def test_an_odd_phrase_is_found_across_lines_and_in_comments(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text('"""It goes\non."""\nx = f"{1} stands here"  # a room of its own\n')
    assert sorted(odd_phrases("a.py")) == ["a.py:1: goes on", "a.py:3: of its own", "a.py:3: stands"]
