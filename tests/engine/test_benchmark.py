"""Lists of benchmarks: the names in --task, the arguments of each benchmark, and the table over all of them."""

import json

import datasets
import hub_rows
import pytest

import eval as evaluation
from common import run
from common.turns import Question
from tasks import benchmarks, hub
from view import tables


def write(folder, args, name, questions, items):
    """Write the results of one benchmark as eval.py does."""
    lines = [line for of_system in items.values() for _, more in of_system for line in more]
    return tables.write(folder, benchmarks.result(args, name, questions, items), lines)


def test_a_list_takes_names_files_and_suites_each_once():
    assert benchmarks.names("gsm8k") == ["gsm8k"]
    assert benchmarks.names(" gsm8k, a/b.jsonl ,gsm8k,") == ["gsm8k", "a/b.jsonl"]
    assert (
        benchmarks.names("popqa,search_qa")[:3] == ["popqa", "nq", "triviaqa"]
        and len(benchmarks.names("search_qa")) == 7
    )


def test_every_name_in_a_suite_is_a_data_set_of_its_kind():
    assert {hub.SOURCES[name].kind for name in benchmarks.SUITES["search_qa"]} == {"search"}
    assert {hub.SOURCES[name].kind for name in benchmarks.SUITES["math_sets"]} == {"math"}


def test_no_suite_has_the_name_of_a_data_set():
    assert not set(benchmarks.SUITES) & set(hub.SOURCES)
    assert benchmarks.names("gsm8k,math") == ["gsm8k", "math"]


def test_one_benchmark_uses_the_run_directory_and_several_use_folders_below_it(tmp_path):
    one, two = {"gsm8k": 0}, {"gsm8k": 0, "x/q.jsonl": 0}
    assert benchmarks.folder_of(tmp_path, one, "gsm8k") == tmp_path
    assert benchmarks.folder_of(tmp_path, two, "x/q.jsonl") == tmp_path / "x-q"


def test_given_flags_override_the_decoding_of_a_paper():
    args = evaluation.parse(["--model", "tiny", "--decoding", "rtpo", "--temperature", "0.8"])
    assert (args.samples, args.temperature, args.top_p) == (4, 0.8, 0.95)
    args = evaluation.parse(["--model", "tiny"])
    assert (args.samples, args.temperature, args.top_p) == (0, 1.0, 1.0)
    with pytest.raises(SystemExit, match="--top_p 0"):
        evaluation.parse(["--model", "tiny", "--top_p", "0"])


