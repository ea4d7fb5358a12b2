"""The recipes of runs/: valid flags, the source of each value, and a plan that fits the card."""

import dataclasses
import importlib
import re
import subprocess

import commands
import pytest
import test_memory
from recipes import arguments, words

from view import estimate

RECIPES = [(name, machine) for name in ("grpo", "tspo", "gtpo", "rtpo") for machine in ("8x80gb", "1x24gb")]
SOURCE = re.compile(r"^ +(--\S+)(?: (\S+))? +# \[(paper|code|Search-R1|ours)\]", re.MULTILINE)
FLAG = re.compile(r"^ +(--\S+)", re.MULTILINE)


def text(name):
    return (commands.ROOT / "runs" / f"{name}.sh").read_text()


@pytest.mark.parametrize("name, machine", RECIPES)
def test_every_flag_of_a_recipe_is_one_of_its_script_with_the_value_written_there(name, machine):
    ranks, args = arguments(name, machine, "--seed", "7")
    assert ranks == int(machine.partition("x")[0]) and args.seed == 7
    given = words(name, machine)[3:]
    values = dict(zip(given, [*given[1:], ""]))
    assert len(values) > 25
    for flag, value in values.items():
        if not flag.startswith("--"):
            continue
        field = flag.removeprefix("--").removeprefix("no-")
        parsed = getattr(args, field)
        if isinstance(parsed, bool):
            assert parsed is not flag.startswith("--no-"), flag
        else:
            assert str(parsed) == value or float(parsed) == float(value), flag


@pytest.mark.parametrize("name", ["grpo", "tspo", "gtpo", "rtpo"])
def test_every_flag_of_a_recipe_names_its_source(name):
    flags = FLAG.findall(text(name))
    assert flags == [flag for flag, *_ in SOURCE.findall(text(name))]
    for machine in ("8x80gb", "1x24gb"):
        passed = [word for word in words(name, machine) if word.startswith("--")][1:]  # after --nproc_per_node
        assert len(passed) == len(set(passed)) and set(passed) <= set(flags)
    for mark in {source for *_, source in SOURCE.findall(text(name))}:
        assert f"[{mark}]" in text(name).partition("set -euo")[0], "a mark is explained at the top"


@pytest.mark.parametrize("name", ["grpo", "tspo", "gtpo", "rtpo"])
def test_both_learning_rates_are_shown(name):
    line = re.search(r"--lr 1e-5 .*", text(name))[0]
    assert "[ours] for LoRA" in line and "1e-6, of full fine-tuning" in line


@pytest.mark.parametrize("name", ["grpo", "tspo", "gtpo", "rtpo"])
def test_the_algorithm_s_own_arguments_are_all_given(name):
    """Require them, because a later change of a default must not change a recipe."""
    import train_grpo

    own = {f.name for f in dataclasses.fields(importlib.import_module(f"train_{name}").Args)}
    own -= {f.name for f in dataclasses.fields(train_grpo.Args)} | {"code_embedder", "trivial_golds"}
    own |= {"lr", "group", "questions", "steps", "temperature", "kl_coef", "average", "clip_low", "clip_high"}
    assert own <= {flag.removeprefix("--") for flag in FLAG.findall(text(name))}


@pytest.mark.parametrize("name, machine", RECIPES)
def test_the_plan_of_a_recipe_fits_the_card_it_is_named_for(name, machine, tmp_path):
    ranks, args = arguments(name, machine, "--seed", "7")
    found = estimate.sizes(test_memory.empty_model(test_memory.config_only(tmp_path / args.model, args.model)))
    card = int(estimate.CARDS[f"{machine[2:4]} GB"] * 2**30)
    made = estimate.make(found, args, card, world=ranks)
    assert made.problems() == []
    assert made.at_once >= 8  # enough to keep the engine busy
    assert args.grad_checkpoint and args.load_4bit == (machine == "1x24gb")


@pytest.mark.parametrize("name", ["grpo", "tspo", "gtpo", "rtpo"])
def test_a_recipe_without_a_machine_prints_its_usage(name):
    for given in ([], ["2x80gb"]):
        done = subprocess.run(
            ["bash", f"runs/{name}.sh", *given], cwd=commands.ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0 and f"bash runs/{name}.sh 8x80gb|1x24gb" in done.stderr


def test_a_flag_after_the_machine_overrides_the_recipe():
    assert arguments("tspo", "8x80gb", "--task", "q.jsonl", "--lr", "3e-5")[1].lr == 3e-5
