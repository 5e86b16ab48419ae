# `make` alone says what there is. Every target installs what it needs first; a second run installs nothing.

PYTHON ?= python3.11
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)

BIN := .venv/bin
PIP = $(BIN)/python -m pip install $(PIP_OPTIONS) --constraint .venv/constraints.txt
# What is installed depends on these alone, whatever the files' dates say.
KEY := $(shell { cat pyproject.toml constraints.txt; echo '$(TORCH)'; } | cksum | cut -d ' ' -f 1)
INSTALLED := .venv/.installed-$(KEY)
TESTABLE := .venv/.testable-$(KEY)

# The oldest versions that are declared (pyproject.toml, meshwright_hf/versions.py), in an environment of their own.
# PyPI's torch is the CUDA build; it runs on CPU too. With a CPU build at hand: OLDEST="torch==2.11.0+cpu ..."
OLDEST ?= torch==2.11.0 transformers==5.17.0 accelerate==1.15.0
OLDEST_BIN := .venv-oldest/bin
OLDEST_KEY := $(shell { cat pyproject.toml constraints.txt; echo '$(OLDEST)'; } | cksum | cut -d ' ' -f 1)
OLDEST_INSTALLED := .venv-oldest/.installed-$(OLDEST_KEY)
# What depends on the versions: models, losses and weights; Trainer, accelerate and datasets; the loader; launching; and
# the command for a GPU, whose machine may have any of them.
OLDEST_TESTS := tests/distribute/test_parity.py tests/data/test_loader.py tests/checkpoint/test_save_pretrained.py \
	$(wildcard tests/integrations/test_hf_[bd]*.py tests/integrations/test_trainer*.py) \
	$(wildcard tests/integrations/test_accelerate*.py) tests/cli/test_launch.py tests/integrations/test_doctor.py \
	tests/mesh/test_host_wire.py tests/gpu_command/test_gpu_command.py
# Of these transformers and accelerate alone, in an environment that takes all else, torch too, from .venv: half a
# minute, where torch takes minutes and 5 GB. The tests where they matter most, of which the slowest are left out.
OLD_HF ?= $(filter-out torch%,$(OLDEST))
OLD_HF_BIN := .venv-old-hf/bin
OLD_HF_KEY := $(shell { cat pyproject.toml constraints.txt; echo '$(TORCH) $(OLD_HF)'; } | cksum | cut -d ' ' -f 1)
OLD_HF_INSTALLED := .venv-old-hf/.installed-$(OLD_HF_KEY)
OLD_HF_TESTS := $(wildcard tests/integrations/test_trainer*.py tests/integrations/test_accelerate*.py) \
	$(wildcard tests/integrations/test_hf_[bd]*.py) tests/data/test_loader.py tests/checkpoint/test_save_pretrained.py \
	tests/roles/test_families.py tests/distribute/test_parity.py

# A client and a server of S3, beside .venv likewise: botocore needs an older dateutil than constraints.txt pins.
S3 := s3fs==2026.9.0 moto==5.2.5 boto3==1.43.117 botocore==1.43.117 py-partiql-parser flask flask-cors
S3_BIN := .venv-s3/bin
S3_INSTALLED := .venv-s3/.installed-$(shell { cat pyproject.toml constraints.txt; echo '$(TORCH) $(S3)'; } | cksum | cut -d ' ' -f 1)

# Newer versions than constraints.txt pins, in an environment of their own; all but the crossings run.
NEWEST ?= torch==2.14.1 transformers==5.24.0
NEWEST_BIN := .venv-newest/bin
NEWEST_KEY := $(shell { cat pyproject.toml constraints.txt; echo '$(NEWEST)'; } | cksum | cut -d ' ' -f 1)
NEWEST_INSTALLED := .venv-newest/.installed-$(NEWEST_KEY)

# Python's default. A machine that sets it would compile every test, and the sources for every command, again and again.
unexport PYTHONDONTWRITEBYTECODE

# Two processes, each with its own half of the cores and its own pools of ranks. 0 is one process with all cores.
WORKERS ?= $(shell test "$$(getconf _NPROCESSORS_ONLN)" -ge 2 && echo 2 || echo 0)
IN_PARALLEL = -q -n $(WORKERS) --dist worksteal --junitxml=build/tests/$@.xml
PYTEST = $(BIN)/python -m pytest $(IN_PARALLEL)
OLD_HF_PYTEST = $(OLD_HF_BIN)/python -m pytest $(IN_PARALLEL) $(OLD_HF_TESTS) -m 'not crossing and not nightly'

