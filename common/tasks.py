"""Questions, golds, prompts, action parsing and outcome scores: what the agent is asked and how it is judged.

Only what the model itself sampled is ever parsed.
"""

import contextlib
import difflib
import functools
import hashlib
import heapq
import importlib.util
import inspect
import json
import random
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from common import data, models, protocol, run, tiny, tiny_math, verify
from common.scores import exact_match, f1, normalise
from common.turns import Question
from tools import Failed
from tools.python import Python
from tools.search import Retriever, Search
from tools.simulate import Simulator

TEST = 500  # questions of a file that are kept for eval.py
GYM = "reasoning_gym:"  # how --task names a data set of that package
DRESS = re.compile(r"\\(?:text|math|mbox)[a-z]*|\\[()\[\]]|[*${}\[\]]")  # what may stand around a letter
OPTION = re.compile(r"\b[A-D]\b|\b[a-d](?=\))")  # a letter that may stand for an option
LETTER = re.compile(  # (letter of an option, what follows it)
    r"(?:(?:the|correct|right|answer|option|choice|is)\b[\s:]*)*\(?([a-z])(?=\s*[).:,;\n]|\s+[-–—]|\s*$)(.*)",
    re.IGNORECASE | re.DOTALL,
)
GYM_TRAIN = 2000  # questions made of it to train on
WIKIPEDIA = (
    "Give --retriever http://host:8000/retrieve, a server that speaks Search-R1's protocol, or --corpus passages.jsonl. The passages "
    "of Search-R1: hf download PeterJinGo/wiki-18-corpus --repo-type dataset --local-dir wiki; gunzip wiki/wiki-18.jsonl.gz; a server "
    "of ours: python -m tools.search serve --corpus wiki/wiki-18.jsonl. docs/retrieval.md says more."
)
RUNS_ANSWERS = re.compile(r"\b(eval|exec|parse_expr|sympify|simplify|parse_latex)\(")  # in the source of a scorer
KINDS = (
    f"a data set ({', '.join(data.SOURCES)}), tiny_search or tiny_math (embedded, nothing to download), reasoning_gym:<name> (made by "
    'that package), or a file questions.jsonl of {"question", "answers"} lines, together with --corpus documents.jsonl or --retriever '
    "http://host:port/retrieve, or with --task_kind math"
)


