"""Tasks: data, prompts, parsing and scores."""

import json
import math

import pytest
import small_models

import tasks
import train_grpo
from common import environment, ranks
from common.turns import Question, Trajectory, Turn
from tasks import loading, scores, search_qa, wordings
from tasks.files import read_questions, split
from tasks.task import Task
from tasks.tiny import tiny_search
from tools import Tool
from tools.search import Search, read_corpus

DOCUMENTS = [
    {"id": "1", "title": "Ada Cole", "text": "Ada Cole works for Nova Labs. " + "She likes tea. " * 30},
    {"id": "2", "title": "Nova Labs", "text": "Nova Labs is led by Bo Hale."},
]


@pytest.fixture
def task():
    args = train_grpo.Args(max_observation_tokens=60)
    questions = [Question(str(i), f"Who leads firm {i}?", ["Bo Hale"]) for i in range(10)]
    return search_qa.SearchQA(args, small_models.tokenizer(), Search(DOCUMENTS, 2), questions[:7], questions[7:])


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
    assert read(task, text) == environment.Action(tool, inner)


@pytest.mark.parametrize(
    "text", ["", "Bo Hale", "<search> Ada", "<search> a </answer>", "<information> x </information>"]
)
def test_text_without_an_action_is_invalid(task, text):
    assert read(task, text) is None


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
    assert scores.exact_match(answer, golds) == em
    assert scores.f1(answer, golds) == pytest.approx(f1)


def turn(tool, tool_input=""):
    return Turn([1], [2], [0.0], tool=tool, tool_input=tool_input)


def read(task, text):
    """Return the action in a completion of that text."""
    return task.read(Turn([1], [2], [0.0], text=text))


class Sums(Task):
    """A task whose tool is Python."""

    def score(self, answer, question):
        return float(answer in question.golds), {"letters": len(answer or "")}


class Noting(Tool):
    """A Python tool that runs no code and returns its input."""

    name, fingerprint = "python", "noting"

    def __call__(self, text, earlier=(), question=None):
        return f"{text} after {list(earlier)}"


@pytest.fixture
def sums(task):
    return Sums(train_grpo.Args(), task.tokenizer, Noting(), task.train, task.held_out)


def test_the_tool_of_a_task_decides_its_prompt_stop_and_fingerprint(task, sums):
    assert sums.decode(sums.prompt_ids(task.train[0])) == wordings.PYTHON_INSTRUCTION + "Question: Who leads firm 0?\n"
    assert "</python>" in sums.limits.stop and sums.limits.tool_seconds == 30
    assert sums.fingerprint != task.fingerprint


def test_the_tool_of_a_task_gets_the_earlier_calls(sums):
    assert sums.call(turn("python", "x"), None, ["x = 1"]) == "x after ['x = 1']"


def test_a_task_scores_its_answers_and_adds_to_their_info(task, sums):
    ended = Trajectory(answer="Bo Hale", info={"own": 1.0})
    sums.finish(ended, task.train[0])
    assert (ended.outcome, ended.info) == (1.0, {"own": 1.0, "letters": 7})


def test_more_shots_than_worked_examples_are_refused(task):
    with pytest.raises(SystemExit, match="--shots 1: this task has 0 worked examples"):
        Sums(train_grpo.Args(shots=1), task.tokenizer, Noting(), [], [])


def test_finish_scores_the_model_s_answer_only(task):
    right, none = Trajectory(answer="bo hale"), Trajectory()
    for t in (right, none):
        task.finish(t, task.train[0])
    assert (right.outcome, right.info["f1"], none.outcome) == (1.0, 1.0, 0.0)


def test_an_observation_is_cut_to_its_limit_and_keeps_the_closing_tag(task):
    whole = task.call(turn("search", "Ada Cole"), None, [])
    shown, ids = task.observe(turn("search"), whole)
    assert len(ids) == 60
    text = task.decode(ids)
    assert text.startswith("\n<information> Doc 1 (Title: Ada Cole) Ada Cole works") and text.endswith(
        " </information>\n"
    )
    assert whole.startswith(shown) and len(shown) < len(whole)  # text that the model never saw must not count as found
    assert text == f"\n<information> {shown} </information>\n"
    shown, ids = task.observe(turn(None), "Nothing found.")
    assert (shown, task.decode(ids)) == ("Nothing found.", "\n<information> Nothing found. </information>\n")


