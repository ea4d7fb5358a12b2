"""Questions, golds, prompts, action parsing and outcome scores: what the agent is asked and how it is judged.

Only what the model itself sampled is ever parsed.
"""

import json
import random
import re
import string
from collections import Counter
from dataclasses import dataclass, replace

from common import models, protocol, run, tiny
from common.turns import Question
from tools.search import Search

# ---- scores


def normalise(text):
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(w for w in text.split() if w not in ("a", "an", "the"))


def exact_match(answer, golds):
    """1.0 if the answer equals one of the golds in normal form, else 0.0. An empty answer is never right."""
    answer = normalise(answer or "")
    return float(bool(answer) and any(answer == normalise(gold) for gold in golds))


def f1(answer, golds):
    """Word-level F1 in normal form, the best over the golds."""
    words = Counter(normalise(answer or "").split())
    best = 0.0
    for gold in golds:
        gold = Counter(normalise(gold).split())
        common = sum((words & gold).values())
        if common:
            precision, recall = common / sum(words.values()), common / sum(gold.values())
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


# ---- tasks


@dataclass
class Action:
    """What a generation asks for: a tool with its input, or (tool None) the final answer."""

    tool: str | None
    text: str


class SearchQA:
    """Questions answered by searching a corpus.

    take(n)                    this rank's share of the next n questions of the run
    prompt_ids, parse, run_tool, observation_ids, finish     what the rollout loop asks
    """

    invalid_message = protocol.INVALID

    def __init__(self, args, tokenizer, train, held_out, search):
        self.tokenizer, self.search = tokenizer, search
        self.train, self.held_out = train, held_out
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


def read_questions(path):
    """Questions of a JSONL file of {"question", "answers"[, "id"]}. Raises SystemExit naming file and line of the first bad one."""
    questions, ids = [], set()
    try:
        lines = open(path, encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"--task {path}: {error.strerror}") from None
    with lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
                golds = item["answers"]
                if (
                    not isinstance(golds, list)
                    or not all(isinstance(g, str) and normalise(g) for g in golds)
                    or not golds
                ):
                    raise ValueError("answers must be a list of strings that are not empty after normalisation")
                name = str(item.get("id", number))
                if name in ids:
                    raise ValueError(f"id {name} occurs twice")
                ids.add(name)
                questions.append(Question(name, str(item["question"]), golds))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SystemExit(f"{path}, line {number}: not a question with answers ({error!r})") from None
    if not questions:
        raise SystemExit(f"{path}: no questions")
    return questions


def load(args):
    """The task --task names: `tiny_search`, or a JSONL file of questions with --corpus. The held-out questions are never trained on.

    Raises SystemExit for data that is missing or malformed, before any model is loaded.
    """
    if args.task == "tiny_search":
        documents, train, held_out = tiny.search_world()
        train, held_out = (
            [Question(q["id"], q["question"], q["answers"], info={"hops": q["hops"]}) for q in part]
            for part in (train, held_out)
        )
        search = Search(documents, args.topk)
    elif args.task.endswith(".jsonl"):
        if not args.corpus:
            raise SystemExit(f"--task {args.task} needs --corpus: a JSONL file of documents with id, title and text.")
        train, held_out = split(read_questions(args.task), args.eval_questions)
        try:
            search = Search(args.corpus, args.topk)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--corpus: {error}") from None
    else:
        raise SystemExit(
            f"--task {args.task or '(none)'}: give tiny_search (embedded, nothing to download), or a file questions.jsonl of "
            '{"question", "answers"} lines together with --corpus documents.jsonl.'
        )
    train = train[: args.limit] if args.limit else train
    tokenizer = models.load_tokenizer(models.resolve(args.model))
    return SearchQA(args, tokenizer, train, held_out[: args.eval_questions], search)


def split(questions, held_out):
    """(train, held-out): a fixed pseudo-random part of the file is held out, at most half of it. No question text is in both."""
    order = sorted(questions, key=lambda q: random.Random(q.text).random())
    count = min(held_out, len(order) // 2)
    if count < 1:
        raise SystemExit(
            f"{len(questions)} question(s) are too few: at least 2 are needed, one of them to evaluate on."
        )
    texts = {normalise(q.text) for q in order[:count]}
    train = [q for q in questions if normalise(q.text) not in texts]
    if not train:
        raise SystemExit("every question of the file has the same text as a held-out one: nothing is left to train on.")
    return train, order[:count]
