"""Groups of random trajectories for tests."""

import random

from common.turns import Group, Question, Trajectory, Turn


def trajectory(rng, turns, outcome=0.0, vocabulary=300, prompt=None, context=20, action=8, observation=12):
    """Return a trajectory of random ids in which every context extends the one before."""
    ids = list(prompt) if prompt else [rng.randrange(vocabulary) for _ in range(context)]
    made = Trajectory(outcome=outcome)
    for k in range(turns):
        acted = [rng.randrange(vocabulary) for _ in range(rng.randint(2, action))]
        observed = [rng.randrange(vocabulary) for _ in range(rng.randint(1, observation))] if k + 1 < turns else []
        made.turns.append(Turn(list(ids), acted, [-rng.random() for _ in acted], observation_ids=observed))
        ids = ids + acted + observed
    return made


def groups(seed=0, count=3, size=4, vocabulary=300):
    """Return `count` groups of `size` trajectories of 1 to 3 turns, the last group all wrong, and turns' advantages."""
    rng = random.Random(seed)
    made = []
    for p in range(count):
        outcomes = [float(g % 2 == 0 and p < count - 1) for g in range(size)]
        prompt = [rng.randrange(vocabulary) for _ in range(15 + p)]
        samples = [trajectory(rng, rng.randint(1, 3), o, vocabulary, prompt) for o in outcomes]
        made.append(Group(Question(str(p), f"question {p}", ["gold"], draw=p), samples))
    advantages = [[[rng.uniform(-1, 1) for _ in t.turns] for t in g.trajectories] for g in made]
    return made, advantages
