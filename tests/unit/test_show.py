"""Views of a run: trajectories in the terminal, and the HTML page."""

import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import random_groups

from common.log import METRICS
from common.turns import Question, Trajectory, Turn, sample
from view import report, show
from view.__main__ import look

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\"> '\"& [bold red]x[/]"


def line(step=1, kind="train", question="q", number=0, outcome=0.0, f1=0.0, advantages=(1.0,), outputs=(), text="said"):
    """Return a line of samples.jsonl with a turn for each advantage. The first turns call a tool and get `outputs`."""
    turns = [Turn([], [1, 2], [], text=text) for _ in advantages]
    for turn, output in zip(turns, outputs):
        turn.tool, turn.tool_input, turn.tool_output, turn.tool_status = "search", "asked", output, "ok"
    trajectory = Trajectory(turns=turns, answer="guess", outcome=outcome, stop="answer", info={"f1": f1})
    return sample(step, kind, Question(question, question, ["The Hague"]), number, trajectory, list(advantages))


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes lines of samples and of metrics to a run directory and returns the directory."""

    def write(items, metrics=()):
        for name, objects in ("samples.jsonl", items), ("metrics.jsonl", metrics):
            if objects:
                (tmp_path / name).write_text("".join(json.dumps(o, ensure_ascii=False) + "\n" for o in objects))
        return tmp_path

    return write


WHOLE = line(outputs=["found"], text="said")
METRIC = {"step": 1, "eval/em": 0.5, "reward/mean": 0.25}
WRONG_SAMPLES = {  # lines of samples.jsonl
    "a list": [1, 2],
    "a number": 7,
    "null": None,
    "empty": {},
    **{
        f"no {key}": {k: v for k, v in WHOLE.items() if k != key}
        for key in ("step", "kind", "question", "golds", "turns", "info")
    },
    "a step in words": WHOLE | {"step": "1"},
    "an endless step": WHOLE | {"step": 10**300},
    "outcome in words": WHOLE | {"outcome": "good"},
    "outcome nan": WHOLE | {"outcome": float("nan")},
    "outcome endless": WHOLE | {"outcome": float("inf")},
    "golds is text": WHOLE | {"golds": "The Hague"},
    "golds of numbers": WHOLE | {"golds": [1, None]},
    "turns is an object": WHOLE | {"turns": {"0": {}}},
    "turns of numbers": WHOLE | {"turns": [1]},
    "a question of numbers": WHOLE | {"question": [1]},
    "info is a list": WHOLE | {"info": [0.5]},
    "f1 in words": WHOLE | {"info": {"f1": "high"}},
    "deep info": WHOLE | {"info": {"a": {"b": [[[[1]]]]}}},
    "forked in words": WHOLE | {"forked": "no"},
    **{
        f"a turn with {key} {value!r}": WHOLE | {"turns": [WHOLE["turns"][0] | {key: value}]}
        for key, value in (
            ("text", None),
            ("text", 3),
            ("tokens", "two"),
            ("tool_output", None),
            ("tool_status", ["ok"]),
            ("tool", 1),
            ("advantage", "big"),
            ("advantage", [1, None]),
            ("advantage", {"a": 1}),
            ("info", [1]),
            ("info", {"a": [[1]]}),
            ("observation_tokens", None),
        )
    },
}
WRONG_METRICS = {
    "a list": [],
    "a text": "x",
    "no step": {"eval/em": 1.0},
    "a step in words": METRIC | {"step": "1"},
    "a value in words": METRIC | {"eval/em": "good"},
    "a list as value": METRIC | {"eval/em": [1]},
    "an object as value": METRIC | {"time/step": {}},
    "an endless value": METRIC | {"eval/em": 10**400},
}
RAW = {
    "deep": b"[" * 100_000 + b"\n",
    "not UTF-8": b"\xff\xfe\n",
    "zeros": b"\0" * 500 + b"\n",
    "a number of 5,000 digits": b"9" * 5000 + b"\n",
}


@pytest.mark.parametrize("case", [*WRONG_SAMPLES, *RAW])
def test_a_malformed_line_of_samples_is_left_out_by_both_views(tmp_path, capsys, case):
    bad = RAW.get(case) or json.dumps(WRONG_SAMPLES[case]).encode() + b"\n"
    whole = json.dumps(WHOLE).encode() + b"\n"
    (tmp_path / "samples.jsonl").write_bytes(whole + bad * 3 + whole)
    for words in (["show"], ["show", "--worst"], ["show", "--best"], ["report"]):
        look([*words, str(tmp_path)])
        out, err = capsys.readouterr()
        assert "2 of 2" in out or "2 of the 2 samples" in out
        assert err.count("\n") == 1 and "line 2 and 2 more: malformed, left out" in err
    (tmp_path / "samples.jsonl").write_bytes(bad)
    assert "no samples of kind" in refused("show", tmp_path)
    look(["report", str(tmp_path)])


@pytest.mark.parametrize("case", [*WRONG_METRICS, *RAW])
def test_a_malformed_line_of_metrics_is_left_out(tmp_path, capsys, case):
    bad = RAW.get(case) or json.dumps(WRONG_METRICS[case]).encode() + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(bad + json.dumps(METRIC).encode() + b"\n")
    look(["report", str(tmp_path)])
    assert "line 1: malformed, left out" in capsys.readouterr().err
    assert [line["step"] for line in report.read_metrics(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.parametrize(
    "name, content",
    [
        ("args.json", "[]"),
        ("args.json", "7"),
        ("args.json", "[" * 100_000),
        ("args.json", '{"a": ' * 900 + "1" + "}" * 900),
        ("args.json", '{"steps": "many", "lr": NaN, "x": [[[1]]], "y": 1e999}'),
        ("args.json", None),
        ("environment.json", "3"),
        ("environment.json", '{"a": ' * 900 + "1" + "}" * 900),
        ("environment-after-step-1.json", None),
        ("x.py", "def ("),
        ("x.py", "\0"),
        ("x.py", "class Args:\n    a.b: int = b'x'\n    f(1)\n    c: int = ...\n    d: int = 1j\n    print"),
        ("x.py", "(" * 9000),
        ("report.html.new", "x"),
    ],
)
def test_other_malformed_files_do_not_keep_the_report_from_being_written(tmp_path, name, content):
    (tmp_path / "samples.jsonl").write_text(json.dumps(WHOLE) + "\n")
    (tmp_path / "args.json").write_text('{"a": 1, "c": 2, "d": 3}')
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_text(content)
    look(["report", str(tmp_path)])
    text = re.search(r'type="application/json">(.*?)</script>', (tmp_path / "report.html").read_text(), re.DOTALL)[1]
    json.loads(text, parse_constant=lambda word: pytest.fail(word))


def test_a_report_that_is_a_link_does_not_touch_what_it_leads_to(tmp_path):
    run, other = tmp_path / "run", tmp_path / "thesis.tex"
    run.mkdir()
    other.write_text("ten years of work")
    (run / "samples.jsonl").write_text(json.dumps(WHOLE) + "\n")
    for name in ("report.html", "report.html.new"):
        (run / name).symlink_to(other)
    look(["report", str(run)])
    assert other.read_text() == "ten years of work" and "<html" in (run / "report.html").read_text()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    assert "cannot be written (Is a directory)" in refused("report", run)


def test_the_time_to_show_a_long_text_grows_with_its_length():
    def seconds(length):
        start = time.process_time()
        for unit in ("x", "a-", "word ", "\u00e9"):
            show.describe(WHOLE | {"question": unit * (length // len(unit))}, None, True, 80)
        return time.process_time() - start

    seconds(20_000)
    assert seconds(1_000_000) < 20 * seconds(100_000)


def printed(capsys, *words):
    look(["show", *map(str, words)])
    return capsys.readouterr().out


def refused(*words):
    with pytest.raises(SystemExit) as stopped:
        look([*map(str, words)])
    assert "\n" not in str(stopped.value)
    return str(stopped.value)


# ---- choosing


def numbers(which, items, count=9):
    return [s["sample"] for s in show.choose(items, which, count)]


def test_worst_is_by_outcome_then_f1_then_advantage_and_best_is_the_reverse():
    items = [
        line(number=0, outcome=1.0, f1=1.0, advantages=[0.5]),
        line(number=1, outcome=0.0, f1=0.4, advantages=[-2.0, -2.0]),
        line(number=2, outcome=0.0, f1=0.0, advantages=[-0.5]),
        line(number=3, outcome=0.0, f1=0.0, advantages=[[-1.0, -2.0], None]),  # mean -0.75
    ]
    assert numbers("worst", items) == [3, 2, 1, 0]
    assert numbers("best", items) == [0, 1, 2, 3]
    assert numbers("worst", items, 2) == [3, 2]
    assert numbers(None, items, 2) == [0, 1]


def test_a_near_miss_is_wrong_with_a_gold_in_a_tool_output_and_nowhere_else():
    items = [
        line(number=0, outputs=["It is in den HA-GUE!"]),  # in normal form
        line(number=1, outputs=["Amsterdam"], text="It is The Hague"),  # only in the model's text
        line(number=2, outputs=["The Hague"], outcome=1.0),  # the answer is right
        line(number=3, advantages=[0.0, 0.0], outputs=["nothing", "The Hague."]),
    ]
    assert numbers("near_miss", items) == [0, 3]
    refused = line(outputs=["That is no search."]) | {"golds": ["no"]}
    refused["turns"][0]["tool_status"] = "invalid"
    around = line(outputs=["Doc 1 (Title: Ada) A town."]) | {"golds": ["1"]}
    assert not show.near_miss(refused) and not show.near_miss(around)
    empty = line(outputs=["a b c"]) | {"golds": ["the"]}  # empty in normal form
    assert not show.near_miss(empty)


def test_samples_of_a_step_and_kind_are_read_in_their_groups(folder):
    at = folder(
        [
            *(line(0, "eval", f"q{i}") for i in range(3)),
            *(line(1, "train", "q0", g) for g in (0, 1)),
            *(line(1, "train", "q0", g, advantages=[0.0, None]) for g in (0, 1)),  # the same question, drawn again
            line(1, "train", "q1", advantages=[[0.0, 0.1]]),
        ]
    )
    blocks = show.index(at / "samples.jsonl")
    assert {key: [len(g.offsets) for g in groups] for key, groups in blocks.items()} == {
        (0, "eval"): [1, 1, 1],
        (1, "train"): [2, 2, 1],
    }
    assert [g.signal for g in blocks[1, "train"]] == [True, False, True]
    read = show.read(at / "samples.jsonl", blocks[1, "train"][1:])
    assert [(s["question"], s["sample"]) for s in read] == [("q0", 0), ("q0", 1), ("q1", 0)]


# ---- in the terminal


def test_the_last_training_step_is_shown_unless_flags_choose_another(folder, capsys):
    at = folder([line(0, "eval"), line(1), line(2, question="second"), line(2, question="third"), line(2, "eval")])
    assert "step 2, train: 2 of 2" in printed(capsys, at)
    assert "question: second" in printed(capsys, at, "--count", 1) and "third" not in printed(capsys, at, "--count", 1)
    assert "step 1, train: 1 of 1" in printed(capsys, at, "--step", 1)
    assert "step 2, eval: 1 of 1" in printed(capsys, at, "--kind", "eval")
    assert "step 2, train: worst, 1 of 2" in printed(capsys, at, "--worst", "--count", 1)


def test_kinds_come_from_the_file(folder, capsys):
    at = folder([line(0, "base greedy"), line(0, "adapter greedy")])
    assert "base greedy: 1 of 1" in printed(capsys, at)
    assert "adapter greedy: 1 of 1" in printed(capsys, at, "--kind", "adapter greedy")


def test_advantages_per_turn_per_token_and_none(folder, capsys):
    text = printed(capsys, folder([line(advantages=[0.5, [0.1, -0.3], None])]))
    assert re.findall(r"turn \d   2 tokens   (.*)", text) == [
        "advantage +0.50",
        "advantage -0.10 (mean of 2 tokens, from -0.30 to +0.10)",
        "not trained",
    ]


def test_bars_separate_the_sampled_tokens():
    class Letters:
        def encode(self, text, add_special_tokens):
            return list(text)

        def decode(self, ids):
            return "".join(ids)

    assert "    a|b\n" in show.describe(line(text="ab"), Letters())
    assert "    abc\n" in show.describe(line(text="abc"), Letters())  # two tokens were sampled: the split is unknown


def test_colour_shows_sign_and_size():
    weak, middle, strong = (show.colour_of(a) for a in (0.1, 0.5, 2.0))
    assert len({weak, middle, strong}) == 3 and all(show.GREEN in code for code in (weak, middle, strong))
    assert show.RED in show.colour_of([-1.0, 0.5]) and show.colour_of(None) == show.GREY and show.colour_of(0.0) == ""
    text = show.describe(line(advantages=[0.5, -0.5, None], outputs=["heard"]), colour=True)
    assert "\x1b[32msaid" in text and "\x1b[31msaid" in text and "\x1b[90msaid" in text and "\x1b[2mheard" in text


def test_colour_and_wrapping_only_on_a_terminal(folder, capsys, monkeypatch):
    at = folder([line(text="word " * 100)])
    assert "\x1b" not in printed(capsys, at) and "word " * 99 in printed(capsys, at)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[" in printed(capsys, at)
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(capsys, at)
    assert "\x1b" not in text and "word " * 20 not in text and text.count("word") == 100


def test_text_of_a_model_cannot_control_the_terminal(folder, capsys):
    text = printed(capsys, folder([line(text=NASTY + "\x1b[2J\x07 Zürich 東京")]))
    assert NASTY in text and r"\x1b[2J\x07 Zürich 東京" in text and "\x1b" not in text


@pytest.mark.parametrize("here", [ROOT, None])
def test_a_printed_command_works_in_this_folder_and_with_spaces_in_names(here, folder, tmp_path, monkeypatch):
    at = folder([line(1)])
    spaced = tmp_path / "a run's folder"
    spaced.mkdir()
    shutil.copy(at / "samples.jsonl", spaced)
    monkeypatch.chdir(here or tmp_path)
    words = report.command("show", spaced if here else Path(spaced.name), "--worst")
    done = subprocess.run(words, shell=True, capture_output=True, text=True)
    assert "step 1, train: worst, 1 of 1" in done.stdout, done.stdout + done.stderr


def test_a_cut_last_line_is_ignored(folder, capsys):
    at = folder([line(1), line(2)])
    with open(at / "samples.jsonl", "ab") as file:
        file.write(json.dumps(line(3, question="東京"), ensure_ascii=False).encode()[:-200])
    assert "step 2, train: 1 of 1" in printed(capsys, at)
    report.write(at, at / "report.html")


def test_a_bad_line_before_the_end_is_left_out_and_reported(folder, capsys):
    at = folder([line(1)])
    with open(at / "samples.jsonl", "a") as file:
        file.write('{"step": 2, "ki\n' + json.dumps(line(3)) + "\n")
    look(["show", str(at)])
    out, err = capsys.readouterr()
    assert "step 3" in out and "line 2: malformed, left out" in err


def test_errors_are_one_line_and_list_the_choices(folder, tmp_path):
    at = folder([line(s) for s in (1, 2, 3)] + [line(s, "eval") for s in (0, 5, 20)])
    assert "not a run directory" in refused("show", tmp_path / "nowhere")
    assert "there are steps 1 to 3." in refused("show", at, "--step", 7)
    assert "there are steps 0 to 20 (3 of them)." in refused("show", at, "--step", 7, "--kind", "eval")
    assert "there are: train, eval" in refused("show", at, "--kind", "tset")
    assert "no near miss among the train samples of step 3" in refused("show", at, "--near_miss")
    assert "not a run directory" in refused("report", tmp_path / "nowhere")
    assert refused("show", at, "--worst", "--best") == refused("play") == refused() == "2"  # usage, by argparse


def test_looking_at_a_run_needs_neither_torch_nor_vllm(folder):
    at = folder([line()], [dict.fromkeys(METRICS) | {"step": 0}])
    code = (
        "import sys; from view.__main__ import look; "
        f"look(['show', {str(at)!r}, '--worst']); look(['report', {str(at)!r}]); "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


# ---- the page


def page_of(at):
    """Write the page of a run directory. Returns (page, its data)."""
    report.write(at, at / "report.html")
    page = (at / "report.html").read_text()
    return page, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def metrics(steps, **values):
    return [
        dict.fromkeys(METRICS) | {"step": s} | {k.replace("__", "/"): f(s) for k, f in values.items()} for s in steps
    ]


def test_every_metric_that_was_measured_is_a_curve_without_its_nulls(folder):
    at = folder(
        (),
        metrics(
            range(3),
            reward__mean=lambda s: s / 2 if s else None,
            credit__mine=lambda s: float(s),
            eval__em=lambda s: 0.5 if s == 0 else None,
        ),
    )
    data = page_of(at)[1]
    assert [(group, [(p["key"], p["points"]) for p in panels]) for group, panels in data["curves"]] == [
        ("eval", [("eval/em", [[0, 0.5]])]),
        ("reward", [("reward/mean", [[1, 0.5], [2, 1.0]])]),
        ("credit", [("credit/mine", [[0, 0.0], [1, 1.0], [2, 2.0]])]),
    ]
    assert data["table"] == [["exact match", 0.5, 0.5, 0]]
    assert "SQuAD" in data["curves"][0][1][0]["meaning"]  # from view/metrics.py


def test_long_curves_are_thinned_by_means():
    points, size = report.thin([(s, float(s)) for s in range(1, 2001)])
    assert size == 4 and len(points) == 500 and points[0] == (4, 2.5)
    assert report.thin([]) == ([], 1) and report.thin([(3, 1.0)]) == ([(3, 1.0)], 1)


def test_groups_come_whole_and_those_with_signal_first(folder):
    flat = [line(question="flat", number=g, advantages=[0.0]) for g in range(3)]
    at = folder(flat + [line(question="mixed", number=g, advantages=[g - 1.0]) for g in range(3)])
    (block,) = page_of(at)[1]["blocks"]
    assert [(i["question"], len(i["samples"])) for i in block["items"]] == [("mixed", 3), ("flat", 3)]
    assert (block["size"], block["shown"], block["groups"], block["signal"]) == (6, 6, 2, 1)


def test_texts_are_cut_before_samples_are_left_out(folder, monkeypatch):
    at = folder([line(number=g, text="long " * 2000 + "</answer>") for g in range(4)])
    monkeypatch.setattr(report, "SAMPLE_BYTES", 6000)
    (block,) = page_of(at)[1]["blocks"]
    (item,) = block["items"]
    texts = [t["text"] for s in item["samples"] for t in s["turns"]]
    assert len(texts) == 4 and all("characters cut" in t and t.endswith("</answer>") and len(t) < 1500 for t in texts)
    monkeypatch.setattr(report, "SAMPLE_BYTES", 700)
    (block,) = page_of(at)[1]["blocks"]
    assert 0 < block["shown"] < 4 == block["items"][0]["size"]
    assert report.evenly(list(range(100)), 4) == [0, 33, 66, 99] and report.evenly([1, 2], 4) == [1, 2]


def test_settings_that_differ_from_the_script_s_defaults(folder):
    at = folder([line()])
    (at / "args.json").write_text(json.dumps({"lr": 0.5, "seed": 1, "unheard_of": [1]}))
    (at / "mine.py").write_text('class Args:\n    lr: float = 1e-5\n    """learning rate"""\n    seed: int = 1\n')
    (at / "environment.json").write_text(json.dumps({"cores": 2, "packages": {"torch": "2"}}))
    (at / "environment-after-step-5.json").write_text(json.dumps({"cores": 4}))
    data = page_of(at)[1]
    assert data["args"] == [["lr", 0.5, 1e-5, "learning rate"], ["seed", 1, 1, ""], ["unheard_of", [1], None, ""]]
    assert data["environments"] == [
        ["environment-after-step-5.json", [["cores", 4]]],
        ["environment.json", [["cores", 2], ["packages.torch", "2"]]],
    ]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """Write a run of 200 steps of 16 questions x 8 samples of 4 turns, with the lengths of a search task."""
    at, rng = tmp_path_factory.mktemp("long"), random.Random(0)
    words = [f"{w} " for w in 'who taught the mayor of Zürich search <answer> 1985 company "river" born in'.split()]
    texts = ["".join(rng.choices(words, k=25)) for _ in range(50)]
    (at / "metrics.jsonl").write_text(
        "".join(json.dumps({k: rng.random() for k in METRICS} | {"step": s}) + "\n" for s in range(201))
    )
    with open(at / "samples.jsonl", "w") as file:
        for step in range(1, 201):
            for question in range(16):
                for g in range(8):
                    made = line(
                        step, "train", f"question {question} of step {step}?", g, float(g % 2), advantages=[g - 3.5] * 4
                    )
                    for turn in made["turns"]:
                        turn |= {
                            "text": rng.choice(texts),
                            "tool": "search",
                            "tool_status": "ok",
                            "tool_input": "Zürich",
                        }
                        turn["tool_output"] = rng.choice(texts) + rng.choice(texts)
                    file.write(json.dumps(made) + "\n")
    return at


@pytest.mark.slow
def test_the_page_of_a_long_run_stays_below_5_mb_and_shows_every_step(long_run):
    page, data = page_of(long_run)
    assert len(page.encode()) < 5_000_000
    assert len(data["blocks"]) == 200 and data["left_out"] == 0
    assert all(b["size"] == 128 and len(b["items"][0]["samples"]) == 8 for b in data["blocks"])


def test_non_finite_numbers_are_null_on_the_page(folder):
    """Check for NaN and Infinity, which JSON does not have: the browser would show an empty page."""
    at = folder([line(advantages=(float("nan"), 1.0))], [dict.fromkeys(METRICS) | {"step": 1}])
    report.write(at, at / "page.html")
    data = (at / "page.html").read_text().split('type="application/json">')[1].split("</script>")[0]
    assert "NaN" not in data and "Infinity" not in data


def test_the_page_loads_nothing_and_no_text_becomes_markup(folder):
    at = folder([line(text=NASTY, outputs=[NASTY], question=NASTY) | {"answer": NASTY}])
    page, data = page_of(at)
    assert page.count("<script") == page.count("</script>") == 2 and "<img" not in page
    assert data["blocks"][0]["items"][0]["samples"][0]["turns"][0]["text"] == NASTY
    # The address of SVG is a name: the browser does not load it.
    around = page.replace(report.encode(data), "").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|href=|@import|url\(", around)
    assert "default-src 'none'" in page


def dom(page, at, fragment=""):
    """Return the DOM of a page after its script has run in a real browser without network."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--proxy-server=127.0.0.1:9", f"--user-data-dir={at / 'browser'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{page}{fragment}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr  # errors of the script, and violations of the page's policy
    return done.stdout.partition('<script id="data"')[0] + done.stdout.rpartition("</script>")[2]


