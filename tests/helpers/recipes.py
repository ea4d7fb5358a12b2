"""The commands of the recipes in runs/, parsed and not run."""

import importlib
import os
import subprocess

import commands

from common.args import parse_args


def words(name, *given):
    """Return the command that a recipe runs, as a list of words."""
    done = subprocess.run(
        ["bash", f"runs/{name}.sh", *given],
        cwd=commands.ROOT,
        env=os.environ | {"TORCHRUN": "echo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def arguments(name, *given):
    """Return (ranks, the parsed arguments of the recipe's script)."""
    command = words(name, *given)
    assert command[0] == "--nproc_per_node" and command[2] == f"train_{name}.py"
    Args = importlib.import_module(f"train_{name}").Args
    return int(command[1]), parse_args(Args, command[3:])
