"""The run directory and the metrics."""

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import commands
import pytest
import random_groups

import train_grpo
from common import ending, run
from common.args import parse_args
from common.log import METRICS, Log
from common.turns import Turn, sample
from view import metrics, record, show

ROOT = Path(__file__).resolve().parents[2]


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
    made, advantages = random_groups.groups()
    log.rollouts(made, advantages)
    log.write(1, 3)
    first, second = lines(tmp_path)
    assert set(first) == set(second) == set(METRICS)
    assert (first["eval/em"], first["reward/mean"], second["eval/em"]) == (0.5, None, None)
    assert (second["step"], second["questions"], second["rollout/trajectories"]) == (1, 3, 12)


def test_rollout_metrics_by_hand(log):
    """Use groups of 4 with outcomes 1 0 1 0, 1 0 1 0, 0 0 0 0."""
    made, advantages = random_groups.groups()
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


def test_a_forked_trajectory_counts_where_it_was_sampled_and_not_as_an_episode(log):
    made, _ = random_groups.groups(count=2, size=2)
    for g in made:
        for trajectory in g.trajectories:
            trajectory.turns = (trajectory.turns * 3)[:3]
    whole, forked = made
    for trajectory in forked.trajectories:
        trajectory.forked, trajectory.outcome, trajectory.stop = 2, 1.0, "length"
    whole.trajectories[0].outcome, whole.trajectories[1].outcome = 1.0, 0.0
    log.rollouts(made, [[[None] * 3] * 2, [[None, None, 0.5], [None, None, -0.5]]])
    line = log.write(1, 2)
    assert (line["reward/mean"], line["reward/all_right"], line["rollout/turns"]) == (0.5, 0, 3)
    assert (line["rollout/stop_length"], line["credit/zero_frac"], line["credit/adv_abs"]) == (0, 0, 0.5)
    tokens = lambda g, start: sum(len(t.action_ids) for tr in g.trajectories for t in tr.turns[start:])  # noqa: E731
    assert (line["rollout/trajectories"], line["rollout/sampled_tokens"]) == (4, tokens(whole, 0) + tokens(forked, 2))


def test_the_mean_reward_is_over_trajectories_and_not_over_groups(log):
    """Use RTPO's groups: 2 right trunks, and 6 wrong siblings of the first turn."""
    trunks, siblings = random_groups.groups(count=2, size=6)[0]
    trunks.trajectories = trunks.trajectories[:2]
    for group, outcome in ((trunks, 1.0), (siblings, 0.0)):
        for trajectory in group.trajectories:
            trajectory.outcome = outcome
    log.rollouts([trunks, siblings], [[[None] * len(t.turns) for t in g.trajectories] for g in (trunks, siblings)])
    line = log.write(1, 1)
    assert (line["reward/mean"], line["reward/all_right"]) == (0.25, 0.5)


def test_a_message_after_an_invalid_turn_is_no_tool_output(log):
    made, advantages = random_groups.groups(count=1, size=2)
    successful, refused = (t.turns[0] for t in made[0].trajectories)
    called(successful, "ok").observation_ids = [1] * 10
    refused.tool_status, refused.observation_ids = "invalid", [1] * 40
    log.rollouts(made, advantages)
    assert log.write(1, 1)["rollout/observation_tokens"] == 10


def test_minibatches_without_samples_do_not_change_the_means(log):
    import torch

    from common.batch import pack

    batch = pack(*random_groups.groups())
    batch.weight = batch.mask / batch.mask.sum()
    for part in (batch, batch.select([])):  # RTPO: all boundaries of a turn may be in one minibatch
        stats = {"policy": torch.tensor(0.4), "kl_ref": torch.tensor(0.2)}
        log.losses(part, part.sampler.clone(), part.sampler.clone(), stats)
        filled = float(len(part) > 0)
        log.optim({"grad_norm": 2.0 * filled, "skipped": 0.0, "updates": filled})
    line = log.write(1, 3)
    assert (line["loss/policy"], line["loss/kl_ref"], line["optim/grad_norm"]) == pytest.approx((0.4, 0.2, 2.0))
    assert line["optim/updates"] == 1


