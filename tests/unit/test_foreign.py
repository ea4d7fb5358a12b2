"""Run directories that someone else made, or a fault damaged: one sentence each, and nothing outside is touched."""

import dataclasses
import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import eval as evaluation
import train_grpo
from common import cache, models, run
from common.args import parse_args
from tasks import loading
from tools import search
from view import tables

ROOT = Path(__file__).resolve().parents[2]
DEEP = "[" * 100_000


def listing(folder):
    """Return {path: (mode, content)} of everything in a folder."""
    return {
        str(p): (p.lstat().st_mode, hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else None)
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture
def sibling(tmp_path):
    """Return a folder beside the run that must not change."""
    folder = tmp_path / "sibling"
    (folder / "inner").mkdir(parents=True)
    (folder / "thesis.tex").write_text("ten years of work\n")
    (folder / "inner" / "state.pt").write_text("")
    before = listing(folder)
    yield folder
    assert listing(folder) == before


@pytest.fixture
def begun(tmp_path):
    """Return a run directory with two whole checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    args = train_grpo.Args(model="tiny", task="tiny_search", steps=9)
    (folder / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    (folder / "lock").touch()
    for step in (2, 4):
        add_checkpoint(folder, step)
    return folder


def add_checkpoint(folder, step):
    path = folder / "checkpoints" / f"step-{step}"
    (path / "adapter").mkdir(parents=True)
    (path / "adapter" / "adapter_config.json").write_text("{}")
    (path / "adapter" / "adapter_model.safetensors").write_text(f"weights {step}")
    (path / "state.pt").write_text(f"state {step}")
    (path / "sha256").write_text(run.sums(path))


def refused(*words, args=train_grpo.Args):
    with pytest.raises(SystemExit) as stopped:
        parse_args(args, [str(word) for word in words])
    text = str(stopped.value)
    assert "\n" not in text and 10 < len(text) < 500, text
    return text


# ---- args.json

SHAPES = {
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "empty": "",
    "cut": '{"model": "ti',
    "deep": DEEP,
    "not UTF-8": b"\xff\xfe{}",
    "a number of 5,000 digits": '{"steps": ' + "9" * 5000 + "}",
}
VALUES = {
    "steps": ["12", 1.5, True, None, [], {}, 10**300],
    "lr": ["1e-5", float("nan"), float("inf"), True, None, [1]],
    "model": [3, None, ["tiny"], "ti\0ny", "ti\nny", "\ud800"],
    "tensorboard": [1, "yes", None],
    "average": ["other", 1, ["token"], None],
    "corpus": [{"a": 1}, 0],
    "temperature": [10**300, "hot"],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_argument_file_of_another_shape_is_one_sentence(begun, sibling, shape):
    text = SHAPES[shape]
    (begun / "args.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "args.json cannot be used" in refused("--out", begun, "--resume")
    with pytest.raises(SystemExit, match=r"args.json cannot be used"):
        evaluation.parse(["--adapter", str(begun)])


@pytest.mark.parametrize("name, value", [(name, value) for name, values in VALUES.items() for value in values])
def test_a_value_of_another_kind_is_one_sentence_that_names_its_flag(begun, name, value):
    given = json.loads((begun / "args.json").read_text()) | {name: value}
    (begun / "args.json").write_text(json.dumps(given))
    assert f"no value for --{name}" in refused("--out", begun, "--resume")


def test_an_argument_file_that_cannot_be_read_is_not_called_missing(begun):
    (begun / "args.json").unlink()
    (begun / "args.json").mkdir()
    assert "Is a directory" in refused("--out", begun, "--resume")
    (begun / "args.json").rmdir()
    assert "no run in" in refused("--out", begun, "--resume")


def test_a_folder_turns_no_sandbox_off(begun, capsys):
    given = json.loads((begun / "args.json").read_text()) | {"unsafe_python": True, "task": "tiny_math"}
    (begun / "args.json").write_text(json.dumps(given))
    assert "started with --unsafe_python. Give it again" in refused("--out", begun, "--resume")
    assert parse_args(train_grpo.Args, ["--out", str(begun), "--resume", "--unsafe_python"]).unsafe_python
    assert not evaluation.parse(["--adapter", str(begun)]).unsafe_python
    assert "not --unsafe_python True" in capsys.readouterr().err
    assert evaluation.parse(["--adapter", str(begun), "--unsafe_python"]).unsafe_python


# ---- checkpoints


@pytest.mark.parametrize("name", ["state.pt", "adapter/adapter_model.safetensors", "sha256"])
@pytest.mark.parametrize("fault", ["cut", "missing", "a folder"])
def test_the_newest_whole_checkpoint_is_taken_and_the_torn_one_is_named(begun, sibling, capsys, name, fault):
    path = begun / "checkpoints" / "step-4" / name
    content = path.read_bytes()
    path.unlink()
    if fault == "cut":
        path.write_bytes(content[:3])
    elif fault == "a folder":
        path.mkdir()
    if fault == "missing" and name == "sha256":  # as earlier versions wrote it
        assert run.last_checkpoint(begun).name == "step-4"
        return
    assert run.last_checkpoint(begun).name == "step-2"
    if (name, fault) != ("state.pt", "missing"):  # without it, it never was a checkpoint
        assert "step-2 is used, and left out: step-4 (" in capsys.readouterr().err


def test_a_run_without_a_whole_checkpoint_is_not_begun_again(begun):
    for step in (2, 4):
        (begun / "checkpoints" / f"step-{step}" / "state.pt").write_text("torn")
    (begun / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="has no whole checkpoint: step-4 .*; step-2 "):
        run.last_checkpoint(begun)
    assert (begun / "metrics.jsonl").read_text() == "{}\n"


def test_folders_with_other_names_are_no_checkpoints(begun):
    for name in ("step-", "step-x", "step--7", "step-1e9", "step-9.5", "step-9 "):
        (begun / "checkpoints" / name).mkdir()
        (begun / "checkpoints" / name / "state.pt").touch()
    assert run.last_checkpoint(begun).name == "step-4"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "args.json.new", "checkpoints", "common", "lock", "train_grpo.py", "adapter/x", "pipe"]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(tmp_path, sibling, name, resume):
    folder = tmp_path / "made"
    (folder / name).parent.mkdir(parents=True)
    if not (folder / "lock").exists() and name != "lock":
        (folder / "lock").touch()
    if name == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(sibling / ("inner" if name in ("checkpoints", "common") else "thesis.tex"))
    wrong = run.claim(train_grpo.Args(resume=resume), folder)
    assert "leads out of the run directory or is no plain file" in wrong and "\n" not in wrong


def test_a_folder_reached_through_a_link_is_a_run_directory(tmp_path, begun):
    (begun / "adapter").symlink_to("checkpoints/step-4/adapter")
    (tmp_path / "link").symlink_to(begun)
    assert run.claim(train_grpo.Args(resume=True), tmp_path / "link") is None
    run.CLAIMS.pop().close()


# ---- refusals come before torch


@pytest.mark.parametrize(
    "words, code, said",
    [
        ([], 1, "exists, and nothing is overwritten: continue it with --resume"),
        (["--resume", "--steps", "4"], 0, "all 4 steps are done"),
    ],
)
def test_a_taken_and_a_complete_run_are_answered_before_torch_is_imported(begun, words, code, said):
    (begun / "adapter").symlink_to("checkpoints/step-4/adapter")
    program = (
        "import runpy, sys, atexit, os\n"
        f"sys.argv = ['train_grpo.py', '--model', 'tiny', '--out', {str(begun)!r}, *{words!r}]\n"
        "real = os._exit\n"
        "os._exit = lambda code: (print('HEAVY', {'torch', 'vllm'} & set(sys.modules), flush=True), real(code))\n"
        "runpy.run_path('train_grpo.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "HEAVY set()" in done.stdout) == (code, True), done.stdout + done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


# ---- eval.py takes the run directory


def test_a_run_directory_is_evaluated_by_its_newest_adapter(begun, capsys):
    add_checkpoint(begun, 11)
    (begun / "adapter").symlink_to("checkpoints/step-11/adapter")
    args = evaluation.parse(["--adapter", str(begun)])
    assert args.adapter == str(begun / "adapter") and args.task == "tiny_search" and args.out.endswith("-run")
    (begun / "checkpoints" / "step-11" / "state.pt").write_text("torn")
    assert evaluation.parse(["--adapter", str(begun)]).adapter == str(begun / "checkpoints" / "step-4" / "adapter")


def test_a_run_directory_without_a_checkpoint_has_no_adapter(tmp_path):
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(SystemExit, match="this run has no checkpoint yet"):
        evaluation.parse(["--adapter", str(tmp_path)])


# ---- a fault of the disk is not taken for a fault of a flag


def corpus_of(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"id": "1", "title": "Paris", "text": "a city"}\n')
    return path


CACHES = {
    "a file": lambda path: path.write_text(""),
    "in a file": lambda path: path.parent.write_text(""),
    "its folder is a file": lambda path: (path.mkdir(parents=True), (path / "bm25").write_text("")),
    "a broken link": lambda path: (path.parent.mkdir(), path.symlink_to("/nowhere/at/all")),
    "the lock is a folder": lambda path: (path / "bm25" / "x.lock").mkdir(parents=True),
}


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("given", [True, False])
def test_a_cache_that_cannot_be_written_is_not_called_a_corpus(tmp_path, monkeypatch, case, given):
    path = tmp_path / "home" / "cache"
    if case == "a file":
        path.parent.mkdir()
    CACHES[case](path)
    monkeypatch.setenv("TURNWISE_CACHE", str(path))
    if case == "the lock is a folder":
        monkeypatch.setattr(search, "fingerprint", lambda documents: "x")
    words = ["--corpus", str(corpus_of(tmp_path)), "--task", str(tmp_path / "q.jsonl")] if given else []
    (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "q {i}?", "answers": ["Paris"]}}\n' for i in range(1000)))
    args = parse_args(train_grpo.Args, ["--model", "tiny", *words])
    with pytest.raises(SystemExit, match="derived files cannot be written there .*TURNWISE_CACHE") as stopped:
        loading.load(args)
    assert "--corpus" not in str(stopped.value) and "\n" not in str(stopped.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_fills_while_an_index_is_made_is_named(tmp_path, monkeypatch, number):
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit, match=os.strerror(number)), cache.locked(cache.cache_dir() / "made"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(ConnectionError), cache.locked(cache.cache_dir() / "made"):  # another's fault passes
        raise ConnectionError("no network")


def test_without_a_home_the_variable_is_named(monkeypatch):
    monkeypatch.delenv("TURNWISE_CACHE", raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    with pytest.raises(SystemExit, match="home directory.*TURNWISE_CACHE"):
        cache.cache_dir()


def test_a_missing_corpus_is_still_named(tmp_path):
    (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "q {i}?", "answers": ["Paris"]}}\n' for i in range(1000)))
    words = ["--model", "tiny", "--task", str(tmp_path / "q.jsonl"), "--corpus", str(tmp_path / "none.jsonl")]
    with pytest.raises(SystemExit, match="--corpus.*none.jsonl"):
        loading.load(parse_args(train_grpo.Args, words))


@pytest.mark.parametrize("load", [models.load_tokenizer, models.empty_model])
def test_a_read_only_cache_of_the_hub_is_not_called_a_wrong_name(monkeypatch, load):
    import transformers

    def fail(path):
        raise PermissionError(errno.EROFS, "Read-only file system", "/home/me/.cache/huggingface/hub/x")

    for loader in (transformers.AutoTokenizer, transformers.AutoConfig):
        monkeypatch.setattr(loader, "from_pretrained", fail)
    with pytest.raises(SystemExit, match="^/home/me/.*: Read-only file system. HF_HOME") as stopped:
        load("owner/name")
    assert "--model" not in str(stopped.value)


def test_an_append_that_is_given_up_leaves_nothing_behind(tmp_path, monkeypatch):
    """The limit of the file's size is a real full disk: 1,000 bytes fit, the rest does not."""
    path = tmp_path / "samples.jsonl"
    run.append(path, ["whole"])
    monkeypatch.setattr(run, "PATIENCE", 0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run.append(path, ["x" * 300] * 50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "whole\n"
    run.append(path, ["more"])
    assert path.read_text() == "whole\nmore\n"


EVALUATIONS = ["[]", "{}", "", '{"figures": 3}', '{"figures": {}}', '{"figures": {"base": {"em": 1}}}', DEEP]


@pytest.mark.parametrize("text", EVALUATIONS, ids=range(len(EVALUATIONS)))
def test_a_malformed_result_of_a_benchmark_is_one_sentence(tmp_path, text):
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(SystemExit, match="eval.json is no result of eval.py") as stopped:
        tables.overview(tmp_path, {"nq": tmp_path})
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_the_adapter_s_weights_have_the_mode_of_other_files(tmp_path, umask, mode):
    import torch
    from safetensors.torch import save_file

    from common.policy import Policy

    def save_pretrained(path, **more):
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        save_file({"a": torch.zeros(1)}, path / "adapter_model.safetensors")

    before = os.umask(umask)
    try:
        Policy.save_adapter(
            SimpleNamespace(model=SimpleNamespace(save_pretrained=save_pretrained)), tmp_path / "adapter"
        )
    finally:
        os.umask(before)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_mode & 0o777 == mode
