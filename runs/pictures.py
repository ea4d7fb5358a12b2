"""Draw README's two pictures from a finished run: python runs/pictures.py out/RUN

docs/trajectory.svg    one trajectory of training, each turn in the colour of its advantage (--step, --question, --sample; by default a
                       near miss of an all-wrong group that TSPO gave signal, else the trajectory that the run itself prints at its end)
docs/curve.png         held-out exact match and training reward over steps

Prints the commit of the run: README names it.
"""

import argparse
import html
import json
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from view import show  # noqa: E402

WIDTH, COLUMNS, LINE = 860, 96, 17  # pixels, characters of a line, pixels of a line


def near_miss_with_signal(samples):
    """Return the first near miss whose turns have different advantages, or None."""
    for sample in samples:
        credits = {show.credit(turn["advantage"]) for turn in sample["turns"]} - {None}
        if sample["kind"] == "train" and show.near_miss(sample) and len(credits) > 1 and max(credits) > 0:
            return sample
    return None


def choose(path, args):
    """Return the sample that the arguments name, or the one that shows the most."""
    if args.step is None:
        found = near_miss_with_signal(show.stream(path)) or show.tutorial(show.stream(path))
        if found:
            return found
        raise SystemExit(f"{path}: no training sample.")
    for sample in show.stream(path):
        named = (args.step, args.question or sample["question_id"], args.sample)
        if sample["kind"] == "train" and (sample["step"], sample["question_id"], sample["sample"]) == named:
            return sample
    raise SystemExit(f"{path}: no training sample {args.sample} of that question in step {args.step}.")


def fill(credit):
    """Return the background of a turn: green for a positive advantage, red for a negative one, stronger when larger."""
    if not credit:
        return "#f2f2f2"
    strength = min(abs(credit), 1.5) / 1.5
    red, green, blue = (46, 160, 67) if credit > 0 else (218, 54, 51)
    return "#" + "".join(f"{round(255 - (255 - c) * (0.15 + 0.45 * strength)):02x}" for c in (red, green, blue))


def svg(sample):
    """Return the picture of a trajectory."""
    rows, y = [], 14

    def text(line, x=18, colour="#1f2328", weight="normal"):
        rows.append(
            f'<text x="{x}" y="{y + 12}" fill="{colour}" font-weight="{weight}" xml:space="preserve">{html.escape(line)}</text>'
        )

    def block(lines, background, **style):
        nonlocal y
        height = len(lines) * LINE + 10
        rows.append(f'<rect x="8" y="{y - 4}" width="{WIDTH - 16}" height="{height}" rx="5" fill="{background}"/>')
        for line in lines:
            text(line, **style)
            y += LINE
        y += 14

    golds = " | ".join(sample["golds"])
    block(textwrap.wrap(f"{sample['question']}   (gold answer: {golds})", COLUMNS), "#ffffff", weight="bold")
    for number, turn in enumerate(sample["turns"], 1):
        credit = show.credit(turn["advantage"])
        head = f"turn {number}    advantage {credit:+.2f}" if credit is not None else f"turn {number}    not trained"
        block([head, *textwrap.wrap(turn["text"].strip(), COLUMNS)], fill(credit))
        if turn["tool_output"]:
            block(
                [f"    {line}" for line in textwrap.wrap(turn["tool_output"].strip(), COLUMNS - 4)],
                "#ffffff",
                colour="#656d76",
            )
    block([f"answer: {sample['answer']}    outcome {sample['outcome']:g}"], "#ffffff", weight="bold")
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    style = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13"'
    back = f'<rect width="{WIDTH}" height="{y}" rx="8" fill="#ffffff" stroke="#d0d7de"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{back}{"".join(rows)}</svg>\n'


def main():
    parser = argparse.ArgumentParser(description="Draw README's two pictures from a finished run.")
    parser.add_argument("folder", type=Path, help="run directory")
    parser.add_argument("--step", type=int)
    parser.add_argument("--question", help="id of the question (default: any)")
    parser.add_argument("--sample", type=int, default=0)
    args = parser.parse_args()
    sample = choose(args.folder / "samples.jsonl", args)
    (ROOT / "docs" / "trajectory.svg").write_text(svg(sample), encoding="utf-8")
    show.curve(
        list(show.stream(args.folder / "metrics.jsonl")), ROOT / "docs" / "curve.png", args.folder.resolve().name
    )
    begun = json.loads((args.folder / "environment.json").read_text())
    print(
        f"step {sample['step']}, question {sample['question_id']}, sample {sample['sample']}; commit {begun['commit']}"
    )


if __name__ == "__main__":
    main()
