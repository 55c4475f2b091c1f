# `make demo` and `make test` each work as the only command after a clone.

PYTHON ?= python3
BIN := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types pytest test-slow test-harness fuzz clean

demo: .venv/.demo
	PATH="$(CURDIR)/$(BIN):$$PATH" bash demo/demo.sh demo-output

test: lint types pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	MYPYPATH=src $(BIN)/mypy -p sinkprune

# A thread of BLAS to each worker: they share cores, and OpenBLAS spins where its threads do.
pytest: .venv/.dev
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not harness"

test-slow: .venv/.dev
	$(BIN)/pytest -m slow

# Wrong inputs until Ctrl-C, or for as many seconds: SECONDS=1200 make fuzz. SEED=1 repeats a run.
fuzz: .venv/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

# lmms-eval asks for some fifty packages, CUDA builds among them; these are what it needs to run a task.
HARNESS := accelerate datasets dill evaluate fsspec jsonlines loguru multiprocess numexpr pandas \
	portalocker psutil pyarrow pytablewriter python-dateutil python-dotenv regex requests sacrebleu scikit-learn \
	tenacity tqdm-multiprocess xxhash zstandard aiohttp httpx

test-harness: .venv/.dev
	$(BIN)/pip install --quiet --no-deps lmms-eval==0.7.3
	$(BIN)/pip install --quiet $(HARNESS)
	$(BIN)/pytest -m harness

clean:
	rm -rf .venv build demo-output src/*.egg-info

.venv/.demo .venv/.dev: .venv/.%: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --editable ".[$*]"
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed here, $$($(PYTHON) --version) found; try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
