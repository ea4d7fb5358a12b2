"""Adapters: a check of those of other origins before they are loaded, storage for published ones until the engine loads them."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, load_peft_weights

from common import ending, models, ranks, run

# Fields of adapter_config.json that trainer and engine respect, or need not know.
SERVED = {"base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode", "eva_config"}
SERVED |= {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"}
SERVED |= {"exclude_modules", "layers_to_transform", "layers_pattern"}
STARTS = ("gaussian", "eva", "orthogonal")  # other initial weights change the base, and in the trainer only


def refuse_unfit(adapter: str, path: str) -> None:
    """Raise SystemExit unless the engine can serve an adapter, and its file has just the weights that it needs on a base."""
    given = {"peft_type": None} | json.loads((Path(adapter) / "adapter_config.json").read_text())
    plain = LoraConfig(task_type="CAUSAL_LM").to_dict()
    given = {name: value for name, value in given.items() if name not in SERVED and (value or name == "peft_type")}
    odd = {name: value for name, value in given.items() if value not in (plain.get(name), *STARTS)}
    if odd:
        raise SystemExit(
            f"--adapter {adapter}: the engine serves PEFT's plain LoRA only, and its adapter_config.json has "
            f"{str(odd)[1:-1][:200]}. Merge it into its base and give that as --model."
        )
    try:
        found = load_peft_weights(adapter, "cpu") if any(Path(adapter).glob("adapter_model.*")) else {}
        with torch.device("meta"):
            model = get_peft_model(models.empty_model(path), LoraConfig.from_pretrained(adapter))
        wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
        shapes, needed = ({(name, tensor.shape) for name, tensor in each.items()} for each in (found, wanted))
        wrong = {name for name, _ in shapes ^ needed} | {name for name in found if not re.search(r"\.\d+\.", name)}
        if wrong:
            raise ValueError(
                f"size mismatch, missing, unknown or outside of its layers: {min(wrong)}; {len(wrong)} in all"
            )
    except Exception as error:  # PEFT, safetensors and pickle raise many kinds
        why = f"incomplete (a git-lfs pointer?), or does not fit this base ({str(error).strip().splitlines()[-1]})"
        raise SystemExit(f"--adapter {adapter}: its file of weights is {why}.") from None


class AdapterStore:
    """The folder of published adapters: memory-backed if there is room, else in the run directory. One copy per node.
    A live run holds the lock of its folder; folders left behind by dead runs are removed."""

    def __init__(self, policy, args):
        need = 3 * sum(p.numel() * p.element_size() for p in policy.parameters)
        memory, folder = Path("/dev/shm"), None
        if ranks.local_rank() == 0:
            self._remove_dead(memory)
            roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > need
            parent = memory if roomy else Path(run.directory(args))
            parent.mkdir(parents=True, exist_ok=True)
            self._remove_dead(parent)
            name = f"turnwise-{os.getuid()}-"
            # Renamed once locked, so that no other run removes it as dead.
            fresh = Path(tempfile.mkdtemp(prefix=f".{name}", dir=parent))
            self.lock = open(fresh / "lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            folder = fresh.rename(parent / fresh.name.removeprefix("."))
            ending.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
        self.folder = ranks.from_local_rank_0(folder)
        self.versions = deque()

    def _remove_dead(self, parent):
        name = f"turnwise-{os.getuid()}-*"
        for folder in (*parent.glob(name), *parent.glob(f".{name}")):
            with contextlib.suppress(OSError):
                starting = folder.name.startswith(".") or not (folder / "lock").exists()
                if starting and time.time() - folder.stat().st_mtime < 60:
                    continue
                with open(folder / "lock", "a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)

    def path(self, version: int) -> Path:
        return self.folder / f"v{version}"

    def save(self, policy, version: int) -> None:
        """Write an adapter, once per node; all ranks call this and wait for it. Only the last two versions are kept."""
        if ranks.local_rank() == 0:
            run.retry_write(f"adapter {version} in {self.folder}", lambda: policy.save_adapter(self.path(version)))
            self.versions.append(version)
            while len(self.versions) > 2:  # a slower rank may still have to load the previous one
                shutil.rmtree(self.path(self.versions.popleft()), ignore_errors=True)
        if ranks.world_size() > 1:
            dist.barrier()
