"""Questions for an agent, and the scoring of its answers. Light on import: no torch, transformers or numpy."""

from typing import TYPE_CHECKING

from tasks import (
    embedded as embedded,  # registers the embedded models in common.models.EMBEDDED for the command line
)

if TYPE_CHECKING:
    from common.args import Sampling
    from tasks.task import Task


def load(args: "Sampling", use: str = "train") -> "Task":
    """Return the task that --task names. See tasks.loading.load."""
    from tasks import loading

    return loading.load(args, use)