def test_a_maximum_with_an_unknown_value_is_null(log):
    for key, values in (("a", (1.0, math.nan)), ("b", (math.nan, 1.0)), ("c", (1.0, 2.0))):
        for value in values:
            log.max(f"policy/{key}", value)
    line = log.write(1, 1)
    assert [line[f"policy/{key}"] for key in "abc"] == [None, None, 2.0]


def test_a_metric_that_was_not_measured_in_a_step_keeps_its_key(log):
    log.mean("credit/revived", None)
    assert log.write(1, 1)["credit/revived"] is None
    log.mean("credit/revived", None)
    log.mean("credit/revived", 1.0)
    assert log.write(2, 1)["credit/revived"] == 1.0


def test_loss_metrics_are_averaged_over_tokens_and_not_over_micro_batches(log):
    import torch

    from common.batch import pack

    made, advantages = random_groups.groups()
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
    log.optim({"grad_norm": 1.0, "skipped": 0.0, "updates": 1.0})
    line = log.write(1, 3)
    mean = float(entropy[batch.mask].mean())
    assert line["policy/entropy"] == pytest.approx(mean, rel=1e-5)
    assert line["loss/policy"] == pytest.approx(mean, rel=1e-5)
    assert line["policy/sampler_absdiff"] == pytest.approx(0.1, rel=1e-4)
    assert line["policy/sampler_kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert line["policy/sampler_ratio"] == pytest.approx(math.exp(0.1), rel=1e-4)


def test_a_log_probability_that_is_not_finite_is_counted_and_left_out_of_the_gap(log):
    import torch

    from common.batch import pack

    batch = pack(*random_groups.groups())
    logp, zeros = batch.sampler + 0.1 * batch.mask, torch.zeros(len(batch))
    first, second = batch.mask.nonzero()[[0, 5], 0]
    batch.sampler[first], batch.sampler[second] = math.nan, -math.inf
    log.losses(batch, logp, zeros, {})
    line = log.write(1, 3)
    assert line["policy/sampler_nonfinite"] == pytest.approx(2 / int(batch.mask.sum()))
    assert line["policy/sampler_absdiff"] == pytest.approx(0.1, rel=1e-4)
    assert line["policy/sampler_maxdiff"] == pytest.approx(0.1, rel=1e-4)


def test_three_steps_of_skipped_updates_give_a_warning(log, monkeypatch):
    notices = []
    monkeypatch.setattr(run, "notice", notices.append)
    for step, skipped in enumerate([1, 1, 0, 1, 1, 1, 1], 1):
        log.optim({"grad_norm": math.nan, "skipped": skipped, "updates": 1 - skipped})
        log.write(step, step)
    assert len(notices) == 1 and "step 6: for 3 steps updates have been skipped" in notices[0]


@pytest.mark.parametrize("status, words", [(None, "no tool has been called"), ("error", "more than 20 %")])
def test_three_steps_without_a_working_tool_give_a_warning(log, monkeypatch, status, words):
    notices = []
    monkeypatch.setattr(run, "notice", notices.append)
    made, advantages = random_groups.groups(count=1)
    for turn in (t for trajectory in made[0].trajectories for t in trajectory.turns):
        called(turn, status)
    for step in (1, 2, 3):
        assert not notices
        log.rollouts(made, advantages)
        log.write(step, step)
    assert len(notices) == 1 and words in notices[0]


def test_three_steps_without_any_advantage_give_a_warning(log, monkeypatch):
    notices = []
    monkeypatch.setattr(run, "notice", notices.append)
    made, advantages = random_groups.groups(count=1)
    zero = [[[0.0] * len(adv_K) for adv_K in adv_GK] for adv_GK in advantages]
    for step, credit in enumerate([zero, zero, advantages, zero, zero, zero, zero], 1):
        log.rollouts(made, credit)
        log.write(step, step)
    assert [notice for notice in notices if "advantage" in notice] == [
        "warning: step 6: for 3 steps every advantage has been 0: nothing is learned. Easier questions or a larger --group may "
        "help; python -m view show prints the answers"
    ]


def test_a_step_is_a_line_without_a_terminal_and_a_bar_in_one(log, monkeypatch, capsys):
    log.args.steps = 2
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        for step in log.steps(0):
            log.mean("reward/mean", 0.25)
            log.write(step, step)
        shown = capsys.readouterr().err
        assert ("step 2 of 2: reward/mean 0.250; 0.0 s" in shown) == (not terminal)
        assert ("steps: 100%" in shown) == terminal and shown.count("\n") == (1 if terminal else 2), shown


def test_a_folder_named_wandb_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if p)])
    importlib.invalidate_caches()
    with pytest.raises(SystemExit, match="--wandb: not installed"):
        parse_args(train_grpo.Args, ["--model", "tiny", "--wandb"])