def test_prompt_is_plain_text_without_a_template_and_templated_with_one(task):
    plain = task.decode(task.prompt_ids(task.train[0]))
    assert plain == wordings.INSTRUCTION + "Question: Who leads firm 0?\n"
    tokenizer = small_models.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    for template, templated in (("auto", True), ("on", True), ("off", False)):
        args = train_grpo.Args(template=template)
        made = search_qa.SearchQA(args, tokenizer, task.tool, task.train, task.held_out)
        ids = made.prompt_ids(task.train[0])
        assert isinstance(ids, list) and isinstance(ids[0], int)
        assert made.decode(ids).startswith("[system] ") == templated
        assert made.decode(ids).endswith("[assistant] ") == templated


def test_shots_come_before_the_question_in_the_form_of_a_rollout(task):
    args = train_grpo.Args(shots=2)
    made = search_qa.SearchQA(args, small_models.tokenizer(), task.tool, task.train, task.held_out)
    text = made.decode(made.prompt_ids(task.train[0]))
    assert text.count("<search>") == 1 + 4 and text.count("<answer>") == 1 + 2
    assert "\n<information> Doc 1 (Title: Rosa Pike) Rosa Pike is a painter." in text
    assert text.endswith("Question: Who leads firm 0?\n")


def test_take_shuffles_each_pass_and_numbers_its_draws(task):
    first = [q.id for q in task.take(7)]
    second = [q.id for q in task.take(7)]
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)] and first != second
    assert task.position == 14
    task.position = 3
    assert [q.draw for q in task.take(6)] == list(range(3, 9))  # tells two draws of one question apart


def test_ranks_that_have_taken_different_numbers_of_questions_are_told(task, monkeypatch):
    """A loop in collect() that ends at another time on each rank would give ranks the same questions, silently."""
    task.take(3)
    monkeypatch.setattr(ranks, "alike", lambda value: value != 3)
    with pytest.raises(SystemExit, match=r"Rank 0 has taken 3 questions, .* task.take\(\) equally often on every rank"):
        task.take(3)


def test_take_divides_the_questions_among_the_ranks(task, monkeypatch):
    first = [q.id for q in task.take(7)]
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        task.position = 0
        shares.append([[q.id for q in task.take(n)] for n in (3, 1, 3)])
    mixed = [id for step in zip(*shares) for id in sorted(step[0] + step[1], key=first.index)]
    assert mixed == first
    assert [len(s) for s in shares[0]] + [len(s) for s in shares[1]] == [2, 0, 2, 1, 1, 1]


def write(path, *lines):
    """Write lines to a file: bytes and strings as they are, anything else as JSON. Returns the path as a string."""
    lines = [json.dumps(line) + "\n" if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"".join(line.encode() if isinstance(line, str) else line for line in lines))
    return str(path)


def questions(count, texts=None):
    return [Question(str(i), f"Who is {i % (texts or count)}?", [str(i)], info={"line": i + 1}) for i in range(count)]


def disjoint(*parts):
    texts = [{scores.normal_form(q.text) for q in part} for part in parts]
    return all(not a & b for i, a in enumerate(texts) for b in texts[:i])


@pytest.mark.parametrize(
    "count, texts, asked, held_out, kept",
    [(40, 40, 8, 8, 10), (40, 40, 200, 10, 10), (3000, 3000, 200, 200, 500), (30, 15, 4, 4, 7), (3, 3, 5, 1, 1)],
)
def test_a_file_is_split_into_three_parts_without_a_common_text(count, texts, asked, held_out, kept):
    made = questions(count, texts)
    train, development, test = split(made, asked)
    assert (len(development), len(test)) == (held_out, kept) and train and disjoint(train, development, test)
    if texts == count:
        assert len(train) == count - held_out - kept
        assert split(made[::-1], asked)[1:] == (development, test)  # by the texts, not by their places


def test_more_held_out_questions_contain_the_fewer_and_leave_the_test_as_it_is():
    few, many = (split(questions(100), n) for n in (5, 20))
    assert many[1][:5] == few[1] and many[2] == few[2] and len(few[2]) == 25


def test_texts_that_differ_by_case_and_punctuation_are_the_same_question():
    made = questions(40) + [Question(f"again{i}", f"who is {i}", ["x"]) for i in range(40)]
    assert disjoint(*split(made, 10))


@pytest.mark.parametrize("made", [questions(2), questions(9, 2)])
def test_too_few_questions_to_split_are_refused(made):
    with pytest.raises(SystemExit, match="at least 3 different ones"):
        split(made, 1)


GOOD = {"question": "Who?", "answers": ["Bo"]}


