"""From --task to a Task: its family, its tool and its questions."""

import functools
import heapq
import importlib.metadata
import importlib.util
from pathlib import Path

from common import models
from common.turns import Question
from tasks import hub
from tasks.choice_qa import ChoiceQA
from tasks.code_qa import CodeQA
from tasks.files import read_questions, single_spaced, split
from tasks.gym import GYM, gym_questions
from tasks.math_qa import MathQA
from tasks.scores import normal_form
from tasks.search_qa import SearchQA
from tasks.tiny import tiny_math, tiny_search
from tools.python import Python
from tools.search import Retriever, Search
from tools.simulate import Simulator

WIKIPEDIA = (
    "Give --retriever http://host:8000/retrieve, a server that speaks Search-R1's protocol, or --corpus passages.jsonl. The passages "
    "of Search-R1: hf download PeterJinGo/wiki-18-corpus --repo-type dataset --local-dir wiki; gunzip wiki/wiki-18.jsonl.gz; a server "
    "of ours: python -m tools.serve --corpus wiki/wiki-18.jsonl. docs/retrieval.md says more."
)
KINDS = (
    f"a data set ({', '.join(hub.SOURCES)}), tiny_search or tiny_math (embedded, nothing to download), reasoning_gym:<name> (made by "
    'that package), or a file questions.jsonl of {"question", "answers"} lines, together with --corpus documents.jsonl or --retriever '
    "http://host:port/retrieve, or with --task_kind math"
)


def load(args, use="train"):
    """The task --task names, of the family it belongs to. Its questions are split into train, held_out (--eval_questions of them, if
    there are) and test; no text is in two of them. use: "train", "eval", or "all", where all questions of a file become `test`.

    Raises SystemExit for data that is missing or malformed, before any model is loaded.
    """
    make = task_maker(args)
    refuse_unlearned(args, make is not search_task)
    source = hub.SOURCES.get(args.task)
    trained = source.train if source else args.task in ("tiny_search", "tiny_math") or args.task.startswith(GYM)
    if use == "all" and trained:
        raise SystemExit(f"--task {args.task} is no test set: it has questions to train on, and others to test on.")
    family, tool, train, held_out, test = make(args, use == "all")
    if use == "train" and not train:
        raise SystemExit(
            f"--task {args.task} is a benchmark, without questions to train on: python eval.py --task {args.task}"
        )
    train = train[: args.limit] if args.limit else train
    tokenizer = models.load_tokenizer(models.resolve(args.model))
    task = family(args, tokenizer, tool, train, held_out, test)
    check_lengths(task, args)
    return task


def task_maker(args):
    """The function that makes the task: search_task or math_task, which knows what --task names."""
    if args.task in hub.SOURCES:
        return search_task if hub.SOURCES[args.task].kind == "search" else math_task
    return (
        math_task if args.task == "tiny_math" or args.task.startswith(GYM) or args.task_kind == "math" else search_task
    )


@functools.cache  # of several benchmarks one sandbox is enough
def python_tool(timeout, unsafe):
    return Python(timeout, unsafe)


def refuse_unlearned(args, mathematics):
    """Raises SystemExit when an embedded base is given a task with the other one's tool: its tags are all it knows."""
    right, other = ("tiny-math", "tiny") if mathematics else ("tiny", "tiny-math")
    if args.model == other:
        tool = "Python" if mathematics else "search"
        raise SystemExit(
            f"--model {other} --task {args.task}: it has not learned to use {tool}; {right} has: --model {right}."
        )


def math_task(args, whole):
    """(family, its tool, train, held_out, test): `tiny_math`, a data set of reasoning_gym, or a JSONL file of questions."""
    if args.corpus or args.retriever:
        raise SystemExit(
            f"--corpus and --retriever: --task {args.task} is answered by computing, there is nothing to search in."
        )
    family, python = MathQA, functools.partial(python_tool, args.tool_timeout, args.unsafe_python)
    if args.task in hub.SOURCES:
        found = hub.load(args.task, args.eval_questions, False)
        family = {"math": MathQA, "choice": ChoiceQA, "code": CodeQA}[found.kind]
        family = functools.partial(family, python()) if family is CodeQA else family
        parts = found.train, found.held_out, found.test
    elif args.task == "tiny_math":
        train, held_out = (
            [Question(q["id"], q["question"], q["answers"], info={"steps": q["steps"]}) for q in part]
            for part in tiny_math.questions()
        )
        half = len(held_out) // 2
        parts = train, held_out[:half][: args.eval_questions], held_out[half:]
    elif args.task.startswith(GYM):
        family, *parts = gym_questions(args)
    else:
        questions = read_questions(args.task, normal=single_spaced)
        parts = ([], [], questions) if whole else split(questions, args.eval_questions, key=single_spaced)
    if family is MathQA and not importlib.util.find_spec("math_verify"):
        raise SystemExit(f"--task {args.task}: math-verify, which compares formulas, is not installed: make setup")
    return family, python() if args.tools == "on" else None, *parts


