"""Find blocks of thinking in a text, and remove them from a text or a context."""

import bisect
import functools
import os
import re
from collections.abc import Callable

TAGS = re.compile("</?think>")


def thinking(text: str, opened: bool = False) -> list[tuple[int, int]]:
    """Return (start, end) of each closed block of thinking in a generation's text. opened: its context ends in a block.

    A second closing tag belongs to the block before it: the text between the two is still thinking.
    """
    blocks, start = [], 0 if opened else None  # start: of the block that is open
    extends = False  # whether a closing tag belongs to the last block
    for tag in TAGS.finditer(text):
        if tag[0] == "<think>":
            start, extends = (tag.start() if start is None else start), False
        elif start is not None:
            blocks.append((start, tag.end()))
            start, extends = None, True
        elif extends:
            blocks[-1] = (blocks[-1][0], tag.end())
    return blocks


def spoken(text: str, opened: bool = False) -> str:
    """Return a generation's text without its closed blocks of thinking."""
    at, parts = 0, []
    for start, stop in thinking(text, opened):
        parts.append(text[at:start])
        at = stop
    return "".join([*parts, text[at:]])


def begins(text: str) -> bool:
    """Return whether a context ends in the tag that opens a block of thinking, as some generation prompts do."""
    return text.rstrip().endswith("<think>")


def without_thinking(
    context: list[int], action: list[int], decode: Callable[[list[int]], str]
) -> tuple[list[int], list[int]]:
    """Return (context ids, action ids) without the action's closed blocks of thinking and the white space after them.

    Ids are removed, never re-encoded. If the context ends in the tag that opens a block, that tag is removed too.

    A token across the start of a block is removed. A token across its end is removed if it contains thinking, or only
    white space after the tag. Otherwise it is kept, with a piece of the closing tag, because the next tag may begin in
    it.
    """
    text, end = decode(action), context[-16:]
    opened = begins(decode(end))
    blocks = thinking(text, opened)
    if not blocks:
        return context, action

    @functools.cache
    def length(n):
        """Return the number of complete characters in the text of the first n ids."""
        prefix = decode(action[:n])
        return len(prefix if text.startswith(prefix) else os.path.commonprefix([prefix, text]))

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
