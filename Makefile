# Set-up is part of every target that needs it: a fresh clone takes `make demo` or `make test` and nothing before it.
SHELL := /bin/sh
BIN := .venv/bin
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo train-demo test check bench bench-buffer bench-policy bench-sandbox chaos lock parts clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv from the hashed lock (demo, test and check do it by themselves)
	@sh scripts/setup.sh

demo: setup ## a whole run on this machine: orchestrator, workers, tiny policy, learner
	@$(BIN)/headrace demo

train-demo: setup ## a transformer learns a game with PyTorch and a real vLLM, plotted (needs make parts; some minutes)
	@$(BIN)/python examples/train_demo.py $(ARGS)

test: setup ## every test
	@$(BIN)/pytest

check: setup ## lint, format, types, import direction, addresses and paths in the tree
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python scripts/check_tree.py

bench: setup ## every benchmark that needs no GPU
	@status=0; for file in benchmarks/bench_*.py; do \
		echo "== $$file"; $(BIN)/python -m "benchmarks.$$(basename $$file .py)" || status=1; \
	done; exit $$status

bench-buffer: setup ## the replay buffer beside Reverb and TransferQueue; installs them under build/peers (7 GB)
	@$(BIN)/python -m benchmarks.buffer $(ARGS)

bench-policy: setup ## a real vLLM under load by Headrace and by a load generator, 50 weight updates; needs make parts
	@$(BIN)/python -m benchmarks.policy $(ARGS)

bench-sandbox: setup ## sandboxes beside a bare interpreter, Docker, gVisor and SWE-ReX (some minutes)
	@$(BIN)/python -m benchmarks.sandbox $(ARGS)

chaos: setup ## kill every process again and again and cut the power, with checkers (some minutes)
	@$(BIN)/python -m tests.chaos.full_run

lock: ## write requirements/ anew from pyproject.toml
	@sh scripts/lock.sh

parts: ## install the heavy parts: vLLM with torch (6 GB, build/parts), gVisor, a browser, a compiler; or say how
	@sh scripts/parts.sh

clean: ## remove what the other targets made
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find sdk sandbox workers orchestrator tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
