# make train    set up if needed, then learn: TSPO on the embedded search task
# make quick    set up if needed, then the tests that need no engine and no model
# make test     set up if needed, then all tests
# make compare  set up if needed, then all scripts side by side, 90 minutes: docs/results.md
# make sweep    set up if needed, then the checks over seeds, models and modes: docs/checked.md
# make setup    create .venv; does nothing, at once, when it is up to date
PYTHON ?= python3
# On a GPU box torchrun starts a rank for each GPU, and sets the threads of each itself.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
endif
# Files that git knows: a user's train_mine.py need not be formatted. Without git: all files.
FILES = $(shell git ls-files '*.py' 2>/dev/null | grep . || echo .)

.PHONY: setup train quick test compare sweep lint
setup:
	@$(PYTHON) install.py

train: setup
	@.venv/bin/python train_tspo.py --model tiny --task tiny_search $(ARGS)

lint: setup
	@.venv/bin/ruff check -q $(FILES) && .venv/bin/ruff format -q --check $(FILES) || (echo "ruff: run .venv/bin/ruff format . and .venv/bin/ruff check ." && false)

quick: lint
	@.venv/bin/python -m pytest tests/unit -m "not slow and not sweep" $(ARGS)

test: lint
	@.venv/bin/python -m pytest $(ARGS)

compare: setup
	@.venv/bin/python runs/compare.py $(ARGS)

sweep: setup
	@.venv/bin/python runs/sweep.py $(ARGS)
