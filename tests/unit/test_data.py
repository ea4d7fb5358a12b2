"""The named data sets, loaded from files as the hub has them."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import commands
import datasets
import hub_rows
import pytest

import tasks
from tasks import hub, scores
from tools.search import Search

LOADED = {  # name: kind, questions to train on and held out, to test on, rows left out, documents
    "hotpotqa": ("search", 11, 3, 3, 5),
    "2wiki": ("search", 11, 3, 3, 5),
    "musique": ("search", 6, 2, 1, 10),
    "nq": ("search", 8, 2, 1, None),
    "triviaqa": ("search", 8, 1, 0, None),
    "popqa": ("search", 0, 2, 0, None),
    "bamboogle": ("search", 0, 3, 0, None),
    "nq_hotpotqa": ("search", 11, 3, 0, None),
    "gsm8k": ("math", 8, 2, 1, None),
    "math": ("math", 10, 2, 2, None),
    "math500": ("math", 0, 2, 0, None),
    "aime24": ("math", 0, 2, 0, None),
    "aime25": ("math", 0, 3, 0, None),
    "amc23": ("math", 0, 3, 0, None),
    "olympiadbench": ("math", 0, 3, 2, None),
    "svamp": ("math", 8, 1, 0, None),
    "gpqa": ("choice", 0, 40, 2, None),
    "humaneval": ("code", 0, 2, 0, None),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an empty folder that replaces the hub, and keep the user's caches clean."""
    monkeypatch.setenv("TURNWISE_DATA", str(tmp_path / "hub"))
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    return tmp_path / "hub"


def load(folder, name, eval_questions=2, with_documents=False, **more):
    hub_rows.write(folder, name)
    return hub.load(name, eval_questions, with_documents, **more)


def everything(made):
    return made.train + made.held_out + made.test


def texts(questions):
    return {scores.normal_form(q.text) for q in questions}


# ---- every set


def test_every_set_has_a_fixture_and_every_fixture_a_set():
    assert set(hub.SOURCES) == set(hub_rows.SETS) == set(LOADED)
    for name, (place, _, _, splits) in hub_rows.SETS.items():
        source = hub.SOURCES[name]
        assert place == f"{source.path}/{source.config or 'default'}"
        assert {source.test, source.train} - {None} <= set(splits)


@pytest.mark.parametrize("name", LOADED)
def test_a_set_loads_from_files_of_its_real_schema(folder, name, capsys):
    kind, train, test, left_out, documents = LOADED[name]
    if name == "math":
        hub_rows.write(folder, "math500")
    made = load(folder, name, with_documents=True)
    assert made.kind == kind and len(made.test) == test
    assert len(made.train) + len(made.held_out) == train
    assert len(made.documents or ()) == (documents or 0) and (made.documents is None) == (documents is None)
    notices = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(notices) == bool(left_out) and all(f"{name}: left out {left_out} of" in line for line in notices)
    assert bool(made.train) == bool(hub.SOURCES[name].train)  # the others are test sets
    questions = everything(made)
    assert len({q.id for q in questions}) == len(questions)
    for q in questions:
        assert q.text.strip() and len(set(q.golds)) == len(q.golds) and all(g == g.strip() != "" for g in q.golds)
        assert bool(q.golds) == (kind != "code")


def with_nulls(value):
    """Yield copies of a cell with one null in each place, at each depth."""
    yield None
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (value | {key: other} for other in with_nulls(inner))
    if isinstance(value, list):
        for place, inner in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in with_nulls(inner))


@pytest.mark.parametrize("name", LOADED)
def test_a_null_in_any_cell_leaves_out_a_row_or_a_paragraph_and_no_more(name):
    source, rows = hub.SOURCES[name], hub_rows.SETS[name][3][hub.SOURCES[name].test]
    tried = 0
    for row in rows[:2]:
        for column in source.columns:
            for cell in with_nulls(row[column]):
                tried += 1
                question = source.read({key: row[key] for key in source.columns} | {column: cell})
                assert question is None or all(isinstance(gold, str) for gold in question.golds)
                if source.paragraphs and column == source.paragraphs[0]:
                    found = source.paragraphs[1](cell or {})
                    assert all(isinstance(part, str) for pair in found for part in pair)
    assert tried >= len(source.columns)


