"""Pack groups of trajectories into a Batch of tensors.

Token in, token out: `pack` joins the exact ids the engine was given and those it sampled; nothing is re-encoded or
re-templated. Masks come from positions, not token ids: a sampled end token is trained even if it equals the padding.

Shapes: G trajectories of a group, K turns of a trajectory, T tokens of a batch (all rows laid end to end, no padding).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from common.turns import Group


@dataclass
class Segment:
    """A row: tokens start..end of a batch, with causal attention. Rows of a `unit` (trajectory) share a micro-batch."""

    start: int
    end: int
    unit: int


@dataclass
class Batch:
    """Per-token tensors (T,) and the segments they form. Index t always means token t: sampler[t], old[t] and the
    policy's log-probability at t are those of ids[t] given the tokens it attends to.

    ids, position      int    token id; position in its row, from 0
    mask, action       bool   trained; sampled by the policy (the actions of a turn with advantage None are not trained)
    turn, trajectory, group   int   index in the trajectory, in this batch, in this batch; turn is -1 outside actions
    adv, weight        float  advantage; weight in the loss (main sets it from token_weights)
    sampler, old, ref  float  log-probabilities of engine, policy before the phase, reference; 0 outside actions.
                              old and ref are None until `prepare` fills them
    extra              further per-token tensors an algorithm adds; sliced like the others
    draws              the draw number of each group's question
    """

    segments: list[Segment]
    draws: list[int]
    ids: Tensor
    position: Tensor
    mask: Tensor
    action: Tensor
    turn: Tensor
    trajectory: Tensor
    group: Tensor
    adv: Tensor
    weight: Tensor
    sampler: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    lr_scale: float = 1.0

    def __len__(self) -> int:
        return len(self.ids)

    def units(self) -> list[list[int]]:
        """Return the segment indices of each unit, in order."""
        found = {}
        for index, segment in enumerate(self.segments):
            found.setdefault(segment.unit, []).append(index)
        return list(found.values())

    def select(self, indices: Sequence[int]) -> "Batch":
        """Return a batch of these segments only."""
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
            if isinstance(value, Tensor):
                setattr(part, f.name, value[tokens])
        part.extra = {name: value[tokens] for name, value in self.extra.items()}
        return part

    def micro(self, micro_tokens: int) -> list["Batch"]:
        """Split into micro-batches of at most `micro_tokens` tokens, in order; a longer unit gets a separate one."""
        assert sum(self.units(), []) == list(range(len(self.segments))), "the segments of a unit must be adjacent"
        bins, used = [], 0
        for unit in self.units():
            length = sum(self.segments[i].end - self.segments[i].start for i in unit)
            if not bins or used + length > micro_tokens:
                bins.append([])
                used = 0
            bins[-1] += unit
            used += length
        return [self.select(indices) for indices in bins]

    def minibatches(self, count: int, questions: int) -> list["Batch"]:
        """Split by whole groups into exactly `count` parts, so that ranks stay in step; parts may be empty. A group's
        part depends on its place among the `questions` of a step over all ranks, not on the number of ranks."""
        parts = [[] for _ in range(count)]
        for index, segment in enumerate(self.segments):
            place = self.draws[int(self.group[segment.start])] % questions
            parts[place * count // questions].append(index)
        return [self.select(indices) for indices in parts]

    def mean_by(self, values: Tensor, by: str) -> Tensor:
        """Average values (T,) over the trained tokens of each "turn" or "trajectory". Returns (T,)."""
        index, size = self._index(by)
        count = values.new_zeros(size).index_add_(0, index, self.mask.to(values.dtype)).clamp(min=1)
        total = values.new_zeros(size).index_add_(0, index, values * self.mask)
        return (total / count)[index] * self.mask

    def trained_in(self, by: str) -> Tensor:
        """Return the number (T,) of trained tokens in each token's "turn" or "trajectory"."""
        index, size = self._index(by)
        return self.adv.new_zeros(size).index_add_(0, index, self.mask.to(self.adv.dtype))[index]

    def _index(self, by):
        """Return a slot number for each token's turn or trajectory, and the number of slots. Rows do not matter, as a
        trajectory may have several. Tokens outside actions (turn -1) get slot 0 of their trajectory."""
        size = int(self.trajectory.max()) + 1 if len(self) else 0
        if by == "trajectory":
            return self.trajectory, size
        turns = int(self.turn.max()) + 2 if len(self) else 0
        return self.trajectory * turns + self.turn + 1, size * turns


def pack(groups: list[Group], advantages: list[list[list[float | list[float] | None]]]) -> Batch:
    """Lay out the trajectories of `groups` as rows of tokens.

    advantages[p][g][k]: of turn k of trajectory g of group p: a number, a list of one number per action token, or None
    for a turn that is context only. A turn whose context extends the row so far is appended to it; otherwise (the model
    was shown another history) a new row starts. A row ends at its last trained token: later tokens have no gradient.
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
                assert len(turn.action_logps) == n and turn.context_ids, "a turn lacks context or log-probabilities"
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
