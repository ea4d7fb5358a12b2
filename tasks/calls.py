"""Read the tool call in a message of the chat protocol: JSON with the name of a tool and its arguments.

The text of an argument is what its JSON says: it is never completed, cut or corrected. Models write three things that
strict JSON forbids. Each has one meaning only, so it is read: a line break or tab inside a string, a backslash before a
character that JSON does not escape (\\d), and arguments that are JSON inside a string, as OpenAI's interface sends them.
"""

import json
import re
from collections.abc import Sequence

from jsonschema import Draft202012Validator

READER = json.JSONDecoder(strict=False)  # strings may contain line breaks and tabs
BACKSLASH = re.compile(r"""\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?""")
FENCE = re.compile(r"\s*(?:```\w*\s+)?")  # of a Markdown block
ANOTHER = re.compile(r"""<tool_call>|\{\s*"(?:name|type|function|id|arguments|parameters)"\s*:""")


def first_call(text: str, tools: Sequence[dict]) -> tuple[str, dict, bool] | None:
    """Return (name, arguments, whether other calls follow) of the call that a text begins with, or None.

    A list of calls counts as its calls in a row, and any text may follow. None: there is no complete JSON, or the tool
    is not one of `tools`, or the arguments do not fit its schema. tools: as chat templates take them.
    """
    try:
        value, rest = _decoded(text[FENCE.match(text).end() :])
        value, *more = value if isinstance(value, list) else [value]
        call = value["function"] if isinstance(value.get("function"), dict) else value  # OpenAI's interface wraps it
        arguments = call["arguments" if "arguments" in call else "parameters"]
        if isinstance(arguments, str):
            arguments, left = _decoded(arguments)
            if left.strip():
                return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    for tool in (each["function"] for each in tools):
        if tool["name"] == call.get("name") and Draft202012Validator(tool["parameters"]).is_valid(arguments):
            return tool["name"], arguments, bool(more or ANOTHER.search(rest))
    return None


def _decoded(text):
    """Return (the JSON value that a text begins with, the rest of the text). Raises ValueError or RecursionError."""
    # Valid JSON has no other backslashes: this changes none of it.
    text = BACKSLASH.sub(lambda found: found[0] if found[1] else "\\\\", text.lstrip())
    value, end = READER.raw_decode(text)
    return value, text[end:]
