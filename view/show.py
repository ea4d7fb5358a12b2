"""A run in the terminal: at its end a table, a curve and a trajectory; later any trajectory, turn by turn, in colour.

    python -m view show out/RUN --worst       trajectories in the terminal
    python -m view report out/RUN             one HTML page (report.py)

Imports neither torch nor vllm, and can read a run in progress.
"""

import contextlib
import heapq
import itertools
import json
import math
import os
import re
import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.scores import normal_form
from tools.search import documents_in

TABLE = (("exact match", "eval/em"), ("F1", "eval/f1"), ("turns", "eval/turns"), ("tool calls", "eval/tool_calls"))
# Terminal colours, as indices into the user's palette: they suit dark and light screens.
BOLD, DIM, GREY, GREEN, RED = "1", "2", "90", "32", "31"


@contextlib.contextmanager
def until_closed() -> Iterator[None]:
    """Print in the block until the reader of the pipe, such as `head`, closes it: that ends the block in silence."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python must not flush to the pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- reading


def lines(path: Path, wanted: Callable[[dict], bool] | None = None) -> Iterator[tuple[int, dict]]:
    """Yield (offset, object) of each line of a JSONL file that is an object of the wanted shape.

    An incomplete last line, of a run in progress, is left out. So are malformed lines: their number is printed.
    """
    offset, malformed = 0, []
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                item = json.loads(raw, parse_constant=lambda _: None)  # NaN is not valid JSON
                if not isinstance(item, dict) or (wanted and not wanted(item)):
                    raise ValueError
            except (ValueError, RecursionError):
                if raw.endswith(b"\n"):
                    malformed.append(number)
            else:
                yield offset, item
            offset += len(raw)
    if malformed:
        which = f"line {malformed[0]}" + (f" and {len(malformed) - 1} more" if malformed[1:] else "")
        print(f"warning: {path}: {which}: malformed, left out", file=sys.stderr)


def stream(path: Path) -> Iterator[dict]:
    """Return an iterator over the samples or metrics of a JSONL file: samples.jsonl may be larger than memory."""
    return (item for _, item in lines(path, is_metrics if Path(path).name == "metrics.jsonl" else is_sample))


def is_number(value: object) -> bool:
    """Return whether a value is a number that a float holds exactly enough to draw."""
    return isinstance(value, (int, float)) and abs(value) < 1e100


def is_step(value: object) -> bool:
    """Return whether a value is a count."""
    return type(value) is int and 0 <= value < 2**53


def is_info(value: object) -> bool:
    """Return whether a value is None or an object of plain values, or of lists of them."""
    plain = lambda v: v is None or isinstance(v, str) or is_number(v)  # noqa: E731
    inner = (v for item in value.values() for v in (item if isinstance(item, list) else [item])) if value else ()
    return value is None or (isinstance(value, dict) and all(map(plain, inner)))


def is_metrics(item: dict) -> bool:
    """Return whether an object is a line of metrics.jsonl: a step, and numbers or nulls."""
    return is_step(item.get("step")) and all(v is None or is_number(v) for v in item.values())


def is_sample(item: dict) -> bool:
    """Return whether an object is a line of samples.jsonl, as common/log.py writes it."""
    has = lambda where, kind, *keys: all(isinstance(where.get(key), kind) for key in keys)  # noqa: E731
    text = (str, type(None))
    return (
        has(item, str, "kind", "question", "stop")
        and is_step(item.get("step"))
        and is_step(item.get("sample"))
        and is_step(item.get("forked", 0))
        and is_number(item.get("outcome"))
        and has(item, text, "answer")
        and has(item, dict, "info")
        and is_info(item["info"])
        and is_number(item["info"].get("f1", 0))
        and has(item, list, "golds", "turns")
        and all(isinstance(gold, str) for gold in item["golds"])
        and all(isinstance(turn, dict) for turn in item["turns"])
        and all(
            has(turn, str, "text", "tool_output")
            and has(turn, text, "tool", "tool_input", "tool_status")
            and is_step(turn.get("tokens"))
            and is_step(turn.get("observation_tokens"))
            and (turn.get("info") is None or isinstance(turn["info"], dict))
            and is_info(turn.get("info"))
            and all(map(is_number, each(turn.get("advantage"))))
            for turn in item["turns"]
        )
    )


@dataclass
class Compared:
    """A group: samples of one question that were compared with each other, by their offsets in the file."""

    question: str
    offsets: list[int] = field(default_factory=list)
    outcomes: list[float] = field(default_factory=list)
    signal: bool = False  # whether some turn has an advantage other than zero


def index(path: Path) -> dict[tuple[int, str], list[Compared]]:
    """Return {(step, kind): groups} of a samples.jsonl, in the order of the file. It holds offsets, not texts."""
    blocks, before = {}, None
    for offset, sample in lines(path, is_sample):
        group = sample["step"], sample["kind"], sample["question"]
        # Samples of a group are consecutive. If a question was drawn twice, the sample number drops.
        if before is None or group != before[0] or sample["sample"] <= before[1]:
            blocks.setdefault(group[:2], []).append(Compared(sample["question"]))
        before = group, sample["sample"]
        compared = blocks[group[:2]][-1]
        compared.offsets.append(offset)
        compared.outcomes.append(sample["outcome"])
        compared.signal |= any(any(each(t.get("advantage"))) for t in sample["turns"])
    return blocks


def read(path: Path, groups: Iterable[Compared]) -> Iterator[dict]:
    """Yield the samples of some groups of an index."""
    with open(path, "rb") as file:
        for offset in itertools.chain.from_iterable(g.offsets for g in groups):
            file.seek(offset)
            yield json.loads(file.readline(), parse_constant=lambda _: None)


# ---- judging


def each(advantage: float | list[float] | None) -> list[float]:
    """Return an advantage as a list: one number for the turn, one per token, or none."""
    return advantage if isinstance(advantage, list) else [] if advantage is None else [advantage]


def credit(advantage: float | list[float] | None) -> float | None:
    """Return a turn's advantage, the mean over its tokens, or None if it is not trained."""
    return statistics.fmean(each(advantage)) if each(advantage) else None


