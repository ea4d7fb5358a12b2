"""GTPO's credit, with numbers worked out by hand."""

import random

import numpy
import pytest
from hand_made import answer, group, same, turn

import train_grpo
import train_gtpo
from tasks import similarity


def invalid():
    return turn(tool=None, status="invalid")


def golden(outcomes=(1.0, 1.0, 0.0, 0.0), alike=None):
    """Return a group: right in 2 turns; right in 3; wrong in 3, the second call invalid; wrong in 1 without a call."""
    g = group(
        [
            (outcomes[0], [turn(), answer()]),
            (outcomes[1], [turn(), turn(), answer()]),
            (outcomes[2], [turn(), invalid(), answer()]),
            (outcomes[3], [answer()]),
        ]
    )
    for trajectory, value in zip(g.trajectories, alike or ()):
        trajectory.info["similarity"] = value
    return g


SHAPED = dict(alike=(1.0, 1.0, (0.8 + 0.6) / 2, 0.0))


def rewards(g, **flags):
    return [train_gtpo.turn_rewards(t, train_gtpo.Args(**flags)) for t in g.trajectories]


def advantages(g, **flags):
    return train_gtpo.compute_advantages(g, train_gtpo.Args(**flags))[0]


def test_turn_rewards_by_hand():
    assert same(rewards(golden()), [[0, 1], [0, 0, 1], [0, -0.1, 0], [-0.1]])
    assert same(rewards(golden(**SHAPED)), [[0, 1], [0, 0, 1], [0, -0.1, 0.35], [-0.1]])  # 0.5 x 0.7, not 0.175
    assert same(rewards(golden(**SHAPED), shaping=0.0), [[0, 1], [0, 0, 1], [0, -0.1, 0], [-0.1]])


def test_a_call_that_fails_or_times_out_costs_nothing_and_an_invalid_first_turn_costs_once():
    g = group(
        [
            (0.0, [turn(status="error"), turn(status="timeout"), answer()]),
            (0.0, [invalid(), answer()]),
            (1.0, [invalid()]),
            (0.0, [turn(status=None)]),  # the last allowed turn: its call does not run
            (0.0, []),
            (0.0, [answer()]),  # cut by length: no call
            (0.0, [turn(), answer()]),
        ]
    )
    assert same(rewards(g), [[0, 0, 0], [-0.1, 0], [0.9], [0], [], [-0.1], [0, 0]])


@pytest.mark.parametrize(
    "g, flags, expected",
    [
        (golden(), {}, [[0.9459, 0.6576], [0.7822, 0.4932, 0.7071], [-0.855, -1.1508, -0.7071], [-0.8732]]),
        (
            golden(),
            {"norm_set": "pooled"},
            [[0.7954, 0.9848], [0.625, 0.7954, 0.9848], [-1.0795, -1.0984, -0.909], [-1.0984]],
        ),
        (golden(), {"adv_std": False}, [[0.52, 0.4], [0.43, 0.3, 0.5], [-0.47, -0.7, -0.5], [-0.48]]),
        (
            golden(**SHAPED),
            {},
            [[0.9295, 0.6904], [0.7433, 0.4564, 0.7071], [-0.5327, -1.1468, -0.7071], [-1.1401]],
        ),
        (
            golden(**SHAPED),
            {"norm_set": "pooled"},
            [[0.7499, 0.9882], [0.5354, 0.7499, 0.9882], [-0.9341, -0.8828, -0.5611], [-1.6336]],
        ),
        (golden([0.0] * 4), {}, [[0.8636, 0.5773], [0.8636, 0.5773, 0], [-0.7727, -1.1547, 0], [-0.9545]]),
    ],
)
def test_advantages_by_hand(g, flags, expected):
    assert same(advantages(g, **flags), expected)