@pytest.mark.parametrize(
    "name, text, golds",
    [
        ("hotpotqa", "Is it so?", ["no"]),
        ("musique", "When?", ["1988", "in 1988", "the year 1988"]),
        ("musique", "Who?", ["Małgorzata Braunek", "Malgorzata Braunek"]),
        ("nq", "how many", ["14 December 1972 UTC", "December 1972"]),
        ("triviaqa", "Who was 'The Boss'?", ["Springsteen", "The Boss", "Bruce Springsteen"]),
        ("popqa", "Where?", ["Zürich", "Zurich"]),
        ("bamboogle", "When was number 2 born?", ["1902"]),
        ("nq_hotpotqa", "who is first?", ["Ada Cole", "ada cole"]),
        ("gsm8k", "What is the price?", ["2,000"]),
        ("gsm8k", "How cold is it?", ["-3"]),
        ("math", "What is a half?", ["\\frac{1}{2}"]),
        ("math", "How many?", ["7"]),
        ("math500", "Where?", ["\\left( 3, \\frac{\\pi}{2} \\right)"]),
        ("aime24", "And then?", ["025"]),
        ("aime25", "Find 2.", ["72"]),
        ("amc23", "How far is 0?", ["27"]),  # 27.0 in the file
        ("amc23", "How far is 1?", ["27.5"]),
        ("olympiadbench", "Let $T=1$.\nFind $T$.", ["2"]),
        ("olympiadbench", "Find all.", ["1, -2"]),  # all values, not one of them
        ("olympiadbench", "Find one.", ["$\\frac{1}{2}$", "0.5"]),
        ("svamp", "There are 8 pies How many are 3 less?", ["5.0"]),
    ],
)
def test_golds_are_those_of_the_row_in_order_and_without_duplicates(folder, name, text, golds):
    hub_rows.write(folder, "math500")
    assert [q.golds for q in load(folder, name).test if q.text == text] == [golds]


def test_ids_come_from_the_rows_and_a_repeated_one_gets_a_suffix(folder):
    made = everything(load(folder, "hotpotqa"))
    assert [q.id for q in made if q.text.startswith("An id")] == ["train-5a0~2"]
    assert {"validation-5c0", "train-5a0", "train-5b2"} <= {q.id for q in made}
    mixed = everything(load(folder, "nq_hotpotqa"))
    assert {q.id: q.info for q in mixed}["train-hotpotqa-train_3"] == {"source": "hotpotqa"}
    assert sum(q.id.endswith("train_3") for q in mixed) == 2 and not any("~" in q.id for q in mixed)


def test_questions_without_an_id_are_named_after_their_text(folder):
    place = folder / hub_rows.SETS["gsm8k"][0]
    ids = {q.text: q.id for q in everything(load(folder, "gsm8k"))}
    columns, splits = hub_rows.SETS["gsm8k"][2:]
    hub_rows.save(place / "train.parquet", splits["train"][::-1], columns)
    assert {q.text: q.id for q in everything(hub.load("gsm8k", 2, False))} == ids and len(ids) == 10


def test_code_questions_carry_their_tests_and_have_no_golds(folder):
    first = load(folder, "humaneval").test[0]
    rows = hub_rows.SETS["humaneval"][3]["test"]
    assert first.info == {name: rows[0][name] for name in ("prompt", "test", "entry_point")}
    assert (first.id, first.text, first.golds) == ("test-HumanEval/0", rows[0]["prompt"], [])


# ---- multiple choice


def options(question):
    return dict(line.split(") ", 1) for line in question.text.splitlines()[1:])


def test_the_gold_letter_names_the_right_option_and_every_letter_occurs(folder):
    test = load(folder, "gpqa").test
    for i, q in enumerate(test, 40):
        assert list(options(q)) == ["A", "B", "C", "D"] and q.text.startswith(f"Which is {i}?\nA) ")
        assert sorted(options(q).values()) == sorted([f"{i} eV", "one of many", "3 eV", f"not {i}"])
        assert options(q)[q.golds[0]] == f"{i} eV"
    assert {q.golds[0] for q in test} == set("ABCD")


