"""The run directory and the metrics."""

import json
import math
import re
import sys
from pathlib import Path

import commands
import pytest
import samples

import train_grpo
from common import run, show
from common.log import METRICS, Log, sample
from common.turns import Turn

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def log(tmp_path):
    return Log(train_grpo.Args(out=str(tmp_path)))


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def called(turn, status):
    turn.tool, turn.tool_status = "search", status
    return turn


def test_every_line_has_every_key_and_null_where_nothing_was_measured(log, tmp_path):
    log.mean("eval/em", 1.0)
    log.mean("eval/em", 0.0)
    log.write(0, 0)
    made, advantages = samples.groups()
    log.rollouts(made, advantages)
    log.write(1, 3)
    first, second = lines(tmp_path)
    assert set(first) == set(second) == set(METRICS)
    assert (first["eval/em"], first["reward/mean"], second["eval/em"]) == (0.5, None, None)
    assert (second["step"], second["questions"]) == (1, 3)


def test_rollout_metrics_by_hand(log):
    """Groups of 4: outcomes 1 0 1 0, 1 0 1 0, 0 0 0 0."""
    made, advantages = samples.groups()
    for trajectory in made[0].trajectories:
        trajectory.stop = "answer"
    called(made[0].trajectories[0].turns[0], "ok")
    called(made[0].trajectories[1].turns[0], "timeout")
    log.rollouts(made, advantages)
    line = log.write(1, 3)
    assert line["reward/mean"] == pytest.approx(4 / 12)
    assert line["reward/std"] == pytest.approx(1 / 3)  # 0.5, 0.5, 0
    assert (line["reward/all_wrong"], line["reward/all_right"]) == (pytest.approx(1 / 3), 0)
    assert line["rollout/stop_answer"] == pytest.approx(4 / 12)
    assert (line["rollout/tool_calls"], line["rollout/tool_used"], line["rollout/tool_success"]) == (
        pytest.approx(2 / 12),
        pytest.approx(2 / 12),
        0.5,
    )
    turns = [t for g in made for tr in g.trajectories for t in tr.turns]
    assert line["rollout/turns"] == pytest.approx(len(turns) / 12)
    assert line["rollout/action_tokens"] == pytest.approx(sum(len(t.action_ids) for t in turns) / len(turns))


