"""The training scripts as a user runs them, with the real engine."""

import json
import math
import os

import commands
import pytest

from common import run
from common.log import METRICS

SCRIPTS = ("train_grpo.py", "train_tspo.py", "train_gtpo.py", "train_rtpo.py")
SMALL = "--steps 2 --questions 3 --group 4 --max_turns 3 --max_turn_tokens 24 --max_context 640 --eval_questions 6 --lora_rank 8 --lr 1e-3"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "c.jsonl").write_text(
        json.dumps({"id": "1", "title": "Oakford", "text": "Oakford is a town by the river."}) + "\n"
    )
    lines = [json.dumps({"question": f"Which town is number {i}?", "answers": ["Oakford"]}) + "\n" for i in range(20)]
    (folder / "q.jsonl").write_text("".join(lines))
    return f"--task {folder}/q.jsonl --corpus {folder}/c.jsonl"


def words_for(model, files, out):
    return f"--model {model} {files} {SMALL} --out {out}".split()


def check(metrics):
    assert all(set(line) == set(METRICS) for line in metrics)
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert metrics[0]["reward/mean"] is None and metrics[0]["eval/em"] is not None and metrics[2]["eval/em"] is not None
    assert all(math.isfinite(v) for line in metrics for v in line.values() if v is not None)
    for line in metrics[1:]:
        assert line["policy/sampler_absdiff"] < 2e-5 and line["policy/sampler_maxdiff"] < 1e-4
        assert line["policy/entropy"] > 0 and line["perf/tokens_per_s"] > 0 and line["optim/skipped"] == 0


@pytest.fixture(scope="module")
def finished(qwen, files, tmp_path_factory):
    """Train the random model as a user does. Returns (run directory, finished process, metrics)."""
    out = tmp_path_factory.mktemp("finished") / "run"
    adapters = lambda: {f for f in os.listdir("/dev/shm") if "turnwise" in f}  # noqa: E731
    left = adapters()
    done = commands.command("train_grpo.py", *words_for(qwen, files, out))
    assert adapters() <= left  # no published adapter is left behind
    return out, done, commands.read_lines(out / "metrics.jsonl")


def test_a_run_writes_its_metrics(finished):
    *_, metrics = finished
    check(metrics)
    # A random model is never right, so that there is nothing to learn.
    assert [line["optim/updates"] for line in metrics] == [None, 0, 0]


def test_a_run_directory_has_arguments_environment_code_adapter_and_curve(finished):
    out, *_ = finished
    names = {p.name for p in out.iterdir()}
    assert {
        "args.json",
        "environment.json",
        "train_grpo.py",
        "common",
        "tasks",
        "tools",
        "view",
        "metrics.jsonl",
        "samples.jsonl",
        "adapter",
        "curve.png",
        "report.html",
    } <= names
    assert json.loads((out / "args.json").read_text())["group"] == 4
    assert json.loads((out / "environment.json").read_text())["packages"]["torch"]
    assert (out / "train_grpo.py").read_text() == (commands.ROOT / "train_grpo.py").read_text()
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == 8


def test_a_run_writes_every_sample(finished):
    samples = commands.read_lines(finished[0] / "samples.jsonl")
    assert len(samples) == 2 * 5 + 2 * 12  # a quarter of 20 questions is held out


def test_a_run_prints_its_result_and_a_trajectory(finished):
    for words in ("before   after step 2", "curve.png", "report.html: 0.", "turn 1", "advantage"):
        assert words in finished[1].stdout


def test_an_adapter_has_a_card_and_the_tokenizer_beside_it(finished, qwen):
    out = finished[0]
    card = (out / "adapter" / "README.md").read_text()
    for words in (
        f"base_model: {qwen}",
        "`train_grpo.py`",
        "| exact match | 0.",
        "after step 2",
        "rank 8",
        "`</search>`",
        "<think>",
    ):
        assert words in card, card
    assert "{" not in card.replace("{}", "") and (out / "adapter" / "tokenizer_config.json").exists()
    assert run.damage((out / "adapter").resolve().parent) is None  # a resumed run takes this checkpoint


def test_a_finished_run_is_not_overwritten(finished, qwen, files):
    with pytest.raises(SystemExit, match="nothing is overwritten"):
        commands.here("train_grpo.py", *words_for(qwen, files, finished[0]))


def test_all_options_of_the_loss_and_the_optimizer_run_together(tmp_path):
    more = (
        "--epochs 2 --minibatches 2 --ratio sequence --average trajectory --kl_coef 0.01 --kl k2 --no-adv_std --optim adamw_8bit "
        "--grad_checkpoint --temperature 0.8 --micro_tokens 300 --tool_workers 0 --save_every 1 --clip_high 0.28 "
        "--max_turn_tokens 40 --questions 4"
    )
    commands.here("train_grpo.py", *words_for("tiny", "--task tiny_search", tmp_path / "run"), *more.split())
    metrics = commands.read_lines(tmp_path / "run" / "metrics.jsonl")
    check(metrics)
    assert all(1 <= line["optim/updates"] <= 4 and line["optim/grad_norm"] > 0 for line in metrics[1:])
    assert metrics[2]["loss/kl_ref"] > 0


def test_the_tiny_base_starts_between_0_15_and_0_5_and_searches(tiny_run):
    metrics = commands.read_lines(tiny_run / "metrics.jsonl")
    check(metrics)
    assert 0.15 <= metrics[0]["eval/em"] <= 0.5
    assert metrics[0]["eval/tool_used"] > 0.9 and metrics[1]["rollout/tool_success"] > 0.9
    samples = commands.read_lines(tiny_run / "samples.jsonl")
    assert len({s["question_id"] for s in samples if s["kind"] == "eval"}) == 32
    trained = {s["question"] for s in samples if s["kind"] == "train"}
    assert not trained & {s["question"] for s in samples if s["kind"] == "eval"}


@pytest.fixture(scope="module")
def stripped(tmp_path_factory):
    """Train the tiny model for two steps with each script, without its earlier thinking. Returns {script: metrics}."""
    folder, found = tmp_path_factory.mktemp("stripped"), {}
    for script in SCRIPTS:
        words = f"{script} --model tiny --context strip_think --steps 2 --questions 4 --eval_questions 4 --eval_every 0"
        commands.here(*words.split(), "--lr", "2e-3", "--out", folder / script)
        found[script] = commands.read_lines(folder / script / "metrics.jsonl")
        for sample in commands.read_lines(folder / script / "samples.jsonl"):
            assert all("<think>" in turn["text"] for turn in sample["turns"])  # there is something to strip
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_trains_in_the_stripped_contexts_of_the_rollout(stripped, script):
    for line in stripped[script][1:]:
        assert 0 < line["policy/sampler_maxdiff"] < 1e-4  # so every ratio of trainer to engine is 1 within 1e-4
        assert line["policy/sampler_ratio"] == pytest.approx(1, abs=1e-4)
        assert line["policy/ratio_max"] == 1
    assert stripped[script][2]["rollout/turns"] > 1.5


def test_every_script_logs_the_same_metrics_but_for_its_credit(stripped):
    for metrics in stripped.values():
        for line in metrics:
            assert {key for key in line if key not in METRICS} == {
                key for key in line if key.startswith("credit/") and key not in METRICS
            }
            assert set(METRICS) <= set(line)
        assert len({frozenset(line) for line in metrics[1:]}) == 1  # the same keys in every step


def test_the_budget_of_a_question_holds_for_every_script(stripped):
    for metrics in stripped.values():
        assert all(0 < line["rollout/trajectories"] <= 4 * 8 for line in metrics[1:])
