"""--context: the parts of earlier turns that the model sees again, and the rows that pack makes of them."""

import random
import re

import chat_templates
import pytest
from scripted_engine import TOKENIZER, play

from common.batch import pack
from common.turns import Group, Question
from tasks.thinking import without_thinking

SECRET = "zzz"  # occurs in thinking only


def packed(trajectory):
    return pack([Group(Question("q", "", []), [trajectory])], [[[1.0] * len(trajectory.turns)]])


# ---- cutting thinking out of ids


def cut(pieces, before=()):
    """Return (context, action) after the cut as lists of pieces. Each piece is one token."""
    pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in (*before, *pieces)]
    decode = lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")  # noqa: E731
    n = len(before)
    context, action = without_thinking(list(range(n)), list(range(n, len(pieces))), decode)
    return [pieces[i].decode() for i in context], [pieces[i].decode(errors="replace") for i in action]


@pytest.mark.parametrize(
    "pieces, kept",
    [
        (["<think>", "zzz", "</think>", " ", "<search>", " a", "</search>"], "<search> a</search>"),
        (["<", "think", ">", "zzz", "</", "thi", "nk>", "<search>", "a", "</search>"], "<search>a</search>"),
        # a token across the end of the block: with white space, with the next tag
        (["<think>", "zzz", "</", "think", ">\n\n", "<search>a</search>"], "<search>a</search>"),
        (["<think>", "zzz", "</think", "><", "search>a</search>"], "><search>a</search>"),
        (["<think>", "zzz", "</think> <search", ">a</search>"], "</think> <search>a</search>"),
        (["<think>zzz</", "think><search>a</search>"], "think><search>a</search>"),
        (["<think>", "zzz zzz</think><search", ">a</search>"], ">a</search>"),  # a token with thinking must go
        (["Well", ".\n<", "think>", "zzz", "</think>", "so"], "Wellso"),  # a token across the start
        (["<think>", "zzz", "</think>", "a ", "<think>", "zzz", "</think>", "b"], "a b"),
        (["<think>", "zzz", "</think", "><", "think>", "zzz", "</think>", "b"], "b"),
        (["<think>", "zzz", "<think>", "zzz", "</think>", " zzz", "</think>", "b"], "b"),  # nested
        (["<think>", "zzz", "</think>", "\n", "\n\n", "b", " "], "b "),
        # characters of several tokens
        (["<think>", b"\xf0\x9f", b"\x98\x80", "</think>", b"\xe2\x82", b"\xac", "b"], "€b"),
        ([b"\xe2\x82", b"\xac", "<think>", "zzz", "</think>", "b"], "€b"),
        (["<think>", "</think>"], ""),
        (["a", "</think>", "b"], "a</think>b"),  # nothing was opened
        (["<think>", "a", "<search>b</search>"], "<think>a<search>b</search>"),  # nothing was closed
        (["<think>", "zzz", "</think>", "a", "<think>", "b"], "a<think>b"),
        (["<search>a</search>"], "<search>a</search>"),
        ([], ""),
    ],
)
def test_closed_blocks_are_cut_at_token_boundaries(pieces, kept):
    context, action = cut(pieces, ["some ", "prompt"])
    if b"\xe2\x82" not in pieces:
        assert "".join(action) == kept
    else:
        assert "".join(action).endswith("b") and len(action) == 3
    assert context == ["some ", "prompt"]


@pytest.mark.parametrize(
    "before, pieces, context, action",
    [
        (["go on\n", "<think>", "\n"], ["zzz", "</think>", "\n\n", "a"], ["go on\n"], ["a"]),
        (["go on\n", "<", "think", ">\n"], ["zzz", "</think>", "a"], ["go on\n"], ["a"]),
        (["go on\n", "<think>"], ["zzz", "</think>", "a", "<think>", "zzz", "</think>", "b"], ["go on\n"], ["a", "b"]),
        (["go on\n", "<think>"], ["zzz", "</think>", "zzz", "</think>", "a"], ["go on\n"], ["a"]),
        (["go on\n", "<think>"], ["<think>", "zzz", "</think>", "a"], ["go on\n"], ["a"]),
        (["go on\n", "<think>"], ["hm", "a"], ["go on\n", "<think>"], ["hm", "a"]),  # not closed
        (["<think>", "</think>", "\n"], ["a", "</think>", "b"], ["<think>", "</think>", "\n"], ["a", "</think>", "b"]),
        (["<think> and </think>."], ["a"], ["<think> and </think>."], ["a"]),
    ],
)
def test_a_block_that_the_generation_prompt_opens_is_cut_from_the_prompt_too(before, pieces, context, action):
    assert cut(pieces, before) == (context, action)


def test_however_a_text_is_split_no_thinking_is_left_and_no_action_is_lost():
    rng = random.Random(1)
    for _ in range(3000):
        parts = []
        for _ in range(rng.randint(1, 3)):
            parts += rng.choice([["<think>", f" {SECRET} ", "</think>"], [], ["é "]])
            parts += [rng.choice(["", " ", "\n\n"])]
        action = "<search> Ada </search>"
        text = "".join(parts) + action
        limits = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.randint(0, 12)))})
        pieces = [text[a:b] for a, b in zip(limits, limits[1:])]
        left = cut(pieces)[1]
        assert SECRET not in "".join(left)
        rest = iter(pieces)
        assert all(piece in rest for piece in left)  # tokens are left out, in place
        thought = {i for found in re.finditer(SECRET, text) for i in range(*found.span())}
        mixed = any(b > len(text) - len(action) and thought & set(range(a, b)) for a, b in zip(limits, limits[1:]))
        assert mixed or "".join(left).endswith(action)


