"""The chat protocol: tools, calls and outputs as the model's own chat template writes them.

The template renders the first context. The texts between later messages are taken from it once, at the start: it is
never applied to sampled text.
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from common import ranks, run
from common.environment import Action
from tasks.calls import first_call
from tasks.tags import Tags, _boxed
from tasks.templates import (
    ASKED,
    CALLED,
    REFUSED,
    SAID,
    THOUGHT,
    cleaned,
    end_ids,
    first_messages,
    harmless,
    in_a_line,
    marks,
    message,
    render,
    takes_system,
    thinks,
)
from tasks.thinking import spoken
from tasks.wordings import wording_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from common.args import Sampling

HEARD = 'the first line\n"the second"'  # a tool output with characters that JSON escapes


class Chat:
    """Calls, outputs and answers as messages of the model's own chat template; same attributes and methods as Tags.

    The template shows which of two call formats the model uses: <tool_call>{"name", "arguments"}</tool_call> in a
    message (Qwen), or a message that is {"name", "parameters"} (Llama 3). The answer is in <answer> tags. Raises
    SystemExit for a template that does not show the model its tool and the tool's outputs.
    """

    def __init__(
        self, args: "Sampling", tokenizer: "PreTrainedTokenizerBase", tool: str | None, examples: Sequence[str] = ()
    ):
        if not tool:
            raise SystemExit("--protocol chat needs a tool. With --tools off use --protocol tags.")
        self.boxed, self.limit = args.answer == "boxed", args.max_observation_tokens
        self.tokenizer, self.tool = tokenizer, tool
        if not tokenizer.chat_template:
            raise SystemExit("--protocol chat: this model has no chat template. Use --protocol tags.")
        if args.template == "off":
            raise SystemExit(
                "--protocol chat needs the chat template, which --template off disables. Use --template auto."
            )
        if examples:
            raise SystemExit(
                "--shots: the worked examples are in the tags protocol. With --protocol chat use --shots 0."
            )
        try:
            self.thinks = thinks(tokenizer)
            self.wording = wording_for(tool, self.boxed, self.thinks)
            self.invalid_message = self.wording.chat_invalid
            self.schema = self._schema()
            self.separate = takes_system(tokenizer, self.wording.chat_system, ASKED, tools=[self.schema])
            self.stop_ids = end_ids(tokenizer)
            self.ends = [end for end in map(tokenizer.decode, self.stop_ids) if end]
            self._learn()
            note = self._habit(args.context)
        except Exception as error:  # a template may raise anything on a message that it does not expect
            raise SystemExit(
                f"--protocol chat: the chat template cannot be used for tool calls ({in_a_line(error)}). "
                "Use --protocol tags."
            ) from None
        if note and ranks.rank() == 0:
            run.notice(f"chat template: {note}")

    # -- the texts of the template

    def _schema(self):
        parameter, meaning = self.wording.parameter
        properties = {parameter: {"type": "string", "description": meaning}}
        function = {"name": self.tool, "description": self.wording.description}
        function["parameters"] = {"type": "object", "properties": properties, "required": [parameter]}
        return {"type": "function", "function": function}

    def _render(self, *messages, generation=False):
        return render(self.tokenizer, self._first(ASKED) + list(messages), generation, tools=[self.schema])

    def _first(self, text):
        return first_messages(self.wording.chat_system, text, self.separate)

    def _call(self, thought=""):
        content = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        function = {"name": self.tool, "arguments": {self.wording.parameter[0]: CALLED}}
        return message("assistant", content, tool_calls=[{"type": "function", "function": function}])

    def _learn(self):
        """Find the template's texts around a tool output, from the call to the next generation. Raises ValueError."""
        prompt, bare = self._render(generation=True), self._render()
        if self.wording.description not in prompt:
            raise ValueError("it leaves the tools out")
        text = self._render(self._call(), message("tool", HEARD, name=self.tool), generation=True)
        if not (prompt.startswith(bare) and text.startswith(bare)):
            raise ValueError("it renders the first messages differently when others follow")
        quoted = json.dumps(HEARD, ensure_ascii=False)[1:-1]
        self.quotes = HEARD not in text and quoted in text
        call, self.around = self._between(text, CALLED, quoted if self.quotes else HEARD)
        start = text[len(prompt if text.startswith(prompt) else bare) : text.index(CALLED)]
        self.tagged = "<tool_call>" in start
        if self.parse(start + CALLED + call) != Action(self.tool, CALLED):
            raise ValueError("it writes calls in an unknown format")
        invalid = self._render(message("assistant", SAID), message("user", REFUSED), generation=True)
        _, self.around_invalid = self._between(invalid, SAID, REFUSED)
        # As in Tags: a complete call or answer ends a generation. So does the opening tag of an output, if any.
        self.stop = (
            ["</answer>"] * (not self.boxed) + ["</tool_call>"] * self.tagged + re.findall(r"<\w+>", self.around[0])
        )
        self.marks = marks(self.tokenizer, *self.around)
        longest = max(len(self._encode("".join(around))) for around in (self.around, self.around_invalid))
        if longest >= self.limit:
            raise SystemExit(
                f"--max_observation_tokens {self.limit}: the chat template alone takes {longest} tokens around an "
                "output. Raise the limit."
            )

    def _between(self, text, first, second):
        """Return (rest of the message with `first`, (text from its end token to `second`, text after `second`))."""
        before, found, after = text.partition(first)[2].partition(second)
        places = [before.index(end) for end in self.ends if end in before]
        if not found or not places:
            raise ValueError("it leaves out tool outputs" if not found else "its messages have no known end token")
        return before[: min(places)], (before[min(places) :], after)

    def _habit(self, context):
        """Return a line about a template that would render earlier turns differently than --context does, else None."""
        output, refused = message("tool", HEARD, name=self.tool), message("user", REFUSED)
        turns = [self._call(), output]
        if not self._render(*turns, *turns).startswith(self._render(*turns)):
            return f"it rewrites earlier turns in its own way; this run uses --context {context} instead"
        turns = [self._call(THOUGHT), output]
        if THOUGHT not in self._render(*turns, self._call(), output):
            same, habit = "strip_think", "it leaves out the thinking of earlier turns"
        else:
            same, habit = "full", "it keeps the thinking of earlier turns"
            if THOUGHT not in self._render(*turns, message("assistant", SAID), refused):
                habit += " until a user message follows (here: after an invalid action)"
        if same != context:
            return f"{habit}, as --context {same} does; this run uses --context {context} instead"
        return f"{habit}; --context full always keeps it" if "until" in habit else None

    def _encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    # -- the methods of Tags

    def prompt_ids(self, text: str) -> list[int]:
        """Return the token ids of the first context, tools included."""
        return self._encode(render(self.tokenizer, self._first(text), True, tools=[self.schema]))

    thinks_on = Tags.thinks_on

    def parse(self, text: str) -> Action | None:
        """Return the action in a generation's text outside its thinking, or None.

        In the tagged format the first complete call or answer counts. In the other one a call begins the message.
        """
        text = "" if self.thinks_on(text) else spoken(text)
        if not self.tagged:
            whole = text.strip().removeprefix("<|python_tag|>").strip()
            if re.match(r"(?:```\w*)?[\s\[]*\{", whole):
                return self._called(whole)
        names = "tool_call" if self.boxed else "tool_call|answer"
        found = re.search(rf"<({names})>((?:(?!<\1>).)*?)</\1>", text, re.DOTALL)
        if not found and self.boxed:
            return _boxed(text)
        if found and found[1] == "answer":
            # An answer tag within the JSON of a call that is not complete is no answer.
            return None if re.search(r"<tool_call>\s*\{", text[: found.start()]) else Action(None, found[2].strip())
        return self._called(found[2], text[found.end() :]) if found and self.tagged else None

    def _called(self, text, after=""):
        """Return the action of the call that a text begins with, or None. after: the message's text after its tag."""
        if not (call := first_call(text, [self.schema])):
            return None
        name, arguments, several = call
        # JSON can contain lone surrogates, which neither a file nor a tokenizer can encode.
        argument = arguments[self.wording.parameter[0]].encode(errors="replace").decode()
        # A line break in front: an argument begins where its first line does, so that its indentation is known.
        return Action(name, cleaned(name, f"\n{argument}"), several or "<tool_call>" in after)

    def observation(self, output: str, tool: str | None, note: str = "") -> tuple[str, list[int]]:
        """Return (the output as the model sees it, token ids from the end of the model's message to its next one).

        The output is cut to the limit. tool: None for the invalid message. note: a sentence in front of the output, left
        out where the limit has no room for it.
        """
        head, tail = self.around if tool else self.around_invalid
        if len(self._encode(head + note + tail)) < self.limit:
            head += note
        output, quotes = harmless(output, self.marks), self.quotes and tool
        body = json.dumps(output, ensure_ascii=False)[1:-1] if quotes else output
        ids = self._encode(head + body + tail)
        if len(ids) <= self.limit:
            return output, ids
        body = self._encode(body)
        for room in range(self.limit - len(self._encode(head + tail)), -1, -1):
            shown = self.tokenizer.decode(body[:room]).rstrip("\ufffd")  # do not end in a partial character
            if quotes:  # nor in a partial escape sequence
                shown = re.match(r"(?:[^\\]|\\u.{4}|\\[^u])*", shown, re.DOTALL)[0]
            ids = self._encode(head + shown + tail)
            if len(ids) <= self.limit:
                break
        return json.loads(f'"{shown}"') if quotes else shown, ids