class Task:
    """Questions, and what every family of them has in common. A family (a class below) says what an answer scores, and may have
    worked examples; its tool decides what the prompt describes.

    tool                       has a name ("search" or "python") and turns the text of a call into the text of its answer; None: no tool
    train, held_out, test      questions to train on, to evaluate on while training (development), and to report (eval.py)
    take(n)                    this rank's share of the next n questions of the run
    prompt_ids, said, thinks_on, parse, run_tool, observation, next_context, finish     what the rollout loop asks
    """

    examples = ()  # worked examples for --shots, as they stand in a prompt of the tags protocol
    asked = "{}"  # what the prompt says around a question

    def __init__(self, args, tokenizer, tool, train, held_out, test=()):
        self.tokenizer, self.tool = tokenizer, tool
        self.keeps_time = getattr(tool, "keeps_time", False)  # whether the tool limits the time of a call itself
        self.train, self.held_out, self.test = train, held_out, list(test)
        self.max_turns, self.max_turn_tokens = args.max_turns, args.max_turn_tokens
        if args.shots > len(self.examples):
            raise SystemExit(f"--shots {args.shots}: this task has {len(self.examples)} worked examples.")
        protocols = {"tags": protocol.Tags, "chat": protocol.Chat}
        self.protocol = protocols[args.protocol](args, tokenizer, tool and tool.name, self.examples[: args.shots])
        self.stop, self.stop_ids = self.protocol.stop, self.protocol.stop_ids
        self.invalid_message = self.protocol.invalid_message
        self.context, self.window = args.context, args.window
        self.position = 0  # questions taken so far, over all ranks
        self.seed, self.order = args.seed, (None, [])

    def score(self, answer, question):
        """(outcome in [0, 1], further numbers by name) of an answer; None: there was no answer."""
        raise NotImplementedError

    # -- questions

    @functools.cached_property
    def fingerprint(self):
        """A hash of the questions and of what the tool answers: a run that is resumed on others is refused."""
        data = [(q.id, q.text, q.golds) for q in (*self.train, *self.held_out)]
        return hashlib.sha256(repr((data, getattr(self.tool, "fingerprint", None))).encode()).hexdigest()

    def take(self, n):
        """The next n questions of the run, of which this rank gets every world-th: possibly none. Each pass over the data is shuffled anew."""
        draws = range(self.position, self.position + n)
        self.position += n
        return [replace(self._at(draw), draw=draw) for draw in draws if draw % run.world_size() == run.rank()]

    def _at(self, position):
        epoch, place = divmod(position, len(self.train))
        if self.order[0] != epoch:
            order = list(range(len(self.train)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self.order = epoch, order
        return self.train[self.order[1][place]]

    # -- what the rollout loop asks

    def prompt_ids(self, question):
        """Ids of the first context."""
        return self.protocol.prompt_ids(self.asked.replace("{}", question.text, 1))

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def said(self, turn):
        """The turn's own text, after the tag that opens its thinking where its context ends in that."""
        return "<think>" * protocol.begins(self.decode(turn.context_ids[-16:])) + turn.text

    def thinks_on(self, text):
        """Whether a stop string that ended a generation here did so in the middle of its thinking: it goes on, as the same turn."""
        return self.protocol.thinks_on(text)

    def parse(self, text):
        """The action in what a generation said, or None."""
        return self.protocol.parse(text)

    def run_tool(self, tool, text, earlier, **more):
        """What the tool answers. earlier: the inputs of this trajectory's earlier calls that ran; more: what only some tools want."""
        return self.tool(text, earlier, **more)

    def observation(self, output, turn):
        """(text as the model is shown it, ids) of what the turn's tool answered; of the invalid message where it called none.

        Where the action has its end token already, the ids go on after it.
        """
        shown, ids = self.protocol.observation(output, turn.tool)
        ended = turn.action_ids[-1:]
        doubled = ids and ended and ids[0] in self.stop_ids and ended[0] in self.stop_ids
        return shown, ids[1:] if doubled else ids

    def next_context(self, turns):
        """Ids of the context of the turn that follows the last of `turns`, by --context."""
        if self.context == "window":
            kept = turns[-self.window :]
            return turns[0].context_ids + [i for turn in kept for i in turn.action_ids + turn.observation_ids]
        last = turns[-1]
        context, action = last.context_ids, last.action_ids
        if self.context == "strip_think":
            context, action = protocol.without_thinking(context, action, self.decode)
        return context + action + last.observation_ids

    def finish(self, trajectory, question):
        """Score a trajectory that has ended."""
        trajectory.outcome, more = self.score(trajectory.answer, question)
        trajectory.info |= more


class SearchQA(Task):
    """Questions answered by searching a corpus. The outcome is exact match; F1 goes into the trajectory's info."""

    examples = tuple(protocol.worked_example(example) for example in protocol.EXAMPLES)

    def score(self, answer, question):
        return exact_match(answer, question.golds), {"f1": f1(answer, question.golds)}


class MathQA(Task):
    """Questions answered by computing in Python. The outcome is whether the answer has the value of a gold."""

    def run_tool(self, tool, text, earlier):
        return super().run_tool(tool, text, earlier).rstrip("\n")  # print ends a line; so does the tag behind it

    def score(self, answer, question):
        return float(verify.equal(answer, question.golds)), {}


class GymQA(MathQA):
    """Questions of a reasoning_gym data set, answered by computing in Python and scored by the data set itself: right or wrong."""

    def __init__(self, score_answer, *args):
        super().__init__(*args)
        self.score_answer = score_answer

    def score(self, answer, question):
        with contextlib.suppress(Exception, SystemExit):  # some scorers raise on an answer that makes no sense
            return float(answer is not None and self.score_answer(answer, question.info["entry"]) == 1.0), {}
        return 0.0, {}


class ChoiceQA(MathQA):
    """Questions with lettered options. The outcome is whether the answer names the right letter, and no other one."""

    asked = "{}\nAnswer with the letter of the right option."

    def score(self, answer, question):
        answer = DRESS.sub("", verify.boxed(answer or "") or answer or "")
        said = LETTER.match(answer.strip())
        if not said:
            return 0.0, {}
        letter = said[1].upper()
        # Who names a second option has not decided; but an option may have such letters in its own text.
        option = " ".join([letter, *re.findall(rf"^{letter}\) (.*)", question.text, re.MULTILINE)])
        named, own = ({name.upper() for name in OPTION.findall(text)} for text in (said[2], option))
        return float(letter in question.golds and named <= own), {}


class CodeQA(MathQA):
    """Functions to be written. The outcome is whether the data set's own tests pass, in the sandbox of the Python tool.

    The answer is the whole function, or what follows the question's text. What the question has above its function (imports, helpers)
    is put before a whole one.
    """

    asked = "Complete this function, and answer with the whole function.\n{}"

    def __init__(self, python, *args):
        super().__init__(*args)
        self.python = python

    def score(self, answer, question):
        prompt, name, test = (question.info[key] for key in ("prompt", "entry_point", "test"))
        code = protocol.cleaned("python", answer or "")
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


def read_question(line, number, normal=normalise):
    """A Question of one line (bytes) of a file; its number becomes info["line"]. Raises ValueError saying what is wrong with it.

    normal: the form in which some gold must not be empty.
    """
    try:
        item = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1}: {error.reason})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno}: {error.msg})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(item, dict):
        raise ValueError('not an object {"question": ..., "answers": [...]}')
    for key in ("question", "answers"):
        if key not in item:
            raise ValueError(f"{key} is missing; it has {', '.join(item) or 'nothing'}")
    text, golds, name = item["question"], item["answers"], item.get("id")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("question must be a string that is not empty")
    if not isinstance(golds, list) or not golds or not all(isinstance(gold, str) and gold.strip() for gold in golds):
        raise ValueError("answers must be a list of strings that are not empty")
    if not any(map(normal, golds)):  # one alias may be, such as "the"
        raise ValueError("no answer is left after normalisation")
    if any("\ud800" <= c <= "\udfff" for c in "".join((text, *golds))):
        raise ValueError("question and answers must be valid Unicode: half of a surrogate pair cannot be encoded")
    return Question(f"line-{number}" if name is None else str(name), text, golds, info={"line": number})


