"""Chat templates and special tokens, as both protocols need them."""

import re
import textwrap
from datetime import datetime

from tasks.thinking import begins
from tasks.wordings import SYSTEM

DATE = datetime(2024, 7, 26)  # what a chat template takes for today: a prompt must not change overnight
# A conversation that a chat template is asked for at the start, to see what it writes around these words.
ASKED, THOUGHT, CALLED, SAID, REFUSED = "Where to?", "Perhaps north.", "ships of the line", "Nowhere.", "Say where."


def message(role, content, **more):
    return {"role": role, "content": content} | more


def render(tokenizer, messages, generation, **more):
    """Text of a conversation in the chat template, at a date that never changes; generation: up to where the model goes on."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=generation, tokenize=False, strftime_now=DATE.strftime, **more
    )


def thinks(tokenizer):
    """Whether a model thinks by itself before it acts: its chat template can switch that off, or begins it. (That a template knows how to
    leave thinking out of a history says nothing: those of models that do not think do, too.)"""
    template, first = str(tokenizer.chat_template or ""), [message("system", SYSTEM), message("user", ASKED)]
    return "enable_thinking" in template or ("<think>" in template and begins(render(tokenizer, first, True)))


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
