"""Checkpoints: all that a run needs to resume as if it had never stopped.

checkpoints/step-N/ holds adapter/ (a normal PEFT adapter) and state.pt (optimizer, random states of every rank, the
position in the data, sizes of metrics.jsonl and samples.jsonl, best evaluation) and sha256, the hashes of these files;
it gets that name when complete.
adapter and adapter-best link to the last and the best adapter. The learning rate is constant: no schedule is saved.
"""

import io
import os
import random
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch

from common import ending, ranks, run
from common.args import Shared
from common.log import Log

if TYPE_CHECKING:
    from common.policy import Policy


class Saver:
    """Keeps the state after every finished step in host memory; writes it when it is due or when the run ends early.

    done          the last finished step, None before the first evaluation
    save(line)    call after each step, with its line of metrics, on all ranks
    """

    def __init__(self, args: Shared, policy: "Policy", task, log: Log, last: Path | None = None):
        """last: the checkpoint to resume from. task: an Environment with `fingerprint` and `position`."""
        self.args, self.policy, self.task, self.log = args, policy, task, log
        self.folder = run.directory(args) / "checkpoints"
        self.done, self.best = None, None  # best: (held-out exact match, step)
        self.random = None  # states of each rank, from the checkpoint
        self.state = None  # after the last finished step: (step, best, adapter, content of state.pt)
        self.written, self.lock = None, threading.Lock()
        data = set(ranks.gather([task.fingerprint]))
        if ranks.from_rank_0(len(data) > 1):
            raise SystemExit("The machines differ: ranks have different questions, documents or Python sandboxes.")
        if last:
            self._restore(last)
        if ranks.rank() == 0:
            ending.at_end(self.rescue)

    def steps(self) -> Iterable[int]:
        """Return the remaining steps, after restoring the random states of the checkpoint."""
        if self.random and ranks.rank() < len(self.random):
            set_random_states(self.random[ranks.rank()])
        return self.log.steps(self.done)

    def save(self, line: dict) -> None:
        step, score = line["step"], line["eval/em"]
        better = score is not None and (self.best is None or score > self.best[0])
        best = (score, step) if better else self.best
        states = ranks.gather([random_states()])
        if ranks.rank() == 0:
            content = {
                "step": step,
                "best": best,
                "questions": self.task.position,
                "data": self.task.fingerprint,
                "random": states,
                "log": self.log.state(),
                "optimizer": in_host_memory(self.policy.optimizer.state_dict()),
            }
            self.state = step, best, self.policy.adapter_state(), content
        self.done, self.best = step, best
        if better or step in (0, self.args.steps) or (self.args.save_every and step % self.args.save_every == 0):
            self.write()

    def write(self) -> None:
        """Write the state in memory to disk. Raises OSError if no write succeeds for run.PATIENCE seconds."""
        with self.lock:
            if self.state and self.state[0] != self.written:
                step, best, adapter, state = self.state
                run.retry_write(f"the checkpoint of step {step}", lambda: self._write(step, adapter, state))
                run.retry_write(f"the links to the checkpoint of step {step}", lambda: self._tidy(best))

    def _write(self, step, adapter, state):
        target, unfinished = self.folder / f"step-{step}", self.folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.policy.save_adapter(unfinished / "adapter", adapter)
        buffer = io.BytesIO()  # torch.save to a file does not raise OSError when the disk is full
        torch.save(state, buffer)
        (unfinished / "state.pt").write_bytes(buffer.getbuffer())
        (unfinished / "sha256").write_text(run.sums(unfinished))
        for path in (*self.folder.parent.glob("*.jsonl"), *unfinished.rglob("*"), unfinished):
            flush(path)
        shutil.rmtree(target, ignore_errors=True)  # half removed, and no checkpoint any more
        unfinished.rename(target)
        flush(self.folder)
        self.written = step

    def _tidy(self, best):
        """Point the links at the last and the best checkpoint; remove unfinished ones and those beyond --keep."""
        shutil.rmtree(self.folder / "unfinished", ignore_errors=True)
        paths = run.checkpoints(self.folder.parent)
        best = self.folder / f"step-{best[1]}" if best else paths[-1]
        for name, path in (("adapter", paths[-1]), ("adapter-best", best)):
            link, temporary = self.folder.parent / name, self.folder.parent / f".{name}"
            if link.is_dir() and not link.is_symlink():  # in a copy of the run directory that followed its links
                shutil.rmtree(link)
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(Path("checkpoints") / path.name / "adapter")
            temporary.replace(link)
        for path in paths[: -self.args.keep] if self.args.keep else []:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)

    def _restore(self, path):
        try:
            state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
            if state["data"] != self.task.fingerprint:
                raise SystemExit(
                    "--resume: questions, corpus or Python (kind, --tool_timeout) are not those of the run."
                )
            self.done, self.best, self.random = state["step"], state["best"], list(state["random"])
            if self.done != run.step_of(path) or not 0 <= state["questions"] < 2**53:
                raise ValueError("another step than in its name, or no position in the data")
            if self.best is not None:
                self.best = float(self.best[0]), int(self.best[1])
            self.task.position = int(state["questions"])
            self.policy.optimizer.load_state_dict(state["optimizer"])
            if ranks.rank() < len(self.random):
                set_random_states(self.random[ranks.rank()])  # `steps` sets them again: here their shape is tested
            self.log.restore(state["log"], self.done)
        except Exception as error:  # whoever wrote the file decides which
            reason = " ".join(str(error).split())[:150] or type(error).__name__
            raise SystemExit(
                f"--resume: {path / 'state.pt'} is not a state of this program ({type(error).__name__}: {reason}). "
                f"Move {path} away to resume from an earlier checkpoint."
            ) from None
        self.written = self.done
        if ranks.rank() == 0:
            if len(self.random) != ranks.world_size():
                run.notice(f"{ranks.world_size()} ranks instead of {len(self.random)}: same samples, other rounding")
            if self.done >= self.args.steps:
                run.notice(f"all {self.done} steps are done: continue with a larger --steps")
            for torn in (p for p in run.checkpoints(self.folder.parent) if run.step_of(p) > self.done):
                shutil.rmtree(aside := torn.with_name(f"torn-{torn.name}"), ignore_errors=True)
                torn.rename(aside)  # its name is needed again
            self._tidy(self.best)

    def rescue(self) -> str | None:
        """Save the last finished step of a run that ends early. Returns how to resume it, or None if it is complete."""
        if self.done is None:
            return "No step was finished: start it again as before."
        if self.done >= self.args.steps and self.written == self.done:
            return None
        try:
            self.write()
            failed = ""
        except Exception as error:
            failed = f"Step {self.done} could not be saved ({error}). "
        if self.written is None:
            return f"{failed}Nothing is saved: start it again as before."
        return f"{failed}Step {self.written} is saved in {self.folder}. Resume with:\n  {resume_command()}"


