"""The rollout loop with a scripted engine: stops, budgets, tools, exact contexts."""

import sys
import threading
import time
from types import SimpleNamespace

import chat_templates
import pytest
import torch
from scripted_engine import DOCUMENTS, TOKENIZER, Scripted, Tool, play

import train_grpo
from common import adapters, calls, ending, loop, run
from common.batch import pack
from common.environment import Environment, Limits, Lost
from common.turns import Group, Question, Trajectory
from tasks import search_qa, wordings
from tools.search import Search


def two_hops(question, sample, turn):
    return ["<search> Ada Cole </search>", "<search> Nova Labs </search>", "<answer> Bo Hale </answer>"][turn]


def test_a_search_agent_searches_twice_and_answers():
    (t,), engine = play(two_hops)
    assert (t.stop, t.answer, t.outcome, len(t.turns)) == ("answer", "Bo Hale", 1.0, 3)
    assert [turn.tool for turn in t.turns] == ["search", "search", None]
    assert [turn.tool_status for turn in t.turns] == ["ok", "ok", None]
    assert t.turns[1].tool_output == "Doc 1 (Title: Nova Labs) Nova Labs is led by Bo Hale."
    for before, after in zip(t.turns, t.turns[1:]):
        assert after.context_ids == before.context_ids + before.action_ids + before.observation_ids
    assert [seen.ids for seen in engine.seen] == [turn.context_ids for turn in t.turns]
    batch = pack([Group(Question("q", "", []), [t])], [[[1.0] * 3]])
    assert len(batch.segments) == 1
    assert batch.ids[batch.mask].tolist() == [i for turn in t.turns for i in turn.action_ids]


def test_a_token_that_reaches_across_the_closing_tag_is_kept_as_sampled():
    ids = TOKENIZER.encode("<search> Ada Cole </search>\n\n")
    assert TOKENIZER.decode(ids[-1:]) == ">\n\n"
    (t,), _ = play(lambda q, s, k: [ids, "<answer> x </answer>"][k])
    assert t.turns[0].action_ids == ids and t.turns[0].tool_input == "Ada Cole"
    assert t.turns[1].context_ids[: len(t.turns[0].context_ids) + len(ids)] == t.turns[0].context_ids + ids


def test_ids_that_are_not_the_tokenizer_s_own_split_are_trained_as_sampled():
    whole = TOKENIZER.encode("<search> Oakford </search>")
    letters = [i for c in "<search> Oakford </search>" for i in TOKENIZER.encode(c)]
    assert whole != letters and TOKENIZER.decode(letters) == "<search> Oakford </search>"
    (t,), _ = play(lambda q, s, k: [letters, "<answer> x </answer>"][k])
    batch = pack([Group(Question("q", "", []), [t])], [[[1.0, 1.0]]])
    assert batch.ids[batch.turn == 0].tolist() == letters


both_protocols = pytest.mark.parametrize("how", ["tags", "chat"])
thinks_by_itself = pytest.mark.parametrize("template", ["UNTIL_USER", "STRIPS"])  # as Qwen3; the prompt opens the block
REST = ", so:</think> <think> is no tag here: <answer> Bo Hale </answer>"


def mention(template, how):
    """Return (the beginning of a turn that mentions a tag in its thinking, its ids, arguments of play)."""
    tokenizer = chat_templates.tokenizer(getattr(chat_templates, template))
    begin = "<think>" * (template != "STRIPS") + " It goes inside <answer> and </answer>"
    return begin, tokenizer.encode(begin), {"tokenizer": tokenizer, "protocol": how}


@both_protocols
@pytest.mark.parametrize("template", ["KEEPS", "THOUGHTLESS"])
def test_a_tag_mentioned_in_thinking_ends_the_turn_of_a_model_that_is_asked_to_think(template, how):
    begin, _, words = mention(template, how)
    (t,), engine = play(lambda q, s, k: begin, **words)
    asks = "Think inside" in words["tokenizer"].decode(engine.seen[0].ids)
    assert (t.answer, t.outcome, len(engine.seen), asks) == ("and", 0.0, 1, True)


