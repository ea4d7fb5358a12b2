"""Run a data set's tests and the function that a model wrote in two processes, so that its code cannot fake a pass.

This file's text is sent to the sandbox: it uses only the standard library. Two processes take part:

    tests       has the data set's test code. It sends the arguments of each call and compares what it gets itself. At the
                end it prints a random word, which is nowhere in the other process
    candidate   a new interpreter with the model's code alone. It returns values of plain types as JSON, so an object whose
                __eq__ is always true does not arrive
"""

import builtins
import contextlib
import json
import os
import subprocess
import sys

PLAIN = (bool, int, float, str)
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: object) -> object:
    """Return a plain value as JSON can hold it: containers as [type, elements]. Raises TypeError for any other value."""
    if value is None:
        return None
    if type(value).__module__ == "numpy":
        return encode(value.tolist())
    for kind in PLAIN:  # also of subclasses, such as an enumeration
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return [name, [encode(item) for item in kind.__iter__(value)]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    raise TypeError(f"{type(value).__name__} is no plain value")


def decode(value: object) -> object:
    """Return the value that `encode` was given."""
    if not isinstance(value, list):
        return value
    name, content = value
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    return CONTAINERS[name](decode(item) for item in content)


def check(source: str, before: str, code: str, test: str, name: str, word: str) -> None:
    """Run the tests, and print the word if they pass.

    source: this file; before: the question's code above its function; code: the model's; name: of the function.
    """
    child = subprocess.Popen(
        [sys.executable, "-s", "-P", "-c", f"{source}\nserve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def asked(message):
        child.stdin.write(json.dumps(message) + "\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline() or '{"error": "SystemExit"}')

    def candidate(*args, **kwargs):
        answer = asked({"args": encode(args), "kwargs": encode(kwargs)})
        if "error" in answer:
            kind = getattr(builtins, answer["error"], RuntimeError)
            ordinary = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if ordinary else RuntimeError)(answer.get("text", ""))
        for mine, theirs in zip(args, decode(answer["args"])):  # changes in place
            if isinstance(mine, list):
                mine[:] = theirs
            elif isinstance(mine, dict | set):
                mine.clear()
                mine.update(theirs)
        return decode(answer["value"])

    asked({"path": sys.path, "code": code, "name": name})
    space = {"__name__": "__main__"}
    exec(compile(f"{before}\n{test}", "<test>", "exec", dont_inherit=True), space)
    space[name] = candidate
    space["check"](candidate)
    print(word)


def serve() -> None:
    """Load the model's code, and answer calls of its function until stdin is closed."""
    requests, answers = (os.fdopen(os.dup(number), mode) for number, mode in ((0, "r"), (1, "w")))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what the code prints is no answer
        os.dup2(null, number)
    sys.set_int_max_str_digits(0)
    first, space = json.loads(requests.readline()), {"__name__": "__main__"}
    sys.path[:] = first["path"]
    fault = None
    try:
        exec(compile(first["code"], "<answer>", "exec", dont_inherit=True), space)
    except BaseException as error:
        fault = error
    print("{}", file=answers, flush=True)
    for line in requests:
        message = json.loads(line)
        try:
            if fault:
                raise fault
            args, kwargs = decode(message["args"]), decode(message["kwargs"])
            value = space[first["name"]](*args, **kwargs)
            answer = {"value": encode(value), "args": encode(args)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": ""}
            with contextlib.suppress(Exception):
                answer["text"] = str(error)[:1000]
        print(json.dumps(answer), file=answers, flush=True)
