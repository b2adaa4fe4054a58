# diagkit: `make demo` to see it, `make test` to trust it. Both set .venv up on a bare machine and reuse it afterwards.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# A Python of 3.10 or newer; .ci/venv.py says what to do when there is none.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; exit; }; done; echo python3)
TORCH ?= 2.13.0
# Where torch comes from; empty means pip's own index. For a small CPU-only torch see README.
TORCH_INDEX ?=
PIP_ARGS ?=
# Test processes beside each other. Two suit two cores: most tests start ranks of their own.
WORKERS ?= 2
# Further arguments for pytest: make test PYTEST="-k parity -x"
PYTEST ?=
# Who narrows the tests down may leave one of the two passes without any (pytest's exit code 5).
NARROWED = $(if $(PYTEST),|| [ $$? = 5 ])
# Further arguments for the benchmarks: make bench BENCH="--only steps"
BENCH ?=
# Which tests make test-torch runs: smoke (parity and the crash) or all
SUITE ?= smoke
# Further arguments for the demo: make demo DEMO="--history"
DEMO ?=
# Further arguments for JupyterLab: make lab LAB="--port 9999 --no-browser"
LAB ?=

VENV := .venv
PY := $(VENV)/bin/python
SETUP = @$(PYTHON) .ci/venv.py --torch-index "$(TORCH_INDEX)" --pip-args "$(PIP_ARGS)"

.PHONY: help setup demo lab notebooks pictures doctor test test-torch test-verl hazards predictions translations data wheel bench lint clean

help:  ## show this list
	@grep -hE '^[a-z][a-z-]*:.*  ## ' $(MAKEFILE_LIST) | sed 's/:.*  ## /\t/' | awk -F'\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

setup:  ## make or refresh .venv, which every target does by itself
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) here. Install Python 3.10 or newer (Debian or Ubuntu: apt-get install python3 python3-venv)." >&2; exit 2; }
	$(SETUP) --venv $(VENV) --torch $(TORCH)

demo: setup  ## see the crash and the guard: both engines on two ranks (DEMO="--help" for more)
	@$(PY) -m diagkit demo $(DEMO)

lab: setup  ## open JupyterLab on the notebooks; start with 01
	@$(PY) -m jupyterlab --ServerApp.root_dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB)

notebooks: setup  ## run every notebook from top to bottom and write it as a page to build/notebooks
	@mkdir -p build/notebooks
	@for notebook in notebooks/*.ipynb; do \
		echo "$$notebook"; \
		$(PY) -m nbconvert --log-level WARN --to html --execute --output-dir build/notebooks "$$notebook" \
			2> >(grep -v "Kernel is running over TCP" >&2) || exit 1; \
	done
	@ls build/notebooks/*.html

pictures: setup  ## draw the README's picture anew
	@$(PY) -m diagkit.views.pictures notebooks/pictures

doctor: setup  ## say what will work on this machine, and what to do for the rest
	@$(PY) -m diagkit doctor

test: setup lint  ## run every test (about ten minutes on two cores)
	@PYTHON=$(PYTHON) .ci/system-packages browser
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not alone and not verl" $(PYTEST) $(NARROWED)
	$(PY) -m pytest -m "alone and not verl" $(PYTEST) $(NARROWED)

test-torch:  ## the smoke tests on another torch, in an environment of its own: TORCH=2.9.1, SUITE=all for every test
	@[ "$(origin TORCH)" = "command line" ] || { echo "error: which torch? For example: make test-torch TORCH=2.9.1" >&2; exit 2; }
	$(SETUP) --venv .venv-torch-$(TORCH) --torch $(TORCH)
	@.venv-torch-$(TORCH)/bin/python -m diagkit doctor demo
	.venv-torch-$(TORCH)/bin/python -m pytest -m "$(if $(filter all,$(SUITE)),not verl and not alone,smoke)" $(PYTEST)

test-verl: setup  ## compare the lab's engines with verl's own (makes .venv-verl: 1.8 GB, about a minute)
	@$(PY) tests/verl/realengines/environment.py --torch-index "$(TORCH_INDEX)" --pip-args "$(PIP_ARGS)"
	$(PY) -m pytest -m verl tests/verl $(PYTEST)

hazards: setup  ## write the catalogue of hazards as a page: build/hazards.md
	@mkdir -p build
	@$(PY) -m diagkit hazards --markdown > build/hazards.md && echo build/hazards.md

# The environment of a torch named on the command line, else the usual one.
MEASURED = $(if $(filter command line,$(origin TORCH)),.venv-torch-$(TORCH),$(VENV))

predictions:  ## measure what each operation does in each state, and ship the table (TORCH=2.9.1 for another torch)
	$(SETUP) --venv $(MEASURED) --torch $(TORCH)
	@$(MEASURED)/bin/python -m diagkit.demo.predictions

translations: setup  ## find every sentence that is told to people, and renew the catalogues (diagkit/catalogues)
	@$(PY) .ci/translations.py

data: setup  ## record the traces in data/ anew (verl's needs the environment of make test-verl)
	@$(PY) data/record.py

wheel: setup  ## build the wheel for nodes without a network: pip install --no-deps dist/diagkit-*.whl
	@rm -rf build/lib build/bdist* dist/diagkit-*.whl
	@$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/diagkit-*.whl

bench: setup  ## measure everything anew (an hour, on a quiet machine): tests/benchmarks/results.md (BENCH="--help")
	@$(PY) tests/benchmarks/bench.py $(BENCH)

lint: setup  ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m mypy

clean:  ## remove what make and the tools built; environments stay
	rm -rf build dist runs *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
