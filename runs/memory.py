"""Check that memory is flat over 200 steps of the tiny model: python runs/memory.py [RUN]   about 15 minutes on 2 cores

With a run directory, read that run's metrics.jsonl instead. Prints resident size, open files and threads at some steps,
and their change from step 20 to the last. Exits with 1 if the size has grown by 3 % or more, or files or threads have
grown.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp() + "/run"
    if len(sys.argv) < 2:
        words = f"train_grpo.py --model tiny --steps 200 --eval_every 50 --save_every 20 --out {out}"
        subprocess.run([sys.executable, *words.split()], cwd=ROOT, check=True)
    lines = {line["step"]: line for line in map(json.loads, open(Path(out) / "metrics.jsonl"))}
    last = max(lines)
    print("step  resident GiB  open files  threads")
    for step in sorted({1, 20, 50, 100, 150, last} & set(lines)):
        line = lines[step]
        print(f"{step:4}{line['perf/rss_gb']:14.3f}{line['perf/open_files']:12}{line['perf/threads']:9}")
    start, end = lines[20], lines[last]
    growth = end["perf/rss_gb"] / start["perf/rss_gb"] - 1
    same = all(end[key] <= start[key] for key in ("perf/open_files", "perf/threads"))
    print(f"from step 20 to {last}: resident size {growth:+.1%}, files and threads {'constant' if same else 'grown'}")
    sys.exit(growth >= 0.03 or not same)


if __name__ == "__main__":
    main()
