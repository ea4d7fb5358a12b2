"""python -m view show|report|plan: look at runs, and at the memory that one will need."""

import argparse
import os
import sys
from pathlib import Path

from common import run
from view import report, show


def plan(words):
    """Become `python train_grpo.py WORDS --dry_run`; a first word that names a script takes its place."""
    script = words.pop(0) if words[:1] and words[0].endswith(".py") else str(run.ROOT / "train_grpo.py")
    os.execv(sys.executable, [sys.executable, script, *words, "--dry_run"])


def look(argv=None):
    """Look at a run directory, or plan the memory of a run."""
    parser = argparse.ArgumentParser(prog="python -m view", description="Look at a run directory, or plan a run.")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("show", help="print trajectories turn by turn, coloured by advantage")
    one.add_argument("folder", type=Path, help="run directory, such as out/RUN")
    one.add_argument("--step", type=int, help="step (default: the last that has samples of the kind)")
    one.add_argument("--kind", help="train, eval, or what else the file has (default: train, or what comes first)")
    one.add_argument("--count", type=int, default=3, help="trajectories (default: 3)")
    which = one.add_mutually_exclusive_group()
    for name, words in (
        ("worst", "lowest outcome first, then lowest F1, then most negative advantage"),
        ("best", "the reverse"),
        ("near_miss", "wrong in the end, though a tool output holds a gold answer"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=words)

    page = commands.add_parser("report", help="write one HTML page with curves, samples and settings")
    page.add_argument("folder", type=Path, help="run directory, such as out/RUN")
    page.add_argument("--out", type=Path, help="file to write (default: report.html in the run directory)")

    planned = commands.add_parser("plan", help="print the memory a run will need: the same as a script's --dry_run")
    planned.add_argument(
        "flags", nargs=argparse.REMAINDER, help="flags of train_grpo.py; or another script, and its flags"
    )

    args = parser.parse_args(argv)
    if args.command == "plan":
        plan(args.flags)
    if args.command == "report":
        print(report.write(args.folder, args.out or args.folder / "report.html"))
        return
    if args.count < 1:
        parser.error("--count: at least 1")
    try:
        show.show(args.folder, args.step, args.kind, args.which, args.count)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough: Python must not write to it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    look()