.PHONY: help setup browser slurm clusters demo test-quick test test-all test-nightly old-hf test-old-hf test-s3 test-oldest test-newest coverage wheel kills random-kills resumes lint types style docs bench bench-data bench-checkpoints bench-planner bench-choice bench-context bench-experts bench-owners bench-referee bench-host gpu families programs verify clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo          train a Llama with 4 processes by a plan it picks and prove it equal to one process; minutes'
	@echo 'make test-quick    each capability once, while you work; 2 to 3 minutes on 2 cores'
	@echo 'make test          every property once at full strength; 15 to 20 minutes on 2 cores; WORKERS=0 for one at a time'
	@echo 'make test-all      also the crossings of families, plans, schedules and kills; 45 minutes on 2 cores'
	@echo 'make test-nightly  the rest of these crossings, of which test-all runs a part; an hour and a half'
	@echo 'make test-old-hf   the Trainer, accelerate, data and models with the oldest transformers; part of test-all'
	@echo 'make test-s3       checkpoints over the protocol of S3, from a server on this machine; two minutes'
	@echo 'make test-oldest   a subset with the oldest torch, transformers and accelerate, in .venv-oldest (5 GB)'
	@echo 'make test-newest   make test with newer versions than those of make setup, in .venv-newest (6 GB)'
	@echo 'make coverage      the lines and branches that test-quick runs, in all of its processes'
	@echo 'make wheel         build the package into dist/, install it into .venv-wheel and try it without transformers'
	@echo 'make lint          sizes, style, types, which package may import which, and whether the docs build'
	@echo 'make docs          build the documentation into site/, without network'
	@echo 'make bench         step times beside transformers TP, DeepSpeed and DDP, with intervals; 20 to 25 minutes'
	@echo 'make bench-data    what the mesh-aware loader costs against a plain DataLoader'
	@echo 'make bench-checkpoints  what digests cost, how long a save stops training, and torch DCP and accelerate'
	@echo 'make bench-context context parallelism: DeepSpeed Ulysses, weak scaling, balanced rows'
	@echo 'make bench-experts expert parallelism: that of transformers, and DeepSpeed AutoEP'
	@echo 'make bench-owners  the step of Muon under ZeRO-1, against Muon that every rank steps whole'
	@echo 'make bench-referee what comparing 8 to 1,024 ranks costs rank 0'
	@echo 'make bench-host    CPU time that the hooks of a plan add to a layer'
	@echo 'make gpu           numbers, memory, time and faults on a GPU, in one page; 25 minutes; GPU=--help lists options'
	@echo 'make bench-planner the planner against measured runs and traced steps; RUNS=path for another table'
	@echo 'make bench-choice  the plan that is picked on this machine against all others; a quarter of an hour'
	@echo 'make families      every type of five mappings of transformers against one device; writes evidence/families.md and models.md; less than an hour on 2 cores'
	@echo 'make kills         a save that is killed, or finds the disk full, at each of its steps; ten minutes'
	@echo 'make resumes       runs of 20 steps under ten plans, loaded after each step and compared to the bit'
	@echo 'make random-kills  runs whose ranks are really killed or stopped, with restarts; half an hour'
	@echo 'make verify        meshwright verify on twenty published configs, and on 23 models with a planted fault'
	@echo 'make programs      2,000 random training programs under 30 plans against one process; 20 minutes on 2 cores'
	@echo 'make setup         only create .venv and install what the others need, as pinned by constraints.txt'
	@echo 'make browser       install chromium by apt-get, which needs root; one test opens a page in it, or is skipped'
	@echo 'make slurm         install Slurm and munge by apt-get, which needs root, for tests on a local cluster'
	@echo 'make clusters      jobs on a local Slurm and Ray, killed, preempted and requeued; half an hour'
	@echo 'make clean         delete .venv, caches and runs/'
	@echo
	@echo 'The demo takes flags:       make demo DEMO="--steps 300 --tp 4 --dp 1"; DEMO=--help lists them.'
	@echo 'Another Python:             make setup PYTHON=python3.12'
	@echo 'Another torch, e.g. CUDA:   export TORCH="torch==2.13.0+cu130 --extra-index-url' \
		'https://download.pytorch.org/whl/cu130"'

