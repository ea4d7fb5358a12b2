"""The embedded models: their builders, and presets that give a sensible run without further flags.

A preset replaces the parser's defaults, so an explicit flag wins. It has only flags that all scripts share.
"""

from pathlib import Path

from common.models import EMBEDDED, Embedded


def tiny() -> Path:
    """Return the folder of the tiny base for tiny_search."""
    from tasks.tiny import tiny_search

    return tiny_search.base()


def tiny_math() -> Path:
    """Return the folder of the tiny base for tiny_math."""
    from tasks.tiny import tiny_math

    return tiny_math.base()


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct."""
    from tasks.smollm2 import smollm2

    return smollm2()


TINY = dict(
    steps=25,
    questions=16,
    group=8,
    max_turns=5,
    max_turn_tokens=40,
    max_observation_tokens=96,
    max_context=768,
    lr=5e-4,
    lora_rank=16,
    lora_alpha=32,
    eval_every=5,
    micro_tokens=8192,
)
EMBEDDED["tiny"] = Embedded(tiny, dict(task="tiny_search", topk=1, **TINY), ("2ea0066892c7011b",))
EMBEDDED["tiny-math"] = Embedded(tiny_math, dict(task="tiny_math", **TINY), ("bb0d91d8dc30ac80",))
EMBEDDED["smollm2"] = Embedded(
    smollm2,
    dict(
        task="tiny_search",
        topk=1,
        shots=2,
        template="off",
        steps=20,
        questions=2,
        group=8,
        max_turns=5,
        max_turn_tokens=48,
        max_observation_tokens=96,
        max_context=1536,
        temperature=0.7,
        lr=1e-4,
        eval_every=0,
        micro_tokens=2048,
    ),
)
