"""The `tags` protocol: what stands in a context around questions, tool outputs and answers.

The model thinks inside <think>, calls a tool by naming it in a tag, <search> query </search>, reads the result inside <information>,
and ends with <answer> ... </answer>. These tags are what search agents of the literature know (Search-R1, arXiv:2503.09516); the
wording is ours.
"""

INSTRUCTION = (
    "Answer the question. Think inside <think> and </think>. To look up facts write <search> query </search>; "
    "what is found comes back inside <information> and </information>. Search as often as you need. "
    "When you know the answer write it, short, inside <answer> and </answer>.\n"
)
SYSTEM = "You answer questions by searching for facts."  # explicit: some templates insert a system message of their own
INFORMATION = ("\n<information> ", " </information>\n")  # what stands around a tool's output in the context
INVALID = "That was neither a search nor an answer. Write <search> query </search> or <answer> answer </answer>."
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


def encode_observation(tokenizer, text, limit, around=INFORMATION):
    """Ids of a tool output between its tags, at most `limit` tokens: the text is cut, never the closing tag."""
    head, tail = (tokenizer.encode(tag, add_special_tokens=False) for tag in around)
    body = tokenizer.encode(text, add_special_tokens=False)
    return head + body[: max(0, limit - len(head) - len(tail))] + tail
