# A virtual environment is made on first use. `make` alone lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo demo-elastic demo-reshape test test-all test-due durations test-unit test-packages test-support test-theirs test-trainer test-torch test-gpu gpu-day wheels test-nccl-like coverage lint bench bench-peers bench-chaos chaos chaos-changes orders mutants soak bench-parallel bench-scale bench-noise bench-gpu bench-planning docs changelog site recording pictures figures clean

# The user's first: what is marked by ### and not by ##.
help:  ### list the targets
	@awk -F ':.*  ### ' '/^[a-z-]+:.*  ### / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo; echo 'To work on it:'
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e ".[test,lint,plot,docs]"
	@touch $@

# Some peers have wheels for few platforms; where one is missing, benchmarks.peers says so and measures the rest.
PEERS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["bench"])
$(VENV)/.installed-bench: $(VENV)/.installed-dev
	for peer in $$($(BIN)/python -c '$(PEERS)'); do $(INSTALL) "$$peer" || true; done
	@touch $@

install: $(VENV)/.installed  ### make the virtual environment, with the package in it

demo: $(VENV)/.installed  ### kill a machine in mid-training, rebuild it, compare all weights
	$(BIN)/python -m examples.demo

demo-elastic: $(VENV)/.installed  ### kill two machines for which none comes, add two later, compare all weights
	$(BIN)/python -m examples.demo_elastic

demo-reshape: $(VENV)/.installed  ### change a running job to unlike pipelines, fewer machines, and back, compare all weights
	$(BIN)/python -m examples.demo_reshape

# Two tests at a time: tests of whole clusters wait more than they compute.
test: test-packages test-unit  ## run the tests; slow ones take turns, a third of them each day
	$(BIN)/python -m pytest -n 2 --dist loadfile --instafail --within 35 tests/cluster tests/theirs tests/stores tests/deploy tests/gpu

test-all: test-packages  ## run all tests with all their cases (an hour and a half)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --thorough --instafail tests/unit tests/simulation
	$(BIN)/python -m pytest -n 2 --dist loadfile --thorough --instafail \
		tests/cluster tests/theirs tests/stores tests/deploy tests/gpu

durations: test-packages  ## measure how long each test of clusters and stores takes (an hour and a half)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --thorough --record-durations --instafail \
		tests/unit tests/simulation
	$(BIN)/python -m pytest -n 2 --dist loadfile --thorough --record-durations --instafail \
		tests/cluster tests/theirs tests/stores tests/deploy tests/gpu

# Seven times a week: then each case of clusters and stores has run in it.
DUE_S ?= 3600
test-due: test-packages  ## run cases of clusters and stores that have not passed for a week (half an hour; DUE_S=3600)
	$(BIN)/python -m pytest -n 2 --dist loadfile --due $(DUE_S) --instafail tests/cluster tests/theirs tests/stores

# Debian packages for the HDFS tests, where they are missing and this user may install them.
test-packages: $(VENV)/.installed-dev  ## install what the HDFS tests need, where that is possible
	$(BIN)/python -m tests.support.install_hadoop

test-unit: $(VENV)/.installed-dev  ## run the tests that need one process only
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --instafail --timeout 400 --within 20 tests/unit tests/simulation

test-support: $(VENV)/.installed-dev  ## run all of docs/support.md (half an hour)
	$(BIN)/python -m pytest -n 2 --thorough tests/cluster/test_support.py

# Scripts that ask for gloo get the backend that behaves like NCCL instead.
test-nccl-like: $(VENV)/.installed-dev  ## run the kill matrix over a backend that behaves like NCCL (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/unit/testing/test_nccl_like.py
	SWIFT_TEST_BACKEND=nccl_like $(BIN)/python -m pytest -n 2 --dist loadfile --thorough --instafail \
		$(patsubst %,tests/cluster/test_%.py,$(OVER_NCCL_LIKE))

OVER_NCCL_LIKE := nccl_like phases kills replicas hybrid sharded sharded_stages failures guests layouts \
	layer_replicas tensor_parallel tied_parameters joint_replays lost_replicas split_replicas \
	memory_checkpoints parallel_recovery script_communication setup_communication several_calls

