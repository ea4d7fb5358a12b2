"""Checkpoints: what a run needs to go on as if it had never stopped.

checkpoints/step-N/ holds adapter/ (a normal PEFT adapter) and state.pt (optimizer, random states of every rank, position in the data,
lengths of metrics.jsonl and samples.jsonl, best evaluation). It is written beside and renamed when it is whole. adapter and
adapter-best are links to the adapters of the last and of the best one. The learning rate is constant: there is no schedule to keep.
"""

import io
import os
import random
import shlex
import shutil
import sys
import threading
from pathlib import Path

import numpy
import torch

from common import ending, ranks, run


class Saver:
    """Keeps the state after every finished step in host memory, and writes it when it is due or when the run ends before its time.

    done          the last finished step, None before the first evaluation
    save(line)    after each step, with its line of metrics; all ranks together
    """

    def __init__(self, args, policy, task, log, last=None):
        """last: the checkpoint to restore everything from, for a run that is resumed."""
        self.args, self.policy, self.task, self.log = args, policy, task, log
        self.folder = run.directory(args) / "checkpoints"
        self.done, self.best = None, None  # best: (held-out exact match, step)
        self.random = None  # states of each rank, from the checkpoint
        self.state = None  # after the last finished step: (step, best, adapter, bytes of state.pt)
        self.written, self.lock = None, threading.Lock()
        data = set(ranks.gather([task.fingerprint]))
        if ranks.from_rank_0(len(data) > 1):
            raise SystemExit(
                "The ranks do not have the same questions, documents and way to run Python: a machine differs."
            )
        if last:
            self._restore(last)
        if ranks.rank() == 0:
            ending.at_end(self.rescue)

    def steps(self):
        """The steps that are left, begun with the random states of the last one."""
        if self.random and ranks.rank() < len(self.random):
            set_random_states(self.random[ranks.rank()])
        return self.log.steps(self.done)

    def save(self, line):
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
                "optimizer": self.policy.optimizer.state_dict(),
            }
            buffer = io.BytesIO()
            torch.save(content, buffer)
            self.state = step, best, self.policy.adapter_state(), buffer.getbuffer()
        self.done, self.best = step, best
        if better or step in (0, self.args.steps) or (self.args.save_every and step % self.args.save_every == 0):
            self.write()

    def write(self):
        """Write the remembered state. Raises OSError when the disk takes nothing for run.PATIENCE seconds."""
        with self.lock:
            if self.state and self.state[0] != self.written:
                step, best, adapter, state = self.state
                run.retry_write(f"the checkpoint of step {step}", lambda: self._write(step, adapter, state))
                run.retry_write(f"the links to the checkpoint of step {step}", lambda: self._tidy(best))

    def _write(self, step, adapter, state):
        target, beside = self.folder / f"step-{step}", self.folder / "unfinished"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        self.policy.save_adapter(beside / "adapter", adapter)
        (beside / "state.pt").write_bytes(state)
        for path in (*self.folder.parent.glob("*.jsonl"), *beside.rglob("*"), beside):
            flush(path)
        beside.rename(target)
        flush(self.folder)
        self.written = step

    def _tidy(self, best):
        """Point the links at the last and the best checkpoint, then remove what is not kept, and what a kill left unfinished."""
        shutil.rmtree(self.folder / "unfinished", ignore_errors=True)
        paths = sorted(self.folder.glob("step-*"), key=run.step_of)
        best = self.folder / f"step-{best[1]}" if best else paths[-1]
        for name, path in (("adapter", paths[-1]), ("adapter-best", best)):
            link, beside = self.folder.parent / name, self.folder.parent / f".{name}"
            if link.is_dir() and not link.is_symlink():  # the directory was copied with its links followed
                shutil.rmtree(link)
            beside.unlink(missing_ok=True)
            beside.symlink_to(Path("checkpoints") / path.name / "adapter")
            beside.replace(link)
        for path in paths[: -self.args.keep] if self.args.keep else []:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)

    def _restore(self, path):
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if state.get("data") != self.task.fingerprint:
            raise SystemExit(
                f"--resume: questions, corpus or Python (its kind, --tool_timeout) are not those {self.folder.parent} was begun with."
            )
        self.done = self.written = state["step"]
        self.best, self.random = state["best"], state["random"]
        self.task.position = state["questions"]
        self.policy.optimizer.load_state_dict(state["optimizer"])
        self.log.restore(state["log"], self.done)
        if ranks.rank() == 0:
            if len(self.random) != ranks.world_size():
                run.notice(
                    f"begun on {len(self.random)} ranks, goes on on {ranks.world_size()}: same samples, other rounding"
                )
            if self.done >= self.args.steps:
                run.notice(f"complete with {self.done} steps: a larger --steps goes on")
            self._tidy(self.best)

    def rescue(self):
        """When the run ends before its time: write the last finished step. Returns how to go on, in words."""
        if self.done is None:
            return "Nothing had been finished yet: start it again as before."
        if self.done >= self.args.steps and self.written == self.done:
            return None
        try:
            self.write()
            failed = ""
        except Exception as error:
            failed = f"Step {self.done} could not be saved ({error}). "
        if self.written is None:
            return f"{failed}Nothing is saved: start it again as before."
        return f"{failed}Step {self.written} is saved in {self.folder}. Go on with:\n  {resume_command()}"


def resume_command():
    """The command that goes on with this run."""
    words = [*sys.argv, *([] if "--resume" in sys.argv else ["--resume"])]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return shlex.join([sys.executable, *words])
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    where = ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes), "..."]
    launcher = ["-m", "torch.distributed.run", *where, "--nproc_per_node", os.environ["LOCAL_WORLD_SIZE"]]
    return shlex.join([sys.executable, *launcher, *words])


def random_states():
    """The global random states of this process, as plain data and tensors."""
    kind, keys, *rest = numpy.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None  # of this rank's device
    return [random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state(), cuda]


def set_random_states(states):
    version, numbers, gauss = states[0]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(states[1]))
    torch.set_rng_state(states[2])
    if torch.cuda.is_available() and states[3] is not None:
        torch.cuda.set_rng_state(states[3])


def flush(path):
    """Have the system bring a file or folder to the disk: after a power cut a renamed checkpoint must not be empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # of a folder some mounts know no such thing
            raise
    finally:
        os.close(descriptor)
