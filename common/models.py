"""From --model to files for trainer and engine: a folder, a hub id, a short name, or an embedded model."""

import difflib
from collections.abc import Callable, Iterable
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
    check(name)
    if not Path(name).is_dir() and name in EMBEDDED:
        return str(EMBEDDED[name].build())
    if Path(name).is_dir() or "/" in name:
        return str(name)
    return next(f"{owner}/{name}" for start, owner in OWNERS.items() if name.startswith(start))


def check(name: str) -> None:
    """Raise SystemExit for a name that is no folder, hub id, short name or embedded model. Loads nothing."""
    if Path(name).is_dir() or name in EMBEDDED or "/" in name or name.startswith(tuple(OWNERS)):
        return
    raise SystemExit(
        f"--model {name}: no such folder, and no known short name.{meant(name, EMBEDDED)} Give a path, a hub id (owner/name), "
        f"{', '.join(EMBEDDED)}, or a name that begins with {', '.join(OWNERS)}."
    )


def meant(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known names that are close to a wrong one, or ""."""
    close = difflib.get_close_matches(name, known, cutoff=0.7)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def refuse_system_error(error: Exception) -> None:
    """Raise SystemExit for an error of a disk or folder, such as a read-only cache of the hub: no flag is its cause."""
    if getattr(error, "errno", None) and not isinstance(error, (ConnectionError, FileNotFoundError)):
        where = error.filename or "the hub's cache"
        raise SystemExit(f"{where}: {error.strerror}. HF_HOME sets another folder for the hub's cache.") from None


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a resolved model: the first download from a hub. Raises SystemExit if that fails."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        refuse_system_error(error)
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
        refuse_system_error(error)
        reason = str(error).splitlines()[0]
        raise SystemExit(f"--model {path}: config.json could not be loaded ({reason}). Is the name right?") from None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
