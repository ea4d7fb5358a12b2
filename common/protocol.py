"""What stands in a context around questions, tool calls and tool outputs: the protocols of --protocol. docs/protocol.md

tags: the model thinks inside <think>, calls a tool by naming it in a tag, <search> query </search>, reads the result inside
<information>, and ends with <answer> ... </answer>. These tags are what search agents of the literature know (Search-R1,
arXiv:2503.09516); the wording is ours.

chat: tools, calls and outputs stand as the model's own chat template writes them. The template is asked for the first context, and, once
at the start, for what it puts between the messages; it is never applied to what was sampled.
"""

import bisect
import functools
import json
import os
import re
import textwrap
from dataclasses import dataclass, replace
from datetime import datetime

from common import run, verify

INSTRUCTION = (
    "Answer the question. Think inside <think> and </think>. To look up facts write <search> query </search>; "
    "what is found comes back inside <information> and </information>. Search as often as you need. "
    "When you know the answer write it, short, inside <answer> and </answer>.\n"
)
SYSTEM = "You answer questions by searching for facts."  # explicit: some templates insert a system message of their own
INFORMATION = ("\n<information> ", " </information>\n")  # what stands around a tool's output in the context
INVALID = "That was neither a search nor an answer. Write <search> query </search> or <answer> answer </answer>."
PYTHON_INSTRUCTION = (
    "Answer the question. Think inside <think> and </think>. To compute write <python> code </python>; "
    "its output comes back inside <output> and </output>. Call it as often as you need. "
    "When you know the answer write it, short, inside <answer> and </answer>.\n"
)
OUTPUT = ("\n<output> ", " </output>\n")
DATE = datetime(2024, 7, 26)  # what a chat template takes for today: a prompt must not change overnight
EXAMPLES = (  # worked examples for --shots: (question, [(think, query, found), ...], think, answer)
    (
        "In which town was the composer of the opera Rusalka born?",
        [
            ("I need the composer of Rusalka.", "Rusalka opera", "Rusalka is an opera by Antonin Dvorak."),
            (
                "Antonin Dvorak. Where was he born?",
                "Antonin Dvorak",
                "Antonin Dvorak is a composer. He was born in Nelahozeves.",
            ),
        ],
        "He was born in Nelahozeves.",
        "Nelahozeves",
    ),
    (
        "Who is the mayor of the town where the painter Rosa Pike lives?",
        [
            (
                "I need the town where Rosa Pike lives.",
                "Rosa Pike",
                "Rosa Pike is a painter. Rosa Pike lives in Fernbury.",
            ),
            ("She lives in Fernbury. Who is its mayor?", "Fernbury", "Fernbury is a town. Its mayor is Hugo Lund."),
        ],
        "The mayor is Hugo Lund.",
        "Hugo Lund",
    ),
)


@dataclass(frozen=True)
class Wording:
    """How a tool is spoken of."""

    instruction: str  # tags
    system: str
    around: tuple[str, str]  # what stands around its output
    invalid: str
    chat_system: str  # chat
    chat_invalid: str
    description: str  # of the tool, and of its only parameter
    parameter: tuple[str, str]


WORDINGS = {
    "search": Wording(
        INSTRUCTION,
        SYSTEM,
        INFORMATION,
        INVALID,
        "Answer the question. Think inside <think> and </think>. To look up facts call the search tool, as often as you need, once "
        "in a message. When you know the answer write it, short, inside <answer> and </answer>.",
        "That was neither a call of the search tool nor an answer. Call it, or write <answer> answer </answer>.",
        "Finds passages of text about something.",
        ("query", "What to look for."),
    ),
    "python": Wording(
        PYTHON_INSTRUCTION,
        "You answer questions by computing in Python.",
        OUTPUT,
        "That was neither code to run nor an answer. Write <python> code </python> or <answer> answer </answer>.",
        "Answer the question. Think inside <think> and </think>. To compute call the python tool, as often as you need, once in a "
        "message. When you know the answer write it, short, inside <answer> and </answer>.",
        "That was neither a call of the python tool nor an answer. Call it, or write <answer> answer </answer>.",
        "Runs Python code and gives its output. Variables of earlier calls are kept.",
        ("code", "The code to run."),
    ),
}
# A conversation that a chat template is asked for at the start, to see what it writes around these words.
ASKED, THOUGHT, CALLED, SAID, REFUSED = "Where to?", "Perhaps north.", "ships of the line", "Nowhere.", "Say where."
HEARD = 'the first line\n"the second"'  # with what JSON would escape


