# Shortcuts. Each command also works without make; CONTRIBUTING.md explains them.
PYTHON ?= python
BENCH ?= recipes/quickstart.yaml

.PHONY: help test lint format bench layers

help:
	@echo "make test    run the test suite"
	@echo "make lint    check style, format and types"
	@echo "make format  fix style and format"
	@echo "make bench   measure training throughput: finetune bench \$$(BENCH)"
	@echo "make layers  print the packages and the imports between them"

test:
	$(PYTHON) -m pytest

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy finetune tests/gpu

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench:
	$(PYTHON) -m finetune bench $(BENCH)

layers:
	$(PYTHON) tools/layers.py
