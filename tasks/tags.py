"""The tags protocol: calls, outputs and answers in tags that are plain text.

The model thinks inside <think>, calls a tool with a tag of its name, <search> query </search>, reads the output inside
<information>, and ends with <answer> ... </answer>. The tags are those of Search-R1 (arXiv:2503.09516); the wording is
ours.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.environment import Action
from tasks import equality
from tasks.templates import (
    ASKED,
    adds_bos,
    cleaned,
    end_ids,
    first_messages,
    harmless,
    marks,
    render,
    takes_system,
    thinks,
)
from tasks.thinking import spoken
from tasks.wordings import question_line, wording_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from common.args import Sampling


class Tags:
    """Calls, outputs and answers in tags that are plain text. A chat template, if any, renders the prompt only.

    stop, stop_ids     strings and token ids that end a generation
    invalid_message    the reply to a generation without an action
    """

    def __init__(
        self, args: "Sampling", tokenizer: "PreTrainedTokenizerBase", tool: str | None, examples: Sequence[str] = ()
    ):
        self.boxed = args.answer == "boxed"
        self.templated = args.template == "on" or (args.template == "auto" and tokenizer.chat_template is not None)
        try:
            self.thinks = self.templated and thinks(tokenizer)
            self.wording = wording_for(tool, self.boxed, self.thinks)
            prompt = self.wording.instruction + question_line(ASKED)
            self.separate = self.templated and takes_system(tokenizer, self.wording.system, prompt)
        except ValueError as reason:
            raise SystemExit(
                f"The chat template of {tokenizer.name_or_path or 'this model'} cannot show the prompt ({reason}). "
                "Use --template off."
            ) from None
        self.tokenizer, self.tool = tokenizer, tool
        self.limit = args.max_observation_tokens
        # A closing action tag ends a generation. So does the opening tag of an output: only the tool writes those.
        ends = (tool and f"</{tool}>", not self.boxed and "</answer>", self.wording.around[0].strip())
        self.stop = [end for end in ends if end]
        self.stop_ids = end_ids(tokenizer)
        self.invalid_message = self.wording.invalid
        self.marks = marks(tokenizer, *self.wording.around)
        if examples and (self.boxed or tool != "search"):
            raise SystemExit("--shots: the worked examples need a search task with --tools on and --answer tags.")
        self.examples = "".join(examples)

    def prompt_ids(self, text: str) -> list[int]:
        """Return the token ids of the first context: instruction, examples, question, in the chat template or plain."""
        text = self.wording.instruction + self.examples + question_line(text)
        if not self.templated:
            bos = [self.tokenizer.bos_token_id] if adds_bos(self.tokenizer) else []
            return bos + self.tokenizer.encode(text, add_special_tokens=False)
        text = render(self.tokenizer, first_messages(self.wording.system, text, self.separate), True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def thinks_on(self, text: str) -> bool:
        """Return whether a text ends inside the thinking of a model that thinks without an instruction."""
        return self.thinks and text.lstrip().startswith("<think>") and "</think>" not in text

    def parse(self, text: str) -> Action | None:
        """Return the first complete action in a generation's text, or None.

        The thinking of a model that thinks without an instruction is not parsed.
        """
        if self.thinks:
            text = "" if self.thinks_on(text) else spoken(text)
        # The match begins at the last opening tag before the closing one: a tag that is only mentioned does not count.
        names = "|".join(filter(None, (self.tool, not self.boxed and "answer"))) or "(?!)"
        found = re.search(rf"<({names})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
        if not found and self.boxed:
            return _boxed(text)
        if found and found[1] == "answer":
            if self.tool == "python" and "<python>" in text[: found.start()]:  # the code contains the answer tag
                return None
            return Action(None, found[2].strip())
        return found and Action(self.tool, cleaned(self.tool, found[2]))

    def observation(self, output: str, tool: str | None, note: str = "") -> tuple[str, list[int]]:
        """Return (the output as the model sees it, its token ids with the tags), cut to the limit.

        tool: None for the invalid message. note: unused, because a generation ends at its first call.
        """
        return cut_observation(self.tokenizer, harmless(output, self.marks), self.limit, self.wording.around)


def _boxed(text):
    """Return the boxed answer outside a text's closed blocks of thinking (the prompt may have opened one), or None."""
    answer = equality.boxed(spoken(text, "<think>" not in text.partition("</think>")[0]))
    return Action(None, answer) if answer else None


def cut_observation(
    tokenizer: "PreTrainedTokenizerBase", text: str, limit: int, around: tuple[str, str]
) -> tuple[str, list[int]]:
    """Return (the text as the model sees it, at most `limit` token ids with the tags). Only the text is cut."""
    head, tail = (tokenizer.encode(tag, add_special_tokens=False) for tag in around)
    body = tokenizer.encode(text, add_special_tokens=False)
    room = max(0, limit - len(head) - len(tail))
    if len(body) > room:
        body = body[:room]
        text = tokenizer.decode(body)
    return text, head + body + tail
