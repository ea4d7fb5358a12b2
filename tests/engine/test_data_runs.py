"""Training and evaluation of every named data set with the real engine, from files of its real schema."""

import json
import signal
import subprocess
import time

import commands
import hub_rows
import pytest

import tasks
import train_grpo
from common import run
from common.batch import pack
from common.policy import Policy
from common.rollout import Engine
from tasks import benchmarks, hub

SEARCHES = [name for name, source in hub.SOURCES.items() if source.kind == "search" and not source.paragraphs]
ONE_OF_A_KIND = ("hotpotqa", "nq", "gsm8k", "gpqa", "humaneval")  # the others: make sweep
TRAINED = [name for name, source in hub.SOURCES.items() if source.train]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder in place of the hub, with a corpus for the sets that have none."""
    folder = tmp_path_factory.mktemp("hub")
    hub_rows.write(folder)
    lines = [json.dumps({"id": str(i), "title": f"Town {i}", "text": f"Its mayor is Ada {i}."}) for i in range(8)]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model(qwen, tmp_path_factory):
    """Return a policy and its engine, for all data sets."""
    out = str(tmp_path_factory.mktemp("data") / "out")
    args = train_grpo.Args(model=qwen, out=out, max_context=1536, lora_rank=8, lora_alpha=16, lr=1e-3)
    policy = Policy(args, run.setup(args)[0])
    return policy, Engine(policy, args)


def args_of(name, folder, **more):
    small = dict(max_context=1536, max_turn_tokens=64, max_observation_tokens=64, max_turns=2, eval_questions=2)
    corpus = str(folder / "corpus.jsonl") if name in SEARCHES else ""
    return train_grpo.Args(model=more.pop("model"), task=name, corpus=corpus, questions=2, group=2, **small, **more)


@pytest.mark.parametrize(
    "name", [one if one in ONE_OF_A_KIND else pytest.param(one, marks=pytest.mark.sweep) for one in hub.SOURCES]
)
def test_every_data_set_is_trained_on_and_evaluated(name, folder, qwen, model):
    policy, engine = model
    args = args_of(name, folder, model=qwen, answer="boxed" if name in ("math", "math500") else "tags")
    if name in TRAINED:
        task = tasks.load(args)
        for step in (1, 2):
            engine.begin(step)
            groups = [group for phase in train_grpo.collect(engine, task, args) for group in phase]
            assert [len(group.trajectories) for group in groups] == [2, 2]
            # A random model is never right: made-up advantages give it something to learn.
            signs = [[[(-1.0) ** i] * len(t.turns) for i, t in enumerate(group.trajectories)] for group in groups]
            batch = pack(groups, signs)
            train_grpo.prepare(batch, policy, args)
            batch.weight = train_grpo.token_weights(batch, lambda x: x, args)
            logp, _ = policy.logps(batch, moments=["entropy"])
            loss, _ = train_grpo.policy_loss(logp, batch, args)
            loss.backward()
            assert policy.step()["updates"] == 1
            engine.publish(policy)
    else:
        with pytest.raises(SystemExit, match="is a benchmark without training questions. Use: python eval.py"):
            tasks.load(args)
    task = tasks.load(args, "eval")
    args.samples = 0  # as in eval.py
    items = benchmarks.evaluate(engine, task, args, task.test[:2], "base", name)
    assert len(items) == len(task.test[:2]) > 0
    for figures, lines in items:
        assert 0 <= figures["em"] <= 1 and figures["turns"] in (1, 2) and len(lines) == 1
        assert ("f1" in figures) == (hub.SOURCES[name].kind == "search")


@pytest.mark.parametrize("name", SEARCHES)
def test_a_set_that_needs_wikipedia_says_how_to_get_it(name, folder, qwen):
    args = args_of(name, folder, model=qwen)
    args.corpus = ""
    with pytest.raises(SystemExit, match="wiki-18-corpus.*python -m tools.serve") as refused:
        tasks.load(args, "eval")
    assert f"--task {name}: " in str(refused.value) and "\n" not in str(refused.value)
    args.tools = "off"
    assert tasks.load(args, "eval").tool is None


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory):
    """Train on 200 questions of hotpotqa with their paragraphs. Returns (environment with the hub, run directory)."""
    folder = tmp_path_factory.mktemp("hotpot")
    hub_rows.write_hotpot(folder / "hub")
    hub, out = {"TURNWISE_DATA": str(folder / "hub")}, folder / "run"
    words = f"--model tiny --task hotpotqa --steps 1 --questions 4 --group 4 --max_context 1024 --eval_questions 4 --out {out}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_DATA", hub["TURNWISE_DATA"])
        commands.here("train_tspo.py", *words.split())
    return hub, out


def test_hotpotqa_is_the_default_task():
    assert train_grpo.Args().task == "hotpotqa"


def test_hotpotqa_is_trained_on_without_corpus_and_server(hotpot):
    _, out = hotpot
    before, *_, after = commands.read_lines(out / "metrics.jsonl")
    assert before["eval/tool_calls"] > 0 and after["step"] == 1 and after["rollout/trajectories"] == 16
    found = [
        turn["tool_output"] for s in commands.read_lines(out / "samples.jsonl") for turn in s["turns"] if turn["tool"]
    ]
    assert found  # their content is arbitrary: the tiny model does not know these words


def test_hotpotqa_searches_its_paragraphs(hotpot, monkeypatch):
    monkeypatch.setenv("TURNWISE_DATA", hotpot[0]["TURNWISE_DATA"])
    tool = tasks.load(train_grpo.Args(model="tiny", task="hotpotqa", topk=2)).tool
    assert len(tool.documents) > 200 and tool(tool.documents[7]["title"]).startswith("Doc 1 (Title: ")


def test_a_killed_list_of_benchmarks_resumes_after_the_finished_ones(hotpot, tmp_path, monkeypatch, capsys):
    hub, out = hotpot
    words = f"--adapter {out}/adapter --task hotpotqa,tiny_search --limit 4 --out {tmp_path}/bench"
    launch, environment = commands.launcher()
    finished, next_one = (tmp_path / "bench" / name / "eval.json" for name in ("hotpotqa", "tiny_search"))
    killed = subprocess.Popen([*launch, "eval.py", *words.split()], cwd=commands.ROOT, env=environment | hub)
    while killed.poll() is None and not finished.exists():
        time.sleep(0.02)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL and not next_one.exists()  # in the middle of the second benchmark
    first = finished.read_text()
    monkeypatch.setenv("TURNWISE_DATA", hub["TURNWISE_DATA"])
    printed = commands.here("eval.py", *words.split(), "--resume")
    assert finished.read_text() == first and next_one.exists()
    rows = (tmp_path / "bench" / "benchmarks.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["hotpotqa", "tiny_search", "mean"]
    bars = capsys.readouterr().err
    assert "hotpotqa: base" not in bars and "tiny_search: base" in bars
    assert "resumes after benchmarks" in printed + bars