@both_protocols
@thinks_by_itself
def test_a_tag_mentioned_in_thinking_ends_no_turn_of_a_model_that_thinks_by_itself(template, how):
    begin, begun, words = mention(template, how)
    pieces = iter([begin, REST])
    (t,), engine = play(lambda q, s, k: next(pieces), **words)
    asks = "Think inside" in words["tokenizer"].decode(engine.seen[0].ids)
    assert (t.answer, t.outcome, len(t.turns), t.stop, asks) == ("Bo Hale", 1.0, 1, "answer", False)
    first, second = engine.seen
    assert t.turns[0].action_ids == begun + words["tokenizer"].encode(REST)
    assert len(t.turns[0].action_logps) == len(t.turns[0].action_ids)
    assert second.ids == first.ids + begun and t.turns[0].context_ids == first.ids
    assert second.max_tokens == first.max_tokens - len(begun) and second.seed != first.seed


@both_protocols
@thinks_by_itself
def test_a_turn_without_tokens_left_to_close_its_thinking_ends_by_length(template, how):
    begin, begun, words = mention(template, how)
    (t,), engine = play(lambda q, s, k: begin, max_turn_tokens=len(begun), **words)
    assert (t.stop, t.answer, t.outcome, len(engine.seen)) == ("length", None, 0.0, 1)


@both_protocols
@thinks_by_itself
def test_a_message_that_ends_in_open_thinking_is_invalid(template, how):
    begin, _, words = mention(template, how)
    (t,), _ = play(lambda q, s, k: begin + "<|im_end|>", max_turns=1, **words)
    assert (t.stop, t.answer, len(t.turns)) == ("invalid", None, 1)


@both_protocols
@thinks_by_itself
def test_an_empty_continuation_of_open_thinking_is_invalid(template, how):
    begin, begun, words = mention(template, how)
    pieces = iter([begin, []])
    (t,), _ = play(lambda q, s, k: next(pieces), max_turns=1, **words)
    assert (t.stop, t.turns[0].action_ids) == ("invalid", begun)


@pytest.mark.parametrize("context", ["full", "strip_think", "window"])
def test_a_block_is_open_where_the_turn_s_own_context_opens_it(context):
    """Use tags, where only the first context ends in the generation prompt: a later turn begins outside of thinking."""
    turns = ["I look.</think> <search> Nova Labs </search>", "<answer> Bo Hale </answer>"]
    tokenizer = chat_templates.tokenizer(chat_templates.STRIPS)
    (t,), engine = play(lambda q, s, k: turns[k], tokenizer=tokenizer, context=context)
    assert (t.stop, t.outcome, len(t.turns), len(engine.seen)) == ("answer", 1.0, 2, 2)


def test_a_turn_cut_by_length_is_trained_but_runs_no_tool():
    for text in ("<search> Ada Cole", "<search> Ada Cole </search>"):
        (t,), _ = play(lambda q, s, k, text=text: (text, "length"))
        assert (t.stop, t.turns[0].tool, t.turns[0].tool_status, t.turns[0].observation_ids) == (
            "length",
            None,
            None,
            [],
        )
        batch = pack([Group(Question("q", "", []), [t])], [[[1.0]]])
        assert int(batch.mask.sum()) == len(t.turns[0].action_ids)


def test_an_invalid_action_is_answered_and_the_episode_continues():
    (t,), _ = play(lambda q, s, k: ["I do not know.", "<answer> Bo Hale </answer>"][k])
    assert (t.stop, t.outcome) == ("answer", 1.0)
    assert (t.turns[0].tool_status, t.turns[0].tool_output) == ("invalid", wordings.INVALID)
    assert TOKENIZER.decode(t.turns[0].observation_ids).startswith("\n<information> That was neither")


def test_the_last_turn_runs_no_tool():
    def called(query):
        raise AssertionError("the tool must not run")

    (t,), _ = play(lambda q, s, k: "<search> Ada Cole </search>", tool=called, max_turns=1)
    assert (t.stop, t.turns[0].tool, t.turns[0].tool_input, t.turns[0].tool_status) == (
        "max_turns",
        "search",
        "Ada Cole",
        None,
    )
    (t,), _ = play(lambda q, s, k: "hm", max_turns=2)
    assert (t.stop, len(t.turns), t.turns[1].observation_ids) == ("invalid", 2, [])