test-theirs: $(VENV)/.installed-dev  ## kill other people's trainers, as they are, at all points
	$(BIN)/python -m pytest -n 2 --dist loadfile --thorough --instafail tests/theirs

test-trainer: $(VENV)/.installed-dev  ## kill the trainer that is like torchtitan's at all points
	$(BIN)/python -m pytest -n 2 --thorough tests/cluster/test_trainer.py

# An environment of its own: torch first, then all else but torch, so that no other torch takes its place.
TORCH ?= 2.14.1
TORCH_VENV := build/torch-$(TORCH)-$(notdir $(PYTHON))
TORCH_BIN := $(TORCH_VENV)/bin

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo torch==$(TORCH) >> $(TORCH_VENV)/constraints.txt
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt -e ".[test,plot]"
	@touch $@

test-torch: $(TORCH_VENV)/.installed  ## run what depends on torch with TORCH=2.14.1 [PYTHON=python3.12]
	OMP_NUM_THREADS=1 $(TORCH_BIN)/python -m pytest -n 2 --thorough tests/unit/torch_adapters tests/unit/undo \
		tests/unit/runtime tests/unit/checkpoint tests/unit/test_package.py
	$(TORCH_BIN)/python -m pytest -n 2 --dist loadfile --budget 3200 $(addprefix tests/cluster/test_, support.py kills.py \
		failures.py replicas.py hybrid.py sharded.py sharded_stages.py tensor_parallel.py layouts.py \
		layer_replicas.py memory_checkpoints.py parallel_recovery.py script_communication.py guests.py)
	$(TORCH_BIN)/python -m examples.demo
	$(TORCH_BIN)/python -m examples.demo_elastic

# On a machine with a GPU nothing is installed from an index: GPU_PYTHON has torch, pytest, pyarrow, fsspec and
# xxhash, and what else is missing comes from the folder WHEELS. `make wheels` fills it, on a machine with an index.
GPU_PYTHON ?= python3
WHEELS ?= build/wheels
GPU_DAY := GPU_PYTHON=$(GPU_PYTHON) WHEELS=$(WHEELS) benchmarks/gpu/day.sh
MANYLINUX := $(patsubst %,--platform manylinux%_x86_64,_2_28 _2_17 2014 _2_12 2010 _2_5 1)

wheels:  ## download what tests and benchmarks on a GPU need beyond torch, for Python 3.12
	mkdir -p build
	$(PYTHON) -m tests.support.wheels needed > build/needed.txt
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary=:all: --dest $(WHEELS) \
		--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none $(MANYLINUX) \
		--requirement build/needed.txt

test-gpu:  ## run the tests that need a GPU (five minutes); without one they are skipped
	$(GPU_DAY) tests

bench-gpu:  ## measure on a GPU (four minutes); without one it says so
	$(GPU_DAY) figures

gpu-day:  ## both, on a machine with a GPU; all output is kept in build/gpu
	$(GPU_DAY)

coverage: $(VENV)/.installed-dev  ## measure which lines of the package all tests run
	-$(BIN)/python -m pytest -n 2 --dist loadfile --thorough --cov --cov-config=tests/coverage.ini --cov-report= tests
	$(BIN)/coverage report --rcfile=tests/coverage.ini --show-missing

lint: $(VENV)/.installed-dev  ## check style, imports and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# With BENCH_RECORD=benchmarks/results each benchmark keeps its figures, and `make docs` puts them on the pages.
bench: $(VENV)/.installed-bench  ### measure overhead and recovery, also against torchrun and torchft
	$(BIN)/python -m benchmarks.logging.overhead
	$(BIN)/python -m benchmarks.logging.collectives
	$(BIN)/python -m benchmarks.recovery.recovery
	$(BIN)/python -m benchmarks.recovery.parallel
	$(BIN)/python -m benchmarks.recovery.verify
	$(BIN)/python -m benchmarks.recovery.audits
	$(BIN)/python -m benchmarks.recovery.memory
	$(BIN)/python -m benchmarks.recovery.imports
	$(BIN)/python -m benchmarks.recovery.step
	$(BIN)/python -m benchmarks.elastic.change
	$(BIN)/python -m benchmarks.elastic.forecast
	$(BIN)/python -m benchmarks.elastic.straggler
	$(BIN)/python -m benchmarks.elastic.size
	$(BIN)/python -m benchmarks.elastic.replicas
	$(BIN)/python -m benchmarks.elastic.worlds

