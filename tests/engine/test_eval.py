"""eval.py: its figures by hand, the source of its arguments, and the same figures as in training."""

import json
import random
from pathlib import Path

import commands
import pytest

import eval as evaluation
from common.turns import Trajectory, Turn
from tasks import benchmarks, stats
from view import tables

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_stays_small():
    assert len((ROOT / "eval.py").read_text().splitlines()) <= 200


# ---- figures


@pytest.mark.parametrize(
    "right, k, chance", [(1, 1, 1 / 4), (1, 2, 1 / 2), (1, 4, 1), (2, 1, 1 / 2), (2, 2, 5 / 6), (2, 4, 1), (0, 4, 0)]
)
def test_pass_at_k_of_four_samples_by_hand(right, k, chance):
    assert stats.pass_at(k, 4, right) == pytest.approx(chance)


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_one():
    from itertools import combinations

    samples = [1, 0, 0, 1, 0, 0, 0]
    for k in range(1, 8):
        subsets = list(combinations(samples, k))
        assert stats.pass_at(k, 7, 2) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_k_doubles_up_to_the_number_of_samples():
    assert [stats.budgets(n) for n in (0, 1, 2, 4, 6)] == [[], [1], [1, 2], [1, 2, 4], [1, 2, 4, 6]]


def test_the_interval_of_a_constant_is_that_constant():
    summary = stats.summarise([{"em": 0.25, "turns": 3}] * 50, seed=1)
    assert summary == {"em": dict(mean=0.25, low=0.25, high=0.25), "turns": dict(mean=3.0, low=3.0, high=3.0)}


def test_the_interval_of_a_share_is_that_of_the_binomial_distribution_and_repeats_itself():
    figures = [{"em": float(i < 60)} for i in range(200)]
    summary = stats.summarise(figures, seed=1)["em"]
    assert summary["mean"] == pytest.approx(0.3) and summary["low"] < 0.3 < summary["high"]
    spread = 1.96 * (0.3 * 0.7 / 200) ** 0.5
    assert (summary["low"], summary["high"]) == (
        pytest.approx(0.3 - spread, abs=0.01),
        pytest.approx(0.3 + spread, abs=0.01),
    )
    assert stats.summarise(figures, seed=1)["em"] == summary


def test_a_difference_is_paired_by_question():
    """Compare two systems that vary a lot over the questions, but together: only the paired difference is sharp."""
    rng = random.Random(1)
    base = [{"f1": rng.random()} for _ in range(100)]
    adapter = [{"f1": one["f1"] + 0.0625} for one in base]
    summaries = stats.compare({"base": base, "adapter": adapter}, seed=1)
    assert list(summaries) == ["base", "adapter", "adapter - base"]
    assert summaries["base"]["f1"]["high"] > summaries["adapter"]["f1"]["low"]
    assert list(summaries["adapter - base"]["f1"].values()) == pytest.approx([0.0625] * 3)
    assert list(stats.compare({"base": base}, seed=1)) == ["base"]


def test_the_figures_of_a_trajectory():
    turns = [Turn([1], [2, 3], [0, 0], tool_status=status) for status in ("ok", "timeout", "invalid", None)]
    figures = benchmarks.measure(Trajectory(turns, outcome=1.0, stop="answer", info={"f1": 1.0}))
    assert (figures["turns"], figures["tool_calls"], figures["tool_used"], figures["tokens"]) == (4, 2, 1, 8)
    assert (figures["em"], figures["f1"]) == (1, 1)
    assert {k for k, v in figures.items() if k.startswith("stop_") and v} == {"stop_answer"}


def test_the_table_has_a_row_for_each_figure_and_for_endings_that_occurred():
    figures = [{"em": 1.0, "tool_calls": 2, "stop_answer": 1.0, "stop_length": 0.0}] * 3
    lines = tables.table(stats.compare({"base": figures, "adapter": figures}, 1)).splitlines()
    assert lines[:2] == ["| | base | adapter | adapter - base |", "|---|---|---|---|"]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| exact match", "| tool calls", "| stop answer"]
    assert lines[3].split(" | ")[1:] == ["2.000 [2.000, 2.000]", "2.000 [2.000, 2.000]", "0.000 [0.000, 0.000] |"]


# ---- the command line


def test_help_is_quick_and_shows_no_flag_that_only_training_needs():
    done = commands.command("-X", "importtime", "eval.py", "--help")
    assert "--samples" in done.stdout and "--adapter" in done.stdout
    assert not any(f"--{name}" in done.stdout for name in ("lr", "optim", "group", "lora_rank", "sleep", "steps"))
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "vllm", "transformers", "peft"}


