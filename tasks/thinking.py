"""Blocks of thinking: where they are in a text, and a context without them."""

import bisect
import functools
import os
import re


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