def test_the_order_of_options_does_not_depend_on_which_is_right(folder):
    rows = [hub_rows.gpqa(f"r{i}", f"Which is {i}?", *"wxyz") for i in range(20)]
    moved = [hub_rows.gpqa(f"r{i}", f"Which is {i}?", *"zxyw") for i in range(20)]
    made = []
    for some in (rows, moved):
        place, ending, columns, _ = hub_rows.SETS["gpqa"]
        hub_rows.save(folder / place / f"train.{ending}", some, columns)
        made.append(hub.load("gpqa", 1, False).test)
    assert [q.text for q in made[0]] == [q.text for q in made[1]] and len({q.text[-24:] for q in made[0]}) > 5
    assert all(one.golds != other.golds for one, other in zip(*made))


# ---- splits


def hotpot_questions(folder, train, **more):
    columns, splits = hub_rows.SETS["hotpotqa"][2:]
    place = folder / hub_rows.SETS["hotpotqa"][0]
    hub_rows.save(place / "train.parquet", train, columns)
    hub_rows.save(place / "validation.parquet", splits["validation"], columns)
    return hub.load("hotpotqa", **({"eval_questions": 5, "with_documents": False} | more))


def test_held_out_questions_are_chosen_by_their_texts_and_not_by_their_places(folder):
    rows = [hub_rows.hotpot(str(i), f"Who leads firm {i}?", "Bo Hale") for i in range(60)]
    others = [row | {"id": str(i)} for i, row in enumerate(rows[::-1])]  # the ids do not matter either
    one, turned = (hotpot_questions(folder, some) for some in (rows, others))
    assert [q.text for q in one.held_out] == [q.text for q in turned.held_out] and len(one.held_out) == 5
    assert texts(one.train) == texts(turned.train) and len(one.train) == 55
    assert texts(one.held_out) != {scores.normal_form(row["question"]) for row in rows[:5]}
    fewer = hotpot_questions(folder, rows, eval_questions=3)
    assert fewer.held_out == one.held_out[:3] and fewer.test == one.test


@pytest.mark.parametrize("asked, rows, held_out", [(5, 60, 5), (200, 60, 15), (1, 3, 0), (1, 4, 1)])
def test_at_most_a_quarter_is_held_out(folder, asked, rows, held_out):
    made = [hub_rows.hotpot(str(i), f"Who leads firm {i}?", "Bo Hale") for i in range(rows)]
    parts = hotpot_questions(folder, made, eval_questions=asked)
    assert (len(parts.held_out), len(parts.train)) == (held_out, rows - held_out)


def test_no_text_is_in_two_parts_whatever_its_case_and_punctuation(folder):
    rows = [
        hub_rows.hotpot(f"{k}{i}", text.format(i), "yes")
        for i in range(40)
        for k, text in enumerate(("Is {}?", "is the {}", "IS {}!"))
    ]
    rows += [hub_rows.hotpot("t", "IS IT SO", "no")]  # asked in validation
    made = hotpot_questions(folder, rows, eval_questions=12)
    assert (len(made.held_out), len(made.train), len(made.test)) == (12, 3 * (40 - 12), 3)
    assert not texts(made.train) & texts(made.held_out) and not texts(made.train + made.held_out) & texts(made.test)


def test_math_questions_that_differ_in_case_or_signs_are_different_and_in_spaces_are_not(folder):
    hub_rows.write(folder, "math500")
    made = load(folder, "math", eval_questions=1)
    kept = {q.text for q in made.train + made.held_out}
    assert {"Is $X$ it?", "Is $x$ it?"} <= kept
    assert "What  is $\\sqrt{9}$?" not in kept and len(kept) == 10  # MATH-500 asks it
    assert not kept & {q.text for q in made.test}


def test_a_set_with_questions_to_train_on_is_not_taken_whole_for_a_test_set(folder, make_args):
    trained = [name for name, (_, train, *_) in LOADED.items() if train]
    assert len(trained) == 9
    for name in (*trained, "tiny_search"):
        with pytest.raises(SystemExit, match=f"--task {name} has training questions.*Use --split test"):
            tasks.load(make_args(task=name), use="all")
    hub_rows.write(folder, "aime25")
    made = tasks.load(make_args(task="aime25", tools="off"), use="all")
    assert (made.train, made.held_out, len(made.test)) == ([], [], 3)