def test_a_run_without_a_tool_gives_no_warning(tmp_path, monkeypatch):
    notices = []
    monkeypatch.setattr(run, "notice", notices.append)
    log = Log(train_grpo.Args(out=str(tmp_path), tools="off"))
    for step in (1, 2, 3, 4):
        log.rollouts(*random_groups.groups(count=1))
        log.write(step, step)
    assert not notices


def test_samples_hold_each_turn_s_text_tool_call_output_advantage_and_the_outcome(log, tmp_path):
    made, advantages = random_groups.groups(count=1, size=2)
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


def test_every_metric_has_a_meaning_and_its_row_in_the_docs():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert sorted(metrics.MEANINGS) == sorted(METRICS)
    rows = [line for line in text.splitlines() if re.match(r"\| `[a-z_/0-9]+` \|", line)]
    assert rows == [metrics.row(key) for key in metrics.MEANINGS]


def test_the_run_directory_is_named_after_script_model_task_and_seed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_mine.py"])
    args = train_grpo.Args(model="owner/Qwen2.5-3B", task="data/hard.jsonl", seed=4)
    assert str(run.directory(args)) == "out/train_mine-Qwen2.5-3B-hard-s4"


def test_a_run_that_ended_before_its_first_checkpoint_can_be_started_again(tmp_path):
    folder, args = tmp_path / "run", train_grpo.Args()
    for _ in range(2):
        assert run.claim(args, folder) is None
        record.write_header(args, ROOT / "train_grpo.py", folder)
        assert not (folder / "metrics.jsonl").exists()
        assert "another process" in run.claim(args, folder)  # not while it runs
        run.CLAIMS.pop().close()
        (folder / "metrics.jsonl").write_text("{}")


def test_a_run_with_a_complete_checkpoint_can_only_be_resumed(tmp_path):
    folder, args = tmp_path / "run", train_grpo.Args()
    assert run.claim(args, folder) is None
    record.write_header(args, ROOT / "train_grpo.py", folder)
    run.CLAIMS.pop().close()
    (folder / "metrics.jsonl").write_text("{}")
    (folder / "checkpoints" / "step-0").mkdir(parents=True)
    assert run.claim(args, folder) is None  # a half-removed checkpoint does not count
    run.CLAIMS.pop().close()
    (folder / "checkpoints" / "step-0" / "state.pt").write_text("")
    assert "continue it with --resume" in run.claim(args, folder)


def test_a_folder_of_other_files_is_refused(tmp_path):
    other, args = tmp_path / "other", train_grpo.Args()
    other.mkdir()
    (other / "thesis.tex").write_text("")
    assert "nothing is overwritten" in run.claim(args, other)
    assert "cannot be written (Not a directory)" in run.claim(args, other / "thesis.tex" / "run")


def test_arguments_changed_on_resume_are_saved(tmp_path):
    args = train_grpo.Args(out=str(tmp_path), steps=6)
    record.write_header(args, ROOT / "train_grpo.py", tmp_path)
    (tmp_path / "checkpoints" / "step-6").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-6" / "state.pt").write_text("")
    more = train_grpo.Args(out=str(tmp_path), steps=1000, resume=True)
    record.write_header(more, ROOT / "train_grpo.py", tmp_path)
    kept = json.loads((tmp_path / "args.json").read_text())
    assert kept["steps"] == 1000 and not kept["resume"] and (tmp_path / "environment-after-step-6.json").exists()


def test_the_newest_checkpoint_is_the_highest_whole_step(tmp_path):
    assert run.last_checkpoint(tmp_path) is None
    for step in (2, 10, 9):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        if step != 10:
            (tmp_path / "checkpoints" / f"step-{step}" / "state.pt").write_text("")
    assert run.last_checkpoint(tmp_path).name == "step-9"


