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


def first_messages(system: str, text: str, separate: bool) -> list[dict]:
    """Return the messages of a prompt: a system and a user message, or (not separate) both texts in a user message."""
    if separate:
        return [message("system", system), message("user", text.strip())]
    return [message("user", f"{system}\n\n{text.strip()}")]


def takes_system(tokenizer: "PreTrainedTokenizerBase", system: str, text: str, **more) -> bool:
    """Return whether a chat template shows a system message; False: it refuses one or leaves it out (as Gemma 2's does).

    Raises ValueError, with the reason, for a template that shows these texts in neither way.
    """
    if not tokenizer.chat_template:
        raise ValueError("there is none")
    reasons = []
    for separate in (True, False):
        try:
            shown = render(tokenizer, first_messages(system, text, separate), True, **more)
        except Exception as error:  # a template may raise anything on a message that it does not expect
            reasons.append(in_a_line(error))
            continue
        if system.strip() in shown and text.strip() in shown:
            return separate
        reasons.append(f"it leaves out or changes {'the question' if system.strip() in shown else 'the instruction'}")
    raise ValueError(reasons[-1])


def in_a_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def thinks(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether a model thinks without an instruction: its chat template can disable thinking, or begins it.

    A template that removes thinking from the history is no sign: templates of models that do not think do so too.
    Raises ValueError for a template that cannot show a prompt.
    """
    template = str(tokenizer.chat_template or "")
    if "enable_thinking" in template or "<think>" not in template:
        return "enable_thinking" in template
    first = first_messages(SYSTEM, ASKED, takes_system(tokenizer, SYSTEM, ASKED))
    return begins(render(tokenizer, first, True))


def cleaned(tool: str | None, text: str) -> str:
    """Return the input of a call, stripped. Python code loses its Markdown fence and its common indentation."""
    if tool != "python":
        return text.strip()
    fenced = re.search(r"^[^\S\n]*```[\w+-]*[ \t]*\n(.*?)(?:```|\Z)", text, re.DOTALL | re.MULTILINE)
    if fenced and re.search(r"'''|\"\"\"", text[: fenced.start()]):
        fenced = None  # the fence is within a string of the code
    # Code that begins on the line of its tag has no known indentation.
    if not fenced and not re.match(r"[ \t]*\n", text):
        return text.strip()
    code = fenced[1] if fenced else text
    indented = code[: len(code) - len(code.lstrip())].rpartition("\n")[2]  # of its first line
    # Code without common indentation is left alone: dedent empties lines of spaces, also within strings.
    return (textwrap.dedent(code) if indented else code).strip()


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
    """Return every token id that ends a message: of tokenizer, generation config, chat template, and common templates."""
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
    return sorted(i for i in {*ids, template_end(tokenizer)} if i is not None)


def template_end(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the first special token that the chat template writes after an assistant message, or None.

    Some models list it nowhere else. Where none is marked as special, an added token counts.
    """
    try:
        text = render(tokenizer, [message("user", ASKED), message("assistant", SAID)], False)
    except Exception:  # no template, or one that cannot show this conversation
        return None
    if SAID not in text:
        return None
    added = tokenizer.added_tokens_decoder
    after = [i for i in tokenizer.encode(text.rpartition(SAID)[2], add_special_tokens=False) if i in added]
    return next((i for i in after if added[i].special), next(iter(after), None))