def test_shared_fields_have_the_defaults_of_training():
    import dataclasses

    import train_grpo

    ours = {f.name: f.default for f in dataclasses.fields(evaluation.Args)}
    theirs = {f.name: f.default for f in dataclasses.fields(train_grpo.Args)}
    assert {k: v for k, v in ours.items() if k in theirs} == {k: v for k, v in theirs.items() if k in ours}
    assert set(ours) - set(theirs) == {"systems", "split", "samples", "decoding", "top_p"}
    source = (ROOT / "eval.py").read_text() + (ROOT / "common" / "args.py").read_text()
    for name in ours:
        place = source.index(f"    {name}: ")
        assert source[place:].splitlines()[1].strip().startswith('"""'), name


@pytest.fixture
def trained(tmp_path):
    """Return the directory of a run with two checkpoints, as training leaves it."""
    folder = tmp_path / "grpo-s1"
    for step in (5, 10):
        adapter = folder / "checkpoints" / f"step-{step}" / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text("{}")
    (folder / "adapter").symlink_to(folder / "checkpoints" / "step-10" / "adapter")
    options = dict(
        model="tiny", task="q.jsonl", corpus="c.jsonl", retriever="", topk=2, template="off", max_turns=4, seed=7
    )
    options |= dict(lr=1e-3, steps=20, group=8, limit=30, adapter="out/warm/adapter", out=str(folder), load_4bit=True)
    (folder / "args.json").write_text(json.dumps(options))
    return folder


def test_missing_flags_come_from_the_run_of_the_adapter(trained):
    args = evaluation.parse(["--adapter", f"{trained}/adapter"])
    assert (args.model, args.task, args.corpus, args.topk, args.max_turns, args.seed) == (
        "tiny",
        "q.jsonl",
        "c.jsonl",
        2,
        4,
        7,
    )
    assert (args.template, args.load_4bit, args.systems, args.limit) == ("off", True, "both", 0)
    assert (args.adapter, args.out) == (f"{trained}/adapter", "out/eval-tiny-q-test-grpo-s1")


def test_given_flags_override_those_of_the_run(trained):
    args = evaluation.parse(
        ["--topk", "5", f"--adapter={trained}/adapter", "--no-load_4bit", "--split=dev", "--limit=3"]
    )
    assert (args.topk, args.load_4bit, args.max_turns, args.limit) == (5, False, 4, 3)
    assert args.out == "out/eval-tiny-q-dev-grpo-s1"


def test_a_retriever_replaces_the_corpus_of_the_run(trained):
    args = evaluation.parse(["--adapter", f"{trained}/adapter", "--retriever", "http://x/retrieve"])
    assert (args.corpus, args.retriever) == ("", "http://x/retrieve")


def test_the_corpus_of_the_run_is_only_for_its_own_questions(trained, capsys):
    for task in ("hotpotqa", "gsm8k", "q.jsonl,gsm8k"):
        args = evaluation.parse(["--adapter", f"{trained}/adapter", "--task", task])
        assert (args.task, args.corpus, args.topk) == (task, "", 2)
        assert capsys.readouterr().err.endswith("; not --corpus c.jsonl\n")
        args = evaluation.parse(["--adapter", f"{trained}/adapter", "--task", task, "--corpus", "d.jsonl"])
        assert args.corpus == "d.jsonl"
    assert evaluation.parse(["--adapter", f"{trained}/adapter", "--task=q.jsonl"]).corpus == "c.jsonl"