def credit_in_words(advantage: float | list[float] | None) -> str:
    """Return a turn's advantage as text."""
    if not each(advantage):
        return "not trained"
    words = f"advantage {credit(advantage):+.2f}"
    if isinstance(advantage, list):
        words += f" (mean of {len(advantage)} tokens, from {min(advantage):+.2f} to {max(advantage):+.2f})"
    return words


def worth(sample: dict) -> tuple[float, float, float]:
    """Return the key that sorts samples from worst to best: outcome, then F1, then mean advantage."""
    credits = [credit(t.get("advantage")) for t in sample["turns"]]
    return sample["outcome"], sample["info"].get("f1", 0.0), statistics.fmean([c or 0.0 for c in credits] or [0.0])


def holds_gold(text: str, golds: list[str]) -> bool:
    """Return whether a text contains a gold answer, both in normal form."""
    text = normal_form(text)
    return any(gold in text for gold in map(normal_form, golds) if gold)


def near_miss(sample: dict) -> bool:
    """Return whether a sample's answer is wrong although a tool output contains a gold answer."""
    outputs = [documents_in(t["tool_output"]) for t in sample["turns"] if t["tool_status"] == "ok"]
    return sample["outcome"] < 1 and any(holds_gold(text, sample["golds"]) for text in outputs)


def choose(samples: Iterable[dict], which: str | None, count: int) -> list[dict]:
    """Return at most `count` samples: the "worst", the "best", the first of "near_miss", or (None) the first."""
    if which in ("worst", "best"):
        pick = heapq.nsmallest if which == "worst" else heapq.nlargest
        return pick(count, samples, key=worth)
    return list(itertools.islice(filter(near_miss, samples) if which else samples, count))


def tutorial(samples: Iterable[dict]) -> dict | None:
    """Return the most instructive training sample: with signal, right, with tool calls, and as late as possible."""
    trained = (s for s in samples if s["kind"] == "train" and s["turns"])

    def teaches(s):
        signal = any(any(each(t.get("advantage"))) for t in s["turns"])
        calls = sum(t["tool_status"] == "ok" for t in s["turns"])
        return signal, s["outcome"], min(calls, 2), s["step"]

    return max(trained, key=teaches, default=None)


# ---- a trajectory as text


def visible(text: str) -> str:
    """Return a text with its control characters escaped, so that a model's output cannot control the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


def tokens(text: str, count: int, tokenizer) -> str:
    """Return a turn's text with a bar between its tokens, or unchanged if the tokenizer finds another number."""
    ids = tokenizer.encode(text, add_special_tokens=False) if tokenizer else []
    return "|".join(tokenizer.decode([i]) for i in ids) if len(ids) == count else text


def colour_of(advantage: float | list[float] | None) -> str:
    """Return a terminal colour: green or red in three strengths, grey without an advantage, "" if it is zero."""
    value = credit(advantage)
    if not value:
        return GREY if value is None else ""
    strength = f"{DIM};" if abs(value) < 0.3 else f"{BOLD};" if abs(value) >= 1 else ""
    return strength + (GREEN if value > 0 else RED)