WORDINGS[None] = Wording(  # no tool
    INSTRUCTION[: INSTRUCTION.index("To look up")] + INSTRUCTION[INSTRUCTION.index("When you know") :],
    "You answer questions.",
    ("", ""),
    "That was no answer. Write <answer> answer </answer>.",
    *("", "", "", ("", "")),
)


def wording(tool, boxed, thinks):
    """How the tool (None: there is none) and the answer are spoken of. boxed: the answer stands in \\boxed{} and not in tags. thinks: the
    model need not be told to think, and if it spoke of the tags that it was told to think in, they would look like the end of it."""
    words, changes = WORDINGS[tool], []
    if boxed:
        changes += [("write it, short, inside <answer> and </answer>", "write it inside \\boxed{}")]
        changes += [("<answer> answer </answer>", "\\boxed{answer}")]
    if thinks:
        changes += [(" Think inside <think> and </think>.", "")]
    texts = {name: text for name, text in vars(words).items() if isinstance(text, str)}
    for old, new in changes:
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return replace(words, **texts)


@dataclass
class Action:
    """What a generation asks for: a tool with its input, or (tool None) the final answer."""

    tool: str | None
    text: str


class Tags:
    """Calls, outputs and answers in tags that are plain text. A chat template, if there is one, holds the first message only.

    stop, stop_ids     what ends a generation
    invalid_message    what a generation without an action is answered
    """

    def __init__(self, args, tokenizer, tool, examples=()):
        self.boxed = args.answer == "boxed"
        self.templated = args.template == "on" or (args.template == "auto" and tokenizer.chat_template is not None)
        self.thinks = self.templated and thinks(tokenizer)
        self.tokenizer, self.tool, self.words = tokenizer, tool, wording(tool, self.boxed, self.thinks)
        self.limit = args.max_observation_tokens
        # A closing action tag ends a generation, and so does the opening tag of an output: the model does not write its own.
        ends = (tool and f"</{tool}>", not self.boxed and "</answer>", self.words.around[0].strip())
        self.stop = [end for end in ends if end]
        self.stop_ids = end_ids(tokenizer)
        self.invalid_message = self.words.invalid
        self.marks = marks(tokenizer, *self.words.around)
        if examples and (self.boxed or tool != "search"):
            raise SystemExit(
                "--shots: the worked examples search, and answer in tags: they go with --tools on and --answer tags."
            )
        self.examples = "".join(examples)

    def prompt_ids(self, text):
        """Ids of the first context: instruction, examples and question, in the chat template or as plain text."""
        text = self.words.instruction + self.examples + question_line(text)
        if not self.templated:
            bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []
            return bos + self.tokenizer.encode(text, add_special_tokens=False)
        text = render(self.tokenizer, [message("system", self.words.system), message("user", text.strip())], True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def thinks_on(self, text):
        """Whether a text ends within the thinking of a model that thinks by itself."""
        return self.thinks and text.lstrip().startswith("<think>") and "</think>" not in text

    def parse(self, text):
        """The first complete action in a generation's own text, or None; outside of thinking if the model thinks by itself."""
        if self.thinks:
            text = "" if self.thinks_on(text) else spoken(text)
        # From the last opening tag before the closing one: a tag that is only mentioned must not begin the query.
        names = "|".join(filter(None, (self.tool, not self.boxed and "answer"))) or "(?!)"
        found = re.search(rf"<({names})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
        if not found and self.boxed:
            return _boxed(text)
        if found and found[1] == "answer":
            if self.tool == "python" and "<python>" in text[: found.start()]:  # an answer that code would have printed
                return None
            return Action(None, found[2].strip())
        return found and Action(self.tool, cleaned(self.tool, found[2]))

    def observation(self, output, tool):
        """(the output as the model is shown it, its ids between the tags): cut to the limit. tool None: the invalid message."""
        return cut_observation(self.tokenizer, harmless(output, self.marks), self.limit, self.words.around)


def _boxed(text):
    """The answer in a generation's own text outside its closed blocks of thinking (the prompt may have opened one), or None."""
    answer = verify.boxed(spoken(text, "<think>" not in text.partition("</think>")[0]))
    return Action(None, answer) if answer else None


class Chat:
    """Calls, outputs and answers as messages of the model's own chat template; same attributes and methods as Tags.

    Two forms of calls are known, and the template shows which one is the model's: <tool_call>{"name", "arguments"}</tool_call> in a
    message (Qwen), or a message that is {"name", "parameters"} (Llama 3). The answer stands in <answer> tags. Raises SystemExit for a
    template that does not show the model its tool and what it answers.
    """

    def __init__(self, args, tokenizer, tool, examples=()):
        if not tool:
            raise SystemExit("--protocol chat is about calling a tool; --tools off goes with --protocol tags.")
        self.boxed = args.answer == "boxed"
        self.thinks = thinks(tokenizer)
        self.tokenizer, self.tool, self.words = tokenizer, tool, wording(tool, self.boxed, self.thinks)
        self.limit, self.invalid_message = args.max_observation_tokens, self.words.chat_invalid
        self.stop_ids = end_ids(tokenizer)
        self.ends = [end for end in map(tokenizer.decode, self.stop_ids) if end]
        parameter, meaning = self.words.parameter
        properties = {parameter: {"type": "string", "description": meaning}}
        function = {"name": tool, "description": self.words.description}
        function["parameters"] = {"type": "object", "properties": properties, "required": [parameter]}
        self.schema = {"type": "function", "function": function}
        if not tokenizer.chat_template:
            raise SystemExit("--protocol chat: this model has no chat template; --protocol tags needs none.")
        if args.template == "off":
            raise SystemExit("--protocol chat needs the chat template that --template off leaves out: --template auto.")
        if examples:
            raise SystemExit("--shots: the worked examples are written in tags; --protocol chat goes with --shots 0.")
        try:
            self._learn()
            note = self._habit(args.context)
        except Exception as error:  # whatever a template does with a message that it does not expect
            what = " ".join(str(error).split()) or type(error).__name__
            raise SystemExit(
                f"--protocol chat: this model's chat template is no way to use a tool ({what}): --protocol tags needs none."
            ) from None
        if note and run.rank() == 0:
            run.say(f"chat template: {note}")

    # -- what the template writes

    def _render(self, *messages, generation=False):
        return render(self.tokenizer, self._first(ASKED) + list(messages), generation, tools=[self.schema])

    def _first(self, text):
        return [message("system", self.words.chat_system), message("user", text.strip())]

    def _call(self, thought=""):
        content = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        function = {"name": self.tool, "arguments": {self.words.parameter[0]: CALLED}}
        return message("assistant", content, tool_calls=[{"type": "function", "function": function}])

    def _learn(self):
        """Find what the template writes between a call and its output, and from there to the next generation. Raises ValueError."""
        prompt, bare = self._render(generation=True), self._render()
        if self.words.description not in prompt:
            raise ValueError("it leaves the tools out")
        text = self._render(self._call(), message("tool", HEARD, name=self.tool), generation=True)
        if not (prompt.startswith(bare) and text.startswith(bare)):
            raise ValueError("it writes the first messages otherwise when others follow")
        quoted = json.dumps(HEARD, ensure_ascii=False)[1:-1]
        self.quotes = HEARD not in text and quoted in text
        call, self.around = self._between(text, CALLED, quoted if self.quotes else HEARD)
        start = text[len(prompt if text.startswith(prompt) else bare) : text.index(CALLED)]
        self.tagged = "<tool_call>" in start
        if self.parse(start + CALLED + call) != Action(self.tool, CALLED):
            raise ValueError("it writes calls in a form that is not known here")
        said = self._render(message("assistant", SAID), message("user", REFUSED), generation=True)
        _, self.around_invalid = self._between(said, SAID, REFUSED)
        # As in Tags: a complete call or answer ends a generation, and so does the tag that opens an output, where there are tags.
        self.stop = (
            ["</answer>"] * (not self.boxed) + ["</tool_call>"] * self.tagged + re.findall(r"<\w+>", self.around[0])
        )
        self.marks = marks(self.tokenizer, *self.around)
        longest = max(len(self._encode("".join(around))) for around in (self.around, self.around_invalid))
        if longest >= self.limit:
            raise SystemExit(
                f"--max_observation_tokens {self.limit}: the chat template alone takes {longest} tokens around an output."
            )

    def _between(self, text, said, heard):
        """(rest of the message with `said`, (from its end token to `heard`, what follows `heard`))."""
        before, found, after = text.partition(said)[2].partition(heard)
        places = [before.index(end) for end in self.ends if end in before]
        if not found or not places:
            raise ValueError(
                "it leaves out what a tool answers" if not found else "its messages have no known end token"
            )
        return before[: min(places)], (before[min(places) :], after)

    def _habit(self, context):
        """A line about how the template would show earlier turns, where that is not how --context shows them; else None."""
        heard, refused = message("tool", HEARD, name=self.tool), message("user", REFUSED)
        turns = [self._call(), heard]
        if not self._render(*turns, *turns).startswith(self._render(*turns)):
            return f"it rewrites earlier turns in a way of its own; here they are shown as --context {context} says"
        turns = [self._call(THOUGHT), heard]
        if THOUGHT not in self._render(*turns, self._call(), heard):
            same, habit = "strip_think", "it leaves out the thinking of earlier turns"
        else:
            same, habit = "full", "it keeps the thinking of earlier turns"
            if THOUGHT not in self._render(*turns, message("assistant", SAID), refused):
                habit += " until a user message follows (here: after an invalid action)"
        if same != context:
            return f"{habit}, as --context {same} does; here they are shown as --context {context} says"
        return f"{habit}; --context full keeps it for good" if "until" in habit else None

    def _encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    # -- as Tags

    def prompt_ids(self, text):
        """Ids of the first context, tools included."""
        return self._encode(render(self.tokenizer, self._first(text), True, tools=[self.schema]))

    thinks_on = Tags.thinks_on

    def parse(self, text):
        """The action in a generation's own text outside its thinking, or None. In the tagged form the first complete call or answer
        counts; a message that is a call holds nothing else."""
        text = "" if self.thinks_on(text) else spoken(text)
        if not self.tagged:
            whole = text.strip()
            for end in self.ends:
                whole = whole.removesuffix(end)
            whole = whole.strip().removeprefix("<|python_tag|>").strip()
            if whole.startswith("{"):
                return self._called(whole)
        names = "tool_call" if self.boxed else "tool_call|answer"
        found = re.search(rf"<({names})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
        if not found and self.boxed:
            return _boxed(text)
        if found and found[1] == "answer":
            return Action(None, found[2].strip())
        return self._called(found[2]) if found and self.tagged else None

    def _called(self, text):
        try:
            call = json.loads(text)
            given = call["arguments" if "arguments" in call else "parameters"][self.words.parameter[0]]
            if call["name"] != self.tool or not isinstance(given, str):
                return None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        # JSON can hold half a surrogate pair, which no file and no tokenizer takes.
        return Action(self.tool, cleaned(self.tool, given.encode(errors="replace").decode()))

    def observation(self, output, tool):
        """(the output as the model is shown it, ids from the end of the model's message to its next one): cut to the limit."""
        head, tail = self.around if tool else self.around_invalid
        output, quotes = harmless(output, self.marks), self.quotes and tool
        body = json.dumps(output, ensure_ascii=False)[1:-1] if quotes else output
        ids = self._encode(head + body + tail)
        if len(ids) <= self.limit:
            return output, ids
        body = self._encode(body)
        for room in range(self.limit - len(self._encode(head + tail)), -1, -1):
            shown = self.tokenizer.decode(body[:room]).rstrip("\ufffd")  # no half a character
            if quotes:  # and no half an escape sequence
                shown = re.match(r"(?:[^\\]|\\u.{4}|\\[^u])*", shown, re.DOTALL)[0]
            ids = self._encode(head + shown + tail)
            if len(ids) <= self.limit:
                break
        return json.loads(f'"{shown}"') if quotes else shown, ids


def thinking(text, opened=False):
    """(start, end) of each closed block of thinking in a generation's text. opened: its context ends within a block.

    A further closing tag belongs to the block before it: what stands between them was still thinking.
    """
    begin = r"(?:\A|<think>)" if opened else "<think>"
    blocks = rf"{begin}.*?</think>(?:(?:(?!<think>).)*</think>)*"
    return [found.span() for found in re.finditer(blocks, text, re.DOTALL)]


def spoken(text, opened=False):
    """A generation's text without its closed blocks of thinking."""
    for start, stop in reversed(thinking(text, opened)):
        text = text[:start] + text[stop:]
    return text


def thinks(tokenizer):
    """Whether a model thinks by itself before it acts: its chat template can switch that off, or begins it. (That a template knows how to
    leave thinking out of a history says nothing: those of models that do not think do, too.)"""
    template, first = str(tokenizer.chat_template or ""), [message("system", SYSTEM), message("user", ASKED)]
    return "enable_thinking" in template or ("<think>" in template and begins(render(tokenizer, first, True)))


def begins(text):
    """Whether a context ends in the tag that opens a block of thinking, as generation prompts do."""
    return text.rstrip().endswith("<think>")


def without_thinking(context, action, decode):
    """(context ids, action ids) without the action's closed blocks of thinking and the white space after them: ids are left out, and
    none is made anew. A block that the end of the context opens, as generation prompts do, is left out there too.

    A token that reaches across the start of a block goes with it; so does one across its end if it holds thinking, or nothing but
    white space follows the tag in it. Otherwise it stays, with a piece of the closing tag: the next tag may begin in it.
    """
    text, end = decode(action), context[-16:]
    opened = begins(decode(end))
    blocks = thinking(text, opened)
    if not blocks:
        return context, action

    @functools.cache
    def length(n):
        """Characters that the first n ids are certain to make: half a character is none."""
        made = decode(action[:n])
        return len(made if text.startswith(made) else os.path.commonprefix([made, text]))

    places, kept, at = range(len(action) + 1), [], 0
    for start, stop in blocks:
        first = bisect.bisect_right(places, start, key=length) - 1
        last = bisect.bisect_left(places, stop, key=length)
        thought = text[length(last - 1) : stop - len("</think>")]  # in the token that completes the tag
        if text[stop : length(last)].strip() and not thought.strip():
            last -= 1
        else:
            while last < len(action) and text[length(last) : length(last + 1)].isspace():
                last += 1
        kept += action[at:first]
        at = last
    if opened and blocks[0][0] == 0:
        tag = next(n for n in range(1, len(end) + 1) if "<think>" in decode(end[-n:]))
        context = context[:-tag]
    return context, kept + action[at:]


def message(role, content, **more):
    return {"role": role, "content": content} | more


def render(tokenizer, messages, generation, **more):
    """Text of a conversation in the chat template, at a date that never changes; generation: up to where the model goes on."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation, tokenize=False, strftime_now=DATE.strftime, **more
    )


def cleaned(tool, text):
    """The input of a call. Code may stand in a Markdown fence, or be indented as a whole."""
    if tool != "python":
        return text.strip()
    fenced = re.search(r"^\s*```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL | re.MULTILINE)
    if not fenced and not re.match(
        r"[ \t]*\n", text
    ):  # it begins beside its tag: the first line does not tell its indentation
        return text.strip()
    return textwrap.dedent(fenced[1] if fenced else text).strip()


def marks(tokenizer, *around):
    """A pattern for what an output must not bring into a context: special tokens, and the tags that stand around outputs."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tags = re.findall(r"</?\w+>", " ".join(around))
    return re.compile("|".join(map(re.escape, sorted({*special, *tags}, key=len, reverse=True))) or r"(?!)")


def harmless(text, marks):
    """The text with its marks spelled otherwise, a space within: what a tool has read or printed ends no message."""
    return marks.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


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
    known = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    ids |= {vocabulary[token] for token in known if token in vocabulary}
    return sorted(i for i in ids if i is not None)


def question_line(text):
    """The line of the prompt that holds the question."""
    return f"Question: {text.strip()}\n"


def worked_example(example):
    """A solved question in the tags protocol, as it stands in the prompt for --shots."""
    question, steps, thought, answer = example
    head, tail = INFORMATION
    text = question_line(question)
    for think, query, found in steps:
        title = found.split(" is ")[0]
        text += f"<think> {think} </think> <search> {query} </search>{head}Doc 1 (Title: {title}) {found}{tail}"
    return f"{text}<think> {thought} </think> <answer> {answer} </answer>\n\n"


def cut_observation(tokenizer, text, limit, around):
    """(text as it is shown, ids of it between its tags), at most `limit` tokens: the text is cut, never the closing tag."""
    head, tail = (tokenizer.encode(tag, add_special_tokens=False) for tag in around)
    body = tokenizer.encode(text, add_special_tokens=False)
    room = max(0, limit - len(head) - len(tail))
    if len(body) > room:
        body = body[:room]
        text = tokenizer.decode(body)
    return text, head + body + tail