def test_resume_finds_the_folder_of_the_same_arguments(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--adapter", f"{trained}/adapter", "--task", "hotpotqa,sub/test.jsonl", "--samples", "4"]
    begun = evaluation.parse(words)
    assert begun.out == "out/eval-tiny-hotpotqa-test-test-grpo-s1"
    with pytest.raises(SystemExit, match=f"--resume: no run in {begun.out}"):
        evaluation.parse([*words, "--resume"])
    Path(begun.out).mkdir(parents=True)
    (Path(begun.out) / "args.json").write_text(json.dumps(vars(begun)))
    for again in ([*words, "--resume"], ["--resume", "--out", begun.out]):
        assert vars(evaluation.parse(again)) == vars(begun) | {"resume": True}
    with pytest.raises(SystemExit, match="--samples 4 -> 2. Leave these out"):
        evaluation.parse([*words, "--resume", "--samples", "2"])


def test_relative_paths_checkpoints_and_symlinks_find_their_run(trained, tmp_path, monkeypatch):
    args = evaluation.parse(["--adapter", f"{trained}/checkpoints/step-5/adapter"])
    assert (args.topk, args.out) == (2, "out/eval-tiny-q-test-grpo-s1-step-5")
    (tmp_path / "best").symlink_to(trained / "checkpoints" / "step-5" / "adapter")
    assert evaluation.parse(["--adapter", f"{tmp_path}/best"]).topk == 2
    monkeypatch.chdir(trained)
    assert evaluation.parse(["--adapter", "adapter"]).topk == 2


def test_an_adapter_outside_a_run_and_a_base_alone_take_the_preset(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    args = evaluation.parse(["--model", "tiny", "--adapter", f"{tmp_path}/mine"])
    assert (args.task, args.topk, args.systems) == ("tiny_search", 1, "both")
    assert args.out == "out/eval-tiny-tiny_search-test-mine"
    args = evaluation.parse(["--model", "tiny"])
    assert (args.systems, args.out) == ("base", "out/eval-tiny-tiny_search-test")


@pytest.mark.parametrize(
    "words, message",
    [
        ("--samples -1", "--samples -1"),
        ("--systems adapter", "needs --adapter"),
        ("--adapter nowhere", "--adapter nowhere: no adapter_config.json"),
        ("--limit -1", "--limit -1"),
        ("--temperature 0", "--temperature 0"),
    ],
)
def test_bad_arguments_are_refused_at_once(words, message):
    with pytest.raises(SystemExit, match=message) as stopped:
        evaluation.parse(["--model", "tiny", *words.split()])
    assert "\n" not in str(stopped.value)


# ---- evaluations of the tiny base, which has right and wrong answers, searches, and an update that changes them


def texts(lines, **wanted):
    """Return {(question, sample): text of each turn} of the lines of samples.jsonl with the wanted values."""
    chosen = [line for line in lines if all(line[k] == v for k, v in wanted.items())]
    return {(s["question_id"], s["sample"]): [t["text"] for t in s["turns"]] for s in chosen}


def words_for(run, out):
    return f"--adapter {run}/adapter --split dev --samples 2 --top_p 0.98 --out {out}".split()


@pytest.fixture(scope="module")
def evaluated(tiny_run, tmp_path_factory):
    """Evaluate the adapter of tiny_run. Returns (folder, eval.json, samples, printed text)."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    printed = commands.here("eval.py", *words_for(tiny_run, folder))
    whole = json.loads((folder / "eval.json").read_text())
    return folder, whole, commands.read_lines(folder / "samples.jsonl"), printed


def test_an_evaluation_has_the_figures_and_texts_of_training(evaluated, tiny_run):
    before, *_, after = commands.read_lines(tiny_run / "metrics.jsonl")
    theirs = commands.read_lines(tiny_run / "samples.jsonl")
    _, whole, ours, _ = evaluated
    for system, line, step in (("base", before, 0), ("adapter", after, 2)):
        for key in ("em", "turns", "tool_calls", "tool_used"):
            assert whole["figures"][system][key]["mean"] == line[f"eval/{key}"], (system, key)
        assert whole["figures"][system]["f1"]["mean"] == pytest.approx(line["eval/f1"], abs=1e-12)
        greedy = texts(ours, kind=f"{system} greedy")
        assert len(greedy) == 32 and greedy == texts(theirs, kind="eval", step=step)
    assert texts(ours, kind="base greedy") != texts(ours, kind="adapter greedy")


def test_neither_a_second_rank_nor_a_limit_changes_an_evaluation(evaluated, two_ranks):
    """Evaluate the first five questions on two ranks: three on one, two on the other."""
    _, whole, samples, _ = evaluated
    few = json.loads((two_ranks / "eval" / "eval.json").read_text())
    assert few["questions"] == whole["questions"][:5]
    others = commands.read_lines(two_ranks / "eval" / "samples.jsonl")
    ids = {sample["question_id"] for sample in others}
    assert len(ids) == 5 and others == [sample for sample in samples if sample["question_id"] in ids]
    assert (two_ranks / "eval" / "eval.md").read_text() in (two_ranks / "printed.txt").read_text()


def test_two_samples_of_a_question_differ_and_give_pass_at_k(evaluated):
    _, whole, lines, _ = evaluated
    for system in ("base", "adapter"):
        sampled = texts(lines, kind=f"{system} sampled")
        assert len(sampled) == 64 and sum(sampled[q, 0] != sampled[q, 1] for q, _ in sampled) > 16
    assert {"pass@1", "pass@2"} <= set(whole["figures"]["adapter - base"]) and len(whole["questions"]) == 32
    assert whole["figures"]["base"]["em"]["mean"] > 0 and whole["figures"]["base"]["pass@2"]["mean"] > 0


def test_the_table_of_an_evaluation_is_written_and_printed(evaluated):
    text = (evaluated[0] / "eval.md").read_text()
    assert "| exact match |" in text and text in evaluated[3]


def test_an_evaluation_is_not_overwritten(evaluated, tiny_run):
    with pytest.raises(SystemExit, match="nothing is overwritten"):
        commands.here("eval.py", *words_for(tiny_run, evaluated[0]))
