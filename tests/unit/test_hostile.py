"""No text that a collapsing policy can write stops the loop: every parser and scorer reads 100 kB in about a second."""

import time

import chat_templates
import pytest

import train_grpo
from common.turns import Question
from tasks import choice_qa, equality, scores, templates, thinking
from tasks.chat import Chat
from tasks.math_qa import MathQA
from tasks.similarity import cosines
from tasks.tags import Tags
from tools import search, simulate

SIZE = 100_000  # characters
SECONDS = 3.0  # CPU time of a reader: three times the promised second

PIECES = {
    "boxes": "\\boxed{",
    "closed boxes": "\\boxed{1}",
    "bare boxes": "\\boxed 5 ",
    "braces": "{",
    "both braces": "{}",
    "thoughts": "<think>",
    "closed thoughts": "<think>a</think>",
    "ends of thoughts": "</think>",
    "calls": "<search>",
    "closed calls": "<search>a</search>",
    "code": "<python>",
    "code with newlines": "<python>\n\n\n\n",
    "answers": "<answer>",
    "answers and calls": "<answer><search><python>",
    "tool calls": "<tool_call>",
    "JSON": '{"a":',
    "lists": "[",
    "lists of calls": '[{"name": "search", "arguments": {"query": "a"}}, ',
    "backslashes": "\\d\\",
    "quotes": '"\\',
    "newlines": "\n",
    "spaces": " ",
    "tabs and newlines": "\t\n ",
    "fences": "```\n",
    "digits": "9",
    "thousands": "9,999",
    "powers": "9^",
    "roots": "√(",
    "dollars": "$ ",
    "sums": "1+",
    "fractions": "\\frac{",
    "equations": "x=",
    "words": "the answer is ",
    "letters": "a) ",
    "documents": "Doc 1 (Title: ",
    "titles": "(title: (a) ",
    "bars": "Doc\n\n",
    "emoji": "🙂",
}


def texts():
    """Return {name: text of SIZE characters}: each piece repeated, and some of them between a call's or answer's tags."""
    found = {name: (piece * (SIZE // len(piece) + 1))[:SIZE] for name, piece in PIECES.items()}
    return found | {
        f"{name} in an answer": f"<answer>{found[name]}</answer>" for name in ("spaces", "newlines", "digits")
    }


def readers():
    """Return {name: function of a text}: what reads a model's text, an answer, or the text of a tool."""
    plain = {
        f"tags, {tool}": Tags(train_grpo.Args(), chat_templates.tokenizer(None), tool).parse
        for tool in ("search", "python", None)
    }
    question = Question("1", "Which?\nA) one\nB) two", ["B"])
    choice = choice_qa.ChoiceQA.__new__(choice_qa.ChoiceQA)
    math = MathQA.__new__(MathQA)
    marks = templates.marks(chat_templates.tokenizer(None), "<information>", "</information>")
    chats = {}
    for name in ("KEEPS", "STRIPS", "JSON_CALLS"):
        chats[f"chat, {name}"] = Chat(
            train_grpo.Args(), chat_templates.tokenizer(getattr(chat_templates, name)), "search"
        ).parse
    return {
        **plain,
        **chats,
        "tags, boxed": Tags(train_grpo.Args(answer="boxed"), chat_templates.tokenizer(None), "python").parse,
        "boxed": equality.boxed,
        "equal": lambda text: math.score(text, Question("1", "?", ["7", "\\frac{x}{2}"])),
        "choice": lambda text: choice.score(text, question),
        "exact match": lambda text: scores.exact_match(text, ["gold"]),
        "F1": lambda text: scores.f1(text, ["gold"]),
        "own form": scores.own_form,
        "spoken": thinking.spoken,
        "spoken, opened": lambda text: thinking.spoken(text, True),
        "cleaned": lambda text: templates.cleaned("python", text),
        "harmless": lambda text: templates.harmless(text, marks),
        "documents": search.documents_in,
        "simulated documents": simulate.written,
        "similarity": lambda text: cosines([text, "x = 1", text + "1"]),
    }


READERS = readers()


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_takes_a_second_of_cpu_at_most_for_any_text(reader):
    slow = {}
    for name, text in texts().items():
        start = time.thread_time()
        READERS[reader](text)
        seconds = time.thread_time() - start
        if seconds > SECONDS:
            slow[name] = round(seconds, 1)
    assert not slow


SHORT = {  # short enough to be compared by value
    name: (piece * 1000)[: equality.LONGEST]
    for name, piece in (
        PIECES
        | {"commas": ",", "values": "x,", "tuples": "(1,", "closed tuples": "(1,2),", "sets": "\\{1,", "ors": "x=1 or "}
        | {"unions": "(1,2)\\cup ", "bounds": "1<x", "builders": "\\{x|x>", "signs": "\\pm 1,", "elements": "x\\in "}
        | {"factorials": "9!", "exponents": "9^{9", "groups": "(9)^9", "binomials": "\\binom{9}{9}", "sides": "x=1,"}
    ).items()
}


@pytest.mark.parametrize("gold", ["7", "(1,2)", "1,2", "3<x<9", "x+3y-6=0", "\\sqrt{3}", "x=1 \\text{ or } x=2"])
def test_a_short_text_is_compared_in_a_second_of_cpu_too(gold):
    slow = {}
    for name, text in SHORT.items():
        start = time.thread_time()
        equality.equal(text, [gold])
        if time.thread_time() - start > SECONDS:
            slow[name] = round(time.thread_time() - start, 1)
    assert not slow
