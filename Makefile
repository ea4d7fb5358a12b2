# make train    set up if needed, then learn: TSPO on the embedded search task
# make test     set up if needed, then the tests
# make compare  set up if needed, then all scripts side by side, 90 minutes: docs/results.md
# make setup    .venv and the tiny base model; does nothing, at once, when both are up to date
PYTHON ?= python3
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: setup train test compare lint
setup:
	@$(PYTHON) install.py

train: setup
	@.venv/bin/python train_tspo.py --model tiny --task tiny_search $(ARGS)

test: setup
	@.venv/bin/ruff check -q . && .venv/bin/ruff format -q --check . || (echo "ruff: run .venv/bin/ruff format . and .venv/bin/ruff check ." && false)
	@.venv/bin/python -m pytest $(ARGS)

compare: setup
	@.venv/bin/python runs/compare.py $(ARGS)
