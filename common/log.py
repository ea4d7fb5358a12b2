"""The log of a run: metrics.jsonl, one line per step, and samples.jsonl, every trajectory."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common import ending, ranks, run
from common.args import Shared
from common.turns import Group, sample

if TYPE_CHECKING:
    from torch import Tensor

    from common.batch import Batch

FILES = ("metrics.jsonl", "samples.jsonl")  # those that a checkpoint can cut off
STOPS = ("answer", "max_turns", "length", "context", "invalid")
METRICS = (
    *("step", "questions", "reward/mean", "reward/std", "reward/all_right", "reward/all_wrong"),
    *("credit/adv_abs", "credit/zero_frac"),
    *("rollout/trajectories", "rollout/sampled_tokens", "rollout/turns", "rollout/action_tokens"),
    *("rollout/observation_tokens", "rollout/tool_calls", "rollout/tool_used", "rollout/tool_success"),
    *(f"rollout/stop_{stop}" for stop in STOPS),
    *("loss/policy", "loss/clip_frac", "loss/kl_ref"),
    *("policy/entropy", "policy/ratio_max", "policy/sampler_absdiff", "policy/sampler_maxdiff"),
    *("policy/sampler_kl", "policy/sampler_ratio", "policy/sampler_nonfinite"),
    *("optim/lr", "optim/grad_norm", "optim/skipped", "optim/updates"),
    *("time/rollout", "time/update", "time/evaluate", "time/step", "time/rank_spread"),
    *("perf/tokens_per_s", "perf/trained_tokens_per_s", "perf/peak_gb", "perf/free_gb"),
    *("perf/rss_gb", "perf/open_files", "perf/threads"),
    *("eval/em", "eval/f1", "eval/turns", "eval/tool_calls", "eval/tool_used"),
)


class Log:
    """Writer of metrics.jsonl (one flat line per step with every key, null if not measured) and samples.jsonl.

    mean(key, value, weight)  log the average over a step and all ranks; value None: null unless there are others
    max(key, value)           log the maximum
    """

    def __init__(self, args: Shared, last: Path | None = None):
        """last: the checkpoint to resume from."""
        self.args, self.folder = args, run.directory(args)
        self.sums, self.maxima, self.bar, self.shown = {}, {}, None, {}
        self.streaks = {}  # warning -> steps in a row that gave reason for it
        # Whether this rank had tokens to train: in each update of the step, and in the current one.
        self.updates, self.trained = [], False
        self.started = time.monotonic()
        self.mirrors = []
        if ranks.rank() == 0:
            if args.wandb:
                import wandb

                begun = (self.folder / "environment.json").read_bytes()  # --resume continues the same wandb run
                name = hashlib.blake2b(begun, digest_size=8).hexdigest()
                ending.at_end(wandb.finish)
                # In the run directory: a folder "wandb" in the current one could be imported in place of the package.
                options = dict(
                    name=self.folder.name,
                    id=name,
                    config=dataclasses.asdict(args),
                    resume="allow",
                    dir=str(self.folder),
                )
                wandb.init(project=os.environ.get("WANDB_PROJECT", "turnwise"), **options)
                self.mirrors.append(lambda line: wandb.log(line, step=line["step"]))
            if args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                purged = run.step_of(last) + 1 if last else None  # hides the steps that `restore` cuts off
                writer = SummaryWriter(str(self.folder / "tensorboard"), flush_secs=10, purge_step=purged)
                ending.at_end(writer.flush)
                self.mirrors.append(lambda line: [writer.add_scalar(k, v, line["step"]) for k, v in line.items()])

    def steps(self, done: int) -> Iterable[int]:
        """Return the steps after `done`, up to --steps, as a progress bar with the last reward and evaluation.

        Without a terminal `write` prints a line a step instead.
        """
        left = range(done + 1, self.args.steps + 1)
        self.bar = run.progress(left, sys.stderr.isatty(), desc="steps", initial=done, total=self.args.steps)
        return self.bar

    def state(self) -> dict:
        """Return the log's part of a checkpoint: the file sizes."""
        paths = (self.folder / name for name in FILES)
        return {"sizes": {path.name: path.stat().st_size for path in paths if path.exists()}}

    def restore(self, state: dict, step: int) -> None:
        """Resume after `step`: cut off later lines, so that the files have every step once."""
        sizes = {self.folder / name: state["sizes"].get(name, 0) for name in FILES} if ranks.rank() == 0 else {}
        for path, size in sizes.items():
            if not 0 <= size <= (path.stat().st_size if path.is_file() else 0):
                raise SystemExit(f"--resume: {path} is shorter than when step {step} was saved: it has lost lines.")
        for path in filter(Path.is_file, sizes):
            os.truncate(path, sizes[path])

    def mean(self, key: str, value: float | None, weight: float = 1.0) -> None:
        total, count = self.sums.get(key, (0.0, 0.0))
        self.sums[key] = (total, count) if value is None else (total + float(value) * weight, count + weight)

    def max(self, key: str, value: float) -> None:
        self.maxima[key] = nan_max([self.maxima.get(key, -math.inf), float(value)])

    @contextlib.contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Add the seconds of the block to time/<key> (of the slowest rank)."""
        start = time.monotonic()
        yield
        seconds, _ = self.sums.get(f"time/{key}", (0.0, 1.0))
        self.sums[f"time/{key}"] = seconds + time.monotonic() - start, 1.0

    def time_each(self, key: str, items: Iterable) -> Iterator:
        """Yield the items, and add the seconds that each takes to make to time/<key>."""
        items = iter(items)
        while True:
            with self.timed(key):
                item = next(items, None)
            if item is None:
                return
            yield item

    def rollouts(self, groups: list[Group], advantages: list) -> None:
        """Measure the groups of a phase and their advantages. Forked trajectories count in metrics of work (tokens,
        tool success), not of whole trajectories (reward/*, turns, stops): older policies sampled their first turns."""
        for group, adv_GK in zip(groups, advantages):
            outcomes = [t.outcome for t in group.trajectories if not t.forked]
            if outcomes:
                for key, value in (
                    ("reward/std", statistics.pstdev(outcomes)),
                    ("reward/all_right", min(outcomes) >= 1),
                    ("reward/all_wrong", max(outcomes) <= 0),
                ):
                    self.mean(key, value)
                self.mean("reward/mean", statistics.fmean(outcomes), len(outcomes))
            flat = [
                a
                for adv_K in adv_GK
                for adv in adv_K
                if adv is not None
                for a in (adv if isinstance(adv, list) else [adv])
            ]
            if flat:
                self.mean("credit/zero_frac", not any(flat))
            for a in flat:
                self.mean("credit/adv_abs", abs(a))
            for trajectory in group.trajectories:
                self._trajectory("rollout", trajectory)

    def _trajectory(self, prefix, trajectory):
        calls = trajectory.calls
        if prefix == "rollout":
            self.mean("rollout/trajectories", 1)
            for turn in trajectory.turns[trajectory.forked :]:
                self.mean("rollout/action_tokens", len(turn.action_ids))
                if turn.ran:
                    self.mean("rollout/observation_tokens", len(turn.observation_ids))
                    self.mean("rollout/tool_success", turn.tool_status == "ok")
        if trajectory.forked:
            return
        self.mean(f"{prefix}/turns", len(trajectory.turns))
        self.mean(f"{prefix}/tool_calls", len(calls))
        self.mean(f"{prefix}/tool_used", bool(calls))
        if prefix == "rollout":
            for stop in STOPS:
                self.mean(f"rollout/stop_{stop}", trajectory.stop == stop)

    def evaluation(self, groups: list[Group]) -> None:
        """Measure greedy trajectories on held-out questions."""
        for group in groups:
            for trajectory in group.trajectories:
                self.mean("eval/em", trajectory.outcome)
                self.mean("eval/f1", trajectory.info.get("f1"))
                self._trajectory("eval", trajectory)

    def losses(self, micro: "Batch", logp: "Tensor", entropy: "Tensor", stats: "dict[str, Tensor]") -> None:
        """Measure a micro-batch of an update: the stats of policy_loss, and the gap between trainer and engine."""
        on = micro.mask
        count = int(on.sum())
        if not count:
            return
        self.trained = True
        self.mean("trained_tokens", len(micro))
        for key, value in stats.items():
            self.mean(f"loss/{key}", value.detach())  # a partial sum: `write` divides it by the number of updates
        self.mean("policy/entropy", entropy[on].mean(), count)
        trainer = (logp.detach() if micro.old is None else micro.old)[on]
        self.max("policy/ratio_max", (logp.detach()[on] - trainer).exp().max())
        gap = trainer - micro.sampler[on]
        finite = gap.isfinite()
        self.mean("policy/sampler_nonfinite", (~finite).float().mean(), count)
        if finite.any():
            gap, count = gap[finite], int(finite.sum())
            self.mean("policy/sampler_absdiff", gap.abs().mean(), count)
            self.mean("policy/sampler_kl", (gap.exp() - gap - 1).mean(), count)
            self.mean("policy/sampler_ratio", gap.exp().mean(), count)
            self.max("policy/sampler_maxdiff", gap.abs().max())

    def optim(self, stats: dict[str, float]) -> None:
        """Measure an update, after `losses` of its micro-batches."""
        self.updates.append(self.trained)
        self.trained = False
        for key, value in stats.items():
            if math.isfinite(value):  # a skipped update has no norm
                self.mean(f"optim/{key}", value)

    def write(self, step: int, questions: int) -> dict[str, float | None]:
        """Reduce over ranks, append the line of this step (on rank 0) and return it."""
        import psutil
        import torch.distributed as dist

        from common import memory

        if ranks.world_size() > 1:
            shared = [None] * ranks.world_size()
            dist.all_gather_object(shared, (self.sums, self.maxima, self.updates))
        else:
            shared = [(self.sums, self.maxima, self.updates)]
        trained = [any(parts) for parts in zip(*(updates for *_, updates in shared))]
        shared = [(sums, maxima) for sums, maxima, _ in shared]
        line = dict.fromkeys(METRICS) | {"step": step, "questions": questions}
        for key in sorted({k for sums, _ in shared for k in sums}):
            total = sum(sums.get(key, (0, 0))[0] for sums, _ in shared)
            count = sum(sums.get(key, (0, 0))[1] for sums, _ in shared)
            if key.startswith("loss/"):
                count = sum(trained)  # all updates, those without effect too: they have a loss
            elif key == "optim/grad_norm":
                count -= len(shared) * trained.count(False)  # empty minibatches have norm 0
            line[key] = total / count if count else None
        for key in {k for _, maxima in shared for k in maxima}:
            line[key] = nan_max([maxima.get(key, -math.inf) for _, maxima in shared])
        for key in ("optim/skipped", "optim/updates"):
            counts = [sums.get(key, (0, 0))[0] for sums, _ in shared]
            line[key] = counts[0] if line[key] is not None else None  # every rank counts the same updates
        self._rates(line, shared)
        line["perf/peak_gb"], line["perf/free_gb"] = memory.peak_gb(), memory.least_free_gb()
        process = psutil.Process()
        line["perf/rss_gb"] = process.memory_info().rss / 2**30
        line["perf/open_files"], line["perf/threads"] = process.num_fds(), process.num_threads()
        self.sums, self.maxima, self.updates = {}, {}, []
        line = {key: value if value is None or math.isfinite(value) else None for key, value in line.items()}
        if ranks.rank() == 0:
            run.append(self.folder / "metrics.jsonl", [json.dumps(line)])
            for mirror in self.mirrors:
                mirror({k: v for k, v in line.items() if v is not None})
            self._warn(line)
            self.shown |= {k: f"{line[k]:.3f}" for k in ("reward/mean", "eval/em") if line[k] is not None}
            if self.bar is not None and self.bar.disable:
                values = ", ".join(f"{key} {value}" for key, value in self.shown.items())
                run.notice(f"step {step} of {self.args.steps}: {values}; {line['time/step']:.1f} s")
            elif self.bar is not None:
                self.bar.set_postfix(self.shown)
        return line

    def _rates(self, line, shared):
        """Set the seconds of the slowest rank, and tokens per second over all ranks."""
        for name in ("rollout", "update", "evaluate"):
            key = f"time/{name}"
            seconds = [sums[key][0] for sums, _ in shared if key in sums]
            line[key] = max(seconds) if seconds else None
            if name == "rollout" and seconds:  # the ranks wait for the slowest one in the update
                line["time/rank_spread"] = max(seconds) - min(seconds)
        now = time.monotonic()
        line["time/step"], self.started = now - self.started, now
        sampled, trained, trajectories = (
            sum(sums.get(key, (0, 0))[0] for sums, _ in shared)
            for key in ("rollout/action_tokens", "trained_tokens", "rollout/trajectories")
        )
        line.pop("trained_tokens", None)
        if trajectories:
            line["rollout/trajectories"], line["rollout/sampled_tokens"] = trajectories, sampled
        line["perf/tokens_per_s"] = sampled / line["time/rollout"] if line["time/rollout"] else None
        line["perf/trained_tokens_per_s"] = trained / line["time/update"] if line["time/update"] else None

    def _warn(self, line):
        """Warn of a fault that has lasted for 3 steps, and again every 20 steps. Without a working tool the policy would learn
        to do without it."""
        calls, success = line["rollout/tool_calls"], line["rollout/tool_success"]
        tool = self.args.tools != "off" and calls is not None
        for text, holds in (
            (
                "updates have been skipped, because the gradient was not finite. A lower --lr or --grad_clip may help; "
                "policy/sampler_nonfinite and policy/ratio_max show where it comes from",
                bool(line["optim/skipped"]),
            ),
            (
                "every advantage has been 0: nothing is learned. Easier questions or a larger --group may help; "
                "python -m view show prints the answers",
                line["credit/zero_frac"] == 1,
            ),
            ("no tool has been called", tool and calls == 0),
            ("more than 20 % of tool calls have failed", tool and success is not None and success < 0.8),
        ):
            self.streaks[text] = steps = self.streaks.get(text, 0) + 1 if holds else 0
            if steps and (steps == 3 or steps % 20 == 0):
                run.notice(f"warning: step {line['step']}: for {steps} steps {text}")

    def samples(self, step: int, kind: str, groups: list[Group], advantages: list | None = None) -> None:
        """Append every trajectory to samples.jsonl: text, tool call, output and advantage of each turn; outcome."""
        items = []
        for p, group in enumerate(groups):
            for g, trajectory in enumerate(group.trajectories):
                adv_K = advantages[p][g] if advantages else [None] * len(trajectory.turns)
                items.append(sample(step, kind, group.question, g, trajectory, adv_K))
        items = ranks.gather(items)
        if ranks.rank() == 0:
            run.append(self.folder / "samples.jsonl", [json.dumps(item, ensure_ascii=False) for item in items])


def nan_max(values: Iterable[float]) -> float:
    """Return the maximum, or nan if there is one, so that an unknown peak does not look small."""
    return max(values, key=lambda value: (math.isnan(value), value))
