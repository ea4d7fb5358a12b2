"""Tasks: data, prompts, parsing and scores."""

import json

import models
import pytest

import train_grpo
from common import protocol, run, tasks
from common.turns import Question, Trajectory
from tools.search import Search, read_corpus

DOCUMENTS = [
    {"id": "1", "title": "Ada Cole", "text": "Ada Cole works for Nova Labs. " + "She likes tea. " * 30},
    {"id": "2", "title": "Nova Labs", "text": "Nova Labs is led by Bo Hale."},
]


@pytest.fixture
def task():
    args = train_grpo.Args(max_observation_tokens=60)
    questions = [Question(str(i), f"Who leads firm {i}?", ["Bo Hale"]) for i in range(10)]
    return tasks.SearchQA(args, models.tokenizer(), questions[:7], questions[7:], Search(DOCUMENTS, 2))


@pytest.mark.parametrize(
    "text, tool, inner",
    [
        ("<think> hm </think> <search> Ada Cole </search>", "search", "Ada Cole"),
        ("<answer>\nBo\nHale </answer>", None, "Bo\nHale"),
        ("<search>a</search><answer>b</answer>", "search", "a"),
        ("<search> a </search>\n\n", "search", "a"),
        ("<think> I will <search> to find her. </think> <search> Ada Cole </search>", "search", "Ada Cole"),
    ],
)
def test_the_first_complete_action_counts(task, text, tool, inner):
    assert task.parse(text) == tasks.Action(tool, inner)


@pytest.mark.parametrize(
    "text", ["", "Bo Hale", "<search> Ada", "<search> a </answer>", "<information> x </information>"]
)
def test_what_is_no_action_is_invalid(task, text):
    assert task.parse(text) is None


@pytest.mark.parametrize(
    "answer, golds, em, f1",
    [
        ("the Bo Hale.", ["Bo Hale"], 1, 1),
        ("BO  HALE", ["x", "Bo Hale"], 1, 1),
        ("Bo", ["Bo Hale"], 0, 2 / 3),
        ("Mr Bo Hale", ["Bo Hale"], 0, 0.8),
        ("", ["Bo Hale"], 0, 0),
        (None, ["Bo Hale"], 0, 0),
        ("the", ["a"], 0, 0),  # both empty in normal form: not a match
        ("an apple", ["apple"], 1, 1),
    ],
)
def test_scores_after_normalisation(answer, golds, em, f1):
    assert tasks.exact_match(answer, golds) == em
    assert tasks.f1(answer, golds) == pytest.approx(f1)


def test_finish_scores_the_model_s_answer_only(task):
    right, none = Trajectory(answer="bo hale"), Trajectory()
    for t in (right, none):
        task.finish(t, task.train[0])
    assert (right.outcome, right.info["f1"], none.outcome) == (1.0, 1.0, 0.0)


def test_an_observation_is_cut_to_its_limit_and_keeps_the_closing_tag(task):
    whole = task.run_tool("search", "Ada Cole")
    ids = task.observation_ids(whole)
    assert len(ids) == 60
    text = task.decode(ids)
    assert text.startswith("\n<information> Doc 1 (Title: Ada Cole) Ada Cole works") and text.endswith(
        " </information>\n"
    )
    short = task.decode(task.observation_ids("Nothing found."))
    assert short == "\n<information> Nothing found. </information>\n"


def test_prompt_is_plain_text_without_a_template_and_templated_with_one(task):
    plain = task.decode(task.prompt_ids(task.train[0]))
    assert plain == protocol.INSTRUCTION + "Question: Who leads firm 0?\n"
    tokenizer = models.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    for template, templated in (("auto", True), ("on", True), ("off", False)):
        args = train_grpo.Args(template=template)
        made = tasks.SearchQA(args, tokenizer, task.train, task.held_out, task.search)
        ids = made.prompt_ids(task.train[0])
        assert isinstance(ids, list) and isinstance(ids[0], int)
        assert made.decode(ids).startswith("[system] ") == templated
        assert made.decode(ids).endswith("[assistant] ") == templated


def test_shots_stand_before_the_question_in_the_same_form_as_a_rollout(task):
    args = train_grpo.Args(shots=2)
    made = tasks.SearchQA(args, models.tokenizer(), task.train, task.held_out, task.search)
    text = made.decode(made.prompt_ids(task.train[0]))
    assert text.count("<search>") == 1 + 4 and text.count("<answer>") == 1 + 2
    assert "\n<information> Doc 1 (Title: Rosa Pike) Rosa Pike is a painter." in text
    assert text.endswith("Question: Who leads firm 0?\n")


