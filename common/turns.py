"""The plain data of a training step: Question -> Group -> Trajectory -> Turn.

Token in, token out: a turn records the exact ids the engine was given and the exact ids it sampled.
"""

from dataclasses import dataclass, field


@dataclass
class Question:
    """One question of a task. `golds`: every string that counts as right. `id` is unique within the task's data, `draw`
    within a run: a question that is drawn again is sampled with other seeds."""

    id: str
    text: str
    golds: list[str]
    draw: int = 0
    info: dict = field(default_factory=dict)


@dataclass
class Turn:
    """One generation and its observation.

    >>> turn = Turn(context_ids=[5, 6], action_ids=[7, 1], action_logps=[-0.1, -0.7], text="<search> Ada </search>")
    >>> turn.tool, turn.tool_status
    (None, None)
    """

    context_ids: list[int]  # the exact ids the engine was given
    action_ids: list[int]  # the exact ids it sampled, stop token included
    action_logps: list[float]  # the engine's log-probabilities of those ids at the sampling temperature
    text: str = ""  # action_ids decoded, for parsing and for people
    tool: str | None = None  # name of the tool the action asks for
    tool_input: str = ""
    several: bool = False  # whether the action names further calls, which do not run
    tool_output: str = ""
    tool_status: str | None = None  # ok | invalid | error | timeout | None: no tool ran
    observation_ids: list[int] = field(default_factory=list)  # appended by the environment; context only
    info: dict[str, float] = field(default_factory=dict)  # plain numbers an algorithm measures

    @property
    def ran(self) -> bool:
        """Return whether the turn's tool call ran, successfully or not."""
        return self.tool_status in ("ok", "error", "timeout")


@dataclass
class Trajectory:
    """One rollout of a question. `stop`: answer | max_turns | length | context | invalid."""

    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None
    outcome: float = 0.0  # the task's score, in [0, 1]
    stop: str = ""
    forked: int = 0  # number of first turns shared with the trajectory it was forked from
    info: dict[str, float] = field(default_factory=dict)

    @property
    def calls(self) -> list[Turn]:
        """Return the turns whose tool call ran, successfully or not."""
        return [turn for turn in self.turns if turn.ran]


@dataclass
class Group:
    """Trajectories compared with each other: the samples of one question, or the siblings at one turn boundary."""

    question: Question
    trajectories: list[Trajectory]
    info: dict[str, float] = field(default_factory=dict)


def sample(step: int, kind: str, question: Question, number: int, trajectory: Trajectory, adv_K: list) -> dict:
    """Return one line of samples.jsonl, as plain data."""
    turns = [
        {
            "text": turn.text,
            "tokens": len(turn.action_ids),
            "tool": turn.tool,
            "tool_input": turn.tool_input,
            "tool_output": turn.tool_output,
            "tool_status": turn.tool_status,
            "observation_tokens": len(turn.observation_ids),
            "advantage": adv,
            "info": turn.info,
        }
        for turn, adv in zip(trajectory.turns, adv_K)
    ]
    return {
        "step": step,
        "kind": kind,
        "question_id": question.id,
        "question": question.text,
        "golds": question.golds,
        "draw": question.draw,
        "sample": number,
        "forked": trajectory.forked,
        "answer": trajectory.answer,
        "outcome": trajectory.outcome,
        "stop": trajectory.stop,
        "info": trajectory.info,
        "turns": turns,
    }
