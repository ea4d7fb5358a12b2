"""The prompt texts around questions, tool calls and tool outputs. docs/protocol.md describes the protocols."""

from dataclasses import dataclass, replace

INSTRUCTION = (
    "Answer the question. Think inside <think> and </think>. To look up facts write <search> query </search>; "
    "what is found comes back inside <information> and </information>. Search as often as you need. "
    "When you know the answer write it, short, inside <answer> and </answer>.\n"
)
SYSTEM = "You answer questions by searching for facts."  # explicit: otherwise some chat templates insert their own
INFORMATION = ("\n<information> ", " </information>\n")  # the text around a tool's output
INVALID = "That was neither a search nor an answer. Write <search> query </search> or <answer> answer </answer>."
SEVERAL = "Only the first call of your message was run. "  # in front of its output, if there were others
PYTHON_INSTRUCTION = (
    "Answer the question. Think inside <think> and </think>. To compute write <python> code </python>; "
    "its output comes back inside <output> and </output>. Call it as often as you need. "
    "When you know the answer write it, short, inside <answer> and </answer>.\n"
)
OUTPUT = ("\n<output> ", " </output>\n")
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
    """The texts that the model reads about one tool, in both protocols."""

    instruction: str  # of the tags protocol
    system: str
    around: tuple[str, str]  # before and after a tool output
    invalid: str  # the reply to an invalid action
    chat_system: str  # of the chat protocol
    chat_invalid: str
    description: str  # of the tool
    parameter: tuple[str, str]  # name and description of its only parameter


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
WORDINGS[None] = Wording(  # no tool
    INSTRUCTION[: INSTRUCTION.index("To look up")] + INSTRUCTION[INSTRUCTION.index("When you know") :],
    "You answer questions.",
    ("", ""),
    "That was no answer. Write <answer> answer </answer>.",
    *("", "", "", ("", "")),
)


def wording_for(tool: str | None, boxed: bool, thinks: bool) -> Wording:
    """Return the wording for a tool (None: no tool). boxed: the answer is in \\boxed{} instead of tags.

    thinks: the model thinks without an instruction. If its thinking quoted the tags of one, they would look like its
    end.
    """
    base, changes = WORDINGS[tool], []
    if boxed:
        changes += [("write it, short, inside <answer> and </answer>", "write it inside \\boxed{}")]
        changes += [("<answer> answer </answer>", "\\boxed{answer}")]
    if thinks:
        changes += [(" Think inside <think> and </think>.", "")]
    texts = {name: text for name, text in vars(base).items() if isinstance(text, str)}
    for old, new in changes:
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return replace(base, **texts)


def question_line(text: str) -> str:
    """Return the prompt's line with the question."""
    return f"Question: {text.strip()}\n"


def worked_example(example: tuple) -> str:
    """Return a solved question, an entry of EXAMPLES, as text of the tags protocol for the prompt of --shots."""
    question, steps, thought, answer = example
    head, tail = INFORMATION
    text = question_line(question)
    for think, query, found in steps:
        title = found.split(" is ")[0]
        text += f"<think> {think} </think> <search> {query} </search>{head}Doc 1 (Title: {title}) {found}{tail}"
    return f"{text}<think> {thought} </think> <answer> {answer} </answer>\n\n"