def test_loss_metrics_are_averaged_over_tokens_and_not_over_micro_batches(log):
    import torch

    from common.turns import pack

    made, advantages = samples.groups()
    batch = pack(made, advantages)
    batch.weight = batch.mask / batch.mask.sum()
    entropy, logp = torch.rand(len(batch)), batch.sampler + 0.1 * batch.mask
    batch.extra = {"entropy": entropy, "logp": logp}
    for micro in batch.micro(60):
        log.losses(
            micro,
            micro.extra["logp"],
            micro.extra["entropy"],
            {"policy": (micro.weight * micro.extra["entropy"]).sum()},
        )
    log.optim({"grad_norm": 1.0, "skipped": 0.0})
    line = log.write(1, 3)
    mean = float(entropy[batch.mask].mean())
    assert line["policy/entropy"] == pytest.approx(mean, rel=1e-5)
    assert line["loss/policy"] == pytest.approx(mean, rel=1e-5)
    assert line["policy/sampler_absdiff"] == pytest.approx(0.1, rel=1e-4)
    assert line["policy/sampler_kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert line["policy/sampler_ratio"] == pytest.approx(math.exp(0.1), rel=1e-4)


@pytest.mark.parametrize("status, words", [(None, "no tool has been called"), ("error", "more than 20 %")])
def test_three_steps_without_a_working_tool_are_warned_of(log, monkeypatch, status, words):
    said = []
    monkeypatch.setattr(run, "say", said.append)
    made, advantages = samples.groups(count=1)
    for turn in (t for trajectory in made[0].trajectories for t in trajectory.turns):
        called(turn, status)
    for step in (1, 2, 3):
        assert not said
        log.rollouts(made, advantages)
        log.write(step, step)
    assert len(said) == 1 and words in said[0]


def test_samples_hold_each_turn_s_text_tool_call_output_advantage_and_the_outcome(log, tmp_path):
    made, advantages = samples.groups(count=1, size=2)
    turn = made[0].trajectories[0].turns[0]
    turn.text, turn.tool, turn.tool_input, turn.tool_output, turn.tool_status = (
        "<search> Zürich </search>",
        "search",
        "Zürich",
        "Doc 1",
        "ok",
    )
    log.samples(7, "train", made, advantages)
    first, second = commands.read_lines(tmp_path / "samples.jsonl")
    assert (first["step"], first["kind"], first["question"], first["golds"], first["sample"], second["sample"]) == (
        7,
        "train",
        "question 0",
        ["gold"],
        0,
        1,
    )
    assert first["outcome"] == made[0].trajectories[0].outcome
    saved = first["turns"][0]
    assert (saved["text"], saved["tool_input"], saved["tool_output"], saved["tool_status"]) == (
        turn.text,
        "Zürich",
        "Doc 1",
        "ok",
    )
    assert [t["advantage"] for t in first["turns"]] == advantages[0][0]
    assert "Zürich" in show.describe(first)


def test_every_metric_has_its_row_in_the_docs():
    text = (ROOT / "docs" / "metrics.md").read_text()
    listed = re.findall(r"^\| `([a-z_/0-9]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(METRICS)


def test_the_run_directory_is_named_after_script_model_task_and_seed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_mine.py"])
    args = train_grpo.Args(model="owner/Qwen2.5-3B", task="data/hard.jsonl", seed=4)
    assert str(run.directory(args)) == "out/train_mine-Qwen2.5-3B-hard-s4"


def test_a_run_that_ended_before_its_first_checkpoint_may_be_started_again_and_nothing_else(tmp_path):
    folder, args = tmp_path / "run", train_grpo.Args()
    for _ in range(2):
        assert run.refusal(args, folder) is None
        run.write_header(args, ROOT / "train_grpo.py", folder)
        assert not (folder / "metrics.jsonl").exists()
        assert "another process" in run.refusal(args, folder)  # free to start again, but not while it runs
        run.CLAIMS.pop().close()
        (folder / "metrics.jsonl").write_text("{}")
    (folder / "checkpoints" / "step-0").mkdir(parents=True)
    assert run.refusal(args, folder) is None  # half of a checkpoint that was being removed
    run.CLAIMS.pop().close()
    (folder / "checkpoints" / "step-0" / "state.pt").write_text("")
    assert "go on with it by --resume" in run.refusal(args, folder)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    assert "nothing is overwritten" in run.refusal(args, other)
    assert "cannot be written (Not a directory)" in run.refusal(args, other / "thesis.tex" / "run")


def test_the_newest_checkpoint_is_the_highest_whole_step(tmp_path):
    assert run.last_checkpoint(tmp_path) is None
    for step in (2, 10, 9):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        if step != 10:
            (tmp_path / "checkpoints" / f"step-{step}" / "state.pt").write_text("")
    assert run.last_checkpoint(tmp_path).name == "step-9"


def test_lines_are_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    """The disk takes half of what is written and then nothing; after a while there is room."""
    path, said = tmp_path / "samples.jsonl", []
    run.append(path, ["one"])
    path.write_text(path.read_text())
    monkeypatch.setattr(run, "say", said.append)
    monkeypatch.setattr(run, "STOPPING", type("Never", (), {"wait": lambda self, seconds: False})())
    written, real = [], open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def truncate(self, size):
            self.file.truncate(size)

        def writelines(self, lines):
            written.append(1)
            if len(written) < 3:
                self.file.write("ha")
                raise OSError(28, "No space left on device")
            self.file.writelines(lines)

    monkeypatch.setattr("builtins.open", lambda *a, **k: Full(real(*a, **k)))
    run.append(path, ["two", "three"])
    monkeypatch.undo()
    assert path.read_text() == "one\ntwo\nthree\n" and len(written) == 3
    assert len(said) == 1 and "No space left on device" in said[0]


def test_a_disk_that_takes_nothing_ends_the_wait_after_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE", 0.0)
    tries = []

    def full():
        tries.append(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run.patiently("the checkpoint of step 3", full)
    monkeypatch.setattr(run, "PATIENCE", 600.0)
    with pytest.raises(OSError, match="No such file"):  # this will not pass
        run.append(tmp_path / "gone" / "metrics.jsonl", ["{}"])


def test_what_is_not_finite_is_null_and_the_line_is_valid_json(log, tmp_path):
    log.mean("policy/entropy", float("nan"))
    log.peak("policy/sampler_maxdiff", float("nan"))
    log.optim({"grad_norm": float("inf"), "lr": 1e-3, "skipped": 1.0})
    log.write(1, 1)
    (line,) = lines(tmp_path)
    assert (line["policy/entropy"], line["policy/sampler_maxdiff"], line["optim/grad_norm"]) == (None, None, None)
    assert (line["optim/skipped"], line["optim/updates"], line["optim/lr"]) == (1, 1, 1e-3)
    assert (
        "NaN" not in (tmp_path / "metrics.jsonl").read_text()
        and "Infinity" not in (tmp_path / "metrics.jsonl").read_text()
    )


def test_a_machine_without_git_is_no_reason_to_stop(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run.environment()["commit"] is None


def test_the_tutorial_trajectory_is_right_in_a_group_that_also_failed():
    made, _ = samples.groups(count=2, size=2)
    items = [
        sample(step, "train", g.question, i, t, [step - 1.0] * len(t.turns))
        for step in (1, 2)
        for g in made
        for i, t in enumerate(g.trajectories)
    ]
    chosen = show.tutorial(items)
    assert chosen["step"] == 2 and chosen["outcome"] == 1.0
    assert show.tutorial([]) is None


def test_turns_print_as_plain_data():
    assert json.loads(json.dumps(Turn([1], [2], [-0.5]).__dict__))["action_ids"] == [2]