@pytest.fixture
def questions(tmp_path):
    """Write a file of problems and a corpus. Returns their folder."""
    lines = [json.dumps({"question": f"What is {i} + 1?", "answers": [str(i + 1)]}) for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    lines = [json.dumps({"id": str(i), "title": f"Town {i}", "text": f"Its mayor is Ada {i}."}) for i in range(8)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    return tmp_path


def args_for(qwen, task, *words):
    small = "--max_context 512 --max_turn_tokens 32 --max_turns 2 --unsafe_python"
    return evaluation.parse(["--model", qwen, "--task", str(task), *small.split(), *words])


def test_the_short_name_of_a_list_has_its_entries_and_a_limited_length():
    assert benchmarks.short("hotpotqa") == "hotpotqa" and benchmarks.short("out/test.jsonl") == "test"
    assert benchmarks.short("hotpotqa, sub/test.jsonl,") == "hotpotqa-test"
    long = ",".join(hub.SOURCES)
    assert benchmarks.short(long).startswith("hotpotqa-2wiki-musique-") and len(benchmarks.short(long)) == 59
    assert benchmarks.short(long) != benchmarks.short(f"{long},tiny_search")


def test_a_given_corpus_replaces_that_of_every_benchmark_that_searches(qwen, questions, monkeypatch):
    monkeypatch.setenv("TURNWISE_DATA", str(questions / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", questions / "cache")
    hub_rows.write(questions / "hub", "hotpotqa")
    corpus, words = str(questions / "corpus.jsonl"), ("--max_context", "1024", "--max_turn_tokens", "64")
    several = "hotpotqa,tiny_search,tiny_math"
    for task, given, size in (
        (several, corpus, {"hotpotqa": 8, "tiny_search": 8, "tiny_math": None}),
        ("hotpotqa", corpus, {"hotpotqa": 8}),
        ("hotpotqa,tiny_math", "", {"hotpotqa": 5, "tiny_math": None}),  # its own paragraphs
    ):
        args = args_for(qwen, task, *words, "--corpus", given)
        found = {name: getattr(task.tool, "documents", None) for name, (task, _) in benchmarks.load(args).items()}
        assert {name: some and len(some) for name, some in found.items()} == size
        for name in size:
            write(questions / name, args, name, [Question("0", "q", ["a"])], {"base": figures(1)})
            used = json.loads((questions / name / "eval.json").read_text())["args"]
            assert (used["task"], used["corpus"]) == (name, given if size[name] else "")


def test_a_corpus_does_not_concern_benchmarks_that_compute(qwen, questions):
    corpus = str(questions / "corpus.jsonl")
    found = benchmarks.load(args_for(qwen, "tiny_search,tiny_math", "--corpus", corpus, "--limit", "3"))
    assert {name: (task.tool.name, len(some)) for name, (task, some) in found.items()} == {
        "tiny_search": ("search", 3),
        "tiny_math": ("python", 3),
    }
    with pytest.raises(SystemExit, match="there is nothing to search in"):
        benchmarks.load(args_for(qwen, "tiny_math", "--corpus", corpus))
    with pytest.raises(SystemExit, match="name a data set"):
        benchmarks.load(args_for(qwen, ","))


def test_without_tools_a_task_has_no_tool_and_needs_no_corpus(qwen, questions):
    (questions / "q.jsonl").write_text((questions / "sums.jsonl").read_text())
    ((task, _),) = benchmarks.load(args_for(qwen, questions / "q.jsonl", "--tools", "off", "--split", "all")).values()
    assert task.tool is None and len(task.test) == 8
    prompt = task.decode(task.prompt_ids(task.test[0]))
    assert "search" not in prompt and "<answer>" in prompt


def figures(*right, f1=None):
    more = {} if f1 is None else {"f1": f1}
    return [
        ({"em": float(value), **more, "turns": 1, "pass@1": float(value)}, [{"question": i}])
        for i, value in enumerate(right)
    ]


def test_the_overview_has_a_row_for_each_benchmark_and_their_plain_mean(qwen, tmp_path):
    args = evaluation.parse(["--model", "tiny"])
    folders = {name: tmp_path / name for name in ("hotpotqa", "gsm8k")}
    some = [Question(str(i), f"q{i}", ["a"]) for i in range(2)]
    write(
        folders["hotpotqa"], args, "hotpotqa", some, {"base": figures(0, 0, f1=0.5), "adapter": figures(1, 0, f1=0.75)}
    )
    write(folders["gsm8k"], args, "gsm8k", some, {"base": figures(0, 1), "adapter": figures(1, 1)})
    lines = tables.overview(tmp_path, folders).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][1:4] == ["exact match, base", "exact match, adapter", "exact match, adapter - base"]
    assert [row[0] for row in cells[2:]] == ["hotpotqa", "gsm8k", "mean"]
    assert cells[2][2].startswith("0.500 [") and cells[3][2] == "1.000 [1.000, 1.000]"
    assert cells[4][1:4] == ["0.250", "0.750", "0.500"]
    assert cells[3][cells[0].index("F1, base")] == "" and cells[4][cells[0].index("F1, base")] == "0.500"
    assert (tmp_path / "benchmarks.md").read_text().splitlines() == lines
    assert tables.LABELS["em"] == "exact match"


def test_writing_a_benchmark_removes_the_files_of_an_earlier_attempt(tmp_path):
    args, some = evaluation.parse(["--model", "tiny"]), [Question("0", "q", ["a"])]
    (tmp_path / "samples.jsonl").write_text('{"of": "an attempt"}\n')
    write(tmp_path, args, "gsm8k", some, {"base": figures(1)})
    assert [json.loads(line) for line in open(tmp_path / "samples.jsonl")] == [{"question": 0}]
    whole = json.loads((tmp_path / "eval.json").read_text())
    assert whole["args"]["task"] == "gsm8k" and whole["figures"]["base"]["em"]["mean"] == 1


def test_finished_benchmarks_are_kept_and_can_be_resumed(tmp_path):
    args, some = evaluation.parse(["--model", "tiny", "--out", str(tmp_path / "run")]), [Question("0", "q", ["a"])]
    assert run.saved_progress(tmp_path / "run") is None
    write(tmp_path / "run" / "gsm8k", args, "gsm8k", some, {"base": figures(1)})
    assert run.saved_progress(tmp_path / "run") == "benchmarks"
    assert "continue it with --resume" in run.claim(args, tmp_path / "run")
