"""Tools that an agent can call: search, and Python in a sandbox."""

from collections.abc import Sequence

from common.turns import Question


class Tool:
    """A function from the text of a call to the text of its answer. Many threads may call it at the same time."""

    name: str  # the name under which the model calls it
    keeps_time = False  # whether the tool itself limits the time of a call
    # A hash of everything that determines the answers: a run cannot be resumed with a different one.
    fingerprint: str | None = None

    def begin(self, step: int) -> None:
        """Prepare for a rollout of a training step, or (0) for an evaluation."""

    def __call__(self, text: str, earlier: Sequence[str] = (), question: Question | None = None) -> str:
        """Return the tool's answer to a call.

        earlier: inputs of the trajectory's earlier calls that ran; question: the question of the trajectory.
        Raises common.environment.Failed when the call fails, Lost when the tool is permanently unavailable.
        """
        raise NotImplementedError