def test_take_shuffles_each_pass_and_shares_questions_out_over_ranks(task, monkeypatch):
    first = [q.id for q in task.take(7)]
    second = [q.id for q in task.take(7)]
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)] and first != second
    assert task.position == 14
    task.position = 3
    assert [q.draw for q in task.take(6)] == list(range(3, 9))  # a question drawn twice is told apart by its draw
    task.position = 0
    monkeypatch.setattr(run, "world_size", lambda: 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(run, "rank", lambda rank=rank: rank)
        task.position = 0
        shares.append([[q.id for q in task.take(n)] for n in (3, 1, 3)])
    mixed = [id for step in zip(*shares) for id in sorted(step[0] + step[1], key=first.index)]
    assert mixed == first
    assert [len(s) for s in shares[0]] + [len(s) for s in shares[1]] == [2, 0, 2, 1, 1, 1]


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_questions_of_a_file_are_split_and_never_trained_on_when_held_out(tmp_path):
    lines = [{"question": f"Who is {i % 15}?", "answers": [str(i)], "id": i} for i in range(30)]
    train, held_out = tasks.split(tasks.read_questions(write(tmp_path / "q.jsonl", *lines)), 10)
    assert len(held_out) == 10 and train
    assert not {q.text for q in train} & {q.text for q in held_out}


@pytest.mark.parametrize(
    "lines, words",
    [
        (['{"question": "Who?"}\n'], "line 1"),
        ([{"question": "Who?", "answers": ["a b"]}, "not json\n"], "line 2"),
        ([{"question": "Who?", "answers": []}], "line 1"),
        ([{"question": "Who?", "answers": ["the"]}], "line 1"),
        ([{"question": "Who?", "answers": "Bo"}], "line 1"),
        (
            [{"question": "Who?", "answers": ["Bo"], "id": 1}, {"question": "Who?", "answers": ["Bo"], "id": 1}],
            "occurs twice",
        ),
        ([""], "no questions"),
        (["[1]\n"], "line 1"),
    ],
)
def test_a_bad_question_file_is_named_with_its_line(tmp_path, lines, words):
    path = write(tmp_path / "q.jsonl", *lines)
    with pytest.raises(SystemExit, match=words) as stopped:
        tasks.read_questions(path)
    assert path in str(stopped.value)


def test_the_embedded_task_holds_out_what_it_is_asked_to(make_args):
    task = tasks.load(make_args(task="tiny_search", eval_questions=200, limit=50))
    assert (len(task.held_out), len(task.train)) == (200, 50)
    assert {q.info["hops"] for q in task.held_out} == {1, 2, 3} and {q.draw for q in task.held_out} == {0}
    assert not {q.text for q in task.train} & {q.text for q in task.held_out}


def test_a_task_without_its_files_is_refused_with_a_way_out(tmp_path, make_args):
    path = write(
        tmp_path / "q.jsonl", {"question": "Who?", "answers": ["Bo"]}, {"question": "Where?", "answers": ["Bo"]}
    )
    for task, corpus, words in (
        (path, "", "--corpus"),
        (path, "missing.jsonl", "missing.jsonl"),
        ("nq", "", "tiny_search"),
    ):
        with pytest.raises(SystemExit, match=words):
            tasks.load(make_args(task=task, corpus=corpus))
    corpus = write(tmp_path / "c.jsonl", {"id": "1", "title": "a", "text": "b"}, {"id": "2"})
    with pytest.raises(SystemExit, match="line 2"):
        tasks.load(make_args(task=path, corpus=corpus))


# ---- search


def test_search_finds_by_title_and_text_and_repeats_itself():
    search = Search(DOCUMENTS, 2)
    assert search("Nova Labs").startswith(
        "Doc 1 (Title: Nova Labs) Nova Labs is led by Bo Hale.\nDoc 2 (Title: Ada Cole)"
    )
    assert search("Hale") == "Doc 1 (Title: Nova Labs) Nova Labs is led by Bo Hale."
    assert [search("Nova Labs") for _ in range(3)] == [search("Nova Labs")] * 3
    assert search("") == search("zzz") == search("the") == "Nothing found."


def test_threads_find_the_same():
    from concurrent.futures import ThreadPoolExecutor

    search = Search(DOCUMENTS, 2)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(search, ["Nova Labs", "Ada Cole", "zzz"] * 200))
    assert found == [search("Nova Labs"), search("Ada Cole"), search("zzz")] * 200


def test_the_index_is_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path))
    path = write(tmp_path / "c.jsonl", *DOCUMENTS)
    for _ in range(2):
        assert Search(path, 1)("Ada").startswith("Doc 1 (Title: Ada Cole)")
        assert len([f for f in (tmp_path / "bm25").iterdir() if f.is_dir()]) == 1
    write(tmp_path / "c.jsonl", *DOCUMENTS, {"id": "3", "title": "Elmton", "text": "A town."})
    assert Search(path, 1)("Elmton") == "Doc 1 (Title: Elmton) A town."
    assert len([f for f in (tmp_path / "bm25").iterdir() if f.is_dir()]) == 2


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        read_corpus(write(tmp_path / "c.jsonl", ""))
