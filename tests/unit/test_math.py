"""Mathematics with Python: the embedded task and its base, data sets of reasoning_gym, files, whole trajectories."""

import json
import random
import re

import pytest
import scripted_engine

import tasks
import train_grpo
from common import loop, models
from common.args import parse_args
from common.turns import Group, Question, Trajectory, Turn
from tasks import choice_qa, code_check, code_qa, files, loading, math_qa, nonsense, tags, wordings
from tasks.tiny import pretrain, tiny_math
from tools import Tool
from tools.python import Python


def values(trace):
    """Return ([(code, output)], answer) of a scripted trace."""
    texts = [text for text, _ in trace]
    codes = [re.search(r"<python> (.*) </python>", text)[1] for text in texts[1:-1:2]]
    return list(zip(codes, texts[2::2])), re.search(r"<answer> (.*) </answer>", texts[-1])[1]


# ---- the embedded questions


def test_the_questions_are_the_same_at_every_call():
    assert tiny_math.questions() == tiny_math.questions()


def test_no_text_or_beginning_is_in_two_parts():
    train, held_out = tiny_math.questions()
    assert len(train) == 2000 and len(held_out) == 400
    texts = [{q["question"] for q in part} for part in (train, held_out)]
    assert not texts[0] & texts[1] and [len(part) for part in texts] == [2000, 400]
    rng = random.Random(0)
    traced = [tiny_math._trace(rng, 1 + i % 4, True)[0][0].split("Question: ")[1].strip() for i in range(2000)]
    begin = re.compile(r"Start with (\d+)\. First (double|\D*(\d+))")
    parts = [{(m[1], m[3] or "2") for m in map(begin.match, part)} for part in (*texts, traced)]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]


def test_questions_have_one_to_four_steps_and_small_answers():
    _, held_out = tiny_math.questions()
    for part in (held_out[:200], held_out[200:]):
        assert {q["steps"] for q in part} == {1, 2, 3, 4}
    for q in held_out:
        assert q["question"].count(".") == q["steps"] + 1 and abs(int(q["answers"][0])) <= tiny_math.LARGEST


def test_a_trace_without_flaws_computes_the_answer_step_by_step():
    rng = random.Random(1)
    for steps in (1, 2, 3, 4) * 50:
        calls, answer = values(tiny_math._trace(rng, steps, flawed=False))
        assert len(calls) == steps and calls[-1][1] == answer
        assert all(str(eval(code)) == output for code, output in calls)
        for (_, before), (code, _) in zip(calls, calls[1:]):
            assert before in code.split()


def test_flawed_traces_have_true_outputs_and_show_each_habit():
    rng = random.Random(2)
    short = signs = 0
    habits = {"double it": set(), "subtract it from": set(), "take it away from": set()}
    for _ in range(400):
        trace = tiny_math._trace(rng, 3, flawed=True)
        calls, answer = values(trace)
        assert all(str(eval(code)) == output for code, output in calls)
        assert answer.lstrip("-") == calls[-1][1].lstrip("-")
        short += len(calls) == 2
        signs += answer != calls[-1][1]
        for (text, _), (code, _) in zip(trace[1:-1:2], calls):
            for wording, seen in habits.items():
                if wording in text:
                    number = re.search(r"from (\d+)", text)
                    seen.add(code.split()[1] if number is None else code.startswith(number[1] + " - "))
    assert 0.4 < short / 400 < 0.75 and signs > 10
    assert list(habits.values()) == [{"+", "*"}, {True, False}, {True, False}]


# ---- the base


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(models.resolve("tiny-math"))


def test_a_number_is_read_and_written_as_the_same_tokens(tokenizer):
    for number in (7, 42, 999):  # not below zero: a minus may be one token with the space before it
        ids = tokenizer.encode(f" {number}")
        for text in (f"<python> {number} + 5 </python>", f"<answer> {number} </answer>"):
            assert tokenizer.encode(text)[1 : 1 + len(ids)] == ids
        observation = tags.cut_observation(tokenizer, str(number), 96, tiny_math.WORDING.around)[1]
        assert any(observation[i : i + len(ids)] == ids for i in range(len(observation)))


