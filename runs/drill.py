"""A fault drill: break runs of the tiny model in every way we know. No run may lose a finished step.

    python runs/drill.py                      # all cases, about 12 minutes on 2 cores
    python runs/drill.py --only rank_killed   # one case

Prints a table: verdict, case, seconds, result. Exits with 1 if a verdict is WRONG. The two cases of a full and a
read-only disk run in a separate mount namespace; on a machine without namespaces they are listed as not tried.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "--model tiny --questions 4 --group 4 --eval_questions 10 --eval_every 0 --save_every 1 --steps 6 --tool_timeout 2"
)
KILLS = 20
PATIENCE = 5.0  # seconds until the run gives up a retriever, with --broken
MARK = f"drill-{os.getpid()}"  # in the environment of every process that this program starts


# ---- the broken tools: python runs/drill.py --broken hangs -- <arguments of train_grpo.py>


def broken(how, argv):
    """Run train_grpo.py with a broken search, a crashing rank, or a retriever given up after PATIENCE seconds."""
    sys.path.insert(0, str(ROOT))
    sys.argv = [str(ROOT / "train_grpo.py"), *argv]
    import train_grpo
    from common import ranks, run
    from common.args import parse_args
    from tasks import loading, search_qa
    from tools import search

    loading.Retriever = functools.partial(search.Retriever, patience=PATIENCE)
    plain, calls = search_qa.SearchQA.call, []

    def call(self, turn, question, earlier):
        calls.append(turn.tool_input)
        if len(calls) % 10 == 0:
            if how == "hangs":
                time.sleep(3600)
            if how == "raises":
                raise ValueError("the index is gone")
            if how == "floods":
                return "x y " * 2_500_000
        return plain(self, turn, question, earlier)

    search_qa.SearchQA.call = call
    plain_advantages, groups = train_grpo.compute_advantages, []

    def compute_advantages(group, args):
        groups.append(group)
        if how == "crashes" and ranks.rank() == 1 and len(groups) == 7:  # two groups a step: in step 4
            raise ValueError("the seventh group is too much")
        return plain_advantages(group, args)

    train_grpo.compute_advantages = compute_advantages
    run.launch(train_grpo.main, parse_args(train_grpo.Args))


# ---- runs


class Run:
    """A training run in progress; its output goes to `folder`/log."""

    def __init__(self, folder, *words, out=None, ranks=1, how=None, piped=False):
        self.out, self.log, self.ranks, self.piped = out or folder / "run", folder / "log", ranks, piped
        script = [str(ROOT / "train_grpo.py")] if how is None else [__file__, "--broken", how, "--"]
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        self.launch([*launch, *script, *SMALL.split(), "--out", str(self.out), *words])

    def launch(self, command):
        threads = str(max(1, (os.cpu_count() or 2) // self.ranks))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "DRILL": MARK}
        self.started = time.time()
        with open(self.log, "w") as log:
            if self.piped:
                self.reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
            output = self.reader.stdin if self.piped else log
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            if self.piped:
                self.reader.stdin.close()

    def steps(self):
        with contextlib.suppress(OSError, ValueError):
            return [json.loads(line)["step"] for line in open(self.out / "metrics.jsonl")]
        return []

    def until(self, condition, seconds=120):
        """Wait until condition() is true. Returns False if the run ends first or the time is up."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def until_step(self, step):
        assert self.until(lambda: step in self.steps()), f"step {step} was not reached: {self.text()[-2000:]}"

    def text(self):
        return self.log.read_text(errors="replace")

    def printed(self, words):
        return words in self.text()

    def wait(self, seconds=180):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "still running"

    def resume(self):
        """Run the resume command that the run printed, to the end. Returns the exit code."""
        found = re.search(r"Resume with:\n  (.*)", self.text())
        assert found, f"no resume command: {self.text()[-2000:]}"
        self.launch(shlex.split(found[1]))
        return self.wait()


