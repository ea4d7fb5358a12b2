"""From what --model says to files that trainer and engine load: a folder, a hub id, a short name, or an embedded model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Embedded:
    """A model that comes with the project. tasks/embedded.py has them."""

    build: Callable[[], Path]  # returns its folder, which it makes at the first call
    preset: dict  # settings that become the parser's defaults


EMBEDDED: dict[str, Embedded] = {}
OWNERS = {  # how short names begin -> their owner on the hub
    "Qwen": "Qwen",
    "Llama-3": "meta-llama",
    "SmolLM": "HuggingFaceTB",
    "Ministral": "mistralai",
    "Mistral": "mistralai",
    "DeepSeek": "deepseek-ai",
    "Phi-": "microsoft",
    "phi-": "microsoft",
    "OLMo": "allenai",
    "Olmo": "allenai",
}


def resolve(name):
    """Path or hub id of a model; builds an embedded one on first use. Raises SystemExit for a name nobody knows."""
    if Path(name).is_dir():
        return str(name)
    if name in EMBEDDED:
        return str(EMBEDDED[name].build())
    if "/" in name:
        return name
    for start, owner in OWNERS.items():
        if name.startswith(start):
            return f"{owner}/{name}"
    raise SystemExit(
        f"--model {name}: no such folder, and no known short name. Give a path, a hub id (owner/name), {', '.join(EMBEDDED)}, "
        f"or a name that begins with {', '.join(OWNERS)}."
    )


def load_tokenizer(path):
    """The tokenizer of a resolved model: the first that is asked of a hub. Raises SystemExit when it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--model {path}: its tokenizer could not be loaded ({str(error).splitlines()[0]}) Is the name right, the hub within "
            "reach, and access granted (gated models: accept the licence there, then `hf auth login`)?"
        ) from None


def empty_model(path):
    """The model a path or hub id names, without storage. Raises SystemExit when its configuration cannot be had."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--model {path}: its config.json could not be loaded ({str(error).splitlines()[0]}) Is the name right, and the hub "
            "within reach?"
        ) from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