@pytest.mark.parametrize(
    "lines, words",
    [
        (['{"question": "Who?"}\n'], "line 1: answers is missing; it has question"),
        ([{"query": "Who?", "answers": ["Bo"]}], "line 1: question is missing; it has query, answers"),
        ([GOOD, "not json\n"], "line 2: not JSON"),
        ([GOOD, "\n", '{"question": "Who?", \n'], "line 3: not JSON"),
        ([GOOD, b'{"question": "Wer ist M\xfcller?", "answers": ["Bo"]}\n'], "line 2: not UTF-8"),
        ([json.dumps(GOOD).encode("utf-16")], "line 1: not UTF-8"),
        (["[1]\n"], "line 1: not an object"),
        (["null\n"], "line 1: not an object"),
        ([GOOD | {"question": " "}], "line 1: question must be"),
        ([GOOD | {"question": 7}], "line 1: question must be"),
        ([GOOD | {"answers": []}], "line 1: answers must be"),
        ([GOOD | {"answers": ["Bo", " "]}], "line 1: answers must be"),
        ([GOOD | {"answers": ["the", "+"]}], "line 1: every answer is empty after normalisation"),
        *(
            ([GOOD | {"answers": ["Bo", f"{sign} "]}], "line 1: answers must be")
            for sign in "\u200b\u200d\ufeff\u2060\u00ad\u200e\u3164\u2800\ufe0f\u034f\u0000"
        ),
        ([GOOD | {"answers": ["the \u200b"]}], "line 1: every answer is empty after normalisation"),
        ([GOOD | {"question": "\u200b"}], "line 1: question must be"),
        ([GOOD | {"answers": "Bo"}], "line 1: answers must be"),
        ([GOOD | {"answers": [7]}], "line 1: answers must be"),
        (['{"question": "Who? \\ud83d", "answers": ["Bo"]}\n'], "line 1: .* valid Unicode"),
        ([GOOD | {"id": 1}, "\n", GOOD | {"id": "1"}], "line 3: id 1 occurs twice, first in line 1"),
        ([], "no questions"),
        (["\n \n"], "no questions"),
    ],
)
def test_a_bad_question_file_is_named_with_its_line(tmp_path, lines, words):
    path = write(tmp_path / "q.jsonl", *lines)
    with pytest.raises(SystemExit, match=words) as stopped:
        read_questions(path)
    assert path in str(stopped.value) and "\n" not in str(stopped.value)


def test_questions_keep_their_line_and_their_own_id(tmp_path):
    path = write(tmp_path / "q.jsonl", "\ufeff", GOOD, "\n", GOOD | {"id": "b7"}, GOOD | {"id": None})
    assert [(q.id, q.info["line"]) for q in read_questions(path)] == [("line-1", 1), ("b7", 3), ("line-4", 4)]


def test_an_alias_that_is_empty_after_normalisation_does_no_harm(tmp_path):
    (question,) = read_questions(write(tmp_path / "q.jsonl", GOOD | {"answers": ["The Who", "the"]}))
    assert scores.exact_match("the who", question.golds) == 1 and scores.exact_match("the", question.golds) == 0


def test_a_folder_and_a_missing_file_are_no_question_file(tmp_path, make_args):
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "no.jsonl", "No such file")):
        with pytest.raises(SystemExit, match=words) as stopped:
            tasks.load(make_args(task=str(path), corpus="c.jsonl"))
        assert str(path) in str(stopped.value)


@pytest.fixture
def files(tmp_path):
    """Return the paths of 12 questions and of a corpus of 2 documents."""
    lines = [{"question": f"Who leads firm {i}?", "answers": ["Bo Hale"]} for i in range(12)]
    return write(tmp_path / "q.jsonl", *lines), write(tmp_path / "c.jsonl", *DOCUMENTS)


def test_the_embedded_task_has_three_parts(make_args):
    documents, train, held_out = tiny_search.search_world()
    task = tasks.load(make_args(task="tiny_search", eval_questions=200, limit=50))
    assert [q.id for q in task.held_out] == [q["id"] for q in held_out[:200]]
    assert [q.id for q in task.test] == [q["id"] for q in held_out[200:]]
    assert len(task.train) == 50 and disjoint(task.train, task.held_out, task.test)
    assert {q.info["hops"] for q in task.held_out} == {1, 2, 3} and {q.draw for q in task.held_out} == {0}
    for asked, given in ((7, 7), (400, 200)):
        other = tasks.load(make_args(task="tiny_search", eval_questions=asked))
        assert other.held_out == task.held_out[:given] and other.test == task.test


def test_a_file_that_is_a_test_set_is_taken_whole(files, make_args):
    task, corpus = files
    made = tasks.load(make_args(task=task, corpus=corpus), use="all")
    assert (made.train, made.held_out) == ([], []) and [q.id for q in made.test] == [f"line-{i}" for i in range(1, 13)]


