"""train_grpo.py's own functions, with numbers worked out by hand."""

import math

import pytest
import random_groups
import torch

import train_grpo
from common.batch import pack
from common.turns import Group, Question, Trajectory, Turn


def group(*outcomes, turns=2):
    made = [Trajectory([Turn([1], [2], [-1.0]) for _ in range(turns)], outcome=o) for o in outcomes]
    return Group(Question("q", "?", ["gold"]), made)


@pytest.mark.parametrize(
    "outcomes, std, expected",
    [
        ((1, 0, 0, 1, 0), True, [1.0954, -0.7303, -0.7303, 1.0954, -0.7303]),  # mean 0.4, sample deviation 0.5477
        ((1, 0, 0, 0, 0), True, [1.7889, -0.4472, -0.4472, -0.4472, -0.4472]),
        ((1, 0, 0, 0), True, [1.5, -0.5, -0.5, -0.5]),
        ((1, 1, 0, 0), True, [0.866, 0.866, -0.866, -0.866]),
        ((0.1, 0.1, 0.1), False, [0, 0, 0]),
        ((1, 0, 0, 1, 0), False, [0.6, -0.4, -0.4, 0.6, -0.4]),
        ((1, 1, 1), True, [0, 0, 0]),
        ((0, 0, 0), True, [0, 0, 0]),
        ((1,), True, [0]),
        ((1,), False, [0]),
    ],
)
def test_advantages_by_hand(make_args, outcomes, std, expected):
    adv_GK, _ = train_grpo.compute_advantages(group(*outcomes), make_args(adv_std=std))
    assert [adv_K[0] for adv_K in adv_GK] == pytest.approx(expected, abs=2e-4)
    assert all(len(adv_K) == 2 and adv_K[0] == adv_K[1] for adv_K in adv_GK)


def test_advantages_follow_a_permutation_and_leave_the_group_alone(make_args):
    made = group(1, 0, 0.3, 0)
    before = repr(made)
    forward, _ = train_grpo.compute_advantages(made, make_args())
    made.trajectories.reverse()
    backward, _ = train_grpo.compute_advantages(made, make_args())
    assert [a[0] for a in backward] == pytest.approx([a[0] for a in forward[::-1]], abs=1e-12)
    made.trajectories.reverse()
    assert repr(made) == before


def test_a_trajectory_without_turns_is_legal(make_args):
    made = group(1, 0)
    made.trajectories[1].turns = []
    adv_GK, _ = train_grpo.compute_advantages(made, make_args())
    assert [len(a) for a in adv_GK] == [2, 0]
    assert len(pack([made], [adv_GK]).segments) == 2  # two turns that share no context, none for the empty one


def one_token(adv, ratio, args, **tensors):
    """Return (loss, gradient, stats) of one trained token of weight 1 whose probability has changed by `ratio`."""
    turn = Turn([5], [6], [-1.0])
    batch = pack([Group(Question("q", "?", []), [Trajectory([turn])])], [[[adv]]])
    batch.weight = batch.mask.float()
    batch.old = torch.where(batch.mask, -1.0, 0.0)
    for name, value in tensors.items():
        setattr(batch, name, torch.where(batch.mask, value, 0.0))
    logp = torch.where(batch.mask, -1.0 + math.log(ratio), 0.0).requires_grad_()
    loss, stats = train_grpo.policy_loss(logp, batch, args)
    loss.backward()
    return float(loss.detach()), float(logp.grad[1]), {k: float(v.detach()) for k, v in stats.items()}


@pytest.mark.parametrize(
    "adv, ratio, high, expected, clipped",
    [
        (1.0954, 1.3, 0.2, -1.3145, 1),  # clipped at 1.2
        (1.0954, 1.3, 0.28, -1.4021, 1),
        (1.0954, 0.7, 0.2, -0.7668, 0),  # positive advantage, falling probability: not clipped
        (-0.7303, 4.0, 0.2, 2.9212, 0),  # negative advantage, rising probability: not clipped
        (-0.7303, 0.7, 0.2, 0.5842, 1),  # clipped at 0.8
        (-0.7303, 1.3, 0.2, 0.9494, 0),
    ],
)
def test_clipped_surrogate_by_hand(make_args, adv, ratio, high, expected, clipped):
    loss, slope, stats = one_token(adv, ratio, make_args(clip_high=high))
    assert loss == pytest.approx(expected, abs=2e-4)
    assert stats["clip_frac"] == clipped
    assert slope == pytest.approx(0 if clipped else -adv * ratio, abs=2e-4)


