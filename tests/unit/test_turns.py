"""Packing: the sampled tokens are trained, each at its position in the context of its sampling."""

import random

import pytest
import random_groups

from common.batch import Segment, pack
from common.turns import Group, Question, Trajectory, Turn

EOS = PAD = 0


def two_turns():
    """Return two turns whose end token is the padding token: prompt 5 6, action 7 8 0, observation 9 9, action 4 0."""
    first = Turn([5, 6], [7, 8, EOS], [-0.1, -0.2, -0.3], observation_ids=[9, 9])
    second = Turn([5, 6, 7, 8, EOS, 9, 9], [4, EOS], [-0.4, -0.5])
    return Trajectory([first, second], outcome=1.0)


def one_group(*trajectories):
    return [Group(Question("q", "?", ["gold"]), list(trajectories))]


def test_golden_mask_table_of_two_turns():
    batch = pack(one_group(two_turns()), [[[0.5, -2.0]]])
    assert batch.ids.tolist() == [5, 6, 7, 8, 0, 9, 9, 4, 0]
    assert batch.mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert batch.action.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert batch.turn.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1, 1]
    assert batch.position.tolist() == list(range(9))
    assert batch.adv.tolist() == [0, 0, 0.5, 0.5, 0.5, 0, 0, -2, -2]
    assert batch.sampler.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5])
    assert batch.segments == [Segment(0, 9, 0)]


def test_an_advantage_of_none_is_context_and_ends_the_row_after_the_last_trained_token():
    batch = pack(one_group(two_turns()), [[[None, 1.0]]])
    assert batch.mask.int().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert batch.action.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    batch = pack(one_group(two_turns()), [[[1.0, None]]])
    assert batch.ids.tolist() == [5, 6, 7, 8, 0]
    assert pack(one_group(two_turns()), [[[None, None]]]).segments == []


def test_a_per_token_advantage_lies_on_its_tokens():
    batch = pack(one_group(two_turns()), [[[[0.1, 0.2, 0.3], 0.0]]])
    assert batch.adv.tolist() == pytest.approx([0, 0, 0.1, 0.2, 0.3, 0, 0, 0, 0])


def test_a_turn_whose_context_does_not_extend_the_ids_gets_its_own_row():
    stripped = two_turns()
    stripped.turns[1].context_ids = [5, 6, 8, EOS, 9, 9]  # the first action's 7 was left out of the history
    batch = pack(one_group(stripped), [[[1.0, 2.0]]])
    assert batch.ids.tolist() == [5, 6, 7, 8, 0, 5, 6, 8, 0, 9, 9, 4, 0]
    assert batch.mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    assert batch.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.trajectory.tolist() == [0] * 13
    assert batch.turn.tolist()[-2:] == [1, 1]
    assert [(s.start, s.end, s.unit) for s in batch.segments] == [(0, 5, 0), (5, 13, 0)]


def test_rows_of_one_trajectory_stay_in_one_micro_batch():
    stripped = two_turns()
    stripped.turns[1].context_ids = [5]
    batch = pack(one_group(stripped, two_turns()), [[[1.0, 2.0], [1.0, 1.0]]])
    assert [len(m) for m in batch.micro(1)] == [8, 9]


def test_packing_changes_no_input():
    made, advantages = random_groups.groups()
    before = repr((made, advantages))
    pack(made, advantages)
    assert repr((made, advantages)) == before


def test_micro_batches_hold_every_token_once_and_respect_the_limit():
    made, advantages = random_groups.groups(count=4, size=6)
    batch = pack(made, advantages)
    longest = max(s.end - s.start for s in batch.segments)
    for limit in (1, longest, 100, 10**6):
        parts = batch.micro(limit)
        assert sum(len(p) for p in parts) == len(batch)
        assert [i for p in parts for i in p.ids.tolist()] == batch.ids.tolist()
        assert all(len(p) <= limit or len(p.segments) == 1 for p in parts)
    assert len(batch.micro(10**6)) == 1


def test_minibatches_split_by_whole_groups_into_the_same_number_everywhere():
    made, advantages = random_groups.groups(count=3)
    batch = pack(made, advantages)
    for count in (1, 2, 3):
        parts = batch.minibatches(count, 3)
        assert len(parts) == count
        assert sum(len(p) for p in parts) == len(batch)
        owners = [set(p.group.tolist()) for p in parts]
        assert all(owners) and sum(len(o) for o in owners) == 3
    assert [len(p) for p in pack([], []).minibatches(2, 3)] == [0, 0]


def test_the_number_of_ranks_does_not_change_the_questions_of_a_minibatch():
    made, advantages = random_groups.groups(count=7, size=2)
    for first in (0, 7):  # the first and the second step of a run with 7 questions a step
        for p, group in enumerate(made):
            group.question.draw = first + p
        parts = []
        for ranks in (1, 2, 3):
            draws = [set() for _ in range(3)]
            for rank in range(ranks):
                batch = pack(made[rank::ranks], advantages[rank::ranks])
                for part, minibatch in zip(draws, batch.minibatches(3, 7)):
                    part |= {batch.draws[g] for g in minibatch.group.tolist()}
            parts.append(draws)
        assert parts[0] == parts[1] == parts[2] and sorted(map(len, parts[0])) == [2, 2, 3]


def test_means_go_by_turn_and_trajectory_ids_and_never_by_row():
    stripped = two_turns()
    stripped.turns[1].context_ids = [5]
    batch = pack(one_group(stripped, two_turns()), [[[1.0, 2.0], [1.0, 1.0]]])
    values = batch.ids.float()
    by_trajectory = batch.mean_by(values, "trajectory")
    by_turn = batch.mean_by(values, "turn")
    assert by_trajectory[batch.mask].tolist() == pytest.approx([(7 + 8 + 0 + 4 + 0) / 5] * 10)
    assert by_turn[batch.mask].tolist() == pytest.approx([5, 5, 5, 2, 2] * 2)
    assert batch.trained_in("turn")[batch.mask].tolist() == [3, 3, 3, 2, 2] * 2
    assert by_turn[~batch.mask].abs().sum() == 0


def test_random_trajectories_train_exactly_the_sampled_ids():
    rng = random.Random(3)
    for _ in range(50):
        t = random_groups.trajectory(rng, rng.randint(1, 5))
        batch = pack(one_group(t), [[[1.0] * len(t.turns)]])
        assert batch.ids[batch.mask].tolist() == [i for turn in t.turns for i in turn.action_ids]
        for k, turn in enumerate(t.turns):
            first = int((batch.turn == k).nonzero()[0])
            assert batch.ids[:first].tolist() == turn.context_ids


def test_a_turn_needs_one_log_probability_per_id():
    broken = two_turns()
    broken.turns[0].action_logps.pop()
    with pytest.raises(AssertionError):
        pack(one_group(broken), [[[1.0, 1.0]]])