def test_only_rank_0_reports_left_out_rows(folder, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    load(folder, "hotpotqa")
    assert "left out" not in capsys.readouterr().err


# ---- documents


def test_hotpotqa_s_corpus_is_its_paragraphs_each_once(folder):
    rows = hub_rows.write_hotpot(folder)
    made = hub.load("hotpotqa", 20, True)
    assert (len(made.train), len(made.held_out), len(made.test)) == (130, 20, 50)
    cells = [row["context"] for row in rows[150:] + rows[:150]]
    pairs = [pair for cell in cells for pair in zip(cell["title"], map(tuple, cell["sentences"]))]
    unique = list(dict.fromkeys(pairs))
    assert len(pairs) == 2000 and 700 < len(unique) < 800  # two of each question, and 400 shared ones
    assert [d["id"] for d in made.documents] == [str(i) for i in range(len(unique))]
    assert {(d["title"], d["text"]) for d in made.documents} == {(t, " ".join(" ".join(s).split())) for t, s in unique}
    assert len({d["title"] for d in made.documents}) == 450  # a title may have several texts
    search = Search(made.documents, 3)
    for question in made.test[:10]:
        person = question.text.removeprefix("Who leads the firm of ").rstrip("?")
        assert search.find(person)[0]["title"] == person
    assert hub.load("hotpotqa", 20, False).documents is None


def test_documents_keep_titles_apart_and_lose_only_white_space(folder):
    documents = load(folder, "hotpotqa", with_documents=True).documents
    assert [(d["title"], d["text"]) for d in documents] == [
        ("Nova Labs", "Nova Labs is led by Bo Hale."),
        ("Nova Labs", "Nova Labs is a song."),
        ("Øre", "Das Øre ist ein Fluß."),
        ("Empty", ""),
        ("Ada Cole", "Ada Cole works for Nova Labs. She likes tea."),
    ]
    musique = load(folder, "musique", with_documents=True).documents  # includes those of an unanswerable question
    assert [d["title"] for d in musique[:2]] == ["Ada Cole", "3hop1__7"] and len(musique) == 10
    assert musique[1]["text"] == "Bo Hale leads it. He likes tea."


# ---- refusals


def refused(name, *words):
    """Assert that load refuses the set in one line that names it and contains all words. Returns the line."""
    with pytest.raises(SystemExit) as stopped:
        hub.load(name, 2, True)
    message = str(stopped.value)
    assert message.startswith(f"--task {name}: ") and "\n" not in message and len(message) < 900
    assert [word for word in words if word not in message] == []
    return message


def test_an_unknown_name_is_answered_with_the_close_ones():
    refused("hotpot", "no data set of that name", "hotpotqa")
    refused("zzz", "hotpotqa, 2wiki, musique", "humaneval")


def test_a_missing_file_is_named(folder):
    refused("gsm8k", "TURNWISE_DATA", f"{folder}/openai/gsm8k/main/test.parquet", "test.jsonl", "unset TURNWISE_DATA")
    hub_rows.write(folder, "gsm8k")
    (folder / "openai/gsm8k/main/train.parquet").unlink()
    refused("gsm8k", "main/train.parquet")
    hub_rows.write(folder, "math")  # MATH-500 is needed to keep its questions out
    refused("math", "HuggingFaceH4/MATH-500/default/test.parquet")


def test_parquet_may_be_lines_of_json(folder):
    asked = [(q.id, q.text, q.golds) for q in everything(load(folder, "hotpotqa"))]
    place, _, _, splits = hub_rows.SETS["hotpotqa"]
    for split in ("train", "validation"):
        (folder / place / f"{split}.parquet").unlink()
        hub_rows.save(folder / place / f"{split}.jsonl", splits[split])
    assert [(q.id, q.text, q.golds) for q in everything(hub.load("hotpotqa", 2, False))] == asked


RENAMED = {"id": "1", "query": "Who?", "golden_answers": ["Bo"]}
OLD = {"id": "1", "question": "Who?", "answer": "Bo", "context": {"title": ["A"], "sentences": ["One text."]}}


@pytest.mark.parametrize(
    "name, rows, words",
    [
        ("popqa", [RENAMED], ["column question of string", "found the columns id, query, golden_answers"]),
        ("popqa", [{"id": "1", "question": "Who?"}], ["golden_answers of list of string"]),
        ("popqa", [RENAMED | {"question": 7}], ["column question of string, and found int64"]),
        ("popqa", [RENAMED | {"question": "Who?", "golden_answers": "Bo"}], ["list of string, and found string"]),
        ("popqa", [RENAMED | {"question": "Who?", "golden_answers": [1]}], ["list of string, and found list of int64"]),
        (
            "hotpotqa",
            [OLD],
            [
                "context of {title: list of string, sentences: list of list of string}, and found {",
                "sentences: list of string}",
            ],
        ),
        ("hotpotqa", [OLD | {"context": [["A", ["One."]]]}], ["context of {title: list"]),
        (
            "musique",
            [hub_rows.musique("1", "Who?", "Bo") | {"paragraphs": ["text"]}],
            ["list of {title: string, paragraph_text: string}"],
        ),
        (
            "musique",
            [hub_rows.musique("1", "Who?", "Bo") | {"answerable": "yes"}],
            ["answerable of bool, and found string"],
        ),
        (
            "aime25",
            [{"id": "1", "problem": "?", "answer": ["7"]}],
            ["answer of string or integer or float, and found list of string"],
        ),
    ],
)
def test_a_column_of_another_name_or_type_is_named_with_the_columns_found(folder, name, rows, words):
    source = hub.SOURCES[name]
    hub_rows.save(folder / source.path / (source.config or "default") / f"{source.test}.jsonl", rows)
    if source.train:
        hub_rows.save(folder / source.path / (source.config or "default") / f"{source.train}.jsonl", rows)
    refused(name, source.path, f"split {source.test}", "expected a column", *words)


def test_a_column_without_any_value_fits_and_numbers_may_be_answers(folder):
    place = folder / "math-ai/aime25/default"
    hub_rows.save(place / "test.jsonl", [{"id": None, "problem": f"Find {i}.", "answer": i} for i in range(2)])
    assert [q.golds for q in hub.load("aime25", 1, False).test] == [["0"], ["1"]]
    rows = [hub_rows.musique(f"2hop__{i}", f"Who is {i}?", "Bo Hale") for i in range(8)]  # no alias anywhere
    for split in ("train", "validation"):
        hub_rows.save(folder / f"dgslibisey/MuSiQue/default/{split}.jsonl", rows)
    assert {tuple(q.golds) for q in hub.load("musique", 1, False).test} == {("Bo Hale",)}


def test_a_broken_or_empty_file_is_refused(folder):
    file = folder / "math-ai/aime25/default/test.jsonl"
    hub_rows.save(file, [{"id": "1", "problem": "Find it.", "answer": ""}])
    refused("aime25", "no row of a split has a question and an answer")
    file.write_text('{"id": "1", "problem": \n')
    refused("aime25", "math-ai/aime25", "split test")
    file.write_text("")
    refused("aime25", "math-ai/aime25", "split test")
    hub_rows.write(folder, "popqa")
    parquet = folder / "RUC-NLPIR/FlashRAG_datasets/popqa/test.parquet"
    parquet.write_bytes(b"PAR1 and then nothing")
    refused("popqa", "split test")


def test_another_configuration_and_another_split_are_named(tmp_path, folder, monkeypatch):
    """Load from a folder of data files, which load_dataset takes in place of a name."""
    monkeypatch.delenv("TURNWISE_DATA")
    columns, splits = hub_rows.SETS["gsm8k"][2:]
    hub_rows.save(tmp_path / "old" / "main" / "test.parquet", splits["test"], columns)
    card = "---\nconfigs:\n- config_name: socratic\n  data_files:\n  - split: test\n    path: main/test.parquet\n---\n"
    (tmp_path / "old" / "README.md").write_text(card)
    monkeypatch.setitem(hub.SOURCES, "gsm8k", replace(hub.SOURCES["gsm8k"], path=str(tmp_path / "old")))
    refused("gsm8k", "configuration main", "found another layout", "'main' not found", "socratic", "SOURCES")
    (tmp_path / "old" / "README.md").write_text(card.replace("socratic", "main"))
    refused("gsm8k", "with the split train", "found another layout", "Should be one of ['test']", "TURNWISE_DATA")


# ---- the hub itself, in a separate process: the library reads its address and HF_HUB_OFFLINE at import


ELSEWHERE = """
import os, sys
import tasks
from tasks import hub, scores
for name in sys.argv[1:]:
    if os.path.isdir(name):
        os.environ["TURNWISE_DATA"] = name
        continue
    try:
        print("loaded", len(hub.load(name, 2, False).test))
    except SystemExit as stop:
        print(stop)
"""


def elsewhere(tmp_path, *names, **environment):
    """Return the result of hub.load for each name, in a process with an empty cache and these variables. A folder among
    the names is TURNWISE_DATA for the names after it."""
    clean = {k: v for k, v in os.environ.items() if k != "TURNWISE_DATA" and not k.startswith("HF_")}
    own = {"HF_HOME": str(tmp_path / "hf"), "TURNWISE_CACHE": str(tmp_path / "cache")} | environment
    command = [sys.executable, "-c", ELSEWHERE, *map(str, names)]
    done = subprocess.run(command, env=clean | own, cwd=commands.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_without_the_hub_a_set_is_refused_and_a_folder_takes_its_place(tmp_path):
    hub_rows.write(tmp_path / "hub", "gsm8k")
    (tmp_path / "hf/datasets/RUC-NLPIR___flash_rag_datasets/nq/0.0.0/0").mkdir(parents=True)  # only nq is in the cache
    names = "gsm8k", "gpqa", "popqa", tmp_path / "hub", "gsm8k"
    gsm8k, gpqa, popqa, loaded = elsewhere(tmp_path, *names, HF_HUB_OFFLINE="1")
    assert "cache" in popqa and "'nq'" not in gsm8k + gpqa
    for message, name in (
        (gsm8k, "openai/gsm8k (configuration main)"),
        (gpqa, "Idavidrein/gpqa"),
        (popqa, "configuration popqa"),
    ):
        assert name in message and "the hub is out of reach" in message and "TURNWISE_DATA" in message
    assert loaded == "loaded 2"


class Hub(BaseHTTPRequestHandler):
    """A hub that refuses all requests, as huggingface.co does for a gated, a private and an unknown repository."""

    answers = {"gpqa": (403, "GatedRepo"), "SVAMP": (401, "RepoNotFound"), "gsm8k": (404, "RepoNotFound")}

    def do_GET(self):
        status, error = next((a for name, a in self.answers.items() if name in self.path), (404, "EntryNotFound"))
        self.send_response(status)
        self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_gated_set_is_refused_with_the_way_to_it_and_an_unknown_one_with_its_page(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        gpqa, svamp, gsm8k = elsewhere(tmp_path, "gpqa", "svamp", "gsm8k", HF_ENDPOINT=address, NO_PROXY="127.0.0.1")
        server.shutdown()
    assert "gated" in gpqa and "Accept its licence at https://huggingface.co/datasets/Idavidrein/gpqa" in gpqa
    assert "hf auth login" in gpqa and "hf auth login" in svamp
    for text, page in ((svamp, "ChilleD/SVAMP"), (gsm8k, "openai/gsm8k")):
        assert f"https://huggingface.co/datasets/{page} has moved" in text and "licence" not in text


@pytest.mark.parametrize("model, task", [("Qwen/nonexistent", "tiny_search"), ("tiny", "gsm8k")])
def test_a_hub_out_of_reach_is_tried_once(tmp_path, model, task):
    code = (
        "import sys; from types import SimpleNamespace; from common import models; from tasks import hub, loading\n"
        "loading.try_once(SimpleNamespace(model=sys.argv[1], task=sys.argv[2]))\n"
        "models.load_tokenizer(sys.argv[1]) if '/' in sys.argv[1] else hub.load(sys.argv[2], 1, False)"
    )
    gone = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    env = os.environ | gone | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    env.pop("TURNWISE_DATA", None)
    done = subprocess.run(
        [sys.executable, "-c", code, model, task],
        env=env,
        cwd=hub_rows.__file__[: -len("tests/helpers/hub_rows.py")],
        text=True,
        capture_output=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") <= 2 and "Retry" not in done.stderr, done.stderr
    assert "hub" in done.stderr and (f"--model {model}: " if "/" in model else f"--task {task}: ") in done.stderr
