"""Chat templates and special tokens, for both protocols."""

import re
import textwrap
from datetime import datetime
from typing import TYPE_CHECKING

from tasks.thinking import begins
from tasks.wordings import SYSTEM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = datetime(2024, 7, 26)  # today's date for a chat template: a prompt must not change overnight
# The texts of a trial conversation, which shows how a chat template renders each kind of message.
ASKED, THOUGHT, CALLED, SAID, REFUSED = "Where to?", "Perhaps north.", "ships of the line", "Nowhere.", "Say where."


def message(role: str, content: str, **more) -> dict:
    """Return a message for a chat template."""
    return {"role": role, "content": content} | more


def render(tokenizer: "PreTrainedTokenizerBase", messages: list[dict], generation: bool, **more) -> str:
    """Return a conversation as text of the chat template, with a fixed date. generation: with the generation prompt."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation, tokenize=False, strftime_now=DATE.strftime, **more
    )


def thinks(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a model thinks without an instruction: its chat template can disable thinking, or begins it.

    A template that removes thinking from the history is no sign: templates of models that do not think do so too.
    """
    template, first = str(tokenizer.chat_template or ""), [message("system", SYSTEM), message("user", ASKED)]
    return "enable_thinking" in template or ("<think>" in template and begins(render(tokenizer, first, True)))


def cleaned(tool: str | None, text: str) -> str:
    """Return the input of a call, stripped. Python code loses its Markdown fence and its common indentation."""
    if tool != "python":
        return text.strip()
    fenced = re.search(r"^[^\S\n]*```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL | re.MULTILINE)
    # Code that begins on the line of its tag has no known indentation.
    if not fenced and not re.match(r"[ \t]*\n", text):
        return text.strip()
    return textwrap.dedent(fenced[1] if fenced else text).strip()


def marks(tokenizer: "PreTrainedTokenizerBase", *around: str) -> re.Pattern:
    """Return a pattern of the strings that an output must not contain: special tokens, and the tags around outputs."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tags = re.findall(r"</?\w+>", " ".join(around))
    return re.compile("|".join(map(re.escape, sorted({*special, *tags}, key=len, reverse=True))) or r"(?!)")


def harmless(text: str, marks: re.Pattern) -> str:
    """Return the text with a space inside each of its marks, so that a tool output cannot end a message."""
    return marks.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer itself begins a text with its BOS token."""
    return tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]


def end_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return every token id that ends a message: of the tokenizer, the generation config, and common templates."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
        ids |= set(configured if isinstance(configured, list) else [configured])
    except OSError:  # a model without a generation config
        pass
    vocabulary = tokenizer.get_vocab()
    known = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    ids |= {vocabulary[token] for token in known if token in vocabulary}
    return sorted(i for i in ids if i is not None)
