"""Checkpoints: complete at any instant, and a killed run resumes bit for bit."""

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import commands
import numpy
import pytest
import torch

import train_grpo
from common import checkpoint, ending, run
from common.log import Log

# ---- the files


class Policy:
    """A trained vector that is saved as an adapter."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)

    def train(self):
        self.weight.grad = torch.randn(3)
        self.optimizer.step()

    def adapter_state(self):
        return self.weight.detach().clone()

    def save_adapter(self, path, state):
        path.mkdir()
        (path / "adapter_model.safetensors").write_text(json.dumps(state.tolist()))


def make(folder, resume=False, **changes):
    folder.mkdir(exist_ok=True)
    args = train_grpo.Args(out=str(folder), resume=resume, **({"steps": 100, "save_every": 1} | changes))
    last = run.last_checkpoint(folder) if resume else None
    policy, task, log = Policy(), SimpleNamespace(position=0, fingerprint=None), Log(args, last)
    if resume:  # the real Policy loads its adapter too
        weights = json.loads((last / "adapter" / "adapter_model.safetensors").read_text())
        policy.weight.data = torch.tensor(weights)
    saver = checkpoint.Saver(args, policy, task, log, last)
    return SimpleNamespace(args=args, policy=policy, task=task, log=log, saver=saver)


def steps(made, first, last, scores=None):
    for step in range(first, last + 1):
        made.policy.train()
        made.task.position = 10 * step
        run.append(made.log.folder / "samples.jsonl", [json.dumps({"step": step})])
        if scores:
            made.log.mean("eval/em", scores[step - first])
        made.saver.save(made.log.write(step, made.task.position))


def kept(folder):
    return sorted((p.name for p in folder.glob("checkpoints/*")), key=lambda name: int(name.split("-")[-1]))


def adapter(folder, name="adapter"):
    return json.loads((folder / name / "adapter_model.safetensors").read_text())


@pytest.fixture(autouse=True)
def no_endings(monkeypatch):
    monkeypatch.setattr(ending, "at_end", lambda action: None)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)


def test_a_resumed_run_has_the_state_of_an_uninterrupted_one(tmp_path):
    straight = make(tmp_path / "a")
    steps(straight, 0, 5)
    drawn = random.random(), numpy.random.rand(), torch.rand(1)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    killed = make(tmp_path / "b")
    steps(killed, 0, 3)
    run.append(tmp_path / "b" / "samples.jsonl", ['{"step": 4}'])  # step 4 was under way
    (tmp_path / "b" / "metrics.jsonl").open("a").write('{"step": 4, "ques')
    random.seed(9), numpy.random.seed(9), torch.manual_seed(9)
    resumed = make(tmp_path / "b", resume=True)
    assert (resumed.saver.done, resumed.task.position) == (3, 30)
    bar = resumed.saver.steps()
    assert list(bar) == list(range(4, 101))
    steps(resumed, 4, 5)
    assert torch.equal(resumed.policy.weight, straight.policy.weight)
    assert drawn == (random.random(), numpy.random.rand(), torch.rand(1))
    read = lambda name, file: [line["step"] for line in commands.read_lines(tmp_path / name / file)]  # noqa: E731
    assert read("a", "metrics.jsonl") == read("b", "metrics.jsonl") == read("b", "samples.jsonl") == [0, 1, 2, 3, 4, 5]


def test_the_last_and_the_best_are_kept_and_linked(tmp_path):
    made = make(tmp_path, keep=2, save_every=1)
    steps(made, 0, 5, scores=[0.1, 0.5, 0.5, 0.2, 0.3, 0.4])
    assert kept(tmp_path) == ["step-1", "step-4", "step-5"]
    assert os.readlink(tmp_path / "adapter") == "checkpoints/step-5/adapter"
    assert os.readlink(tmp_path / "adapter-best") == "checkpoints/step-1/adapter"
    assert adapter(tmp_path) == made.policy.weight.tolist()
    again = make(tmp_path, resume=True, keep=1)
    assert again.saver.best == (0.5, 1) and kept(tmp_path) == ["step-1", "step-5"]
    steps(make(tmp_path / "all", keep=0), 0, 3)
    assert kept(tmp_path / "all") == ["step-0", "step-1", "step-2", "step-3"]


def test_a_checkpoint_is_written_when_due_when_better_and_at_both_ends(tmp_path):
    made = make(tmp_path, keep=0, save_every=4, steps=10)
    steps(made, 0, 10, scores=[0.1, 0.1, 0.3, 0.2, 0.2, 0.2, 0.4, 0.1, 0.1, 0.1, 0.1])
    assert kept(tmp_path) == ["step-0", "step-2", "step-4", "step-6", "step-8", "step-10"]


def test_a_state_is_serialised_only_when_it_is_written_and_is_that_of_its_step(tmp_path, monkeypatch):
    """Serialising the optimizer of a 3B model takes a second: it is copied after every step, and serialised when due."""
    serialised, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *words: serialised.append(words) or save(*words))
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--model", "tiny"])
    made = make(tmp_path, keep=0, save_every=4, steps=10)
    steps(made, 0, 7)
    assert len(serialised) == 2 and kept(tmp_path) == ["step-0", "step-4"]
    moments = [each["exp_avg"].clone() for each in made.policy.optimizer.state.values()]
    made.policy.train()  # step 8 changes the optimizer's tensors in place
    made.saver.rescue()
    found = torch.load(tmp_path / "checkpoints/step-7/state.pt")["optimizer"]["state"]
    assert len(serialised) == 3 and moments and all(torch.equal(a, found[i]["exp_avg"]) for i, a in enumerate(moments))
    assert not torch.equal(moments[0], made.policy.optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_last_finished_step_is_saved_when_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--model", "tiny"])
    made = make(tmp_path, save_every=50, steps=10)
    assert "start it again as before" in made.saver.rescue()
    steps(made, 0, 7)
    weight = made.policy.weight.tolist()
    made.policy.train()  # step 8 is unfinished and dropped
    message = made.saver.rescue()
    assert kept(tmp_path) == ["step-7"] and adapter(tmp_path) == weight
    assert message.startswith("Step 7 is saved in ") and message.endswith(" train_grpo.py --model tiny --resume")
    steps(made, 8, 10)
    assert made.saver.rescue() is None  # the run is complete


def test_a_run_that_ends_while_saving_a_better_step_keeps_the_best(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "notice", lambda text: None)
    made = make(tmp_path / "run", save_every=50)
    steps(made, 0, 1, scores=[0.1, 0.5])
    steps(made, 2, 4)

    def hangs():
        raise Killed

    made.policy.adapter_state = hangs
    with pytest.raises(Killed):
        steps(made, 5, 5, scores=[0.9])
    made.saver.rescue()
    assert kept(tmp_path / "run") == ["step-1", "step-4"]
    assert os.readlink(tmp_path / "run" / "adapter-best") == "checkpoints/step-1/adapter"
    assert make(tmp_path / "run", resume=True).saver.best == (0.5, 1)


def test_a_directory_copied_with_its_links_followed_resumes(tmp_path):
    steps(make(tmp_path / "a"), 0, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / "adapter").is_symlink()
    assert make(tmp_path / "b", resume=True).saver.done == 2
    assert os.readlink(tmp_path / "b" / "adapter") == "checkpoints/step-2/adapter"


def test_other_data_are_refused(tmp_path):
    made = make(tmp_path)
    made.task.fingerprint = "a"
    steps(made, 0, 1)
    with pytest.raises(SystemExit, match="questions, corpus or Python .* are not those"):
        make(tmp_path, resume=True)


class Killed(BaseException):
    pass


def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Kill the process at the n-th file operation while step 5 replaces step 4, for every n."""
    template = tmp_path / "template"
    made = make(template)
    steps(made, 0, 4)
    before = made.policy.weight.tolist()
    made.policy.train()
    after = made.policy.weight.tolist()
    count, outcomes = 0, []
    while True:
        folder = tmp_path / f"killed-{count}"
        shutil.copytree(template, folder, symlinks=True)
        saver = make(folder, resume=True).saver
        saver.policy, left = made.policy, [count]

        def dying(function, left=left):
            def call(*args, **kwargs):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "unlink", "symlink_to", "write_bytes", "write_text"):
                patch.setattr(Path, name, dying(getattr(Path, name)))
            patch.setattr(os, "fsync", dying(os.fsync))
            patch.setattr(os, "rmdir", dying(os.rmdir))
            try:
                saver.save(saver.log.write(5, 50))
                break
            except Killed:
                pass
        last = run.last_checkpoint(folder)
        state = torch.load(last / "state.pt", weights_only=True)
        saved = json.loads((last / "adapter" / "adapter_model.safetensors").read_text())
        assert (state["step"], saved) in ((4, before), (5, after))
        again = make(folder, resume=True)  # also repairs the links
        assert again.saver.done == state["step"] and adapter(folder) == saved
        assert [line["step"] for line in commands.read_lines(folder / "metrics.jsonl")] == list(
            range(state["step"] + 1)
        )
        outcomes.append(state["step"])
        count += 1
    assert len(outcomes) > 12 and outcomes == sorted(outcomes) and set(outcomes) == {4, 5}