def test_lines_are_appended_whole_or_not_at_all(tmp_path, monkeypatch):
    """Fill the disk in the middle of a write, and make room after two attempts."""
    path, notices = tmp_path / "samples.jsonl", []
    run.append(path, ["one"])
    path.write_text(path.read_text())
    monkeypatch.setattr(run, "notice", notices.append)
    monkeypatch.setattr(ending, "STOPPING", SimpleNamespace(wait=lambda seconds: False, is_set=lambda: False))
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
    assert len(notices) == 1 and "No space left on device" in notices[0]


def test_a_full_disk_ends_the_retries_after_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE", 0.0)
    tries = []

    def full():
        tries.append(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run.retry_write("the checkpoint of step 3", full)
    monkeypatch.setattr(run, "PATIENCE", 600.0)
    with pytest.raises(OSError, match="No such file"):  # waiting does not help
        run.append(tmp_path / "gone" / "metrics.jsonl", ["{}"])


def test_non_finite_numbers_are_null_and_the_line_is_valid_json(log, tmp_path):
    log.mean("policy/entropy", float("nan"))
    log.max("policy/sampler_maxdiff", float("nan"))
    log.optim({"grad_norm": float("inf"), "lr": 1e-3, "skipped": 1.0, "updates": 0.0})
    log.write(1, 1)
    (line,) = lines(tmp_path)
    assert (line["policy/entropy"], line["policy/sampler_maxdiff"], line["optim/grad_norm"]) == (None, None, None)
    assert (line["optim/skipped"], line["optim/updates"], line["optim/lr"]) == (1, 0, 1e-3)
    assert (
        "NaN" not in (tmp_path / "metrics.jsonl").read_text()
        and "Infinity" not in (tmp_path / "metrics.jsonl").read_text()
    )


def test_without_git_the_commit_is_null(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert record.environment(ROOT, {})["commit"] is None


def test_the_tutorial_trajectory_is_right_in_a_group_that_also_failed():
    made, _ = random_groups.groups(count=2, size=2)
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


# ---- how a process ends

ENDING = """
import sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from common import ending, run
from view import show

folder = Path({folder!r})
def save():
    (folder / "saved").write_text("step 3")
    {more}
    return "Go on with: --resume"
ending.at_end(save)
def main(args):
    (folder / "up").write_text("")
    {body}
run.launch(main, None)
"""


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(tmp_path, body, more="", number=None, gone=False, again=None):
    """Run main with a body and send a signal when it is up (twice with `again` seconds). Returns (exit code, output)."""
    # The child inherits ignored signals: the tests may run in the background or under nohup.
    for each in (signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDING.format(folder=str(tmp_path), body=body, more=more)],
        cwd=ROOT,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    until((tmp_path / "up").exists)
    if gone:  # as if `tee` or the terminal were killed
        os.close(reader)
    if number:
        process.send_signal(number)
    if again:
        time.sleep(again)
        process.send_signal(number)
    try:
        code = process.wait(60)
    finally:
        process.kill()
    return code, "" if gone else os.read(reader, 100_000).decode()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("gone", [False, True])
def test_a_signal_saves_and_ends_also_with_a_blocked_main_thread_and_a_closed_output(tmp_path, number, gone):
    """Block the main thread permanently, as in a collective whose other ranks are dead."""
    code, text = ended(tmp_path, "lock = threading.Lock(); lock.acquire(); lock.acquire()", "", number, gone)
    assert code == 128 + number and (tmp_path / "saved").read_text() == "step 3"
    assert gone or text.split("\n")[1].startswith(f"{signal.Signals(number).name}: saving the last")
    assert gone or text.endswith("\nGo on with: --resume\n")


@pytest.mark.slow
def test_a_process_ends_although_the_lock_of_the_progress_bar_is_never_released(tmp_path):
    """Hold the lock, as a thread does that died while it printed to a broken pipe."""
    body = "from tqdm import tqdm; tqdm.get_lock().acquire(); time.sleep(600)"
    assert ended(tmp_path, body, "", signal.SIGINT)[0] == 128 + signal.SIGINT and (tmp_path / "saved").exists()


@pytest.mark.slow
def test_an_error_saves_too_and_exits_with_1(tmp_path):
    code, text = ended(tmp_path, "raise ValueError('no index')")
    assert code == 1 and (tmp_path / "saved").exists()
    assert text.endswith("ValueError: no index\n\nGo on with: --resume\n") and "Traceback" in text


@pytest.mark.slow
@pytest.mark.parametrize("many", ["torch.cuda.is_initialized = lambda: True", "os.environ['WORLD_SIZE'] = '2'"])
def test_a_run_on_a_gpu_or_on_several_ranks_ends_without_the_interpreter_s_shutdown(tmp_path, many):
    """The shutdown would run the atexit handler. NCCL's may hang; gloo's aborts when rank 0 has ended first."""
    body = f"""import atexit, os, torch
    atexit.register(lambda: (folder / "shut down").write_text(""))
    {many}"""
    code, text = ended(tmp_path, body)
    assert code == 0 and (tmp_path / "saved").exists() and not (tmp_path / "shut down").exists()
    assert text.strip() == "Go on with: --resume"


@pytest.mark.slow
@pytest.mark.parametrize(
    "all_reduce, reason",
    [
        ("time.sleep(600)", "(No answer in 1 s; TURNWISE_FIRST_SECONDS allows more.)"),
        ("raise_(RuntimeError('NCCL error: unhandled system error'))", "(NCCL error: unhandled system error)"),
        ("box.zero_()", "(The sum over 1 ranks is 0.)"),
    ],
)
def test_ranks_that_cannot_exchange_data_end_at_once_with_advice(tmp_path, all_reduce, reason):
    body = f"""import torch, torch.distributed as dist
    def raise_(error):
        raise error
    dist.all_reduce = lambda box: {all_reduce}
    run.FIRST_SECONDS = 1
    run.first_collective(torch.device("cpu"))"""
    code, text = ended(tmp_path, body)
    assert code == 1 and reason in text and "Rank 0: the ranks cannot exchange data over gloo" in text
    assert "--ipc=host" in text and "--shm-size" in text


def test_a_resolved_flag_is_used_and_the_given_one_is_kept(tmp_path, monkeypatch):
    """args.json has --sleep auto, so that --resume on another card resolves it again; environment.json has the value."""
    monkeypatch.setattr(run, "RESOLVED", {})
    args = train_grpo.Args(task="tiny_search", out=str(tmp_path / "run"))
    used = run.resolve(args, sleep="kv")
    assert (args.sleep, used.sleep) == ("auto", "kv")
    (tmp_path / "run").mkdir()
    record.write_header(used, Path(train_grpo.__file__), tmp_path / "run")
    assert json.loads((tmp_path / "run/args.json").read_text())["sleep"] == "auto"
    assert json.loads((tmp_path / "run/environment.json").read_text())["resolved"] == {"sleep": "kv"}


@pytest.mark.slow
@pytest.mark.parametrize("stop, code, said", [("'--group 1: no'", 1, "--group 1: no\n"), ("3", 3, ""), ("None", 0, "")])
def test_an_exit_keeps_its_code_and_has_no_traceback(tmp_path, stop, code, said):
    found, text = ended(tmp_path, f"raise SystemExit({stop})")
    assert (found, text.split()) == (code, f"{said} Go on with: --resume".split())


@pytest.mark.slow
def test_a_second_signal_ends_a_save_that_hangs(tmp_path):
    code, text = ended(tmp_path, "time.sleep(600)", "time.sleep(600)", signal.SIGINT, again=6)
    assert code == 128 + signal.SIGINT and "Repeat after 3 s" in text and "Go on with" not in text


@pytest.mark.slow
def test_a_signal_to_a_process_that_a_tool_forked_ends_only_that_process(tmp_path):
    body = (
        "import multiprocessing as m; p = m.get_context('fork').Process(target=time.sleep, args=(600,)); p.start(); time.sleep(0.3);"
        " p.terminate(); p.join(30); (folder / 'child').write_text(str(p.exitcode)); time.sleep(1.5); raise SystemExit(5)"
    )
    assert ended(tmp_path, body)[0] == 5 and (tmp_path / "child").read_text() == str(-signal.SIGTERM)


@pytest.mark.slow
def test_a_rank_whose_torchrun_is_gone_saves_completely_and_ends(tmp_path):
    """Kill the parent of a rank whose save takes longer than several checks of the parent."""
    child = ENDING.format(
        folder=str(tmp_path), body="time.sleep(600)", more="time.sleep(5); (folder / 'whole').touch()"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    until((tmp_path / "up").exists)
    process.kill(), process.wait()
    until((tmp_path / "whole").exists)
