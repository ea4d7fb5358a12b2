"""Run under torchrun: run the main of several scripts one after another, since a start takes longer than they do.

python -m torch.distributed.run ... tests/helpers/in_turn.py '["train_rtpo.py", "--model", "tiny"]' '["eval.py", ...]'
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import commands  # noqa: E402
import rank_worker  # noqa: E402

if __name__ == "__main__":
    for script, *words in map(json.loads, sys.argv[1:]):
        if script == "rank_worker.py":
            rank_worker.main(*words)
        else:
            print(commands.here(script, *words), flush=True)