# --keep goes on where a run was cut off: all of it takes an hour.
BENCH_PEERS ?= --keep build/peers.jsonl
bench-peers: $(VENV)/.installed-bench  ### kill machines under swift_ft and four other systems, in turns (an hour)
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers.table $(BENCH_PEERS)

bench-chaos: $(VENV)/.installed-dev  ## run 500 random plans of faults over all topologies (an hour)
	$(BIN)/python -m benchmarks.recovery.campaign

# Every eighth of an hour or so another hundred: CHAOS="--plans 5000 --keep build/chaos" goes on where it was.
CHAOS ?= --plans 200
chaos: $(VENV)/.installed-dev  ## run random plans of all kinds of faults over all topologies (as root: networks, too)
	$(BIN)/python -m benchmarks.recovery.campaign --faults all $(CHAOS)

chaos-changes: $(VENV)/.installed-dev  ## run 100 random plans of faults against jobs that change meanwhile (half an hour)
	$(BIN)/python -m tests.support.change_chaos --plans 100

orders: $(VENV)/.installed-dev  ## simulate 100,000 orders of failures of all kinds of jobs (half an hour on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.proof.orders

MUTANTS ?=
mutants: $(VENV)/.installed-dev  ## plant 150 small faults in the protocol: who finds them? (half an hour; MUTANTS="--count 9999")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.protocol_mutants $(MUTANTS)

# Two hours; SOAK="--keep build/soak.jsonl" goes on where it was cut off, one training after the other.
SOAK ?=
soak: $(VENV)/.installed-dev  ## train for an hour with a failure each half minute, and as long without: what grows?
	$(BIN)/python -m benchmarks.recovery.soak $(SOAK)

bench-parallel: $(VENV)/.installed-dev  ## measure parallel recovery alone
	$(BIN)/python -m benchmarks.recovery.parallel

bench-noise: $(VENV)/.installed-dev  ## count false alarms about slow machines in an hour beside other work
	$(BIN)/python -m benchmarks.elastic.noise

# torch says of each key that is not there yet that its wait timed out.
bench-scale: $(VENV)/.installed-dev  ## measure the control plane of up to 1,024 machines, and simulate 16,384
	mkdir -p build
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR $(BIN)/python -m benchmarks.scale.control_plane --out build/scale.json
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.scale.simulated --measured build/scale.json

docs: $(VENV)/.installed-dev  ## draw the map and the protocol, write tables from the code, and figures from the runs
	$(BIN)/python -m docs.house
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.support
	$(BIN)/python -m docs.results
	$(BIN)/python -m docs.decision_list
	$(BIN)/python -m docs.prose

changelog: $(VENV)/.installed  ## show what a release would add to the changelog, from changes/
	$(INSTALL) towncrier
	$(BIN)/towncrier build --draft --version next

# The variable silences an advertisement, which is no warning about the site.
site: $(VENV)/.installed-dev  ### build the site of all documents in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

recording: $(VENV)/.installed-dev  ## record the demo as the moving picture of the README
	$(BIN)/python -m docs.record_demo

pictures: $(VENV)/.installed-dev  ## draw the pictures of docs/timeline.md from a real run with failures (needs Chromium)
	$(BIN)/python -m docs.record_timeline

bench-planning: $(VENV)/.installed-dev  ## time the grouping and the layouts, and compare a simulated training with an executed one
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.planning.grouping
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.planning.moves
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.planning.devices
	$(BIN)/python -m benchmarks.planning.elastic
	$(BIN)/python -m benchmarks.planning.simulated
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.planning.layouts

figures: $(VENV)/.installed-dev  ### measure and draw the paper's figures 9 to 11 and table 3 in benchmarks/figures
	$(BIN)/python -m benchmarks.paper.figures

clean:  ### remove the virtual environment and all that was built
	rm -rf $(VENV) build *.egg-info runs .coverage*