def read_questions(path, normal=normalise):
    """Questions of a JSONL file of {"question", "answers"[, "id"]}. Raises SystemExit naming file and line of the first bad one."""
    questions, seen = [], {}  # id -> line
    try:
        lines = open(path, "rb")  # decoded line by line, to name the one that is not UTF-8
    except OSError as error:
        raise SystemExit(f"--task {path}: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            try:
                question = read_question(line, number, normal)
                if question.id in seen:
                    raise ValueError(f"id {question.id} occurs twice: in line {seen[question.id]} too")
            except ValueError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from None
            seen[question.id] = number
            questions.append(question)
    if not questions:
        raise SystemExit(f"{path}: no questions")
    return questions


def load(args, use="train"):
    """The task --task names, of the family it belongs to. Its questions are split into train, held_out (--eval_questions of them, if
    there are) and test; no text is in two of them. use: "train", "eval", or "all", where all questions of a file become `test`.

    Raises SystemExit for data that is missing or malformed, before any model is loaded.
    """
    make = task_maker(args)
    refuse_unlearned(args, make is not search_task)
    source = data.SOURCES.get(args.task)
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
    if args.task in data.SOURCES:
        return search_task if data.SOURCES[args.task].kind == "search" else math_task
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
    if args.task in data.SOURCES:
        found = data.load(args.task, args.eval_questions, False)
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
        questions = read_questions(args.task, normal=words)
        parts = ([], [], questions) if whole else split(questions, args.eval_questions, key=words)
    if family is MathQA and not importlib.util.find_spec("math_verify"):
        raise SystemExit(f"--task {args.task}: math-verify, which compares formulas, is not installed: make setup")
    return family, python() if args.tools == "on" else None, *parts


def gym_questions(args):
    """(family, train, held_out, test) of `reasoning_gym:<name>`. Questions come from seeds far apart, and no text is in two parts."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SystemExit(
            f"--task {args.task}: {error}. .venv/bin/pip install reasoning-gym==0.1.25 (a part of it needs a C compiler)"
        ) from None
    name = args.task.removeprefix(GYM)
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise SystemExit(f"--task {args.task}: reasoning_gym has no such data set. Close: {', '.join(close)}.")
    scorer = sys.modules[DATASETS[name][0].__module__]
    if RUNS_ANSWERS.search(inspect.getsource(scorer)) and not args.unsafe_python:
        raise SystemExit(
            f"--task {args.task}: this data set may run an answer as code to score it, outside any sandbox. --unsafe_python allows it."
        )
    taken, parts = set(), []
    train = min(GYM_TRAIN, args.limit or GYM_TRAIN)
    for number, (part, count) in enumerate((("test", TEST), ("held_out", args.eval_questions), ("train", train))):
        # The question of a seed and index is that of the seed before it and the next index.
        try:
            dataset = reasoning_gym.create_dataset(name, size=count, seed=number * 10**7)
        except Exception as error:
            raise SystemExit(f"--task {args.task}: not without a configuration of its own ({error}).") from None
        made = {}
        for entry in tqdm(dataset, desc=f"{args.task} {part}", leave=False, disable=run.rank() > 0):
            made.setdefault(words(entry["question"]), entry)
        fresh = [entry for text, entry in made.items() if text not in taken]
        golds = [
            [] if entry["answer"] is None else [str(entry["answer"])] for entry in fresh
        ]  # [] where many are right
        questions = [
            Question(f"{part}-{i}", entry["question"], gold, info={"entry": entry})
            for i, (entry, gold) in enumerate(zip(fresh, golds))
        ]
        parts.insert(0, questions)
        taken |= made.keys()
    if not parts[0] or not parts[1]:
        raise SystemExit(f"--task {args.task}: it has too few different questions to train on some and test on others.")
    return functools.partial(GymQA, dataset.score_answer), *parts


def search_task(args, whole):
    """(SearchQA, its tool, train, held_out, test): a data set, `tiny_search`, or a JSONL file of questions; with --corpus, --retriever or
    documents of their own to search in."""
    if args.corpus and args.retriever:
        raise SystemExit("--corpus and --retriever: one of them, there is one place to search in.")
    given = args.corpus or args.retriever or args.tools == "off"
    if args.task in data.SOURCES:
        found = data.load(args.task, args.eval_questions, not given)
        if not given and found.documents is None:
            raise SystemExit(
                f"--task {args.task}: its answers are looked up in Wikipedia, which it does not bring along. {WIKIPEDIA}"
            )
        documents, parts = found.documents or args.corpus, (found.train, found.held_out, found.test)
    elif args.task == "tiny_search":
        documents, *parts = tiny.search_world()
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


def words(text):
    """A text with single spaces. For mathematics, where signs and case matter."""
    return " ".join(text.split())


def split(questions, held_out, key=normalise):
    """(train, held-out, test): fixed pseudo-random parts of a file; `held_out` questions and TEST, but at most a quarter of the file each.

    The test questions do not depend on `held_out`. No question text is in two of them, texts of the same key being the same.
    """
    order = sorted(questions, key=lambda q: random.Random(q.text).random())
    quarter = max(1, len(order) // 4)
    parts, taken = [], set()
    for count, candidates in ((TEST, order[::-1]), (held_out, order)):
        parts.insert(0, [q for q in candidates if key(q.text) not in taken][: min(count, quarter)])
        taken |= {key(q.text) for q in parts[0]}
    train = [q for q in questions if key(q.text) not in taken]
    if not train:
        raise SystemExit(
            f"{len(questions)} question(s) are too few: at least 3 of different text are needed, one each to train on, to "
            "evaluate on while training, and to test on."
        )
    return train, *parts


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
            if normalise(gold) or question.golds == [gold]
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