def processes():
    """Return {pid: rank or None} of the running processes that this program started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            if f"DRILL={MARK}" in entries and "zombie" not in (folder / "status").read_text():
                ranks = [entry[5:] for entry in entries if entry.startswith("RANK=")]
                found[int(folder.name)] = int(ranks[0]) if ranks else None
    return found


def left_in_memory():
    return {name for name in os.listdir("/dev/shm") if "turnwise" in name} if os.path.isdir("/dev/shm") else set()


def whole(run, steps):
    """Return whether every step is logged exactly once, and no process and no shared memory is left."""
    return run.steps() == list(range(steps + 1)) and not processes() and not left_in_memory()


def finished(run, last):
    """Return whether `last` (step-N) is the last step in the metrics, or the one before: state follows the metrics."""
    return int(last.removeprefix("step-")) in (run.steps()[-1], run.steps()[-1] - 1) and last not in (
        "step-0",
        "step-1",
    )


class Server:
    """The retrieval server of the tests, with the tiny world as its corpus."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/retrieve"

    def start(self):
        command = [
            sys.executable,
            str(ROOT / "tests" / "helpers" / "retrieval_server.py"),
            "--port",
            str(self.port),
            "--corpus",
            "tiny",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.wait()


# ---- the cases: each returns (description of the result, whether it is right)


def retriever_killed_and_restarted(folder):
    server = Server()
    server.start()
    run = Run(folder, "--retriever", server.address)
    run.until_step(1)
    server.kill()
    waited = run.until(lambda: run.printed("trying again"))
    time.sleep(3)
    server.start()
    code = run.wait()
    server.kill()
    steps = [json.loads(line) for line in open(run.out / "metrics.jsonl")]
    success = min(line["rollout/tool_success"] for line in steps if line["rollout/tool_success"] is not None)
    result = f"the run waited and continued to step {run.steps()[-1]}; {success:.0%} of the calls answered"
    return result, waited and code == 0 and success == 1 and run.printed("answers again") and whole(run, 6)


def retriever_stays_away(folder):
    server = Server()
    server.start()
    run = Run(folder, "--retriever", server.address, "--save_every", "50", how="retriever")
    run.until_step(3)
    server.kill()
    code = run.wait()
    stopped, last = run.steps(), (run.out / "adapter").readlink().parent.name
    right = code == 1 and run.printed("has given no results for") and not run.printed("Traceback") and not processes()
    server.start()
    again = run.resume()
    server.kill()
    result = (
        f"stopped after {PATIENCE:.0f} s with {last} saved ({stopped[-1]} finished); resumed to step {run.steps()[-1]}"
    )
    return result, right and last == f"step-{stopped[-1]}" and again == 0 and whole(run, 6)


def _tool(folder, how, counted, words=""):
    run = Run(folder, *words.split(), how=how)
    code = run.wait(300)
    lines = [json.loads(line) for line in open(run.out / "samples.jsonl")]
    calls = [turn for line in lines for turn in line["turns"] if turn["tool_status"] in ("ok", "error", "timeout")]
    hit = [turn for turn in calls if counted(turn)]
    longest = max(len(turn["tool_output"]) for turn in calls)
    result = (
        f"{len(hit)} of {len(calls)} calls; the run continued to step {run.steps()[-1]}; longest saved output {longest}"
    )
    return result, code == 0 and len(hit) > 5 and longest < 60_000 and whole(run, 6)


def tool_hangs(folder):
    return _tool(folder, "hangs", lambda turn: turn["tool_status"] == "timeout", "--tool_workers 8")


def tool_raises(folder):
    return _tool(folder, "raises", lambda turn: turn["tool_output"] == "Error: ValueError: the index is gone")


def tool_returns_10_mb(folder):
    return _tool(folder, "floods", lambda turn: turn["tool_output"].endswith("[cut: 10000000 characters]"))


def disk_full_while_saving(folder):
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    run = Run(folder, out=disk / "run")
    run.until_step(2)
    room = os.statvfs(disk)
    with contextlib.suppress(OSError), open(disk / "filler", "wb") as filler:
        for _ in range(room.f_bavail * room.f_frsize // 4096 - 64):  # leaves 256 KiB, less than a checkpoint
            filler.write(bytes(4096))
    waited = run.until(lambda: run.printed("No space left on device"))
    at = run.steps()[-1]
    time.sleep(3)
    (disk / "filler").unlink()
    code = run.wait()
    right = waited and code == 0 and whole(run, 6) and (run.out / "adapter").readlink().parent.name == "step-6"
    return f"the run waited at step {at} until there was room, then continued to step {run.steps()[-1]}", right


def read_only_out_folder(folder):
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk], check=True)
    run = Run(folder, out=disk / "run")
    code = run.wait()
    line = next((line for line in run.text().splitlines() if "cannot be written" in line), "")
    return f"exit {code}: {line}", code == 1 and bool(line) and not run.printed("Traceback")


