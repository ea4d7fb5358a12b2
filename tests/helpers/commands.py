"""Runs the project's commands in a subprocess, as a user does, or in this process, which is faster."""

import contextlib
import gc
import importlib
import io
import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The fixture two_ranks runs these commands on two ranks.
RTPO_ON_RANKS = "train_rtpo.py --questions 3 --model tiny --steps 2 --eval_questions 5 --eval_every 0"
EVAL_ON_RANKS = "eval.py --split dev --samples 2 --top_p 0.98 --limit 5"


def launcher(ranks=1):
    """Return (first words of a command, environment) that run a script. The ranks share the cores evenly."""
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    threads = max(1, (os.cpu_count() or 2) // ranks)
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
    }
    return launch, environment | {"OMP_NUM_THREADS": str(threads)}


def command(*words, ranks=1, check=True):
    """Run a script to completion. Returns the finished process; a failure shows its output."""
    launch, environment = launcher(ranks)
    done = subprocess.run(
        [*launch, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if check:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def known_to_git(*patterns):
    """Return the files that git tracks (a user's copy of a script is none); without git all but the environment and runs."""
    command = ["git", "ls-files", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split()
    if done.returncode:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
        names = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    return sorted(name for name in names if (ROOT / name).is_file() and not name.startswith((".venv/", "out/")))


def here(script, *words):
    """Run a script's main in this process: the libraries are imported already, so it takes half the time. Returns what
    it prints."""
    from common.args import parse_args

    module, words, printed = importlib.import_module(script.removesuffix(".py")), list(map(str, words)), io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.main(module.parse(words) if script == "eval.py" else parse_args(module.Args, words))
    gc.collect()  # the engine's memory
    return printed.getvalue()


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