# ---- the contexts of a rollout


def thinker(question, sample, turn):
    """Search three times and answer, with thinking in many places. Every third sample is encoded letter by letter."""
    rng = random.Random(f"{sample}/{turn}")
    think = f"<think> {SECRET} {rng.random()} </think>"
    if turn == 3:
        return f"{think} <answer> Bo Hale </answer>"
    text = [
        f"{think} <search> Ada Cole </search>",
        f"{think}\n\n{think} well <search> Ada Cole </search>\n\n",
        f"Hm {think}<search> Ada Cole </search>",
        "<search> Ada Cole </search>",
        f"{think} I do not know.",
        "<think> open <search> Ada Cole </search>",
    ][(sample + turn) % 6]
    if sample % 3 == 0:
        return [i for letter in text for i in TOKENIZER.encode(letter)]
    return text


def expected(turns, k, context, window):
    """Return the ids of the context of turn k by a plain form of the rule."""
    prompt, earlier = turns[0].context_ids, turns[:k]
    if context == "window":
        earlier = earlier[-window:]
    actions = [t.action_ids for t in earlier]
    if context == "strip_think":
        actions = [without_thinking([], ids, TOKENIZER.decode)[1] for ids in actions]
    return prompt + [i for ids, turn in zip(actions, earlier) for i in ids + turn.observation_ids]


@pytest.mark.parametrize(
    "context, window", [("full", 2), ("strip_think", 2), ("window", 1), ("window", 2), ("window", 9)]
)
def test_every_turn_is_trained_in_the_context_it_was_sampled_in(context, window):
    made, engine = play(thinker, count=12, context=context, window=window)
    given = {tuple(seen.id.split("/")[1:3]): seen.ids for seen in engine.seen}
    for g, t in enumerate(made):
        assert len(t.turns) == 4 and t.outcome == 1.0
        batch = packed(t)
        for k, turn in enumerate(t.turns):
            assert turn.context_ids == given[str(g), str(k)] == expected(t.turns, k, context, window)
            text = TOKENIZER.decode(turn.context_ids)
            if context == "strip_think":
                assert SECRET not in text
            elif k and context == "full":
                assert text.count(SECRET) == sum(earlier.text.count(SECRET) for earlier in t.turns[:k])
            places = (batch.turn == k).nonzero().flatten().tolist()
            assert batch.ids[places].tolist() == turn.action_ids and batch.mask[places].all()
            (row,) = (s for s in batch.segments if s.start <= places[0] < s.end)
            assert batch.ids[row.start : places[0]].tolist() == turn.context_ids
            assert batch.position[places].tolist() == list(range(places[0] - row.start, places[-1] + 1 - row.start))
        assert int(batch.mask.sum()) == sum(len(turn.action_ids) for turn in t.turns)
        assert len({s.unit for s in batch.segments}) == 1  # a trajectory stays in one micro-batch


def rows(script, **changes):
    (t,), _ = play(script, **changes)
    return [sorted({int(k) for k in packed(t).turn[s.start : s.end] if k >= 0}) for s in packed(t).segments]


def test_turns_share_a_row_as_long_as_the_context_grows():
    think = lambda q, s, k: ["<think> a </think>"] * (k != 1) * 1 or []  # noqa: E731
    script = lambda q, s, k: "".join(think(q, s, k)) + ("<answer> x </answer>" if k == 3 else "<search> a </search>")  # noqa: E731
    assert rows(script, context="full") == [[0, 1, 2, 3]]
    assert rows(script, context="strip_think") == [[0], [1, 2], [3]]  # turn 1 has no thinking
    assert rows(script, context="window", window=1) == [[0, 1], [2], [3]]
    assert rows(script, context="window", window=2) == [[0, 1, 2], [3]]
    assert rows(script, context="window", window=3) == [[0, 1, 2, 3]]


def test_a_block_opened_by_the_generation_prompt_of_a_template_is_left_out_of_later_contexts():
    tokenizer = chat_templates.tokenizer(chat_templates.STRIPS)
    call = (
        f'{SECRET}\n</think>\n\n<tool_call>\n{{"name": "search", "arguments": {{"query": "Ada Cole"}}}}\n</tool_call>'
    )
    script = lambda q, s, k: call if k < 2 else f"{SECRET} </think> <answer> x </answer>"  # noqa: E731
    for name, count in (("full", 2), ("strip_think", 0)):
        (t,), _ = play(script, tokenizer=tokenizer, protocol="chat", context=name)
        text = tokenizer.decode(t.turns[2].context_ids)
        assert text.count(SECRET) == count and text.endswith("assistant\n<think>\n")
        assert text.count("<think>") - text.count("<think> and </think>") == count + 1