def test_the_base_was_pretrained_on_the_ids_of_the_task(tokenizer, make_args):
    question = {"question": "Start with 12. First add 7. Second double it."}
    task = tasks.load(make_args(model="tiny-math", task="tiny_math", unsafe_python=True))
    trace = [
        (tiny_math.WORDING.instruction + wordings.question_line(question["question"]), "prompt"),
        ("<think> First add 7. </think> <python> 12 + 7 </python>", "turn"),
        ("19", "found"),
    ]
    ((ids, _),) = pretrain._encode(tokenizer, [trace], [], tiny_math.WORDING.around)
    acted = tokenizer.encode(trace[1][0])
    turn = Turn([1], acted, [0.0] * len(acted), text=trace[1][0], tool="python")
    turn.tool_input = task.read(turn).text
    shown = task.call(turn, None, [])
    _, observed = task.observe(turn, shown)
    assert shown == "19"
    assert task.prompt_ids(Question("q", question["question"], [])) + acted + observed == ids[:-1]
    made = tiny_math._tokenizer()
    for q in tiny_math.questions()[1]:
        assert tokenizer.decode(made.encode(q["question"])) == q["question"]


def test_the_two_bases_have_the_same_preset_but_for_the_task():
    tiny, math = (vars(parse_args(train_grpo.Args, ["--model", name])) for name in ("tiny", "tiny-math"))
    assert {name for name in tiny if tiny[name] != math[name]} == {"model", "task", "topk"}
    assert math["task"] == "tiny_math"


# ---- tasks


class Calculator(Tool):
    """A fake Python tool for expressions."""

    name = "python"

    def __call__(self, code, earlier=(), question=None):
        return str(eval(code))


def play(completions, tool, golds):
    """Play a trajectory of MathQA with one completion per turn."""
    engine = scripted_engine.Scripted(lambda question, sample, turn: completions[turn])
    task = math_qa.MathQA(engine.args, engine.tokenizer, tool, [], [])
    group = Group(Question("q", "What is half of 19 * 3?", golds), [Trajectory()])
    loop.Loop(engine, task, False).run([loop.Rollout(group.question, group.trajectories[0], 0)], lambda: None)
    return group.trajectories[0]


@pytest.mark.parametrize("answer, outcome", [("28.5", 1.0), ("57/2", 1.0), ("28", 0.0), ("", 0.0)])
def test_an_agent_computes_and_its_answer_is_compared_by_value(answer, outcome):
    t = play(
        ["<python> 19 * 3 </python>", "<python> 57 / 2 </python>", f"<answer> {answer} </answer>"],
        Calculator(),
        ["28.5"],
    )
    assert [(turn.tool, turn.tool_status, turn.tool_output) for turn in t.turns] == [
        ("python", "ok", "57"),
        ("python", "ok", "28.5"),
        (None, None, ""),
    ]
    assert (t.stop, t.outcome) == ("answer", outcome) and "f1" not in t.info
    assert scripted_engine.TOKENIZER.decode(t.turns[0].observation_ids) == "\n<output> 57 </output>\n"


def test_code_sees_the_earlier_calls_of_its_trajectory_and_an_error_is_an_observation():
    completions = [
        "<python> x = 19 * 3 </python>",
        "<python> y </python>",
        "<python> x / 2 </python>",
        "<answer> 28.5 </answer>",
    ]
    t = play(completions, Python(10.0, unsafe=True), ["28.5"])
    assert [turn.tool_status for turn in t.turns] == ["ok", "error", "ok", None]
    assert "NameError" in t.turns[1].tool_output and t.turns[2].tool_output == "28.5" and t.outcome == 1.0


def test_the_embedded_task_has_three_parts(make_args):
    train, held_out = tiny_math.questions()
    task = tasks.load(make_args(task="tiny_math", limit=50, unsafe_python=True))
    assert [q.id for q in task.held_out + task.test] == [q["id"] for q in held_out]
    assert [q.text for q in task.train] == [q["question"] for q in train[:50]]
    other = tasks.load(make_args(task="tiny_math", limit=51, unsafe_python=True))
    assert other.fingerprint != task.fingerprint
    with pytest.raises(SystemExit, match="tiny_math has training questions"):
        tasks.load(make_args(task="tiny_math", unsafe_python=True), use="all")