def rows(sample: dict, tokenizer) -> Iterator[tuple[str, str, str]]:
    """Yield (indent, text, colour) of each part of a trajectory."""
    yield "  ", f"question: {sample['question']}   gold: {' | '.join(sample['golds'])}", BOLD
    for k, turn in enumerate(sample["turns"], 1):
        advantage = turn.get("advantage")
        info = "".join(f"   {name} {value}" for name, value in (turn.get("info") or {}).items())
        words = "from the trunk" if k <= sample.get("forked", 0) else credit_in_words(advantage)
        yield "  ", f"turn {k}   {turn['tokens']} tokens   {words}{info}", ""
        yield "    ", tokens(turn["text"], turn["tokens"], tokenizer).strip(), colour_of(advantage)
        if turn["tool_status"]:
            call = f"{turn['tool']}({turn['tool_input']!r})" if turn["tool"] else "no action"
            yield "    ", f"{call}: {turn['tool_status']}, {turn['observation_tokens']} tokens", DIM
            yield "    > ", turn["tool_output"].strip(), DIM
    f1 = f"   F1 {sample['info']['f1']:.2f}" if "f1" in sample["info"] else ""
    yield "  ", f"answer: {sample['answer']}   outcome {sample['outcome']:g}{f1}   stop: {sample['stop']}", BOLD


def wrap(line: str, width: int) -> list[str]:
    """Return a line in parts of at most `width` characters."""
    if (
        len(short := line.expandtabs().rstrip()) <= width
    ):  # textwrap would take most of the time of a text of short lines
        return [short] if short else []
    # Of pieces: the time that textwrap takes for a long word grows with the square of its length.
    pieces = re.findall(r".{1,4000}(?:\s|$)|.{1,4000}", line)
    return [part for piece in pieces for part in textwrap.wrap(piece, width, replace_whitespace=False)]


def describe(sample: dict, tokenizer=None, colour: bool = False, width: int | None = None) -> str:
    """Return a sample as text, turn by turn; with a tokenizer there is a bar between the sampled tokens."""
    out = []
    for indent, text, code in rows(sample, tokenizer):
        for line in visible(text).split("\n"):
            parts = width and wrap(line, max(width - len(indent), 20)) or [line]
            out += [f"{indent}\x1b[{code}m{part}\x1b[0m" if colour and code else indent + part for part in parts]
    return "\n".join(out)


def terminal() -> dict:
    """Return describe()'s arguments for stdout: on a terminal wrapped, and in colour unless NO_COLOR is set."""
    if not sys.stdout.isatty():
        return {}
    return {"colour": not os.environ.get("NO_COLOR"), "width": shutil.get_terminal_size().columns}


# ---- at the end of a run


def curve(metrics: list[dict], path: Path, title: str | None = None) -> Path:
    """Draw held-out exact match and training reward over steps as a PNG. Returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, label, style in (
        ("reward/mean", "mean outcome of samples", "-"),
        ("eval/em", "held-out exact match, greedy", "o-"),
    ):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        axes.plot(*zip(*points or [(math.nan, math.nan)]), style, label=label)
    axes.set(xlabel="step", ylim=(0, 1), title=title or path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


# ---- afterwards


def show(
    folder: str | Path, step: int | None = None, kind: str | None = None, which: str | None = None, count: int = 3
) -> None:
    """Print trajectories of one step. Raises SystemExit if there are none."""
    path = Path(folder) / "samples.jsonl"
    if not path.is_file():
        raise SystemExit(f"{folder}: not a run directory, or nothing has been sampled yet: it has no samples.jsonl.")
    blocks = index(path)
    kinds = list(dict.fromkeys(k for _, k in blocks))
    kind = kind or ("train" if "train" in kinds else next(iter(kinds), None))
    if kind not in kinds:
        raise SystemExit(f"{folder}: no samples of kind {kind}; there are: {', '.join(kinds) or 'none'}.")
    steps = sorted(s for s, k in blocks if k == kind)
    step = steps[-1] if step is None else step
    if step not in steps:
        raise SystemExit(f"{folder}: no {kind} samples of step {step}; there are steps {in_words(steps)}.")
    groups = blocks[step, kind]
    chosen = choose(read(path, groups), which, count)
    if not chosen:
        raise SystemExit(f"{folder}: no near miss among the {kind} samples of step {step}.")
    total = sum(len(g.offsets) for g in groups)
    print(f"{folder}, step {step}, {kind}: {f'{which}, '.replace('_', ' ') if which else ''}{len(chosen)} of {total}")
    for sample in chosen:
        print(f"\nsample {sample['sample']}")
        print(describe(sample, **terminal()))


def in_words(steps: list[int]) -> str:
    """Return a short text for sorted step numbers."""
    if len(steps) == 1:
        return f"{steps[0]} only"
    whole = len(steps) == steps[-1] - steps[0] + 1
    return f"{steps[0]} to {steps[-1]}" + ("" if whole else f" ({len(steps)} of them)")
