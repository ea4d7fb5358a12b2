"""What is asked of an agent and how its answers are judged. Light on import: neither torch, nor transformers, nor numpy."""

from tasks import (
    embedded as embedded,  # fills common.models.EMBEDDED, so that the command line knows the embedded models
)


def load(args, use="train"):
    """The task --task names. See tasks.loading.load."""
    from tasks import loading

    return loading.load(args, use)
