"""Tables of benchmark results, which eval.py prints and writes."""

import json
from pathlib import Path

from common import run

LABELS = {"em": "exact match", "f1": "F1", "tokens": "sampled tokens"}


def table(summaries: dict[str, dict]) -> str:
    """Return tasks.stats.compare()'s summaries as Markdown, one column each, without stop reasons that never occur."""
    lines = [f"| | {' | '.join(summaries)} |", "|---" * (1 + len(summaries)) + "|"]
    for key in next(iter(summaries.values())):
        row = [summary[key] for summary in summaries.values()]
        if not key.startswith("stop") or any(cell["mean"] for cell in row):
            cells = ["{mean:.3f} [{low:.3f}, {high:.3f}]".format(**cell) for cell in row]
            lines.append(f"| {LABELS.get(key, key.replace('_', ' '))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(folder: Path, result: dict, lines: list[dict]) -> str:
    """Write a benchmark's eval.json (the result), eval.md (a table) and samples.jsonl (lines). Returns the table."""
    args = result["args"]
    title = (
        f"{args['model']} {args['adapter']}".strip()
        + f": {len(result['questions'])} questions ({args['split']}) of {args['task']}"
    )
    text = f"{title}, greedy, with 95 % intervals over questions\n\n{table(result['figures'])}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").unlink(missing_ok=True)  # left by an interrupted attempt
    run.append(folder / "samples.jsonl", [json.dumps(line, ensure_ascii=False) for line in lines])
    (folder / "eval.md").write_text(text)
    run.write_json(folder / "eval.json", result)  # last: it marks the benchmark as finished
    return text


def figures_in(path: Path) -> dict[str, dict]:
    """Return the figures of a finished benchmark. Raises SystemExit for a malformed file."""
    try:
        figures = json.loads(path.read_text())["figures"]
        table(figures)  # has every number that a table needs
        return figures
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, StopIteration):
        raise SystemExit(f"{path} is no result of eval.py. Remove it to evaluate that benchmark again.") from None


def overview(folder: Path, folders: dict[str, Path]) -> str:
    """Write benchmarks.md: a table with a row per finished benchmark, and their unweighted mean. Returns its text.

    folders: {benchmark: folder of its results}
    """
    figures = {name: figures_in(folder / "eval.json") for name, folder in folders.items()}
    systems = list(next(iter(figures.values())))
    columns = [key for key in ("em", "f1") if any(key in of[systems[0]] for of in figures.values())]
    columns += [key for key in next(iter(figures.values()))[systems[0]] if key.startswith("pass@")]
    head = [f"{LABELS.get(key, key)}, {system}" for key in columns for system in systems]
    lines = [f"| | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    cells = {name: [of[system].get(key) for key in columns for system in systems] for name, of in figures.items()}
    for name, row in cells.items():
        shown = ["{mean:.3f} [{low:.3f}, {high:.3f}]".format(**cell) if cell else "" for cell in row]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    means = [[row[i]["mean"] for row in cells.values() if row[i]] for i in range(len(head))]
    lines.append(f"| mean | {' | '.join(f'{sum(column) / len(column):.3f}' for column in means)} |")
    text = "\n".join(lines) + "\n"
    (folder / "benchmarks.md").write_text(text)
    return text
