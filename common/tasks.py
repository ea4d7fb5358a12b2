"""Questions, golds, prompts, action parsing and outcome scores: what the agent is asked and how it is judged.

Only what the model itself sampled is ever parsed.
"""

import functools
import hashlib
import heapq
import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from common import models, protocol, run, tiny
from common.scores import exact_match, f1, normalise
from common.turns import Question
from tools.search import Retriever, Search

TEST = 500  # questions of a file that are kept for eval.py


@dataclass
class Action:
    """What a generation asks for: a tool with its input, or (tool None) the final answer."""

    tool: str | None
    text: str


class SearchQA:
    """Questions answered by searching a corpus.

    train, held_out, test      questions to train on, to evaluate on while training (development), and to report (eval.py)
    take(n)                    this rank's share of the next n questions of the run
    prompt_ids, parse, run_tool, observation_ids, finish     what the rollout loop asks
    """

    invalid_message = protocol.INVALID

    def __init__(self, args, tokenizer, train, held_out, search, test=()):
        self.tokenizer, self.search = tokenizer, search
        self.keeps_time = getattr(search, "keeps_time", False)  # whether the tool limits the time of a call itself
        self.train, self.held_out, self.test = train, held_out, list(test)
        self.max_turns, self.max_turn_tokens = args.max_turns, args.max_turn_tokens
        self.observation_limit = args.max_observation_tokens
        # A closing action tag ends a generation, and so does an information tag: the model does not write its own observations.
        self.stop = ["</search>", "</answer>", "<information>"]
        self.stop_ids = end_ids(tokenizer)
        self.chat = args.template == "on" or (args.template == "auto" and tokenizer.chat_template is not None)
        self.examples = "".join(protocol.worked_example(e) for e in protocol.EXAMPLES[: args.shots])
        self.position = 0  # questions taken so far, over all ranks
        self.seed, self.order = args.seed, (None, [])

    # -- questions

    @functools.cached_property
    def fingerprint(self):
        """A hash of the questions and the corpus: a run that is resumed on others is refused."""
        data = [(q.id, q.text, q.golds) for q in (*self.train, *self.held_out)]
        return hashlib.sha256(repr((data, getattr(self.search, "fingerprint", None))).encode()).hexdigest()

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

    # -- protocol

    def prompt_ids(self, question):
        """Ids of the first context: the chat template's when there is one, else instruction, examples and question as plain text."""
        text = protocol.INSTRUCTION + self.examples + protocol.question_line(question.text)
        if not self.chat:
            bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []
            return bos + self.tokenizer.encode(text, add_special_tokens=False)
        messages = [{"role": "system", "content": protocol.SYSTEM}, {"role": "user", "content": text.strip()}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, text):
        """The first complete action in a generation's own text, or None."""
        # From the last opening tag before the closing one: a tag that is only mentioned must not begin the query.
        found = re.search(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
        if not found:
            return None
        kind, inner = found[1], found[2].strip()
        return Action(None if kind == "answer" else kind, inner)

    def run_tool(self, tool, text):
        return self.search(text)

    def observation_ids(self, output):
        return protocol.encode_observation(self.tokenizer, output, self.observation_limit)

    def finish(self, trajectory, question):
        """Score a trajectory that has ended: outcome is exact match; F1 goes into its info."""
        trajectory.outcome = exact_match(trajectory.answer, question.golds)
        trajectory.info["f1"] = f1(trajectory.answer, question.golds)


def adds_bos(tokenizer):
    """Whether the tokenizer itself begins a text with its start token."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def end_ids(tokenizer):
    """Every id that ends a message: the tokenizer's, the generation config's, and the end-of-message tokens of common templates."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        more = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
        ids |= set(more if isinstance(more, list) else [more])
    except OSError:  # a model without a generation config
        pass
    vocabulary = tokenizer.get_vocab()
    ids |= {vocabulary[t] for t in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>") if t in vocabulary}
    return sorted(i for i in ids if i is not None)


def read_question(line, number):
    """A Question of one line (bytes) of a file; its number becomes info["line"]. Raises ValueError saying what is wrong with it."""
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
    if not any(map(normalise, golds)):  # one alias may be, such as "the"
        raise ValueError("no answer is left after normalisation")
    if any("\ud800" <= c <= "\udfff" for c in "".join((text, *golds))):
        raise ValueError("question and answers must be valid Unicode: half of a surrogate pair cannot be encoded")
    return Question(f"line-{number}" if name is None else str(name), text, golds, info={"line": number})


def read_questions(path):
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
                question = read_question(line, number)
                if question.id in seen:
                    raise ValueError(f"id {question.id} occurs twice: in line {seen[question.id]} too")
            except ValueError as error:
                raise SystemExit(f"{path}, line {number}: {error}") from None
            seen[question.id] = number
            questions.append(question)
    if not questions:
        raise SystemExit(f"{path}: no questions")
    return questions


def load(args, whole=False):
    """The task --task names: `tiny_search`, or a JSONL file of questions with --corpus or --retriever.

    Questions are split into train, held_out (--eval_questions of them, if there are) and test; no text is in two of them. whole: the file
    is a test set itself, and all of it is `test`. Raises SystemExit for data that is missing or malformed, before any model is loaded.
    """
    if args.corpus and args.retriever:
        raise SystemExit("--corpus and --retriever: one of them, there is one place to search in.")
    if args.task == "tiny_search":
        if whole:
            raise SystemExit("--task tiny_search is no test set: it has questions to train on, and others to test on.")
        documents, *parts = tiny.search_world()
        train, held_out = (
            [Question(q["id"], q["question"], q["answers"], info={"hops": q["hops"]}) for q in part] for part in parts
        )
        half = len(held_out) // 2
        held_out, test = held_out[:half][: args.eval_questions], held_out[half:]
    elif args.task.endswith(".jsonl") or (args.task and Path(args.task).exists()):
        if not (args.corpus or args.retriever):
            raise SystemExit(
                f"--task {args.task} needs something to search in: --corpus documents.jsonl (lines of id, title and text), or "
                "--retriever http://host:port/retrieve (a server)."
            )
        documents, questions = args.corpus, read_questions(args.task)
        train, held_out, test = ([], [], questions) if whole else split(questions, args.eval_questions)
    else:
        raise SystemExit(
            f"--task {args.task or '(none)'}: give tiny_search (embedded, nothing to download), or a file questions.jsonl of "
            '{"question", "answers"} lines together with --corpus documents.jsonl or --retriever http://host:port/retrieve.'
        )
    if args.retriever:
        search = Retriever(args.retriever, args.topk, timeout=args.tool_timeout)
    else:
        try:
            search = Search(documents, args.topk)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--corpus: {error}") from None
    train = train[: args.limit] if args.limit else train
    tokenizer = models.load_tokenizer(models.resolve(args.model))
    task = SearchQA(args, tokenizer, train, held_out, search, test)
    check_lengths(task, args)
    return task


def split(questions, held_out):
    """(train, held-out, test): fixed pseudo-random parts of a file; `held_out` questions and TEST, but at most a quarter of the file each.

    The test questions do not depend on `held_out`. No question text is in two of them.
    """
    order = sorted(questions, key=lambda q: random.Random(q.text).random())
    quarter = max(1, len(order) // 4)
    parts, taken = [], set()
    for count, candidates in ((TEST, order[::-1]), (held_out, order)):
        parts.insert(0, [q for q in candidates if normalise(q.text) not in taken][: min(count, quarter)])
        taken |= {normalise(q.text) for q in parts[0]}
    train = [q for q in questions if normalise(q.text) not in taken]
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
        return f"{args.task}, line {question.info['line']}" if "line" in question.info else f"question {question.id}"

    for question in questions:
        answers = [f"<answer> {gold} </answer>" for gold in question.golds if normalise(gold)]
        if min(len(answer.encode()) for answer in answers) <= args.max_turn_tokens:  # a token is a byte at least
            continue
        shortest = min(len(task.tokenizer.encode(answer, add_special_tokens=False)) for answer in answers)
        if shortest > args.max_turn_tokens:
            raise SystemExit(
                f"{place(question)}: its shortest answer takes {shortest} tokens, its tags included, and --max_turn_tokens is "
                f"{args.max_turn_tokens}: raise --max_turn_tokens or remove the line."
            )
    for question in heapq.nlargest(48, questions, key=lambda q: len(q.text)):
        tokens = len(task.prompt_ids(question))
        if tokens >= args.max_context:
            raise SystemExit(
                f"{place(question)}: its prompt takes {tokens} tokens, and --max_context is {args.max_context}: raise "
                "--max_context or remove the line."
            )