def resume_command() -> str:
    """Return the command that resumes this run."""
    words = [*sys.argv, *([] if "--resume" in sys.argv else ["--resume"])]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join([sys.executable, *words])
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    where = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "..."]
    launcher = ["-m", "torch.distributed.run", *where, "--nproc_per_node", os.environ["LOCAL_WORLD_SIZE"]]
    return shlex.join([sys.executable, *launcher, *words])


def in_host_memory(state: object) -> object:
    """Return a copy of nested dicts and lists, with its tensors in host memory."""
    if isinstance(state, dict):
        return {key: in_host_memory(value) for key, value in state.items()}
    if isinstance(state, list):
        return [in_host_memory(value) for value in state]
    return state.detach().to("cpu", copy=True) if torch.is_tensor(state) else state


def random_states() -> list:
    """Return the global random states of this process, as plain data and tensors."""
    kind, keys, *rest = numpy.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None  # of this rank's device
    return [random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state(), cuda]


def set_random_states(states: list) -> None:
    version, numbers, gauss = states[0]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(states[1]))
    torch.set_rng_state(states[2])
    if torch.cuda.is_available() and states[3] is not None:
        torch.cuda.set_rng_state(states[3])


def flush(path: Path) -> None:
    """Sync a file or folder to disk: after a power cut a renamed checkpoint must not be empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some mounts cannot sync a folder
            raise
    finally:
        os.close(descriptor)