def test_lost_lines_of_a_file_are_noticed(tmp_path):
    steps(make(tmp_path), 0, 3)
    os.truncate(tmp_path / "samples.jsonl", 20)
    with pytest.raises(SystemExit, match="samples.jsonl is shorter than when step 3 was saved"):
        make(tmp_path, resume=True)


def test_eight_bit_optimizer_states_come_back_bit_for_bit(tmp_path):
    from common.policy import make_optimizer

    def train(parameters, optimizer, count):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        for _ in range(count):
            optimizer.step()

    generator = torch.Generator().manual_seed(0)
    first = [torch.nn.Parameter(torch.randn(64, 128, generator=generator))]
    optimizer = make_optimizer("adamw_8bit", first, 0.01)
    train(first, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    second = [torch.nn.Parameter(first[0].detach().clone())]
    again = make_optimizer("adamw_8bit", second, 0.01)
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    kept = generator.get_state()
    train(first, optimizer, 2)
    generator.set_state(kept)
    train(second, again, 2)
    assert torch.equal(*first, *second)


# ---- whole runs

SMALL = (
    "--model tiny --steps 3 --questions 3 --group 6 --max_turns 4 --eval_questions 4 --lora_rank 8 --lr 1e-3 "
    "--eval_every 2 --tool_workers 0"
)


def stopped_in_step_2(words, out, number, ranks=1):
    """Start a run, send it a signal in the middle of step 2, and wait. Returns (exit code, output, seconds it took)."""
    launch, environment = commands.launcher(ranks)
    log = open(f"{out}.err", "w+")
    started = subprocess.Popen(
        [*launch, *words, "--out", out],
        cwd=commands.ROOT,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    metrics = Path(out) / "metrics.jsonl"
    saved = lambda: number == signal.SIGTERM or run.step_of(run.last_checkpoint(Path(out))) >= 1  # noqa: E731
    while started.poll() is None and not (metrics.exists() and '"step": 1,' in metrics.read_text() and saved()):
        time.sleep(0.01)
    time.sleep(0.1)
    assert started.poll() is None, Path(log.name).read_text()[-3000:]
    at = time.monotonic()
    if number == signal.SIGKILL and ranks > 1:  # the workers have separate sessions and notice that torchrun is gone
        os.kill(started.pid, number)
    else:
        os.killpg(started.pid, number)
    code = started.wait(60)
    while run.claim(SimpleNamespace(resume=True), Path(out)):  # a worker still holds the run
        assert time.monotonic() - at < 60
        time.sleep(0.05)
    run.CLAIMS.pop().close()
    return code, Path(log.name).read_text(), time.monotonic() - at


def adapter_bytes(out):
    return hashlib.sha256((Path(out) / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def same(a, b):
    """Assert that two runs sampled, measured and learned the same, bit for bit."""
    for name in ("samples.jsonl", "metrics.jsonl"):
        left, right = (commands.read_lines(Path(out) / name) for out in (a, b))
        for line in left + right:
            for key in [key for key in line if key.startswith(("time/", "perf/"))]:
                del line[key]
        assert left == right, name
    assert adapter_bytes(a) == adapter_bytes(b)
    one, two = (torch.load(run.last_checkpoint(Path(out)) / "state.pt", weights_only=True) for out in (a, b))
    assert one["optimizer"]["param_groups"] == two["optimizer"]["param_groups"]
    states = [optimizer["state"] for optimizer in (one["optimizer"], two["optimizer"])]
    assert states[0].keys() == states[1].keys() and states[0]
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items())
    assert one["questions"] == two["questions"] == 9


def resumed(words, straight, stopped, ranks=1):
    """Resume a stopped run and assert that it ends as the straight one, with the lines that it had."""
    lines = (Path(stopped) / "metrics.jsonl").read_text().splitlines()
    if ranks == 1:
        commands.here(*words, "--out", stopped, "--resume")
    else:
        commands.command(*words, "--out", stopped, "--resume", ranks=ranks)
    after = (Path(stopped) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in after] == [0, 1, 2, 3]
    assert after[:2] == lines[:2]
    same(straight, stopped)


def test_sigterm_drops_the_step_saves_the_last_one_and_the_run_resumes_bit_for_bit(tmp_path):
    """RTPO, which has the most random states. --save_every is 50, so only the signal can have saved the step."""
    words = f"train_rtpo.py {SMALL} --save_every 50".split()
    straight, stopped = str(tmp_path / "straight"), str(tmp_path / "stopped")
    commands.here(*words, "--out", straight)
    left = set(os.listdir("/dev/shm"))
    code, text, seconds = stopped_in_step_2(words, stopped, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM and seconds < 30
    assert "SIGTERM: saving the last finished step" in text and "Traceback" not in text
    saved = int(re.search(r"Step (\d) is saved", text)[1])  # 1, or 2 on a machine that stalls
    assert f"--out {stopped} --resume" in text and saved >= 1 and kept(Path(stopped))[-1] == f"step-{saved}"
    assert set(os.listdir("/dev/shm")) <= left
    resumed(words, straight, stopped)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "script, ranks", [("train_grpo.py", 2), *((f"train_{name}.py", 1) for name in ("grpo", "tspo", "gtpo", "rtpo"))]
)
def test_a_run_killed_in_the_middle_of_step_2_resumes_bit_for_bit(tmp_path, script, ranks):
    words = f"{script} {SMALL} --save_every 1".split()
    straight, killed = str(tmp_path / "straight"), str(tmp_path / "killed")
    commands.command(*words, "--out", straight, ranks=ranks)
    stopped_in_step_2(words, killed, signal.SIGKILL, ranks)
    resumed(words, straight, killed, ranks)


# ---- a state that someone else made


def pickled_command(path):
    """Return the bytes of a pickle that would make a file."""

    class Command:
        def __reduce__(self):
            return os.system, (f"touch {path}",)

    return pickle.dumps(Command())


STATES = {
    "a list": lambda s: [],
    "empty": lambda s: {},
    "another step": lambda s: s | {"step": 77},
    "a step in words": lambda s: s | {"step": "3"},
    "no position": lambda s: s | {"questions": "many"},
    "a negative position": lambda s: s | {"questions": -5},
    "an endless position": lambda s: s | {"questions": 10**300},
    "a position that is nan": lambda s: s | {"questions": float("nan")},
    "best is a path": lambda s: s | {"best": (1.0, "../../sibling")},
    "best is a number": lambda s: s | {"best": 1.0},
    "random is a number": lambda s: s | {"random": 5},
    "random is empty": lambda s: s | {"random": [[]]},
    "random of another shape": lambda s: s | {"random": [[(3, [1, 2], None), ("MT19937", [1]), torch.zeros(3), None]]},
    "no optimizer": lambda s: s | {"optimizer": None},
    "another optimizer": lambda s: s | {"optimizer": {"state": {}, "param_groups": [{"params": [0, 1, 2]}]}},
    "no log": lambda s: s | {"log": None},
    "sizes is a list": lambda s: s | {"log": s["log"] | {"sizes": [1, 2]}},
    "a negative size": lambda s: s | {"log": s["log"] | {"sizes": {"metrics.jsonl": -1}}},
    "a size in words": lambda s: s | {"log": s["log"] | {"sizes": {"metrics.jsonl": "all"}}},
    "a size of nothing": lambda s: s | {"log": s["log"] | {"sizes": {"metrics.jsonl": None}}},
    "an endless size": lambda s: s | {"log": s["log"] | {"sizes": {"metrics.jsonl": 10**300}}},
}


@pytest.mark.parametrize("case", [*STATES, "torn", "text", "a pickle that runs a command"])
def test_a_malformed_state_is_one_sentence_and_nothing_is_cut_off(tmp_path, case):
    folder, made = tmp_path / "run", make(tmp_path / "run")
    steps(made, 1, 3)
    path = folder / "checkpoints" / "step-3" / "state.pt"
    if case in STATES:
        torch.save(STATES[case](torch.load(path)), path)
    else:
        pickle_ = pickled_command(tmp_path / "taken")
        path.write_bytes({"torn": path.read_bytes()[:500], "text": b"hello"}.get(case, pickle_))
    (folder / "checkpoints" / "step-3" / "sha256").write_text(run.sums(path.parent))  # as its maker would
    before = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    with pytest.raises(SystemExit) as stopped:
        make(folder, resume=True)
    assert "--resume: " in str(stopped.value) and "\n" not in str(stopped.value)
    assert all((folder / name).read_bytes() == content for name, content in before.items())
    assert not (tmp_path / "taken").exists()


def test_sizes_of_other_files_are_not_heeded(tmp_path):
    folder, made, other = tmp_path / "run", make(tmp_path / "run"), tmp_path / "thesis.tex"
    other.write_text("ten years of work")
    steps(made, 1, 3)
    (folder / "args.json").write_text("{}")
    path = folder / "checkpoints" / "step-3" / "state.pt"
    state = torch.load(path)
    state["log"]["sizes"] |= {"../thesis.tex": 0, str(other): 0, "args.json": 0}
    torch.save(state, path)
    (path.parent / "sha256").unlink()
    assert make(folder, resume=True).saver.done == 3
    assert other.read_text() == "ten years of work" and (folder / "args.json").read_text() == "{}"


def test_a_torn_checkpoint_gives_way_to_the_one_before(tmp_path, capsys):
    folder, made = tmp_path / "run", make(tmp_path / "run", keep=0)
    steps(made, 1, 3)
    whole = folder / "checkpoints" / "step-3" / "state.pt"
    whole.write_bytes(whole.read_bytes()[:-700])
    again = make(folder, resume=True, keep=0)
    assert again.saver.done == 2 and "left out: step-3 (state.pt changed" in capsys.readouterr().err
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    steps(again, 3, 3)
    assert run.last_checkpoint(folder).name == "step-3"