def search_task(args, whole):
    """(SearchQA, its tool, train, held_out, test): a data set, `tiny_search`, or a JSONL file of questions; with --corpus, --retriever or
    documents of their own to search in."""
    if args.corpus and args.retriever:
        raise SystemExit("--corpus and --retriever: one of them, there is one place to search in.")
    given = args.corpus or args.retriever or args.tools == "off"
    if args.task in hub.SOURCES:
        found = hub.load(args.task, args.eval_questions, not given)
        if not given and found.documents is None:
            raise SystemExit(
                f"--task {args.task}: its answers are looked up in Wikipedia, which it does not bring along. {WIKIPEDIA}"
            )
        documents, parts = found.documents or args.corpus, (found.train, found.held_out, found.test)
    elif args.task == "tiny_search":
        documents, *parts = tiny_search.search_world()
        documents = args.corpus or documents
        train, held_out = (
            [Question(q["id"], q["question"], q["answers"], info={"hops": q["hops"]}) for q in part] for part in parts
        )
        half = len(held_out) // 2
        parts = train, held_out[:half][: args.eval_questions], held_out[half:]
    elif args.task.endswith(".jsonl") or (args.task and Path(args.task).exists()):
        if not given:
            raise SystemExit(
                f"--task {args.task} needs something to search in: --corpus documents.jsonl (lines of id, title and text), or "
                "--retriever http://host:port/retrieve (a server). Mathematics: --task_kind math."
            )
        documents, questions = args.corpus, read_questions(args.task)
        parts = ([], [], questions) if whole else split(questions, args.eval_questions)
    else:
        raise SystemExit(f"--task {args.task or '(none)'}: give {KINDS}.")
    if args.tools == "off":
        return SearchQA, None, *parts
    if args.retriever.startswith("llm:"):
        steps = getattr(args, "steps", 1)  # eval.py has none, and asks as at the start
        return SearchQA, Simulator(args.retriever, args.topk, args.tool_timeout, steps, args.seed), *parts
    if args.retriever:
        return SearchQA, Retriever(args.retriever, args.topk, timeout=args.tool_timeout), *parts
    try:
        return SearchQA, Search(documents, args.topk), *parts
    except (OSError, ValueError) as error:
        raise SystemExit(f"--corpus: {error}") from None


def check_lengths(task, args):
    """Raises SystemExit naming a question that could never be answered: its golds outgrow a turn, or its prompt the context."""
    questions = task.train + task.held_out + task.test

    def place(question):
        return (
            f"{args.task}, line {question.info['line']}"
            if "line" in question.info
            else f"{args.task}, question {question.id}"
        )

    for question in questions:
        answers = [
            f"<answer> {gold} </answer>" if args.answer == "tags" else f"\\boxed{{{gold}}}"
            for gold in question.golds
            if normal_form(gold) or question.golds == [gold]
        ]
        if (
            not answers or min(len(answer.encode()) for answer in answers) <= args.max_turn_tokens
        ):  # a token is a byte at least
            continue
        shortest = min(len(task.tokenizer.encode(answer, add_special_tokens=False)) for answer in answers)
        if shortest > args.max_turn_tokens:
            raise SystemExit(
                f"{place(question)}: its shortest answer takes {shortest} tokens, its tags included, and --max_turn_tokens is "
                f"{args.max_turn_tokens}: raise --max_turn_tokens{' or remove the line' * ('line' in question.info)}."
            )
    for question in heapq.nlargest(48, questions, key=lambda q: len(q.text)):
        tokens = len(task.prompt_ids(question))
        if tokens >= args.max_context:
            raise SystemExit(
                f"{place(question)}: its prompt takes {tokens} tokens, and --max_context is {args.max_context}: raise "
                f"--max_context{' or remove the line' * ('line' in question.info)}."
            )