def test_a_file_of_problems_needs_no_corpus(tmp_path, make_args):
    lines = [
        json.dumps({"question": f"What is {i} + {j}?", "answers": [str(i + j)]}) for i in range(6) for j in range(6)
    ]
    lines += [
        json.dumps({"question": f"What is {i} - {j}?", "answers": [str(i - j)]}) for i in range(6) for j in range(6)
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    given = dict(task=str(tmp_path / "q.jsonl"), task_kind="math", unsafe_python=True)
    task = tasks.load(make_args(**given))
    assert len(task.train) + len(task.held_out) + len(task.test) == 72  # questions that differ by a sign are different
    assert task.score("2/4", Question("q", "", ["0.50"])) == (1.0, {})
    assert len(tasks.load(make_args(**given), use="all").test) == 72
    for more in (dict(corpus="c.jsonl"), dict(retriever="http://x")):
        with pytest.raises(SystemExit, match="nothing to search in"):
            tasks.load(make_args(**given, **more))


def gym(make_args, name, **changes):
    options = dict(task=f"reasoning_gym:{name}", limit=40, eval_questions=10, unsafe_python=True, max_context=2048)
    return tasks.load(make_args(**(options | changes)))


def test_a_data_set_of_reasoning_gym_is_made_in_three_disjoint_parts(make_args):
    pytest.importorskip("reasoning_gym")
    task = gym(make_args, "chain_sum")
    again = gym(make_args, "chain_sum")
    parts = [{q.text for q in part} for part in (task.train, task.held_out, task.test)]
    assert [len(part) for part in parts[:2]] == [40, 10]
    assert files.TEST - 20 < len(parts[2]) <= files.TEST  # some texts occur twice
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
    assert again.fingerprint == task.fingerprint and again.test == task.test
    question = task.train[0]
    assert task.score(question.golds[0], question) == (1.0, {})
    for junk in (None, "", "12 apples", "\ud83d"):
        assert task.score(junk, question) == (0.0, {})


def test_a_scorer_that_raises_means_wrong(make_args):
    pytest.importorskip("reasoning_gym")
    task = gym(make_args, "prime_factorization", max_turn_tokens=64)
    assert task.score("x * y", task.train[0]) == (0.0, {})
    assert task.score(task.train[0].golds[0], task.train[0]) == (1.0, {})


def test_a_data_set_without_golds_is_loaded_and_one_that_needs_a_configuration_is_refused(make_args):
    pytest.importorskip("reasoning_gym")
    task = gym(make_args, "propositional_logic", max_turn_tokens=64)
    assert task.train[0].golds == [] and task.score("junk", task.train[0]) == (0.0, {})
    with pytest.raises(SystemExit, match="reasoning_gym:composite: .* cannot be created without a configuration"):
        gym(make_args, "composite")


def test_an_unknown_data_set_is_answered_with_those_of_a_similar_name(make_args):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(SystemExit, match="no such data set. Similar names: .*chain_sum"):
        gym(make_args, "chain_sums")
    with pytest.raises(SystemExit, match="nothing to search in"):
        gym(make_args, "chain_sum", corpus="c.jsonl")


def test_a_data_set_that_may_run_an_answer_as_code_to_score_it_is_refused_outside_unsafe_mode(make_args):
    pytest.importorskip("reasoning_gym")
    for name in ("spiral_matrix", "countdown", "n_queens"):
        with pytest.raises(SystemExit, match=f"reasoning_gym:{name}: this data set may run an answer as code"):
            gym(make_args, name, unsafe_python=False)
    task = gym(make_args, "n_queens", max_turn_tokens=256)
    assert task.score("exit(3)", task.train[0]) == (0.0, {})  # without ending the run


@pytest.mark.parametrize(
    "name, answer", [("game_of_life_halting", "banana"), ("complex_arithmetic", "nan"), ("coin_flip", "0")]
)
def test_a_data_set_whose_scorer_pays_for_nonsense_is_refused(make_args, name, answer):
    pytest.importorskip("reasoning_gym")
    message = f"reasoning_gym:{name}: its scorer pays for nonsense. The answer '{answer}' is right for [0-9]+ of "
    with pytest.raises(SystemExit, match=message):
        gym(make_args, name)


@pytest.mark.parametrize("name", ["circuit_logic", "calendar_arithmetic", "letter_counting", "binary_alternation"])
def test_a_data_set_of_few_answers_is_not_refused_for_right_guesses(make_args, name):
    pytest.importorskip("reasoning_gym")
    assert gym(make_args, name, max_context=8192).train


def test_a_scorer_of_reasoning_gym_pays_no_formula_where_the_gold_is_a_number(make_args):
    pytest.importorskip("reasoning_gym")
    task = gym(make_args, "gsm_symbolic")
    question = task.train[0]
    assert (
        task.score(f"{question.golds[0]}+0", question) == (0.0, {}) and task.score(question.golds[0], question)[0] == 1
    )
    assert gym(make_args, "gsm_symbolic", unevaluated=True).score(f"{question.golds[0]}+0", question) == (1.0, {})


class Scorer(math_qa.MathQA):
    """Questions whose score is a function of answer and golds."""

    def __init__(self, function, *more):
        super().__init__(*more)
        self.function = function

    def score(self, answer, question):
        return self.function(answer, question), {}


@pytest.mark.parametrize(
    "function, refused",
    [
        (lambda answer, question: 1.0, "'banana' is right for 20 of 20"),
        (lambda answer, question: 0.3, "'banana'"),
        (lambda answer, question: float(answer in question.text), "'?'"),
        (lambda answer, question: float(answer == question.text), "the question's own text"),
        (lambda answer, question: float(question.golds[0] in answer), "'1/0'"),
        (lambda answer, question: float(answer.isdigit()), "'0'"),
        (lambda answer, question: float(answer in question.golds), ""),
        (lambda answer, question: 0.2, ""),
        (lambda answer, question: float(answer == "banana" and question.id == "3"), ""),
    ],
)
def test_each_scorer_is_asked_nonsense(make_args, function, refused):
    questions = [Question(str(i), f"Which of 0 and {i % 2} is {i % 2}?", [str(i % 2)]) for i in range(30)]
    task = Scorer(function, make_args(task="mine"), scripted_engine.TOKENIZER, None, questions, [])
    if not refused:
        return nonsense.refuse_generous(task, "mine")
    with pytest.raises(SystemExit, match=re.escape(f"--task mine: its scorer pays for nonsense. The answer {refused}")):
        nonsense.refuse_generous(task, "mine")


def test_the_questions_own_words_are_no_answer_where_the_gold_is_a_number(make_args):
    question = Question("1", "What is 17*23?", ["391"])
    for unevaluated in (False, True):
        task = math_qa.MathQA(make_args(unevaluated=unevaluated), scripted_engine.TOKENIZER, None, [question], [])
        assert task.score("17*23", question) == (float(unevaluated), {}) and task.score("391", question) == (1.0, {})


# ---- benchmarks of another kind


def of_kind(family, make_args, question, *more):
    args = make_args(task="x", tools="off")
    return family(*more, args, scripted_engine.TOKENIZER, None, [], [], [question])


@pytest.mark.parametrize(
    "answer, right",
    [
        *(
            (answer, 1.0)
            for answer in (
                "B",
                "b",
                "(B)",
                "B)",
                "B) Mars",
                "B. Mars",
                "Answer: B",
                "option B",
                r"\boxed{B}",
                r"\text{B}",
                r"\textbf{B}",
                r"\mathrm{B}",
                r"$\mathbf{(B)}$",
                "**B**",
                "[B]",
                "**Answer:** B",
                "B, because it is",
                "B - Mars",
                "The answer is B",
                "The correct option is (B).",
                "Final answer: B",
                "It is B",
                "It is B.",
                "B is correct",
                "B is the right answer, since it is red.",
                "`B`",
                "**Final answer:** `B`",
                "B) $D$, Mars",  # the option's own text
                "b)\na planet",
            )
        ),
        *((answer, 0.0) for answer in ("A", "", None, "Mars", "Bright", "A or B", "be", "A) $B$", "B planet")),
        *((answer, 0.0) for answer in ("B) or C)", "b) or c)", "B, or perhaps A", "B/C", "A, B")),
        *(
            (answer, 0.0)
            for answer in ("not B", "BC", "It is not B", "A is correct", "B is correct, or C", "B is wrong")
        ),
    ],
)
def test_an_option_is_named_by_its_letter(make_args, answer, right):
    question = Question("1", "Which planet is red?\nA) Venus\nB) $D$, Mars\nC) Io\nD) Sun", ["B"])
    assert of_kind(choice_qa.ChoiceQA, make_args, question).score(answer, question) == (right, {})


PROMPT = 'import math\n\n\ndef half(n):\n    """The half of n, rounded down."""\n'
TESTED = "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(0) == math.floor(0)\n"


@pytest.mark.parametrize(
    "answer, right",
    [
        ("def half(n):\n    return n // 2", 1.0),
        ("```python\nfrom os import path\n\ndef half(n):\n    return n // 2\n```", 1.0),
        ("return n // 2", 1.0),  # continues the question's code
        ("m = n // 2\n    return m", 1.0),
        ("m = n // 2\nreturn m", 1.0),
        ("\n    m = n // 2\n    return m\n", 1.0),
        ("```python\nm = n // 2\nreturn m\n```", 1.0),
        ("```python\n    m = n // 2\n    return m\n```", 1.0),
        ("```\nfor m in (n // 2,):\n    return m\n```", 1.0),
        ("```\nm = n / 2\nreturn m\n```", 0.0),
        ("def half(n):\n    return n / 2", 0.0),
        ("def half(n):\n    return n // ", 0.0),
        ("def half(n):\n    raise SystemExit", 0.0),  # exit code 0, as after success
        ("import os\nos._exit(0)", 0.0),
        ("def check(f):\n    pass\ndef half(n):\n    while True: pass", 0.0),
        # These would pass in the process of the tests: an object that equals everything, a word that can be read, patched modules.
        (
            "class All(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 2\n"
            "def half(n):\n    return All(7)",
            0.0,
        ),
        ("class All:\n    def __eq__(self, other): return True\ndef half(n):\n    return All()", 0.0),
        ("def half(n):\n    return True", 0.0),
        (
            "import builtins, json\njson.loads = json.dumps = lambda *a, **k: {'value': 2}\ndef half(n):\n    return 7",
            0.0,
        ),
        ("import sys\nsys.modules['__main__'].encode = lambda value: 2\ndef half(n):\n    return 7", 0.0),
        ("import os\nos.write(1, b'passed')\ndef half(n):\n    os.kill(os.getppid(), 9)", 0.0),
        ("import atexit\natexit.register(print, 'passed')\ndef half(n):\n    raise SystemExit(0)", 0.0),
        (
            "import gc\ndef half(n):\n    return next(o for o in gc.get_objects() if isinstance(o, dict) and 'word' in o)",
            0.0,
        ),
        (
            "import inspect, sys\ndef half(n):\n    f = sys._getframe()\n    while f:\n        if 'test' in f.f_locals: return 2\n"
            "        f = f.f_back\n    return 7",
            0.0,
        ),
        ("def half(n):\n    print('much ' * 1000)\n    return n // 2", 1.0),
        ("import enum\nclass E(enum.IntEnum):\n    zero = 0\n    two = 2\ndef half(n):\n    return E(n // 2)", 1.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_a_function_is_right_when_the_tests_of_its_question_pass(make_args, answer, right):
    question = Question("HumanEval/0", PROMPT, [], info={"prompt": PROMPT, "entry_point": "half", "test": TESTED})
    task = of_kind(code_qa.CodeQA, make_args, question, loading.python_tool(2.0, False))
    assert task.score(answer, question) == (right, {})


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -3, 10**30, 1.5, float("inf"), "ä\ud800", [], (), set(), {}, b"x", 1 + 2j, frozenset({1})]
    + [[(1, "a"), {2: [None, {3}]}], {(1, 2): {"a": b""}}],
)
def test_a_plain_value_arrives_as_it_was(value):
    sent = json.loads(json.dumps(code_check.encode(value)))
    assert code_check.decode(sent) == value and type(code_check.decode(sent)) is type(value)


def test_a_function_may_change_its_argument_and_raise(make_args):
    prompt = "def grow(items, more=1):\n"
    test = """
def check(candidate):
    items = [1]
    assert candidate(items, more=2) is None and items == [1, 2]
    try:
        candidate(None)
    except TypeError:
        return
    assert False
"""
    question = Question("HumanEval/1", prompt, [], info={"prompt": prompt, "entry_point": "grow", "test": test})
    task = of_kind(code_qa.CodeQA, make_args, question, loading.python_tool(2.0, False))
    assert task.score("items += [more]", question) == (1.0, {})
    assert task.score("items.append(1)", question) == (0.0, {})
