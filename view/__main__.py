"""python -m view show|report|plan: look at a run directory, or plan the memory of a run."""

import argparse
import os
import sys
from pathlib import Path

from common import run
from view import report, show


def plan(words: list[str]) -> None:
    """Replace this process by `python train_grpo.py WORDS --dry_run`, or by the script that the first word names."""
    script = words.pop(0) if words[:1] and words[0].endswith(".py") else str(run.ROOT / "train_grpo.py")
    os.execv(sys.executable, [sys.executable, script, *words, "--dry_run"])


def look(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m view", description="Look at a run directory, or plan a run.")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("show", help="print trajectories turn by turn, coloured by advantage")
    one.add_argument("folder", type=Path, help="run directory, such as out/RUN")
    one.add_argument("--step", type=int, help="step (default: the last with samples of this kind)")
    one.add_argument("--kind", help="train, eval, or another kind in the file (default: train, else the first)")
    one.add_argument("--count", type=int, default=3, help="number of trajectories (default: 3)")
    which = one.add_mutually_exclusive_group()
    for name, words in (
        ("worst", "lowest outcome first, then lowest F1, then most negative advantage"),
        ("best", "the reverse"),
        ("near_miss", "a wrong answer although a tool output contains a gold answer"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=words)

    page = commands.add_parser("report", help="write one HTML page with curves, samples and settings")
    page.add_argument("folder", type=Path, help="run directory, such as out/RUN")
    page.add_argument("--out", type=Path, help="file to write (default: report.html in the run directory)")

    commands.add_parser(
        "plan", help="print the memory that a run will need: flags of train_grpo.py, or a script and its flags"
    )

    args, flags = parser.parse_known_args(argv)
    if args.command == "plan":
        plan(flags)
    if flags:
        parser.error(f"unknown arguments: {' '.join(flags)}")
    if args.command == "report":
        page = report.write(args.folder, args.out or args.folder / "report.html")
        with show.until_closed():
            print(page)
        return
    if args.count < 1:
        parser.error("--count must be at least 1")
    with show.until_closed():
        show.show(args.folder, args.step, args.kind, args.which, args.count)


if __name__ == "__main__":
    look()