def test_a_task_without_its_files_is_refused_with_a_way_out(files, tmp_path, make_args):
    task, corpus = files
    bad = write(tmp_path / "bad.jsonl", {"id": "1", "title": "a", "text": "b"}, {"id": "2"})
    for given, words in (
        (dict(task=task), "--corpus documents.jsonl .* --retriever http"),
        (dict(task=task, corpus=corpus, retriever="http://x"), "one of them"),
        (dict(task="tiny_search", corpus=corpus, retriever="http://x"), "one of them"),
        (dict(task=task, corpus="missing.jsonl"), "--corpus: .*missing.jsonl"),
        (dict(task=task, corpus=str(tmp_path)), "--corpus: .*directory"),
        (dict(task=task, corpus=bad), "--corpus: .*line 2"),
        (dict(task=task, corpus=write(tmp_path / "empty.jsonl")), "--corpus: .*empty"),
        (dict(task="nosuch"), "--task nosuch: Give .*hotpotqa.*tiny_search .*--corpus .*--retriever"),
        (dict(task="hotpot_qa"), "--task hotpot_qa: Did you mean hotpotqa or nq_hotpotqa"),
    ):
        with pytest.raises(SystemExit, match=words) as stopped:
            tasks.load(make_args(**given))
        assert "\n" not in str(stopped.value)


def test_a_retriever_replaces_a_corpus(files, make_args, monkeypatch):
    class Server(Tool):
        name, keeps_time = "search", True

        def __init__(self, address, topk, timeout, probe):
            self.given, self.probe = (address, topk, timeout), probe

        def __call__(self, query, earlier=(), question=None):
            return f"found {query}"

    monkeypatch.setattr(loading, "Retriever", Server)
    for name in (files[0], "tiny_search"):
        task = tasks.load(make_args(task=name, retriever="http://127.0.0.1:1/retrieve", topk=4, tool_timeout=5.0))
        assert task.tool.given == ("http://127.0.0.1:1/retrieve", 4, 5.0)
        assert task.call(turn("search", "Bo"), None, []) == "found Bo" and task.limits.tool_seconds == math.inf
    assert not tasks.load(make_args(task=files[0], corpus=files[1])).limits.tool_seconds == math.inf


def test_a_question_that_cannot_be_answered_within_a_turn_is_refused(tmp_path, files, make_args):
    long = {"question": "What does it say?", "answers": ["many words " * 20, "even more words " * 20]}
    lines = [{"question": f"Who leads firm {i}?", "answers": ["Bo Hale"]} for i in range(6)]
    for more, refused in (([], True), (["Bo"], False)):  # one gold that fits is enough
        task = write(tmp_path / "q.jsonl", *lines, long | {"answers": long["answers"] + more})
        args = make_args(task=task, corpus=files[1], max_turn_tokens=40)
        if not refused:
            tasks.load(args)
            continue
        with pytest.raises(SystemExit, match=r"line 7: its shortest answer takes \d+ tokens.*--max_turn_tokens is 40"):
            tasks.load(args)
        tasks.load(make_args(task=task, corpus=files[1], max_turn_tokens=400))


def test_the_length_of_an_answer_is_counted_in_tokens_with_its_tags(files, make_args):
    count = len(small_models.tokenizer().encode("<answer> Bo Hale </answer>"))
    tasks.load(make_args(task=files[0], corpus=files[1], max_turn_tokens=count))
    with pytest.raises(SystemExit, match=f"takes {count} tokens"):
        tasks.load(make_args(task=files[0], corpus=files[1], max_turn_tokens=count - 1))


def test_a_prompt_that_fills_the_context_is_refused(tmp_path, files, make_args):
    lines = [{"question": f"Who leads firm {i}?", "answers": ["Bo Hale"]} for i in range(60)]
    task = write(tmp_path / "q.jsonl", *lines, {"question": "Who? " * 200, "answers": ["Bo"]})
    args = make_args(task=task, corpus=files[1], max_context=600)
    with pytest.raises(SystemExit, match=r"line 61: its prompt takes (\d+) tokens.*--max_context is 600") as stopped:
        tasks.load(args)
    tokens = int(str(stopped.value).split("takes ")[1].split()[0])
    tasks.load(make_args(task=task, corpus=files[1], max_context=tokens + 1))
    with pytest.raises(SystemExit, match=f"takes {tokens} tokens"):
        tasks.load(make_args(task=task, corpus=files[1], max_context=tokens))


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