def test_a_fabricated_observation_ends_the_turn_as_invalid():
    engine = Scripted(two_hops)
    task = search_qa.SearchQA(engine.args, TOKENIZER, Tool(None), [], [])
    assert "<information>" in task.limits.stop
    (t,), _ = play(lambda q, s, k: ["The firm is <information>", "<answer> x </answer>"][k])
    assert t.turns[0].tool_status == "invalid"


def test_a_full_context_ends_a_trajectory_and_is_no_exception():
    start = len(play(two_hops)[0][0].turns[0].context_ids)
    first = len(TOKENIZER.encode(two_hops("", 0, 0)))
    # no room for the prompt; room for the prompt and part of a turn; for a turn but not for the tool's output
    for limit, turns in ((start, 0), (start - 5, 0), (start + first, 1), (start + first + 10, 1)):
        (t,), engine = play(two_hops, max_context=limit)
        assert (t.stop, len(t.turns), t.outcome) == ("context", turns, 0.0)
    n = len(TOKENIZER.encode("one two three four"))
    (t,), engine = play(lambda q, s, k: ("one two three four", "length"), max_context=start + n, max_turn_tokens=100)
    assert t.stop == "context" and engine.seen[0].max_tokens == n


def test_a_failing_tool_is_an_observation_and_is_counted():
    def broken(query):
        raise ValueError("no index")

    (t,), _ = play(two_hops, tool=broken)
    assert [turn.tool_status for turn in t.turns] == ["error", "error", None]
    assert t.turns[0].tool_output == "Error: ValueError: no index" and t.stop == "answer"


def test_a_hanging_call_times_out_and_delays_no_other():
    release = threading.Event()

    def hang(query):
        if query == "Nova Labs":
            release.wait(30)
        return "found"

    started = time.monotonic()
    made, _ = play(two_hops, count=6, tool=hang, tool_timeout=0.3, tool_workers=2)
    release.set()
    assert time.monotonic() - started < 10
    assert [[turn.tool_status for turn in t.turns] for t in made] == [["ok", "timeout", None]] * 6
    assert made[0].turns[1].tool_output == "Error: no answer within 0.3 seconds"