def test_the_population_s_deviation_gives_the_numbers_of_the_reference():
    """Convert to ddof 0 by sqrt(n / (n - 1)), with the number n of trajectories that have the turn: 4, 3 and 2."""
    got = [[a * (n / (n - 1)) ** 0.5 for a, n in zip(row, (4, 3, 2))] for row in advantages(golden())]
    assert same(got, [[1.0923, 0.8054], [0.9032, 0.604, 1.0], [-0.9872, -1.4094, -1.0], [-1.0082]])


def test_returns_are_discounted_rewards():
    pair = lambda g, **flags: advantages(group([*g, (0.0, [])]), adv_std=False, norm_set="padded", **flags)[0]  # noqa: E731
    # The other trajectory is empty and padded with 0, so that an advantage is half the return.
    assert same([pair([(1.0, [turn(), turn(), answer()])])], [[0.405, 0.45, 0.5]])
    assert same([pair([(0.0, [turn(), invalid(), answer()])])], [[-0.045, -0.05, 0.0]])
    assert same([pair([(0.0, [answer()])])], [[-0.05]])


def test_without_discount_shaping_and_penalties_every_return_is_the_outcome():
    flags = dict(gamma=1.0, shaping=0.0, format_penalty=0.0)
    rng = random.Random(0)
    for _ in range(20):
        g = group([(float(rng.random() < 0.5), [turn(), turn(), answer()]) for _ in range(6)])
        assert same(advantages(g, **flags), train_grpo.compute_advantages(g, train_grpo.Args())[0], atol=1e-9)
    # Of unequal lengths too: without deviation an advantage is the return minus the mean over the group's turns.
    g = group([(1.0, [turn(), answer()]), (0.0, [answer()]), (1.0, [turn(), turn(), invalid(), answer()])])
    got = advantages(g, adv_std=False, norm_set="pooled", **flags)
    assert same(got, [[1 - 6 / 7] * 2, [-6 / 7], [1 - 6 / 7] * 4])


def test_the_order_of_the_trajectories_does_not_matter():
    g, order = golden(**SHAPED), [2, 0, 3, 1]
    permuted = group([(g.trajectories[i].outcome, g.trajectories[i].turns) for i in order])
    for place, i in enumerate(order):
        permuted.trajectories[place].info = g.trajectories[i].info
    got = advantages(g)
    assert same(advantages(permuted), [got[i] for i in order], atol=1e-12)


@pytest.mark.parametrize("norm_set", ["turn_index", "pooled", "padded"])
@pytest.mark.parametrize(
    "g",
    [
        group([(1.0, [turn(), answer()])]),
        group([(0.0, []), (0.0, [])]),
        group([(1.0, [turn(), answer()]), (0.0, []), (0.0, [turn()])]),
    ],
)
def test_lone_trajectories_and_empty_ones_stay_finite(g, norm_set):
    got = advantages(g, norm_set=norm_set)
    assert [len(row) for row in got] == [len(t.turns) for t in g.trajectories]
    assert all(numpy.isfinite(row).all() for row in got)


def test_a_constant_reward_gives_zeros():
    g = group([(1.0, [turn(), answer()]) for _ in range(4)])
    assert advantages(g) == [[0.0, 0.0]] * 4


def test_a_turn_that_one_trajectory_reached_has_no_advantage():
    g = group([(1.0, [turn(), turn(), answer()]), (0.0, [turn(), answer()])])
    assert advantages(g)[0][2] == 0.0


# ---- similarity


class Engine:
    """An engine that returns one group."""

    def __init__(self, made):
        self.made = made

    def rollout(self, task, questions, n, progress):
        return [self.made]


class Task:
    def take(self, n):
        return []


def collected(g, **flags):
    (groups,) = train_gtpo.collect(Engine(g), Task(), train_gtpo.Args(**flags))
    return [t.info.get("similarity") for t in groups[0].trajectories]