def rank_killed(folder):
    run = Run(folder, "--save_every", "50", ranks=2)
    run.until_step(3)
    victim = next(pid for pid, rank in processes().items() if rank == 1)
    os.kill(victim, signal.SIGKILL)
    at = time.monotonic()
    code = run.wait(90)
    while processes() and time.monotonic() < at + 90:
        time.sleep(0.1)
    seconds = time.monotonic() - at
    last = (run.out / "adapter").readlink().parent.name
    right = code not in (0, "still running") and seconds < 60 and not left_in_memory()
    saved = finished(run, last)
    again = run.resume()
    result = f"all ranks ended within {seconds:.0f} s with {last} saved; resumed to step {run.steps()[-1]}"
    return result, right and saved and again == 0 and whole(run, 6)


def rank_raises(folder):
    run = Run(folder, "--save_every", "50", ranks=2, how="crashes")
    code = run.wait()
    right = code == 1 and run.printed("the seventh group is too much") and not processes() and not left_in_memory()
    stopped, last = run.steps(), (run.out / "adapter").readlink().parent.name
    again = run.resume()
    result = f"all ranks ended with {last} saved ({stopped[-1]} finished); resumed to step {run.steps()[-1]}"
    return result, right and last == f"step-{stopped[-1]}" == "step-3" and again == 0 and whole(run, 6)


def _stopped(folder, number, ranks=1, piped=False):
    run = Run(folder, "--save_every", "50", ranks=ranks, piped=piped)
    run.until_step(3)
    if piped:  # like `tee` in `... | tee log`, which Ctrl-C kills too: every further write fails
        run.reader.kill()
    os.kill(run.process.pid, number)
    at = time.monotonic()
    code = run.wait(90)
    seconds, right = time.monotonic() - at, not processes() and not left_in_memory()
    last = (run.out / "adapter").readlink().parent.name
    right = (
        right
        and finished(run, last)
        and (code not in (0, "still running") if ranks > 1 or piped else code == 128 + number)
    )
    again = Run(folder, "--resume").wait() if piped else run.resume()
    result = f"ended within {seconds:.0f} s with {last} saved; resumed to step {run.steps()[-1]}"
    return result, right and again == 0 and whole(run, 6)


def ctrl_c(folder):
    return _stopped(folder, signal.SIGINT)


def ctrl_c_of_a_pipe(folder):
    return _stopped(folder, signal.SIGINT, piped=True)


def ctrl_c_under_torchrun(folder):
    return _stopped(folder, signal.SIGINT, ranks=2)


def sigterm(folder):
    return _stopped(folder, signal.SIGTERM)


def torchrun_killed(folder):
    run = Run(folder, "--save_every", "50", ranks=2)
    run.until_step(3)
    run.process.kill()
    at = time.monotonic()
    while processes() and time.monotonic() < at + 90:
        time.sleep(0.1)
    seconds, right = time.monotonic() - at, not processes() and not left_in_memory()
    last = (run.out / "adapter").readlink().parent.name
    right = right and finished(run, last)
    result = f"the ranks noticed and ended within {seconds:.0f} s with {last} saved; resumed"
    return result, right and run.resume() == 0 and whole(run, 6)


