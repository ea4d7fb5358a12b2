"""TSPO's credit, with numbers worked out by hand."""

import random

import pytest
from hand_made import answer, group, same, turn

import train_grpo
import train_tspo

N = None
T1 = [2, N, N, N], [3] * 4  # turn of the first occurrence (from 1), turns
T2 = [2, 1, N, N], [3, 2, 3, 1]


def made(firsts, lengths, outcomes=None, gold="Ada Cole", **more):
    """Return a group, all wrong by default. Trajectory i finds the gold in turn firsts[i] and in every later turn."""
    outcomes = outcomes or [0.0] * len(firsts)
    return group(
        [
            (
                outcome,
                [
                    turn(output=f"Doc: {gold}!" if first and k >= first else "Doc: nothing") if k < length else answer()
                    for k in range(1, length + 1)
                ],
            )
            for first, length, outcome in zip(firsts, lengths, outcomes)
        ],
        golds=[gold],
        **more,
    )


def advantages(g, **flags):
    return train_tspo.compute_advantages(g, train_tspo.Args(**flags))[0]


def stats(g, **flags):
    return train_tspo.compute_advantages(g, train_tspo.Args(**flags))[1]


@pytest.mark.parametrize(
    "case, flags, expected",
    [
        (T1, {}, [[0, 1.5, 0], *[[0, -0.5, 0]] * 3]),
        (T1, {"folr_scope": "upto"}, [[1.5, 1.5, 0], *[[-0.5, -0.5, 0]] * 3]),
        (T1, {"norm_set": "pooled"}, [[-0.2887, 3.1754, -0.2887], *[[-0.2887] * 3] * 3]),
        (T1, {"norm_set": "pooled", "folr_scope": "upto"}, [[2.1409, 2.1409, -0.4282], *[[-0.4282] * 3] * 3]),
        (T1, {"adv_std": False}, [[0, 0.375, 0], *[[0, -0.125, 0]] * 3]),
        (T2, {}, [[-0.5, 1.1547, 0], [1.5, -0.5773], [-0.5, -0.5773, 0], [-0.5]]),
        (T2, {"folr_scope": "upto"}, [[0.866, 1.1547, 0], [0.866, -0.5773], [-0.866, -0.5773, 0], [-0.866]]),
        (T2, {"norm_set": "pooled"}, [[-0.504, 1.7638, -0.504], [1.7638, -0.504], [-0.504] * 3, [-0.504]]),
        (
            T2,
            {"norm_set": "pooled", "folr_scope": "upto"},
            [[1.3333, 1.3333, -0.6667], [1.3333, -0.6667], [-0.6667] * 3, [-0.6667]],
        ),
        (T2, {"norm_set": "padded"}, [[-0.5, 1.5, 0], [1.5, -0.5], [-0.5, -0.5, 0], [-0.5]]),
        (
            T2,
            {"norm_set": "padded", "folr_scope": "upto"},
            [[0.866, 1.5, 0], [0.866, -0.5], [-0.866, -0.5, 0], [-0.866]],
        ),
    ],
)
def test_an_all_wrong_group_by_hand(case, flags, expected):
    # The last turn calls no tool, so the first occurrence is before it.
    assert same(advantages(made(*case), **flags), expected)


def test_the_population_s_deviation_gives_the_numbers_of_the_reference():
    """Convert to ddof 0 by sqrt(n / (n - 1)): 1.7320 and -0.5773 for four trajectories."""
    got = advantages(made(*T1))
    assert same([[a * (4 / 3) ** 0.5 for a in row] for row in got], [[0, 1.7320, 0], *[[0, -0.5773, 0]] * 3])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 1.0])
def test_the_size_of_the_reward_cancels_out(alpha):
    assert same(advantages(made(*T1), folr_alpha=alpha), [[0, 1.5, 0], *[[0, -0.5, 0]] * 3])
    halved = advantages(made(*T1), folr_alpha=alpha, adv_std=False)
    assert same(halved, [[0, 0.75 * alpha, 0], *[[0, -0.25 * alpha, 0]] * 3])


def test_a_group_with_a_right_answer_has_grpo_s_advantages():
    g = made([2, 2, N, N], [3, 3, 2, 4], outcomes=[1.0, 0.0, 0.0, 0.0])
    assert same(advantages(g), [[1.5] * 3, [-0.5] * 3, [-0.5] * 2, [-0.5] * 4])
    both = advantages(g, turn_level="all")
    # All four reach turn 2 and the first two find the gold there: +-0.8660 is added. Turns 1, 3 and 4 find nothing.
    assert same(both, [[1.5, 2.366, 1.5], [-0.5, 0.366, -0.5], [-0.5, -1.366], [-0.5, -1.366, -0.5, -0.5]])


@pytest.mark.parametrize(
    "g",
    [
        made([1, N, 2], [2, 3, 3], outcomes=[1.0] * 3),  # all right
        made([N] * 3, [1, 2, 3]),  # all wrong, nothing found
        made([2] * 4, [3] * 4),  # all find it in the same turn
        made([1], [2]),  # one trajectory
        made([N, N], [0, 0]),  # no turns
    ],
)
@pytest.mark.parametrize("norm_set", ["turn_index", "padded"])
@pytest.mark.parametrize("std", [True, False])
def test_equal_trajectories_give_zeros(g, norm_set, std):
    flags = dict(norm_set=norm_set, adv_std=std, folr_alpha=0.1)
    assert advantages(g, **flags) == [[0.0] * len(t.turns) for t in g.trajectories]
    assert stats(g, **flags)["revived"] in (None, 0.0)