setup: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo $(DEMO)

test-quick: $(TESTABLE)
	$(PYTEST) -m quick

test: $(TESTABLE)
	$(PYTEST) -m 'not crossing and not nightly'

# One run for the cases of `make test` and the crossings, so that they are collected once and the pools start once. The
# old versions are installed first: what is not to be had is said at once.
test-all: old-hf
	$(PYTEST) -m 'not nightly'
	$(MAKE) test-old-hf

old-hf: $(OLD_HF_INSTALLED)

test-nightly: $(TESTABLE)
	$(PYTEST) -m nightly

kills: $(TESTABLE)
	MESHWRIGHT_FAULT_STRIDE=1 $(BIN)/python -m pytest -q -s -k 'ends_early or ends_at_any_step or the_old_or_the_new' \
		-m 'crossing or nightly' tests/checkpoint tests/integrations

resumes: $(TESTABLE)
	MESHWRIGHT_RESUME_STEPS=20 $(BIN)/python -m pytest -q -k equal_to_the_bit tests/checkpoint/test_resume.py

test-oldest: $(OLDEST_INSTALLED)
	$(OLDEST_BIN)/python -m pytest -q $(OLDEST_TESTS) -k 'not test_parity or llama or qwen3'

test-old-hf: $(OLD_HF_INSTALLED)
	$(OLD_HF_PYTEST)

test-newest: $(NEWEST_INSTALLED)
	$(NEWEST_BIN)/python -m pytest $(IN_PARALLEL) -m 'not crossing and not nightly'

coverage: $(TESTABLE)
	$(PYTEST) -m quick --cov --cov-report=term --cov-report=html:.coverage-html

