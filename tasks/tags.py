"""The tags protocol: calls, outputs and answers in tags that are plain text.

The model thinks inside <think>, calls a tool by naming it in a tag, <search> query </search>, reads the result inside
<information>, and ends with <answer> ... </answer>. These tags are what search agents of the literature know (Search-R1,
arXiv:2503.09516); the wording is ours.
"""

import re

from common.environment import Action
from tasks import equality
from tasks.templates import adds_bos, cleaned, end_ids, harmless, marks, message, render, thinks
from tasks.thinking import spoken
from tasks.wordings import question_line, wording_for


class Tags:
    """Calls, outputs and answers in tags that are plain text. A chat template, if there is one, holds the first message only.

    stop, stop_ids     what ends a generation
    invalid_message    what a generation without an action is answered
    """

    def __init__(self, args, tokenizer, tool, examples=()):
        self.boxed = args.answer == "boxed"
        self.templated = args.template == "on" or (args.template == "auto" and tokenizer.chat_template is not None)
        self.thinks = self.templated and thinks(tokenizer)
        self.tokenizer, self.tool, self.wording = tokenizer, tool, wording_for(tool, self.boxed, self.thinks)
        self.limit = args.max_observation_tokens
        # A closing action tag ends a generation, and so does the opening tag of an output: the model does not write its own.
        ends = (tool and f"</{tool}>", not self.boxed and "</answer>", self.wording.around[0].strip())
        self.stop = [end for end in ends if end]
        self.stop_ids = end_ids(tokenizer)
        self.invalid_message = self.wording.invalid
        self.marks = marks(tokenizer, *self.wording.around)
        if examples and (self.boxed or tool != "search"):
            raise SystemExit(
                "--shots: the worked examples search, and answer in tags: they go with --tools on and --answer tags."
            )
        self.examples = "".join(examples)

    def prompt_ids(self, text):
        """Ids of the first context: instruction, examples and question, in the chat template or as plain text."""
        text = self.wording.instruction + self.examples + question_line(text)
        if not self.templated:
            bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []
            return bos + self.tokenizer.encode(text, add_special_tokens=False)
        text = render(self.tokenizer, [message("system", self.wording.system), message("user", text.strip())], True)
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
        return cut_observation(self.tokenizer, harmless(output, self.marks), self.limit, self.wording.around)


def _boxed(text):
    """The answer in a generation's own text outside its closed blocks of thinking (the prompt may have opened one), or None."""
    answer = equality.boxed(spoken(text, "<think>" not in text.partition("</think>")[0]))
    return Action(None, answer) if answer else None


def cut_observation(tokenizer, text, limit, around):
    """(text as it is shown, ids of it between its tags), at most `limit` tokens: the text is cut, never the closing tag."""
    head, tail = (tokenizer.encode(tag, add_special_tokens=False) for tag in around)
    body = tokenizer.encode(text, add_special_tokens=False)
    room = max(0, limit - len(head) - len(tail))
    if len(body) > room:
        body = body[:room]
        text = tokenizer.decode(body)
    return text, head + body + tail
