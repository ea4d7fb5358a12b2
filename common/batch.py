"""Groups of trajectories packed into a Batch of tensors.

Token in, token out. `pack` lays the exact ids that the engine was given and those that it sampled side by side; nothing is decoded,
re-encoded or re-templated on the way. Masks come from positions, never from token ids, so a sampled
end token is trained even where it equals the padding token.

Shapes: G trajectories of a group, K turns of a trajectory, T tokens of a batch (all rows laid end to end, no padding).
"""

import copy
from dataclasses import dataclass, field, fields

import torch


@dataclass
class Segment:
    """A row: tokens start..end of a batch, which attend causally to each other. `unit`: rows of equal number, those of a trajectory,
    stay in one micro-batch."""

    start: int
    end: int
    unit: int


@dataclass
class Batch:
    """Per-token tensors of shape (T,) and the segments they form. Everything at index t belongs to token t itself: `sampler[t]`,
    `old[t]` and a policy's log-probability at t are of ids[t] given what it attends to.

    ids, position      int    token id; position in its sequence, from 0 in each row
    mask, action       bool   trained; sampled by the policy (an action of a turn whose advantage is None is not trained)
    turn, trajectory, group   int   index in the trajectory, in this batch, in this batch; turn is -1 outside actions
    adv, weight        float  advantage; weight in the loss (main sets it from token_weights)
    sampler, old, ref  float  log-probabilities by the engine, by the policy before the phase, by the reference; 0 outside actions.
                              old and ref are None until `prepare` fills them
    extra              further per-token tensors an algorithm adds; sliced like the others
    draws              of each group the number of its question's draw
    """

    segments: list[Segment]
    draws: list[int]
    ids: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor
    action: torch.Tensor
    turn: torch.Tensor
    trajectory: torch.Tensor
    group: torch.Tensor
    adv: torch.Tensor
    weight: torch.Tensor
    sampler: torch.Tensor
    old: torch.Tensor | None = None
    ref: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    lr_scale: float = 1.0

    def __len__(self):
        return len(self.ids)

    def units(self):
        """Lists of indices of the segments that must stay together, in order."""
        found = {}
        for index, segment in enumerate(self.segments):
            found.setdefault(segment.unit, []).append(index)
        return list(found.values())

    def select(self, indices):
        """A batch of these segments only."""
        chosen = [self.segments[i] for i in indices]
        segments, end = [], 0
        for s in chosen:
            start, end = end, end + s.end - s.start
            segments.append(Segment(start, end, s.unit))
        if len(indices) == len(self.segments) and list(indices) == sorted(indices):
            tokens = slice(None)
        else:
            spans = [torch.arange(s.start, s.end) for s in chosen]
            tokens = (torch.cat(spans) if spans else torch.arange(0)).to(self.ids.device)
        part = copy.copy(self)
        part.segments = segments
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):
                setattr(part, f.name, value[tokens])
        part.extra = {name: value[tokens] for name, value in self.extra.items()}
        return part

    def micro(self, micro_tokens):
        """Split into micro-batches of at most `micro_tokens` tokens, order kept; a longer unit is a micro-batch of its own."""
        assert sum(self.units(), []) == list(range(len(self.segments))), "the segments of a unit must lie side by side"
        bins, used = [], 0
        for unit in self.units():
            length = sum(self.segments[i].end - self.segments[i].start for i in unit)
            if not bins or used + length > micro_tokens:
                bins.append([])
                used = 0
            bins[-1] += unit
            used += length
        return [self.select(indices) for indices in bins]

    def minibatches(self, count, questions):
        """Split by whole groups into exactly `count` parts, possibly empty: ranks stay in step.

        A group's part follows from its place among the `questions` of a step over all ranks, so the number of ranks cannot change it.
        """
        parts = [[] for _ in range(count)]
        for index, segment in enumerate(self.segments):
            place = self.draws[int(self.group[segment.start])] % questions
            parts[place * count // questions].append(index)
        return [self.select(indices) for indices in parts]

    def mean_by(self, values, by):
        """values (T,) averaged over the trained tokens of each "turn" or "trajectory", given back to each token; 0 elsewhere."""
        index, size = self._index(by)
        count = values.new_zeros(size).index_add_(0, index, self.mask.to(values.dtype)).clamp(min=1)
        total = values.new_zeros(size).index_add_(0, index, values * self.mask)
        return (total / count)[index] * self.mask

    def trained_in(self, by):
        """count (T,): how many tokens of this token's "turn" or "trajectory" are trained."""
        index, size = self._index(by)
        return self.adv.new_zeros(size).index_add_(0, index, self.mask.to(self.adv.dtype))[index]

    def _index(self, by):
        """A number for each token's turn or trajectory, and how many numbers there are. By id and never by row: the turns of a
        trajectory may lie in several rows. Tokens outside actions have turn -1 and fall into slot 0 of their trajectory."""
        size = int(self.trajectory.max()) + 1 if len(self) else 0
        if by == "trajectory":
            return self.trajectory, size
        turns = int(self.turn.max()) + 2 if len(self) else 0
        return self.trajectory * turns + self.turn + 1, size * turns


def pack(groups, advantages):
    """Lay the trajectories of `groups` out as rows of tokens.

    advantages[p][g][k]: advantage of turn k of trajectory g of group p: a number, a list with one number per action token, or None for
    a turn that is context only. As long as a turn's context extends the ids so far, its turns share a row; otherwise (the rollout
    showed the model another history) it starts a row of its own. A row ends at its last trained token: what follows has no gradient.
    """
    segments, columns = [], {name: [] for name in ("ids", "position", "mask", "action", "turn", "adv", "sampler")}
    owners = {"trajectory": [], "group": []}
    trajectory_index = 0

    def add_row(row, group_index):
        last = max(t for t, trained in enumerate(row["mask"]) if trained) + 1
        start = len(columns["ids"])
        segments.append(Segment(start, start + last, trajectory_index))
        for name, column in columns.items():
            column += range(last) if name == "position" else row[name][:last]
        owners["trajectory"] += [trajectory_index] * last
        owners["group"] += [group_index] * last

    for group_index, (group, adv_GK) in enumerate(zip(groups, advantages, strict=True)):
        for trajectory, adv_K in zip(group.trajectories, adv_GK, strict=True):
            rows = []
            for k, (turn, adv) in enumerate(zip(trajectory.turns, adv_K, strict=True)):
                n = len(turn.action_ids)
                assert len(turn.action_logps) == n and turn.context_ids, (
                    "a turn needs a context and a log-probability per id"
                )
                if not rows or turn.context_ids[: len(rows[-1]["ids"])] != rows[-1]["ids"]:
                    rows.append({name: [] for name in columns})
                row = rows[-1]
                fresh = turn.context_ids[len(row["ids"]) :]
                context = len(fresh)
                row["ids"] += fresh + turn.action_ids
                row["mask"] += [False] * context + [adv is not None] * n
                row["action"] += [False] * context + [True] * n
                row["turn"] += [-1] * context + [k] * n
                adv_T = [0.0] * n if adv is None else adv if isinstance(adv, list) else [float(adv)] * n
                assert len(adv_T) == n, "a per-token advantage needs one number per action token"
                row["adv"] += [0.0] * context + adv_T
                row["sampler"] += [0.0] * context + turn.action_logps
            for row in rows:
                if any(row["mask"]):
                    add_row(row, group_index)
            trajectory_index += 1

    kinds = {"mask": torch.bool, "action": torch.bool, "adv": torch.float32, "sampler": torch.float32}
    tensors = {n: torch.tensor(c, dtype=kinds.get(n, torch.long)) for n, c in {**columns, **owners}.items()}
    return Batch(
        segments, [group.question.draw for group in groups], weight=torch.zeros(len(columns["ids"])), **tensors
    )
