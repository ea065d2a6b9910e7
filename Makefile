# make demo   sets everything up and runs the main job
# make test   sets everything up and runs checks and tests
# make quick  runs the tests that start no processes
# make gpu-test   runs tests on this host's GPUs: NCCL, and the end-to-end suite on trainers that share one
# make emulated-gpu-test   runs the tests of failures, state and jobs on GPUs and NCCL that are emulated in host memory
# make mutants   changes the rules of recovery one place at a time and reports what no test notices (an hour)
# make peer-venv   makes the environment with torchft, which benchmarks.recovery --peer measures next to ftd
# make docs   writes the pages and schemas that are made of the code, and builds the site with checked links into site/
# make dist   builds the wheel and the source archive into dist/
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PEER_VENV  := .peer-venv
PEER_STAMP := $(PEER_VENV)/.installed

export OMP_NUM_THREADS ?= 1
# Every process that tests start would compile all modules again if none of them stored its bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: peer-venv demo test quick gpu-test emulated-gpu-test mutants check docs dist setup mosquitto promtool chromium compiler clean

setup: $(STAMP)

# Most modules are never imported, so they are compiled at their first import, which halves the time. What every trainer
# imports is compiled here, because there is a limit for the time in which one starts.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) torch==2.13.0
	$(BIN)/$(PIP_INSTALL) --editable '.[dev]'
	$(BIN)/python -c 'import torch, transformers, ftd.cli.main, runtime.process.trainer'
	touch $(STAMP)

peer-venv: $(PEER_STAMP)

# torchft needs no package of ftd; its worker uses modules of ftd's runtime, which need msgspec and numpy.
$(PEER_STAMP): constraints.txt
	$(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/$(PIP_INSTALL) torch==2.13.0 msgspec numpy
	$(PEER_VENV)/bin/$(PIP_INSTALL) torchft-nightly==2026.10.26
	touch $(PEER_STAMP)

mosquitto:
	@tools/install-mosquitto

chromium:
	@tools/install-chromium

compiler:
	@tools/install-compiler

promtool: setup
	@tools/install-promtool $(BIN)

demo: setup
	$(BIN)/ftd local examples/gpt.toml --nodes 4 --chaos examples/demo-chaos.toml --report demo-report.json

# On a busy machine mypy's workers may start too late for it; it ends with 2 then, and checks without workers.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto || { test $$? -eq 2 && $(BIN)/mypy; }
	$(BIN)/lint-imports

docs: setup
	$(BIN)/ftd config reference > docs/reference/keys.md
	$(BIN)/python -m ftd.observe.view.schema profile > docs/reference/profile.schema.json
	$(BIN)/python -m ftd.observe.view.schema report > docs/reference/report.schema.json
	$(BIN)/python -m ftd.replay.schema replay > docs/reference/replay.schema.json
	$(BIN)/python -m ftd.replay.schema advice > docs/reference/advice.schema.json
	$(BIN)/python -m tests.helpers.models_page
	$(BIN)/python -m benchmarks.evaluation_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

dist: setup
	rm -rf build dist
	$(BIN)/python -m build --outdir dist

# Daemons wait now and then, so three workers use two cores best. A test that fails runs once more, and the summary
# names it, also one that ended its worker; that may happen twice at most.
test:
	@$(MAKE) --no-print-directory --jobs 4 setup mosquitto promtool chromium compiler check
	$(BIN)/pytest -n 3 --reruns 1 --dist loadfile --no-loadscope-reorder --max-worker-restart 2

quick: setup
	$(BIN)/pytest -n 3 --quick

# Nodes that share a GPU slow each other's health checks down.
gpu-test: setup mosquitto
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU that torch can use")'
	$(BIN)/pytest -n 0 tests/gpu
	FTD_HEALTH_MIN_SPEED=0 FTD_TEST_DEVICE=cuda $(BIN)/pytest -n 1 tests/e2e

# The other end-to-end tests either train no job of their own or need what is not emulated, such as speed.
ON_GPUS := $(addsuffix .py,$(addprefix tests/e2e/test_e2e_,zero failures snapshots checkpoints devices memory samples \
	metrics standby control evaluation export job_file))
emulated-gpu-test: setup mosquitto compiler
	$(BIN)/python -m tests.helpers.emulated_gpu $(BIN)/pytest -n 0 tests/gpu/test_cuda.py
	for backend in nccl gloo; do FTD_TEST_BACKEND=$$backend $(BIN)/python -m tests.helpers.emulated_gpu \
		$(BIN)/pytest -n 1 --reruns 1 $(ON_GPUS) || exit 1; done

mutants: setup
	$(BIN)/python -m tools.mutants --json mutants.json

clean:
	rm -rf $(VENV)
