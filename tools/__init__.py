"""What an agent can call: search, and Python in a sandbox."""


class Tool:
    """A function from the text of a call to the text of its answer, called from many threads at once."""

    name: str  # as the model calls it
    keeps_time = False  # whether the tool limits the time of a call itself
    fingerprint: str | None = (
        None  # a hash of everything its answers follow from: a run is not resumed with another one
    )

    def begin(self, step: int) -> None:
        """Prepare for a rollout of a training step, or (0) for an evaluation."""

    def __call__(self, text: str, earlier=(), question=None) -> str:
        """Answer a call. earlier: inputs of the trajectory's earlier calls that ran; question: the Question it is about.

        Raises common.environment.Failed for a call that did not succeed, Lost when the tool is gone for good.
        """
        raise NotImplementedError
