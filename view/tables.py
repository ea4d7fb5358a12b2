"""Tables of benchmarks: what eval.py prints and writes."""

import json

from common import run

LABELS = {"em": "exact match", "f1": "F1", "tokens": "sampled tokens"}


def table(summaries):
    """The summaries of compare() as Markdown, one column each; an ending that never occurs has no row."""
    lines = [f"| | {' | '.join(summaries)} |", "|---" * (1 + len(summaries)) + "|"]
    for key in next(iter(summaries.values())):
        row = [summary[key] for summary in summaries.values()]
        if not key.startswith("stop") or any(cell["mean"] for cell in row):
            cells = ["{mean:.3f} [{low:.3f}, {high:.3f}]".format(**cell) for cell in row]
            lines.append(f"| {LABELS.get(key, key.replace('_', ' '))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(folder, result, lines):
    """Write eval.json (the result), eval.md (its table) and samples.jsonl (the lines) of one benchmark. Returns the table as text."""
    args = result["args"]
    what = (
        f"{args['model']} {args['adapter']}".strip()
        + f": {len(result['questions'])} questions ({args['split']}) of {args['task']}"
    )
    text = f"{what}, greedy, with 95 % intervals over questions\n\n{table(result['figures'])}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").unlink(missing_ok=True)  # of an attempt that did not come to its end
    run.append(folder / "samples.jsonl", [json.dumps(line, ensure_ascii=False) for line in lines])
    (folder / "eval.md").write_text(text)
    run.write_json(folder / "eval.json", result)  # last: where it is, the benchmark is finished
    return text


def overview(folder, folders):
    """One table of several finished benchmarks, as Markdown, also written to benchmarks.md: a row each, and their unweighted mean.

    folders: {name: folder of its results}
    """
    figures = {name: json.loads((folder / "eval.json").read_text())["figures"] for name, folder in folders.items()}
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
