"""RTPO's siblings, phases and credit."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from hand_made import answer, group, same, turn

import train_rtpo
from common.batch import pack
from common.environment import Environment, Limits
from common.turns import Group, Question, Trajectory, Turn


def siblings(outcomes, k=1, turns=3, taken=range(99)):
    """Return siblings of turn k (from 0), which share the earlier turns and differ in the number of later ones. taken:
    the token of turn k of each sibling."""
    shared = [turn() for _ in range(k)]
    made = group(
        [(o, shared + [turn() for _ in range(turns - k - 1 + i)] + [answer()]) for i, o in enumerate(outcomes)]
    )
    for trajectory, token in zip(made.trajectories, taken):
        trajectory.turns[k].action_ids = [token]
    made.info["turn"] = k
    return made


def advantages(g, **flags):
    return train_rtpo.compute_advantages(g, train_rtpo.Args(**flags))[0]


def of_turn(g, k, **flags):
    return [row[k] for row in advantages(g, **flags)]


@pytest.mark.parametrize(
    "outcomes, expected",
    [
        ([1, 0], [0.5, -0.5]),
        ([1, 1], [0, 0]),
        ([1, 0, 0], [0.6667, -0.3333, -0.3333]),
        ([1, 1, 0], [0.3333, 0.3333, -0.6667]),
        ([1], [0]),
    ],
)
def test_a_sibling_s_advantage_is_its_outcome_minus_the_siblings_mean(outcomes, expected):
    for k in (0, 1, 2):
        got = advantages(siblings(outcomes, k=k))
        assert same([[row[k] for row in got]], [expected])
        assert sum(row[k] for row in got) == pytest.approx(0)
        assert all((a is None) == (place != k) for row in got for place, a in enumerate(row))


def test_siblings_that_took_the_same_turn_share_their_mean_advantage():
    assert same([of_turn(siblings([1, 0, 0, 1], taken=[5, 5, 6, 6]), 1)], [[0, 0, 0, 0]])
    assert same([of_turn(siblings([1, 0, 0], taken=[5, 5, 6]), 1)], [[0.1667, 0.1667, -0.3333]])  # 0.5, 0.5, 0 less 1/3
    for outcomes in ([1, 0], [1, 0, 0], [1, 1, 0]):  # exactly 0, without rounding errors
        g = siblings(outcomes, taken=[5, 5, 5])
        adv_GK, stats = train_rtpo.compute_advantages(g, train_rtpo.Args())
        assert [row[1] for row in adv_GK] == [0] * len(outcomes) and stats["signal_turn_2"] == 0


def test_adv_std_divides_by_the_deviation_of_the_outcomes():
    assert same([of_turn(siblings([1, 0]), 1, adv_std=True)], [[0.7071, -0.7071]])
    assert same([of_turn(siblings([1, 0, 0]), 1, adv_std=True)], [[1.1547, -0.5773, -0.5773]])
    # The mean of 1.1547 and -0.5773: equal turns do not change the deviation, which is that of the outcomes.
    assert same([of_turn(siblings([1, 0, 0], taken=[5, 5, 6]), 1, adv_std=True)], [[0.2887, 0.2887, -0.5773]])
    assert of_turn(siblings([1, 0, 0], taken=[5, 5, 5]), 1, adv_std=True) == [0, 0, 0]


def test_a_trunk_is_not_trained_whatever_its_outcome():
    trunks = group([(1.0, [turn(), answer()]), (0.0, [answer()])], info={"boundaries": 3, "dropped": 0})
    adv_GK, stats = train_rtpo.compute_advantages(trunks, train_rtpo.Args())
    assert adv_GK == [[None, None], [None]]
    assert (stats["boundaries"], stats["dropped"], stats["signal_turn_1"]) == (3, 0, None)
    assert pack([trunks], [adv_GK]).segments == []


def test_the_order_of_siblings_does_not_matter_and_equal_outcomes_give_zeros():
    g, order = siblings([1, 0, 0, 1]), [2, 0, 3, 1]
    permuted = group([(g.trajectories[i].outcome, g.trajectories[i].turns) for i in order], info=g.info)
    assert of_turn(permuted, 1) == [of_turn(g, 1)[i] for i in order]
    for outcome in (0.0, 0.1, 1.0):
        _, stats = train_rtpo.compute_advantages(siblings([outcome] * 3), train_rtpo.Args())
        assert of_turn(siblings([outcome] * 3), 1) == [0, 0, 0] and stats["signal_turn_2"] == 0


def test_the_objective_of_two_siblings_by_hand():
    """Check eq. (6): ratios (1.3, 0.9) with advantage 0.5 and (0.7, 1.1, 1.0) with -0.5 give 0.525 and -0.4833 per
    turn, and 0.0208 together."""
    args = train_rtpo.Args(tis_cap=0.0)
    ratios = [[1.3, 0.9], [0.7, 1.1, 1.0]]
    made = [Trajectory([Turn([7], [1] * len(r), [-1.0] * len(r))], outcome=o) for r, o in zip(ratios, (1.0, 0.0))]
    g = Group(Question("q", "?", []), made, {"turn": 0})
    batch = pack([g], [advantages(g)])
    batch.old = torch.full((len(batch),), -1.0) * batch.mask
    batch.weight = train_rtpo.token_weights(batch, float, args)
    logp = batch.old.clone()
    logp[batch.mask] += torch.tensor([x for r in ratios for x in r]).log()
    loss, _ = train_rtpo.policy_loss(logp, batch, args)
    assert -float(loss) == pytest.approx(0.0208, abs=1e-4)
    batch.weight = train_rtpo.token_weights(batch, float, train_rtpo.Args(average="token"))
    loss, _ = train_rtpo.policy_loss(logp, batch, args)
    assert -float(loss) * 5 == pytest.approx(-0.40, abs=1e-4) and -float(loss) == pytest.approx(-0.08, abs=1e-4)


@pytest.mark.parametrize("count", [2, 3])
def test_in_expectation_siblings_give_the_policy_gradient_of_their_turn_times_g_minus_1_over_g(count):
    """Enumerate all ways that `count` siblings can choose between three turns, weighted by the policy."""
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    outcomes = [1.0, 0.0, 0.25]
    chances = logits.detach().softmax(0)
    args, expected = train_rtpo.Args(tis_cap=0.0), torch.zeros(3)
    for chosen in itertools.product(range(3), repeat=count):
        before = Turn([7], [5], [-1.0])
        made = [Trajectory([before, Turn([7, 5, 6], [a], [-1.0])], outcome=outcomes[a]) for a in chosen]
        g = Group(Question("q", "?", []), made, {"turn": 1})
        batch = pack([g], [advantages(g)])
        batch.weight = train_rtpo.token_weights(batch, float, args)
        logp = torch.zeros(len(batch)).masked_scatter(batch.mask, logits.log_softmax(0)[batch.ids[batch.mask]])
        loss, _ = train_rtpo.policy_loss(logp, batch, args)
        expected += chances[list(chosen)].prod() * torch.autograd.grad(-loss, logits)[0]
    (gradient,) = torch.autograd.grad((logits.softmax(0) * torch.tensor(outcomes)).sum(), logits)
    assert torch.allclose(expected, gradient * (count - 1) / count, atol=1e-6) and gradient.abs().max() > 0.1


def test_no_token_outside_the_boundary_s_turn_is_trained():
    rng = random.Random(0)
    context = [rng.randrange(50) for _ in range(6)]
    turns = []
    for _ in range(4):
        acted = [rng.randrange(50) for _ in range(3)]
        turns.append(Turn(list(context), acted, [-1.0] * 3, observation_ids=[9, 9]))
        context += acted + [9, 9]
    g = Group(Question("q", "?", []), [Trajectory(turns, outcome=o) for o in (1.0, 0.0)], {"turn": 2})
    batch = pack([g], [advantages(g)])
    assert batch.turn[batch.mask].tolist() == [2] * 6
    for segment in batch.segments:  # the row is that turn's exact context and the turn
        assert batch.ids[segment.start : segment.end].tolist() == turns[2].context_ids + turns[2].action_ids


# ---- boundaries and phases


class Scripted:
    """An engine with trunks of given lengths and siblings as long as their trunk. It records its calls."""

    def __init__(self, lengths):
        self.lengths, self.asked, self.version = lengths, [], 0

    def rollout(self, task, questions, n, progress):
        self.asked.append(("trunks", len(questions), n, self.version))
        return [
            Group(question, [Trajectory([Turn([1], [2], [-1.0]) for _ in range(k)]) for k in self.lengths[question.id]])
            for question in questions
        ]

    def fork(self, task, boundaries, n, progress):
        self.asked.append(("siblings", [b[2] for b in boundaries], n, self.version))
        return [
            Group(g.question, [Trajectory(list(g.trajectories[t].turns), forked=k) for _ in range(n)], {"turn": k})
            for g, t, k in boundaries
        ]


def play(lengths, **flags):
    """Collect one step, with a new policy version in each phase. Returns (the groups of each phase, the engine)."""
    questions = [Question(str(i), "?", [], draw=i) for i in range(len(lengths))]
    engine = Scripted({q.id: k for q, k in zip(questions, lengths)})
    task = SimpleNamespace(take=lambda n: questions)
    args = train_rtpo.Args(questions=len(lengths), trunks=len(lengths[0]), **flags)
    phases = []
    for groups in train_rtpo.collect(engine, task, args):
        phases.append(groups)
        engine.version += 1
    return phases, engine


@pytest.mark.parametrize("lengths, rollouts", [([1, 1, 2, 2], 16), ([3, 4], 16), ([3] * 4, 28), ([6] * 2, 26)])
def test_rollouts_of_a_question_when_every_boundary_is_forked(lengths, rollouts):
    phases, _ = play([lengths], group=64, max_turns=6)
    assert sum(len(g.trajectories) for groups in phases for g in groups) == rollouts


@pytest.mark.parametrize("turns, sampled, trained", [(3, 15, 6), (6, 48, 12)])
def test_turns_sampled_and_trained_for_one_trunk(turns, sampled, trained):
    phases, _ = play([[turns]], group=64, max_turns=6)
    groups = [g for phase in phases for g in phase]
    assert sum(len(t.turns) - t.forked for g in groups for t in g.trajectories) == sampled
    assert sum(a is not None for g in groups for row in advantages(g, max_turns=6) for a in row) == trained


def test_phases_go_from_the_last_turn_to_the_first_each_with_the_policy_of_the_one_before():
    _, engine = play([[3, 1], [2, 5]], group=64, max_turns=6)
    assert engine.asked == [
        ("trunks", 2, 2, 0),
        ("siblings", [4], 2, 0),  # no trunk has 6 turns
        ("siblings", [3], 2, 1),
        ("siblings", [2, 2], 2, 2),
        ("siblings", [1, 1, 1], 2, 3),
        ("siblings", [0, 0, 0, 0], 2, 4),
    ]


def test_trunks_come_once_with_the_first_phase():
    phases, _ = play([[3, 1], [2, 5]], group=64, max_turns=6)
    assert [sum("turn" not in g.info for g in groups) for groups in phases] == [2, 0, 0, 0, 0]


@pytest.mark.parametrize("size, kept", [(8, 3), (16, 7), (17, 7), (64, 10), (4, 1)])
def test_boundaries_beyond_the_budget_are_dropped_and_counted(size, kept):
    phases, _ = play([[5, 5]], group=size, max_turns=5)
    chosen = [g for groups in phases for g in groups if "turn" in g.info]
    trunks = phases[0][0]
    assert len(chosen) == kept == trunks.info["boundaries"] and trunks.info["dropped"] == 10 - kept
    assert 2 + 2 * kept <= size


def test_the_choice_of_boundaries_is_seeded_and_uniform():
    counts = dict.fromkeys(range(5), 0)
    for seed in range(400):
        made = Group(Question("q", "?", []), [Trajectory([Turn([1], [2], [-1.0])] * 5)])
        args = train_rtpo.Args(seed=seed, trunks=1, group=5)
        chosen = train_rtpo.choose_boundaries(made, args)
        assert [b[1:] for b in chosen] == [b[1:] for b in train_rtpo.choose_boundaries(made, args)]
        for _, _, k in chosen:
            counts[k] += 1
    assert sum(counts.values()) == 800 and all(120 < n < 200 for n in counts.values())  # 160 each, +- 4 deviations


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(siblings=1), "--siblings 1"),
        (dict(trunks=0), "--trunks 0"),
        (dict(group=3), "--group 3"),
    ],
)
def test_a_budget_that_cannot_work_is_refused_at_start_up(flags, words):
    with pytest.raises(SystemExit, match=words):
        train_rtpo.Args(**flags)


def test_no_two_siblings_are_drawn_with_the_same_seeds():
    """Compare trunks, siblings of two trunks at one boundary (whose first contexts are equal), and phases."""
    from common.loop import Loop, Rollout
    from common.rollout import Engine

    class Counting:
        fork = Engine.fork
        args, step, phase = train_rtpo.Args(), 1, 0

        def _finish(self, task, rollouts, greedy, progress):
            self.phase += 1
            loop = Loop(self, Environment(None, Limits(1, 1)), greedy)
            seen.extend(
                loop._seed(rollout, len(rollout.trajectory.turns) + later) for rollout in rollouts for later in range(3)
            )

    seen, engine = [], Counting()
    trunks = Group(Question("q", "?", []), [Trajectory([Turn([1], [2], [-1.0])] * 3) for _ in range(2)])
    engine._finish(None, [Rollout(trunks.question, Trajectory(), g) for g in range(2)], False, None)
    for k in (2, 1, 0):
        engine.fork(None, [(trunks, 0, k), (trunks, 1, k)], 2)
    assert len(seen) == len(set(seen)) == 3 * (2 + 3 * 4)