@pytest.mark.parametrize("g", [made([1], [2]), made([N, N], [0, 0]), made([1, N], [2, 0]), made([N], [0])])
def test_lone_and_empty_trajectories_stay_finite_when_pooled(g):
    got = advantages(g, norm_set="pooled")
    assert [len(row) for row in got] == [len(t.turns) for t in g.trajectories]
    assert all(abs(a) < 10 for row in got for a in row)


def test_trajectories_of_one_turn_have_grpo_s_advantages():
    rng = random.Random(0)
    for _ in range(20):
        g = made([N] * 5, [1] * 5, outcomes=[float(rng.random() < 0.4) for _ in range(5)])
        assert advantages(g) == train_grpo.compute_advantages(g, train_grpo.Args())[0]


@pytest.mark.parametrize("flags", [{}, {"norm_set": "pooled"}, {"folr_scope": "upto"}, {"turn_level": "all"}])
def test_the_order_of_the_trajectories_does_not_matter(flags):
    g, order = made(*T2), [2, 0, 3, 1]
    permuted = group([(g.trajectories[i].outcome, g.trajectories[i].turns) for i in order])
    got = advantages(g, **flags)
    assert advantages(permuted, **flags) == [got[i] for i in order]


def test_a_gold_is_found_in_normal_form_and_with_match_word_by_whole_words():
    g = group([(0.0, [turn(output="They met in the USA, once."), answer()]), (0.0, [turn(output="US!"), answer()])])
    g.question.golds = ["The U.S."]
    assert same(advantages(g), [[0, 0], [0, 0]])  # "us" is in "usa" too: both find it
    assert same(advantages(g, match="word"), [[-0.7071, 0], [0.7071, 0]])


@pytest.mark.parametrize("match", ["substring", "word"])
@pytest.mark.parametrize("gold", ["1", "Title", "Doc", "Nothing"])
def test_the_words_around_documents_hold_no_gold(gold, match):
    from tools.search import as_text

    without, with_it = ([{"title": "Oakford", "text": text}] for text in ("By the river.", f"It has {gold} of them."))
    g = group([(0.0, [turn(output=as_text(found)), answer()]) for found in (without, with_it, [])], golds=[gold])
    assert same(advantages(g, match=match), [[-0.5773, 0], [1.1547, 0], [-0.5773, 0]])


@pytest.mark.parametrize("cut", ["Doc", "Doc ", "Doc 3", "Doc 3 (", "Doc 3 (Ti", "Doc 3 (Title", "Doc 3 (Title: "])
def test_a_cut_document_header_holds_no_gold(cut):
    output = f"Doc 1 (Title: Ada) By the river.\n{cut}"
    g = group([(0.0, [turn(output=text), answer()]) for text in (output, output + " and 3")], golds=["3"])
    assert same(advantages(g), [[-0.7071, 0], [0.7071, 0]])


def test_only_outputs_of_successful_calls_count():
    status = ["ok", "error", "timeout", "invalid", None]
    g = group([(0.0, [turn(status=s, output="Ada Cole"), answer()]) for s in status])
    assert same(advantages(g), [[1.7889, 0], *[[-0.4472, 0]] * 4])


def test_trivial_golds_count_unless_they_are_skipped():
    g = group(
        [(0.0, [turn(output="Yes, it was so."), answer()]), (0.0, [turn(output="Nothing"), answer()])], golds=["yes"]
    )
    assert same(advantages(g), [[0.7071, 0], [-0.7071, 0]])
    assert advantages(g, trivial_golds="skip") == [[0, 0], [0, 0]]
    assert stats(g)["trivial_hits"] == 1.0 and stats(g, trivial_golds="skip")["trivial_hits"] is None


def test_a_gold_that_the_question_names_is_trivial():
    g = made([1, N], [2, 2], question="Who is older, Ada Cole or Bo Hale?")
    assert stats(g)["trivial_hits"] == 1.0 and advantages(g, trivial_golds="skip") == [[0, 0], [0, 0]]
    # Here it is only part of longer words.
    assert stats(made([1, N], [2, 2], question="Who is Adam Coleman?"))["trivial_hits"] == 0.0


def test_statistics_by_hand():
    found = stats(made(*T2))
    assert (found["near_miss"], found["revived"], found["trivial_hits"], found["short_hits"]) == (0.5, 1.0, 0.0, 0.0)
    assert [found[f"hit_turn_{k}"] for k in range(1, 6)] == [0.25, 0.25, 0, 0, 0]
    assert stats(made([N, N], [2, 2]))["revived"] == 0.0
    mixed = stats(made([1, 1, N], [2, 2, 2], outcomes=[1.0, 0.0, 0.0], gold="6 p"))
    assert mixed["revived"] is None and mixed["near_miss"] == pytest.approx(1 / 3) and mixed["short_hits"] == 1.0
    assert set(found) == set(mixed)


def test_inputs_are_left_as_they_were():
    import copy

    g = made(*T2)
    before = copy.deepcopy(g)
    advantages(g)
    assert g == before