def test_a_tool_whose_calls_all_hang_ends_the_run(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(calls, "HANGING", 3)
    with pytest.raises(SystemExit, match="tool calls hang"):
        play(two_hops, count=20, tool=lambda query: release.wait(30), tool_timeout=0.05, tool_workers=2)
    release.set()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_lost_tool_ends_the_run_with_its_message(workers):
    def lost(query):
        raise Lost("the retriever has been away for 120 s")

    with pytest.raises(SystemExit, match="^the retriever has been away for 120 s$"):
        play(two_hops, tool=lost, tool_workers=workers)


def test_a_scorer_whose_tool_is_lost_ends_the_run_with_its_message(monkeypatch):
    def lost(self, trajectory, question):
        raise Lost("python does not start again")

    monkeypatch.setattr(search_qa.SearchQA, "finish", lost)
    with pytest.raises(SystemExit, match="^python does not start again$"):
        play(two_hops)


def test_a_tool_that_keeps_its_own_time_does_not_time_out():
    class Patient:
        keeps_time = True

        def __call__(self, query):
            time.sleep(0.3)
            return "found"

    (t,), _ = play(two_hops, tool=Patient(), tool_timeout=0.05)
    assert [turn.tool_status for turn in t.turns] == ["ok", "ok", None]


def test_any_result_of_a_tool_becomes_text_of_a_limited_length():
    for output, kept in (
        ("x" * 10_000_000, "x" * 50_000 + " [cut: 10000000 characters]"),
        ("half \ud83d", "half ?"),
        (None, "None"),
    ):
        (t,), _ = play(two_hops, tool=lambda query, output=output: output)
        assert kept.startswith(t.turns[0].tool_output) and len(t.turns[0].observation_ids) <= 512
        large = dict(max_observation_tokens=100_000, max_context=200_000)
        (t,), _ = play(two_hops, tool=lambda query, output=output: output, **large)
        assert t.turns[0].tool_output == kept


def test_only_the_shown_part_of_an_output_is_recorded():
    (t,), _ = play(two_hops, tool=lambda query: "Bo " * 30 + "Hale", max_observation_tokens=60)
    shown = (
        TOKENIZER.decode(t.turns[0].observation_ids).removeprefix("\n<information> ").removesuffix(" </information>\n")
    )
    assert t.turns[0].tool_output == shown and "Hale" not in shown and shown.startswith("Bo Bo")


def test_a_tool_that_calls_exit_is_a_failing_tool():
    (t,), _ = play(two_hops, tool=lambda query: sys.exit(3))
    assert t.turns[0].tool_status == "error" and t.turns[0].tool_output == "Error: SystemExit: 3"


def test_published_adapters_of_dead_runs_are_removed_where_memory_is_small(tmp_path, monkeypatch):
    """Kill and restart a run as in a container with a /dev/shm of 64 MB: same directory, same process id."""

    class Policy:
        parameters = [torch.zeros(10)]

        def save_adapter(self, path):
            path.mkdir()

    monkeypatch.setattr(adapters.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(ending, "at_end", lambda action: None)
    args = train_grpo.Args(out=str(tmp_path))
    for _ in range(3):
        store = adapters.AdapterStore(Policy(), args)
        for version in (1, 2, 3):
            store.save(Policy(), version)
        assert [p.name for p in tmp_path.iterdir()] == [store.folder.name]
        assert sorted(p.name for p in store.folder.iterdir()) == ["lock", "v2", "v3"]
        other = adapters.AdapterStore(Policy(), args)  # must not remove the live one
        assert len(list(tmp_path.iterdir())) == 2
        store.lock.close(), other.lock.close()  # killed


def test_no_more_tools_than_workers_run_at_once():
    running, most, lock = [0], [0], threading.Lock()

    def tool(query):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return "found"

    play(two_hops, count=12, tool=tool, tool_workers=3)
    assert most[0] <= 3
    most[0] = 0
    play(two_hops, count=4, tool=tool, tool_workers=0)
    assert most[0] == 1


def test_every_request_has_its_own_seed_whatever_the_schedule():
    _, slow = play(two_hops, count=8, tool=lambda q: time.sleep(0.01) or "found")
    _, fast = play(two_hops, count=8, tool=lambda q: "found", tool_workers=0)
    seeds = lambda engine: {tuple(seen.id.split("/")[:3]): seen.seed for seen in engine.seen}  # noqa: E731
    assert seeds(slow) == seeds(fast)
    assert len(set(seeds(slow).values())) == 24


def test_the_seed_of_a_request_depends_on_seed_step_phase_and_draw():
    episode, found = loop.Rollout(Question("q", "", []), Trajectory(), 0), []
    for changes, step, phase in (
        (dict(seed=1), 1, 1),
        (dict(seed=2), 1, 1),
        (dict(seed=1), 2, 1),
        (dict(seed=1), 1, 2),
    ):
        engine = Scripted(two_hops, **changes)
        engine.step, engine.phase = step, phase
        found.append(loop.Loop(engine, Environment(TOKENIZER, Limits(1, 1)), False)._seed(episode, 0))
    episode.question.draw = 1  # the same question, drawn again
    found.append(loop.Loop(engine, Environment(TOKENIZER, Limits(1, 1)), False)._seed(episode, 0))
    assert len(set(found)) == 5 and all(0 <= seed < 2**63 for seed in found)


def test_evaluation_is_greedy():
    _, engine = play(two_hops, greedy=True)
    assert {(seen.temperature, seen.seed) for seen in engine.seen} == {(0.0, None)}


def test_a_rollout_can_start_from_earlier_turns():
    (t,), _ = play(two_hops)
    fork = Trajectory(turns=t.turns[:1])
    engine = Scripted(two_hops)
    task = search_qa.SearchQA(engine.args, TOKENIZER, Search(DOCUMENTS, 1), [], [])
    episode = loop.Rollout(Question("q", "", ["Bo Hale"]), fork, 0, t.turns[1].context_ids)
    loop.Loop(engine, task, False).run([episode], lambda: None)
    assert engine.seen[0].ids == t.turns[1].context_ids
    assert (fork.outcome, len(fork.turns), len(t.turns)) == (1.0, 3, 3)


def hang_in_a_tool(monkeypatch):
    play(two_hops, tool=lambda q: time.sleep(0.5) or "found", tool_workers=0)


def hang_in_a_scorer(monkeypatch):
    monkeypatch.setattr(search_qa.SearchQA, "finish", lambda *_: time.sleep(0.5))
    play(two_hops)


def lose_a_generation(monkeypatch):
    started, real = time.monotonic(), Scripted.advance

    def advance(self):
        return real(self) if time.monotonic() - started > 0.5 else ()

    monkeypatch.setattr(Scripted, "advance", advance)
    play(two_hops)


@pytest.mark.parametrize(
    "wait, expected",
    [
        (hang_in_a_tool, "tool calls: 1 (search('Ada Cole') of question q, sample 0, turn 1, for "),
        (hang_in_a_scorer, "scores: 1 (question q, sample 0, turn 3, for "),
        (lose_a_generation, "generations: 1 (question q, sample 0, turn 1)"),
    ],
)
def test_a_silent_wait_is_reported_with_question_sample_and_turn(wait, expected, monkeypatch):
    """Also while the main thread is blocked: a tool at --tool_workers 0."""
    lines = []
    monkeypatch.setattr(run, "notice", lines.append)
    monkeypatch.setattr(calls, "WATCHDOG", 0.1)
    wait(monkeypatch)
    assert any(f"nothing has finished for 0 s; pending: {expected}" in line for line in lines), lines


def test_a_score_that_is_late_ends_the_run_with_question_and_answer(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(search_qa.SearchQA, "finish", lambda *_: release.wait(30))
    with pytest.raises(SystemExit) as stop:
        play(two_hops, tool_timeout=0.2)
    release.set()
    assert str(stop.value) == (
        "The score of question q, sample 0: no answer within 0.2 seconds (--tool_timeout). Raise --tool_timeout, or mend "
        "the task's score(). Its answer: 'Bo Hale'."
    )


def test_a_score_that_raises_ends_the_run_with_question_and_answer(monkeypatch):
    monkeypatch.setattr(search_qa.SearchQA, "score", lambda *_: {}["gold"])
    with pytest.raises(
        RuntimeError, match="The score of question q, sample 0: .* raised KeyError. Its answer: 'Bo Hale'"
    ):
        play(two_hops)


def test_adapter_folders_of_dead_runs_are_removed_and_of_live_ones_kept(tmp_path):
    import fcntl
    import os

    store = object.__new__(adapters.AdapterStore)
    dead, live = (tmp_path / f"turnwise-{os.getuid()}-{n}" for n in (1, 2))
    for folder in (dead, live):
        folder.mkdir()
        (folder / "lock").write_text("")
    with open(live / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store._remove_dead(tmp_path)
        assert not dead.exists() and live.exists()


HALVES = TOKENIZER.encode("é🙂")  # a token per byte


@pytest.mark.parametrize("context, whole", [(HALVES, True), (HALVES[:2], True), (HALVES[:3], False)])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("stop", [["</answer>"], []])
def test_a_context_that_ends_within_a_character_is_refused_by_name(context, whole, turn, stop):
    """vLLM decodes the end of the context with the generation: tests/engine/test_engine.py shows what it does then."""

    class Halved(Environment):
        def prompt_ids(self, question):
            return context if turn == 0 else TOKENIZER.encode("?")

        def observe(self, turn, output):
            return "", context

    engine = Scripted(lambda q, s, k: "a")
    group = Group(Question("q7", "?", []), [Trajectory()])
    task = Halved(TOKENIZER, Limits(2, 8, stop))
    play_it = loop.Loop(engine, task, False)
    if whole or not stop:
        play_it.run([loop.Rollout(group.question, group.trajectories[0], 0)], lambda: None)
        assert group.trajectories[0].stop == "invalid"
        return
    method = ("prompt_ids", "observe")[turn]
    with pytest.raises(SystemExit, match=rf"question q7, turn {turn}: Halved\.{method} ends within a character"):
        play_it.run([loop.Rollout(group.question, group.trajectories[0], 0)], lambda: None)
    assert len(engine.seen) == turn
