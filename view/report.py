"""One HTML page of a run directory: curves of every metric, samples with their credit, settings. Needs no network.

The page is the template report.html with the run's data in it as JSON. The template's script inserts the output of
models and tools as text, never as markup. Size is bounded: curves by a number of points, samples by a budget in bytes.
"""

import ast
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

from common import run
from common.log import FILES
from view import card, metrics, show

POINTS = 600  # per curve; in longer curves each point is a mean over neighbours
SAMPLE_BYTES = 4_300_000  # for all samples together, so that the page stays below 5 MB
STEP_BYTES = 16_000  # least budget of a step's samples; with too many steps for that, some steps are omitted
CUTS = (8000, 4000, 2000, 1000, 500, 250, 120)  # characters per text; the first that makes a group fit is used


def write(folder: str | Path, path: str | Path) -> str:
    """Write the page of a run directory. Returns a line with its size. Raises SystemExit if there is no run."""
    folder, path = Path(folder), Path(path)
    files = [folder / name for name in FILES]
    if not any(file.is_file() for file in files):
        raise SystemExit(
            f"{folder}: not a run directory, or nothing to report yet: no metrics.jsonl and no samples.jsonl."
        )
    lines = read_metrics(files[0]) if files[0].is_file() else []
    blocks, left_out = samples(files[1]) if files[1].is_file() else ([], 0)
    args = as_json(folder / "args.json")
    changed = max(file.stat().st_mtime for file in files if file.is_file())
    data = {
        "name": folder.resolve().name,
        "changed": time.strftime("%Y-%m-%d %H:%M", time.localtime(changed)),
        "step": max([line["step"] for line in lines] + [block["step"] for block in blocks], default=0),
        "steps": args["steps"] if show.is_step(args.get("steps")) else None,
        "seconds": [line["time/step"] for line in lines if line.get("time/step")],
        "table": table(lines),
        "curves": curves(lines),
        "blocks": blocks,
        "left_out": left_out,
        "args": arguments(folder, args),
        "environments": [(file.name, flat(as_json(file))[:2000]) for file in sorted(folder.glob("environment*.json"))],
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8").replace("__DATA__", encode(data), 1)
    page = page.encode("utf-8", "replace")  # half a surrogate pair, which UTF-8 cannot encode, becomes "?"
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        temporary.write_bytes(page)
        temporary.replace(path)  # a link of that name is replaced: what it leads to is not touched
    except OSError as error:
        raise SystemExit(f"{path} cannot be written ({error.strerror}). Give another --out.") from None
    shown, size = (sum(block[key] for block in blocks) for key in ("shown", "size"))
    return f"{path}: {len(page) / 1e6:.1f} MB, {shown} of the {size} samples"


def summary(folder: str | Path, task) -> None:
    """Write report.html, curve.png and the adapter's card, and print the table and one trajectory with its tokens (rank 0)."""
    folder = Path(folder)
    metrics = list(show.stream(folder / "metrics.jsonl"))
    evals = [line for line in metrics if line.get("eval/em") is not None] or [{"step": 0}]
    card.write(folder, task, evals)
    first, last = evals[0], evals[-1]
    picture, page = show.curve(metrics, folder / "curve.png"), write(folder, folder / "report.html")
    chosen = show.tutorial(show.stream(folder / "samples.jsonl"))
    with show.until_closed():  # by the reader of a pipe
        print(f"\nHeld-out questions, greedy        before   after step {last['step']}")
        for name, key in show.TABLE:
            if first.get(key) is not None and last.get(key) is not None:  # math tasks have no F1
                print(f"  {name:<30}{first[key]:8.3f}{last[key]:8.3f}")
        print(f"\nLearning curve: {picture}")
        if chosen:
            print(f"\nOne trajectory of step {chosen['step']}:")
            print(show.describe(chosen, task.tokenizer, **show.terminal()))
        print(f"\nReport, one HTML page: {page}")
        print(f"More trajectories: {command('show', folder, '--worst')}")
        print(f"Metrics, samples and adapter: {folder}/")
        sys.stdout.flush()


def command(*words: str | Path) -> str:
    """Return a shell command of `python -m view` that works in the current directory. words: its arguments."""
    here = Path.cwd()
    if here == run.ROOT:
        python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(here) else sys.executable
        return shlex.join([python, "-m", "view", *map(str, words)])
    words = [str(word.absolute()) if isinstance(word, Path) else word for word in words]
    return f"cd {shlex.quote(str(run.ROOT))} && {shlex.join([sys.executable, '-m', 'view', *words])}"


def as_json(file: Path) -> dict:
    """Return the object in a JSON file, or {} if the file is missing, incomplete or holds something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=str) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def flat(nested: dict, prefix: str = "") -> list[tuple]:
    """Return (name, value) pairs of a nested object; an inner name follows its outer names, separated by dots."""
    pairs = []
    for name, value in nested.items():
        inner = isinstance(value, dict) and prefix.count(".") < 8  # of a file that someone else made: no deeper
        pairs += flat(value, f"{prefix}{name}.") if inner else [(prefix + name, plain(value))]
    return pairs


def plain(value: object) -> object:
    """Return a value of a settings file as the page shows it: scalars and lists of scalars, texts not too long."""
    if isinstance(value, list) and all(item is None or isinstance(item, (str, int, float)) for item in value):
        return [plain(item) for item in value[:200]]
    if isinstance(value, str):
        return shorten(value, CUTS[0])
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**300):
        return value if value == value and abs(value or 0) != float("inf") else str(value)
    return "..."


# ---- metrics


def read_metrics(path: Path) -> list[dict]:
    """Return the lines of metrics.jsonl sorted by step. If a resumed run repeated a step, the later line counts."""
    return [line for _, line in sorted({line["step"]: line for line in show.stream(path)}.items())]


def table(lines: list[dict]) -> list[tuple]:
    """Return (name, first value, last value, step of the last) of each measured metric in show.TABLE."""
    rows = []
    for name, key in show.TABLE:
        points = measured(lines, key)
        if points:
            rows.append((name, points[0][1], points[-1][1], points[-1][0]))
    return rows


def measured(lines: list[dict], key: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of a metric, without its nulls."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def curves(lines: list[dict]) -> list[tuple[str, list[dict]]]:
    """Return [(group, panels)] of all metrics that were measured: evaluation first, then in the order of the file."""
    groups = {"eval": []}
    for key in dict.fromkeys(key for line in lines for key in line if key != "step"):
        points, size = thin(measured(lines, key))
        if points:
            group = key.partition("/")[0] if "/" in key else ""
            panel = {"key": key, "meaning": metrics.hint(key), "points": points, "mean_of": size}
            groups.setdefault(group, []).append(panel)
    groups["run"] = groups.pop("", [])  # keys without a group come last
    return [(group, panels) for group, panels in groups.items() if panels]


def thin(points: list[tuple]) -> tuple[list[tuple[int, float]], int]:
    """Return (at most POINTS points, n): each is the mean of n neighbours, placed at the step of the last of them."""
    size = -(-len(points) // POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], float(f"{statistics.fmean(value for _, value in part):.6g}")) for part in parts], size


# ---- settings


def arguments(folder: Path, args: dict) -> list[tuple]:
    """Return (name, value, default, meaning) of each argument, the last two from the run's copy of its code.

    If they are not found there, they are None and "".
    """
    known, args = {}, {name: plain(value) for name, value in args.items()}
    # The script comes last: its defaults override the shared ones.
    for file in filter(Path.is_file, (folder / "common" / "args.py", *folder.glob("*.py"))):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # no code of ours
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in ("Sampling", "Shared", "Args"):
                for item, after in zip(node.body, [*node.body[1:], None]):
                    if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Constant):
                        text = getattr(after.value, "value", "") if isinstance(after, ast.Expr) else ""
                        known[ast.unparse(item.target)] = plain(item.value.value), text if isinstance(text, str) else ""
    return [(name, value, *known.get(name, (None, ""))) for name, value in args.items()]


# ---- samples


def samples(path: Path) -> tuple[list[dict], int]:
    """Return (blocks, number of omitted blocks). A block is a step and kind with as many whole groups as fit into it.

    Groups with signal come first. The others keep the file's order, so that evaluations show the same questions each
    time.
    """
    blocks = show.index(path)
    kinds = {kind: sorted(step for step, k in blocks if k == kind) for _, kind in blocks}
    most = SAMPLE_BYTES // STEP_BYTES
    kept = [
        (step, kind)
        for kind, steps in kinds.items()
        for step in evenly(steps, max(most * len(steps) // len(blocks), 2))
    ]
    made, left = [], SAMPLE_BYTES
    for number, (step, kind) in enumerate(kept):
        groups = blocks[step, kind]
        share = left // (len(kept) - number)  # bytes that a block does not use go to the blocks after it
        items, used = [], 0
        for group in sorted(groups, key=lambda g: not g.signal):
            item, size = fit(path, group, share - used, cut=not items)
            if not item:
                break
            items.append(item)
            used += size
        left -= used
        outcomes = [outcome for g in groups for outcome in g.outcomes]
        made.append(
            {
                "step": step,
                "kind": kind,
                "size": len(outcomes),
                "shown": sum(len(item["samples"]) for item in items),
                "mean": sum(outcomes) / len(outcomes),
                "groups": len(groups),
                "signal": sum(g.signal for g in groups),
                "items": items,
            }
        )
    return made, len(blocks) - len(kept)


def evenly(steps: list[int], count: int) -> list[int]:
    """Return at most `count` evenly spaced steps, including the first and the last."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def fit(path: Path, group: show.Compared, room: int, cut: bool) -> tuple[dict | None, int]:
    """Return (group for the page, its bytes), or (None, 0) if it exceeds `room` bytes.

    cut: shorten texts and, if that is not enough, omit samples.
    """
    whole = list(show.read(path, [group]))
    for limit in CUTS if cut else CUTS[:1]:
        item = for_page(whole, limit)
        if (size := length(item)) <= room:
            return item, size
    while cut and len(item["samples"]) > 1:
        item["samples"].pop()
        if (size := length(item)) <= room:
            return item, size
    return None, 0


def encode(data) -> str:
    """Return JSON that is safe inside a page: it cannot open a tag."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def length(item) -> int:
    """Return the bytes of an item in the page."""
    return len(encode(item).encode("utf-8", "replace"))


def for_page(whole: list[dict], limit: int) -> dict:
    """Return a group of samples as the page's script reads it, with texts of about `limit` characters at most."""
    first = whole[0]
    return {
        "question": shorten(first["question"], limit),
        "golds": [shorten(gold, limit) for gold in first["golds"][:20]],
        "size": len(whole),
        "samples": [
            {
                "number": sample["sample"],
                "answer": shorten(sample["answer"], limit),
                "outcome": sample["outcome"],
                "stop": sample["stop"],
                "info": sample["info"],
                "turns": [turn_for_page(turn, sample["golds"], limit) for turn in sample["turns"]],
            }
            for sample in whole
        ],
    }


def turn_for_page(turn: dict, golds: list[str], limit: int) -> dict:
    """Return a turn as the page's script reads it."""
    advantage = turn.get("advantage")
    made = {"text": shorten(turn["text"], limit), "tokens": turn["tokens"]}
    if (credit := show.credit(advantage)) is not None:
        made["credit"] = round(credit, 4)
    if isinstance(advantage, list) and advantage:
        made["range"] = [round(f(advantage), 4) for f in (min, max)]
    if turn.get("info"):
        made["info"] = turn["info"]
    if turn["tool_status"]:
        made["call"] = f"{turn['tool']}({shorten(turn['tool_input'], limit)})" if turn["tool"] else "no action"
        made |= {
            "status": turn["tool_status"],
            "output": shorten(turn["tool_output"], limit),
            "heard": turn["observation_tokens"],
        }
        if show.holds_gold(turn["tool_output"], golds):
            made["gold"] = True
    return made


def shorten(text: str | None, limit: int) -> str | None:
    """Return a text, cut in the middle if it is too long: actions are at the end."""
    if not text or len(text) <= limit + 60:
        return text
    return f"{text[: limit // 2]} [... {len(text) - limit // 2 * 2} characters cut ...] {text[-(limit // 2) :]}"