def test_similarity_is_the_mean_over_the_correct_trajectories(monkeypatch):
    table = numpy.array([[1, 0.3, 0.8, 0.1], [0.3, 1, 0.6, 0.2], [0.8, 0.6, 1, 0.5], [0.1, 0.2, 0.5, 1]])
    seen = []
    monkeypatch.setattr(similarity, "cosines", lambda texts, embedder: (seen.append(texts), table)[1])
    code = [["a = 1", "print(a)"], ["b = 2"], ["c = 3"], ["d = 4"]]
    g = group([(o, [turn("python", text=t) for t in c] + [answer()]) for o, c in zip((1.0, 1.0, 0.0, 0.0), code)])
    assert collected(g)[2:] == pytest.approx([(0.8 + 0.6) / 2, (0.1 + 0.2) / 2])
    assert seen == [["a = 1\nprint(a)", "b = 2", "c = 3", "d = 4"]]
    assert rewards(g)[2][-1] == pytest.approx(0.35)


@pytest.mark.parametrize("outcomes", [(0.0, 0.0), (1.0, 1.0)])
def test_similarity_needs_right_and_wrong_trajectories(outcomes):
    assert collected(group([(o, [turn(text="print(1)"), answer()]) for o in outcomes])) == [None, None]


def test_tf_idf_knows_equal_alike_and_different_code():
    code = ["total = a + b\nprint(total)", "total = a + b\nprint(total)", "total = a - b\nprint(total)", "x", "", "  "]
    alike = similarity.cosines(code)
    assert alike[0, 1] == pytest.approx(1) and 0.3 < alike[0, 2] < 0.95
    assert alike[0, 3] == 0 and not alike[4].any() and not alike[5].any()
    assert similarity.cosines(["", ""]).tolist() == [[0, 0], [0, 0]]
    assert alike == pytest.approx(alike.T)


def test_negative_cosines_count_as_zero(monkeypatch):
    vectors = numpy.array([[1.0, 0.0], [-0.6, 0.8]])
    monkeypatch.setattr(similarity, "embed", lambda texts, embedder: vectors)
    assert similarity.cosines(["a", "b"], "model").tolist() == [[1, 0], [0, 1]]


def test_an_embedding_model_is_loaded_by_plain_transformers(qwen, tmp_path):
    """Embed with a random model: mean-pooled hidden states, which padding and order must not change."""
    texts = ["Oakford is a town", "the quick brown fox jumps over the lazy dog", "Oakford is a town"]
    alike = similarity.cosines(texts, qwen)
    assert alike[0, 2] == pytest.approx(1, abs=1e-5) and alike[0, 1] < 0.999
    assert similarity.cosines(texts[1::-1], qwen)[0, 1] == pytest.approx(alike[0, 1], abs=1e-5)


def test_any_model_that_embeds_will_do_and_one_that_cannot_is_refused_at_start_up(tmp_path):
    import torch
    from small_models import random_qwen, tokenizer
    from transformers import AutoModel, RobertaConfig, RobertaModel, T5Config, T5Model

    half = random_qwen(tmp_path / "half")  # stored in half precision, without a padding token, with short positions
    AutoModel.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    roberta = RobertaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    roberta.intermediate_size, roberta.max_position_embeddings = 32, 66
    RobertaModel(roberta).save_pretrained(tmp_path / "roberta")
    T5Model(T5Config(vocab_size=400, d_model=32, d_kv=16, d_ff=32, num_layers=1)).save_pretrained(tmp_path / "t5")
    for name in ("roberta", "t5"):
        tokenizer().save_pretrained(tmp_path / name)
    for name in (half, str(tmp_path / "roberta")):
        train_gtpo.Args(code_embedder=name)
        alike = similarity.cosines(["the town " * 2000, "the town"], name)
        assert alike[0, 0] == pytest.approx(1, abs=1e-5) and 0 <= alike[0, 1] <= 1
    # T5 gives no hidden states without a decoder's input.
    with pytest.raises(SystemExit, match="t5: it cannot embed texts"):
        train_gtpo.Args(code_embedder=str(tmp_path / "t5"))


def test_a_missing_embedder_is_refused_at_start_up(tmp_path):
    with pytest.raises(SystemExit, match="--code_embedder .*nowhere: it cannot embed texts"):
        train_gtpo.Args(code_embedder=str(tmp_path / "nowhere"))
