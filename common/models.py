"""From --model to files for trainer and engine: a folder, a hub id, a short name, or an embedded model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Embedded:
    """A model that comes with the project (see tasks/embedded.py)."""

    build: Callable[[], Path]  # returns its folder, created by the first call
    preset: dict  # flags that become the parser's defaults
    former: tuple[str, ...] = ()  # names of the folder in earlier versions: adapters name it


EMBEDDED: dict[str, Embedded] = {}
OWNERS = {  # prefix of a short name -> owner on the hub
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


def resolve(name: str) -> str:
    """Return the path or hub id of a model; builds embedded ones on first use. Raises SystemExit for unknown names."""
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
        f"--model {name}: no such folder, and no known short name. Give a path, a hub id (owner/name), "
        f"{', '.join(EMBEDDED)}, or a name that begins with {', '.join(OWNERS)}."
    )


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a resolved model: the first download from a hub. Raises SystemExit if that fails."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--model {path}: its tokenizer could not be loaded ({str(error).splitlines()[0]}). Check the name and the "
            "connection to the hub. For a gated model accept its licence there, then run `hf auth login`."
        ) from None


def empty_model(path: str) -> "PreTrainedModel":
    """Return the model of a path or hub id, without storage. Raises SystemExit if its config.json cannot be loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"--model {path}: config.json could not be loaded ({reason}). Is the name right?") from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