def killed_20_times(folder):
    """Kill one run (kill -9) at random, every third time while it writes a checkpoint, and resume it each time."""
    rng = random.Random(1)
    run, writing, before = Run(folder, "--steps", "1000", "--tool_workers", "0"), 0, []
    for kill in range(KILLS):
        assert run.until((run.out / "args.json").exists), run.text()
        unfinished = run.out / "checkpoints" / "unfinished"
        if kill % 3 == 2:
            run.until(functools.partial(run.printed, "steps:"))
            time.sleep(rng.uniform(0, 1))
            run.until(unfinished.exists)
            time.sleep(rng.uniform(0, 0.02))
        else:
            time.sleep(rng.uniform(1, 20))
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        writing += unfinished.exists() and unfinished.stat().st_mtime > run.started  # not left by an earlier kill
        kept = [line for line in open(run.out / "metrics.jsonl")] if run.steps() else []
        last = max((int(p.parent.name[5:]) for p in run.out.glob("checkpoints/step-*/state.pt")), default=None)
        assert kept[: len(before)] == before, "an earlier line was changed"
        before = kept[: last + 1] if last is not None else []
        run = Run(folder, "--steps", "1000", "--tool_workers", "0", "--resume")
    assert run.until(lambda: len(run.steps()) > len(before) + 1), run.text()[-2000:]
    os.killpg(run.process.pid, signal.SIGTERM)
    run.wait()
    steps = int((run.out / "adapter").readlink().parent.name[5:])
    run = Run(folder, "--steps", str(steps + 1), "--tool_workers", "0", "--resume")
    code = run.wait()
    straight = Run(folder, "--steps", str(steps + 1), "--tool_workers", "0", out=folder / "straight")
    straight.wait(600)
    same = all(
        (run.out / name).read_bytes() == (straight.out / name).read_bytes()
        for name in ("samples.jsonl", "adapter/adapter_model.safetensors")
    )
    result = f"{KILLS} kills, {writing} of them inside a checkpoint, over {steps + 1} steps; samples and adapter "
    result += f"{'equal' if same else 'differ from'} those of a run without kills"
    return result, code == 0 and same and writing > 0 and whole(run, steps + 1)


CASES = (
    *(retriever_killed_and_restarted, retriever_stays_away, tool_hangs, tool_raises, tool_returns_10_mb),
    *(disk_full_while_saving, read_only_out_folder, rank_killed, rank_raises, ctrl_c, ctrl_c_of_a_pipe, sigterm),
    *(ctrl_c_under_torchrun, torchrun_killed, killed_20_times),
)
MOUNTING = (disk_full_while_saving, read_only_out_folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=[case.__name__ for case in CASES], help="run only this case; repeatable"
    )
    args = parser.parse_args()
    # A shell's background job ignores SIGINT, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    mounts = "DRILL_MOUNTS" in os.environ
    if not mounts and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        os.execvpe(unshare[0], [*unshare, sys.executable, *sys.argv], os.environ | {"DRILL_MOUNTS": "1"})
    failed = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for case in CASES:
            if args.only and case.__name__ not in args.only:
                continue
            case_folder = Path(folder) / case.__name__
            case_folder.mkdir()
            started = time.monotonic()
            if case in MOUNTING and not mounts:
                result, right = "not tried: no mount namespaces on this machine", None
            else:
                try:
                    result, right = case(case_folder)
                except Exception as error:
                    result, right = repr(error), False
            verdict = {True: "right", False: "WRONG", None: "-"}[right if right is None else bool(right)]
            print(f"{verdict:<6}{case.__name__:<32}{time.monotonic() - started:5.0f} s  {result}", flush=True)
            failed += right is False or right == 0
            for pid in processes():
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["umount", case_folder / "disk"], capture_output=True, check=False)
    sys.exit(failed > 0)


if __name__ == "__main__":
    if "--broken" in sys.argv[1:2]:
        broken(sys.argv[2], sys.argv[4:])
    else:
        main()