@pytest.mark.skipif(not BROWSER, reason="needs chromium or google-chrome")
def test_the_page_in_a_browser(folder):
    made, advantages = random_groups.groups()
    items = [
        sample(1, "train", g.question, i, t, a)
        for g, adv_GK in zip(made, advantages)
        for i, (t, a) in enumerate(zip(g.trajectories, adv_GK))
    ]
    items += [line(2, text=NASTY, outputs=["heard of The Hague"], question=NASTY, advantages=[[-1.0, -0.5], None])]
    at = folder(
        items,
        metrics((0, 1, 2), eval__em=lambda s: 0.25 if s == 0 else None, reward__mean=lambda s: s / 4 if s else None),
    )
    report.write(at, at / "page.html")
    shown = dom(at / "page.html", at)
    curves = re.findall(r'<svg[^>]*aria-label="([^"]*)"', shown)
    assert curves == ["eval/em", "reward/mean"] and shown.count("<polyline") == 2
    assert ">step 2</b>" in shown and "near miss" in shown and "<mark>The Hague</mark>" in shown
    assert "mean of its tokens, from -1.00 to -0.50" in shown and "not trained" in shown
    assert "<title>taken" not in shown and "<img" not in shown and "&lt;img src=x onerror=" in shown
    assert '<p id="failed"></p>' in shown
    first = dom(at / "page.html", at, "#kind=train&step=1")
    assert ">step 1</b>" in first and all(f">question {p}</div>" in first for p in range(3))
    assert first.count('<details class="sample"') == 12


@pytest.mark.skipif(not BROWSER, reason="needs chromium or google-chrome")
@pytest.mark.parametrize("case", ["only step 0", "no samples", "no metrics"])
def test_the_page_of_a_small_run_in_a_browser(folder, case):
    measured = metrics([0], eval__em=lambda s: 0.25)
    at = folder(
        [line(0, "eval", advantages=[None])] if case != "no samples" else (), measured if case != "no metrics" else ()
    )
    report.write(at, at / "page.html")
    shown = dom(at / "page.html", at)
    assert '<p id="failed"></p>' in shown and ">Settings</h2>" in shown
    assert shown.count("<svg") == (case != "no metrics") and shown.count('<details class="sample"') == (
        case != "no samples"
    )


def test_a_reader_that_closes_the_pipe_ends_the_output_in_silence():
    code = (
        "from view import show\nwith show.until_closed():\n    for i in range(100000): print('a long line')\nprint('b')"
    )
    done = subprocess.run(f'{sys.executable} -c "{code}" | head -1', shell=True, text=True, capture_output=True)
    assert (done.stdout, done.stderr) == ("a long line\n", "")