# The newest versions of what it needs, as a user gets them; of torch the one that is chosen here.
wheel:
	rm -rf dist
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m pip install build
	.venv-wheel/bin/python -m build --outdir dist
	$(PYTHON) -m venv --clear .venv-wheel
	.venv-wheel/bin/python -m $(NEWER_PIP)
	.venv-wheel/bin/python -m pip install $(TORCH) dist/*.whl
	.venv-wheel/bin/python -m pip check
	.venv-wheel/bin/python -P .ci/try_wheel.py

# With make -j2 the types, which take most of the time, are checked beside the rest.
lint: types style

types: $(TESTABLE)
	$(BIN)/mypy

style: $(TESTABLE)
	$(BIN)/python .ci/sizes.py
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --site-dir .mkdocs_check && rm -rf .mkdocs_check  # --quiet drops warnings

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'open site/index.html'

bench-data: $(INSTALLED)
	$(BIN)/python -m benchmarks.loading

bench-checkpoints: $(INSTALLED)
	$(BIN)/python -m benchmarks.checkpoints

bench-planner: $(INSTALLED)
	$(BIN)/python -m benchmarks.planner $(if $(RUNS),--runs $(RUNS))
	$(BIN)/python -m benchmarks.footprint

bench-choice: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.own_choice

bench-context: $(INSTALLED)
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.context --figure equal
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.context --figure time --rounds 12
	$(BIN)/torchrun --nproc-per-node 4 -m benchmarks.context --figure scaling --rounds 6
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.context --figure balance --rounds 10

bench-experts: $(INSTALLED)
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.experts --figure equal
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.experts --figure time --rounds 24

bench-owners: $(INSTALLED)
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.owners
	$(BIN)/torchrun --nproc-per-node 2 -m benchmarks.owners --vocabulary 256

bench-referee: $(INSTALLED)
	$(BIN)/python -m benchmarks.referee

bench-host: $(INSTALLED)
	$(BIN)/python -m benchmarks.host_time

# With the Python at hand: a machine with a GPU has its own torch, and nothing is installed.
gpu:
	PYTHONPATH=plugin:integrations:. $(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m conformance.gpu $(GPU)

verify: $(INSTALLED)
	$(BIN)/python -m conformance.verify

families: $(INSTALLED)
	$(BIN)/python -m conformance.families.static
	$(BIN)/python -m conformance.families
	mkdir -p build
	-$(BIN)/python -m conformance.families.reach --results build/reach.jsonl
	$(BIN)/python -m conformance.families.reach_page build/reach.jsonl
	rm build/reach.jsonl
	-$(BIN)/python -m conformance.families.draws --results build/draws.jsonl
	$(BIN)/python -m conformance.families.draws_page build/draws.jsonl
	rm build/draws.jsonl

random-kills: $(INSTALLED)
	$(BIN)/python -m conformance.random_kills

clusters: $(TESTABLE)
	$(BIN)/python -m conformance.clusters slurm
	$(BIN)/python -m conformance.clusters ray

programs: $(INSTALLED)
	$(BIN)/python -m conformance.random_programs

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .venv-old-hf .venv-s3 .venv-oldest .venv-newest .venv-wheel runs build dist site .coverage* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	rm -rf *.egg-info

# The pip that comes with Python may be years old: 23.0 takes more than nine minutes to resolve the CUDA build of torch
# and downloads it twice, where 26.3 takes one and a half. Without a newer one, the old one works too.
NEWER_PIP = pip install --quiet --upgrade pip || echo 'pip was not upgraded; resolving torch may take long'

# torch goes first and alone, so that TORCH decides which one it is; the rest finds it installed.
$(INSTALLED):
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m $(NEWER_PIP)
	sed '/^torch==/d' constraints.txt > .venv/constraints.txt
	$(PIP) $(TORCH)
	$(PIP) --editable '.[hf,deepspeed,dev]'
	rm -f .venv/.installed-* .venv/.testable-*
	touch $@

$(TESTABLE): $(INSTALLED)
	$(PIP) --editable '.[hf,deepspeed,dev,test-libraries]'
	$(PIP) --no-deps --target .venv/triton triton==3.9.0  # apart, since torch behaves differently where it finds it
	touch $@

# Neither the new versions of the three nor those of what they require in other versions.
$(OLDEST_INSTALLED):
	test -x $(OLDEST_BIN)/pip || $(PYTHON) -m venv .venv-oldest
	$(OLDEST_BIN)/python -m $(NEWER_PIP)
	grep -vE '^(torch|transformers|accelerate|huggingface_hub|hf-xet|tokenizers|httpx2|httpcore2|deepspeed|trl)==' \
		constraints.txt > .venv-oldest/constraints.txt
	$(OLDEST_BIN)/python -m pip install --constraint .venv-oldest/constraints.txt $(OLDEST) \
		--editable '.[hf]' hypothesis peft pytest pytest-timeout
	rm -f .venv-oldest/.installed-*
	touch $@

# A path file adds what is installed in .venv, behind the old versions. pip takes it for installed and gets these alone.
$(OLD_HF_INSTALLED): $(TESTABLE)
	$(BIN)/python -m venv --clear .venv-old-hf  # of the same Python
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(OLD_HF_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(OLD_HF_BIN)/python -m pip install --quiet $(PIP_OPTIONS) $(OLD_HF) \
		|| { echo '$(OLD_HF) could not be installed from the package index (the lines above say why). The tests with' \
			'the oldest versions need it once. To run the others without it: make test, and pytest -m crossing' >&2; exit 1; }
	touch $@

test-s3: $(S3_INSTALLED)
	$(S3_BIN)/python -m pytest -q tests/checkpoint/test_s3.py

$(S3_INSTALLED): $(TESTABLE)
	$(BIN)/python -m venv --clear .venv-s3
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(S3_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(S3_BIN)/python -m pip install --quiet $(S3)
	touch $@

$(NEWEST_INSTALLED):
	test -x $(NEWEST_BIN)/pip || $(PYTHON) -m venv .venv-newest
	$(NEWEST_BIN)/python -m $(NEWER_PIP)
	grep -vE '^(torch|transformers)==' constraints.txt > .venv-newest/constraints.txt
	$(NEWEST_BIN)/python -m pip install --constraint .venv-newest/constraints.txt $(NEWEST) \
		--editable '.[hf,deepspeed,dev,test-libraries]'
	rm -f .venv-newest/.installed-*
	touch $@

# One test opens the planner's page in a browser. Where none can be installed it is skipped, the rest runs.
browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null \
		|| command -v google-chrome > /dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq -o Acquire::http::Timeout=20 \
			&& apt-get install --yes --no-install-recommends chromium; } \
		|| echo 'no chromium, and no way to install it here: the test that opens a page in a browser is skipped'

# The tests that start a Slurm of their own are skipped where it cannot be installed.
slurm:
	@command -v sbatch > /dev/null \
		|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq -o Acquire::http::Timeout=20 \
			&& apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge; } \
		|| echo 'no Slurm, and no way to install it here: the tests on a local cluster are skipped'
