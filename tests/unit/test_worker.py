"""The processes that run math-verify: limits, memory, messages, and their end."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import commands
import pytest

from common.turns import Question
from tasks import equality, worker
from tasks.math_qa import MathQA

ENDLESS = "9^{9999999}"  # this pool does not bound sizes: tasks/equality.py does


@pytest.fixture(scope="module")
def started():
    """Return one pool for several tests, which must leave it working."""
    pool = worker.Pool()
    yield pool
    pool.close()


@pytest.fixture
def pool(started, monkeypatch):
    """Return the pool as at the start of a run, with comparisons of at most one second."""
    monkeypatch.setattr(worker, "SECONDS", 1.0)
    started.slow.clear()
    started.decided.cache_clear()
    started.told = -worker.MINUTE
    return started


def root(number):
    """Return a comparison that is right and that no other test makes."""
    return [(f"\\sqrt{{{number * number}}}", str(number))]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_endless_comparison_ends_in_time_and_the_next_one_works(pool):
    assert pool.ask(root(3))
    parent = pool.all[0].popen.pid
    child = children(parent)
    started = time.monotonic()
    assert not pool.ask([(ENDLESS, "3")])
    assert time.monotonic() - started < 10
    assert pool.ask(root(4)) and pool.all[0].popen.pid == parent  # only its child was killed
    assert children(parent) != child and not running(child[0])


@pytest.mark.slow
def test_a_step_of_512_samples_with_one_endless_answer_waits_once_and_says_why(pool, capsys):
    started = time.monotonic()
    assert not any(pool.ask([(ENDLESS, "\\sqrt{3}")]) for _ in range(512))
    assert time.monotonic() - started < 30
    said = capsys.readouterr().err
    assert "rank 0: an answer took longer than 1 s to compare and counts as wrong: '9^{9999999}'" in said
    assert said.count("ran out of time") == 1


@pytest.mark.slow
def test_different_endless_answers_get_less_time_each_and_right_ones_still_count(pool, monkeypatch, capsys):
    seconds = []
    for number in range(8):
        started = time.monotonic()
        assert not pool.ask([(f"9^{{{9999999 + number}}}", "\\sqrt{3}")])
        seconds.append(time.monotonic() - started)
        assert pool.ask([("x(x+1)", "x^2+x")]) and pool.ask(root(100 + number))
    assert pool.limit() == worker.LEAST and seconds[0] > 0.9
    assert sum(seconds[-3:]) < sum(seconds[:3])
    assert capsys.readouterr().err.count("\n") == 1  # one line a minute


def test_answers_that_are_slow_but_not_endless_get_less_time_too(pool, monkeypatch):
    monkeypatch.setattr(worker.Process, "ask", lambda self, pairs, limit: time.sleep(0.3) or "0")
    for number in range(15):
        pool.ask(root(300 + number))
    assert pool.limit() == worker.LEAST


def test_an_answer_that_ran_out_of_a_shortened_time_is_tried_again(pool, monkeypatch):
    monkeypatch.setattr(pool, "limit", lambda: 0.2)
    assert not pool.ask([(ENDLESS, "2")])
    monkeypatch.undo()
    assert pool.decided.cache_info().currsize == 0


def test_a_decided_comparison_is_remembered_for_its_golds(pool):
    for _ in range(3):
        assert pool.ask([("\\sqrt{49}", "7")]) and not pool.ask([("\\sqrt{49}", "8")])
    assert pool.decided.cache_info().misses == 2 and pool.decided.cache_info().hits == 4


def test_scoring_that_takes_longer_than_a_minute_prints_a_line(pool, monkeypatch, capsys):
    monkeypatch.setattr(worker, "MINUTE", 0.3)
    monkeypatch.setattr(worker.Process, "ask", lambda self, pairs, limit: time.sleep(0.2) or "0")
    for number in range(4):
        pool.ask(root(200 + number))
    assert "comparing answers has taken" in capsys.readouterr().err


def test_endless_powers_factorials_and_sums_never_reach_a_process(monkeypatch):
    """512 samples that answer 9^{9999999}, and 512 with exponents that all differ, are scored at once."""
    monkeypatch.setattr(equality.POOL, "ask", None)  # it would raise
    question, task = Question("1", "?", ["\\sqrt{3}"]), MathQA.__new__(MathQA)
    started = time.process_time()
    for number in range(512):
        assert task.score(ENDLESS, question)[0] == task.score(f"9^{{{9999990 + number}}}", question)[0] == 0
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    "formula",
    [
        *(
            "9^{9999999}",
            "9^{-9999999}",
            "9^9999999",
            "9**9999999",
            "9^{9999990+7}",
            "9^{3000 \\cdot 3000}",
            "9^{(9999999)}",
        ),
        *("9^{\\frac{9999999}{1}}", "9^{\\sqrt{99999999999999}}", "(9^{9999})^{9999}", "{9^{9999}}^{9999}", "2^{12!}"),
        *("9999999!", "(9999999)!", "(3000+3000)!", "((9!)!)!", "9!!", "(9^{99})!", "\\sqrt{9999999!}", "{(9!)}!"),
        *("\\binom{9999999}{4999999}", "\\sum_{k=1}^{9999999} k", "\\prod_{k=1}^{99999} k", "\\sum_{k=1}^{9999} k!"),
        *("{" * 900, "(1," * 300 + "1" + ")" * 300, "[" * 20 + "1" + "]" * 20, "}{"),
        *("(x+1)^{9999}", "(x+y+z)^{1000}", "x^{99999999}", "10^{10^{10}}", "2^{2^{2^{2^{2^{2}}}}}", "9^{9,999,999}"),
    ],
)
def test_a_formula_that_is_too_large_is_found_before_it_is_computed(formula):
    assert not equality.formula(equality.latex(formula))


@pytest.mark.parametrize(
    "formula",
    [
        *("2^{2023}", "x^{2023}+1", "10^{100}", "e^{-45}", "2^{\\frac{1}{2}}", "(x+1)^{12}", "(1+\\sqrt{2})^{10}"),
        *(
            "20!",
            "\\frac{1}{21!}",
            "\\binom{100}{50}",
            "\\sum_{k=1}^{100} k^2",
            "(2+3)!",
            "3^{n+1}",
            "2023^{2}",
            "e^{2.5}",
        ),
    ],
)
def test_a_formula_of_usual_size_is_computed(formula):
    assert equality.formula(equality.latex(formula))


def test_a_process_that_has_died_is_replaced(pool):
    assert pool.ask(root(5))
    os.killpg(pool.all[0].popen.pid, signal.SIGKILL)
    pool.all[0].popen.wait()
    assert pool.ask(root(6))


def test_a_child_that_dies_between_two_comparisons_moves_no_result_to_the_next_one(pool):
    assert pool.ask(root(7))
    for number in range(3):
        os.kill(children(pool.all[-1].popen.pid)[0], signal.SIGKILL)
        time.sleep(0.1)
        assert pool.ask(root(10 + number)) and not pool.ask([(f"\\sqrt{{{number + 2}}}", "1")])


def test_without_a_process_only_numbers_are_right_and_a_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(equality, "POOL", worker.Pool())
    monkeypatch.setattr(worker.sys, "executable", "/bin/false")
    assert not equality.equal("\\sqrt{9}", ["2+1"]) and equality.equal("3.0", ["3"])
    assert "math-verify does not start: formulas count as wrong" in capsys.readouterr().err


def test_a_process_loads_no_torch():
    code = "import sys; import tasks.worker; print({'torch', 'transformers', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=commands.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_threads_get_the_answers_to_their_own_questions_from_two_processes(pool):
    before = threading.active_count()
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: pool.ask([(f"\\sqrt{{{i * i}}}", str(i % 5))]), range(1, 41)))
    assert answers == [i < 5 for i in range(1, 41)]
    assert threading.active_count() <= before and len(pool.all) <= worker.PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_no_process_outlives_the_trainer(how):
    """End the trainer, or kill it in the middle of a comparison, whose child ends by its own limit at the latest."""
    end = "time.sleep(60)" if how == "killed" else "ending.exit_now(3)"
    code = (
        "import threading, time; from common import ending; from tasks import worker; pool = worker.Pool();"
        "pool.ask([('\\\\sqrt{9}', '3')]); worker.SECONDS = 3;"
        f"threading.Thread(target=pool.ask, args=([('{ENDLESS}', '3')],), daemon=True).start();"
        f"time.sleep(0.5); print(pool.all[0].popen.pid, flush=True); time.sleep(0.5); {end}"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=commands.ROOT, stdout=subprocess.PIPE, text=True)
    parent = int(trainer.stdout.readline())
    family = [parent, *children(parent)]
    assert len(family) == 2
    if how == "killed":
        trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    until = time.monotonic() + 60
    while any(map(running, family)):
        assert time.monotonic() < until
        time.sleep(0.2)