def test_ratio_one_is_the_reinforce_gradient(make_args):
    _, slope, _ = one_token(0.7, 1.0, make_args())
    assert slope == pytest.approx(-0.7, abs=1e-6)


@pytest.mark.parametrize(
    "kl, ref, expected",
    [
        ("k1", -1.2, 0.2),
        ("k2", -1.2, 0.02),
        ("k3", -1.2, 0.0187),
        ("k1", -0.5, -0.5),
        ("k2", -0.5, 0.125),
        ("k3", -0.5, 0.1487),
    ],
)
def test_kl_estimators_by_hand(make_args, kl, ref, expected):
    loss, _, stats = one_token(0.0, 1.0, make_args(kl=kl, kl_coef=2.0), ref=ref)
    assert stats["kl_ref"] == pytest.approx(expected, abs=2e-4)
    assert loss == pytest.approx(2 * expected, abs=4e-4)


@pytest.mark.parametrize("old, sampler, expected", [(-1.0, -1.1, 1.1052), (-1.0, -2.5, 2.0), (-3.0, -1.0, 0.1353)])
def test_truncated_ratio_of_trainer_to_engine_weighs_the_loss(make_args, old, sampler, expected):
    _, slope, _ = one_token(1.0, math.exp(old + 1.0), make_args(), old=old, sampler=sampler)
    assert -slope == pytest.approx(expected, abs=2e-4)
    _, slope, _ = one_token(1.0, math.exp(old + 1.0), make_args(tis_cap=0.0), old=old, sampler=sampler)
    assert -slope == pytest.approx(1.0, abs=1e-6)


def losses_table():
    """Return a batch of two trajectories and their token losses: 1 1 | 2 (two turns) and 3 (one turn)."""
    first = Trajectory([Turn([5], [6, 6], [-1.0] * 2), Turn([5, 6, 6, 7], [6], [-1.0])])
    second = Trajectory([Turn([5], [6], [-1.0])])
    batch = pack([Group(Question("q", "?", []), [first, second])], [[[1.0, 1.0], [1.0]]])
    losses = torch.zeros(len(batch))
    losses[batch.mask] = torch.tensor([1.0, 1.0, 2.0, 3.0])
    return batch, losses


@pytest.mark.parametrize(
    "average, expected",
    [
        ("token", 7 / 4),
        ("trajectory", (4 / 3 + 3) / 2),  # 2.1667
        ("turn", (1 + 2 + 3) / 3),
        ("constant", 7 / (2 * 5)),  # two trajectories of at most 5 tokens: 0.7
    ],
)
def test_token_weights_by_hand(make_args, average, expected):
    batch, losses = losses_table()
    weight = train_grpo.token_weights(batch, float, make_args(average=average, max_turns=1, max_turn_tokens=5))
    assert float((weight * losses).sum()) == pytest.approx(expected, abs=1e-4)
    assert float(weight[~batch.mask].abs().sum()) == 0


def test_sequence_ratio_is_the_geometric_mean_over_its_tokens(make_args):
    """Check log-ratios 0.1, -0.05, 0.2: their mean 0.0833 gives the ratio 1.0869 for every token, as in GSPO."""
    turn = Turn([5], [6, 6, 6], [-1.0] * 3)
    batch = pack([Group(Question("q", "?", []), [Trajectory([turn])])], [[[1.0]]])
    batch.weight = batch.mask / 3
    batch.old = torch.where(batch.mask, -1.0, 0.0)
    logp = batch.old.clone()
    logp[batch.mask] += torch.tensor([0.1, -0.05, 0.2])
    for ratio in ("turn", "sequence"):
        loss, _ = train_grpo.policy_loss(logp, batch, make_args(ratio=ratio))
        assert float(loss) == pytest.approx(-1.0869, abs=1e-4)


def test_a_group_without_signal_gives_zeros_and_stays_finite(make_args):
    made, _ = random_groups.groups(count=1, size=3)
    for t in made[0].trajectories:
        t.outcome = 0.0
    adv_GK, _ = train_grpo.compute_advantages(made[0], make_args())
    batch = pack(made, [adv_GK])
    batch.weight = train_grpo.token_weights(batch, float, make_args())
    logp = batch.sampler.clone().requires_grad_()
    loss, _ = train_grpo.policy_loss(logp, batch, make_args())
    loss.backward()
    assert float(loss.detach()) == 0 and float(logp.grad.abs().sum()) == 0
    assert float(batch.weight.sum()) == pytest.approx(1.0)


def test_an_empty_batch_has_finite_weights(make_args):
    for average in ("token", "turn", "trajectory", "constant"):
        weight = train_grpo.token_weights(pack([], []), float, make_args(average=average))
        assert weight.shape == (0,)
