# Everything runs in .venv, which the first target that needs it sets up. `make help` lists the targets.
#
#   PYTHON=python3.12   the interpreter that the environment is made from (3.10 or newer)
#   VENV=.venv          where it lives. Empty (`make run VENV=`): use PYTHON's own packages, where torch and the rest
#                       are installed already; then only this package itself is installed, without dependencies
#   ARGS="..."          handed on to the command: make run ARGS="--steps 50", make test ARGS="-k mask"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
EXTRAS := cuda,cli,dev

VENV := $(strip $(VENV))
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
STAMP := $(if $(VENV),$(VENV)/.flashattn_hopper,build/.flashattn_hopper)
STAGE := build/lint
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := install -c constraints.txt -e '.[$(EXTRAS)]'

# Why: Python puts the folder it starts in first on its path; `kernels` there is our device code, elsewhere another
# project's package. Tests must see what an installed package sees (Python 3.11 and newer; older ones ignore it).
export PYTHONSAFEPATH := 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run test gpu lint compile native bench docs clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo '  ARGS="..." is handed on; PYTHON=... and VENV=... choose the environment (see the top of the Makefile)'

setup: $(STAMP) ## set up the environment (the other targets do it by themselves)

ifneq ($(VENV),)
# Why two installs: one that succeeds without an index proves that the environment is complete, so an edited
# pyproject.toml does not cost a network, or a build environment of its own. On a new one it fails at once.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "needs Python 3.10 or newer; choose one with PYTHON=python3.12" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
	  || { echo "python -m venv failed (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@$(PY) -c 'import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [21, 3])' \
	  || $(PIP) install --quiet --upgrade pip
	@$(PIP) --quiet $(INSTALL) --no-index --no-build-isolation >/dev/null 2>&1 \
	  || { echo "installing into $(VENV) (torch and the kernel compiler: some minutes the first time)"; \
	       $(PIP) $(INSTALL); }
	@touch $@
else
$(STAMP): pyproject.toml
	@cd / && $(PY) -c 'import flashattn_hopper.kernels.sm90' 2>/dev/null \
	  || (cd '$(CURDIR)' && $(PIP) install --no-deps --no-build-isolation -e .)
	@mkdir -p $(@D) && touch $@
endif

run: $(STAMP) ## train a small GPT on real text through hopper_attention
	$(PY) -m flashattn_hopper train $(ARGS)

test: $(STAMP) lint ## lint, then every test that needs no GPU
	$(PY) -m pytest -n $(JOBS) -m "not gpu" $(ARGS)

# Eight processes share the GPU: what takes time is the float64 that results are compared with. On the CPU each of them
# would take every core.
gpu: $(STAMP) ## the tests that need a Hopper GPU
	OMP_NUM_THREADS=2 $(PY) -m pytest -n 8 -m gpu $(ARGS)

compile: $(STAMP) ## compile the kernels (no GPU needed)
	$(PY) -m pytest -n $(JOBS) -m compile $(ARGS)

# The layer contracts are read from installed folders, so they run on a staged copy, started inside it.
lint: $(STAMP) ## ruff, and the layer contracts of pyproject.toml
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@rm -rf build/lib build/bdist.* $(STAGE)
	@$(PIP) --quiet install --no-deps --no-index --no-build-isolation --no-compile --target $(STAGE) .
	@cp pyproject.toml $(STAGE)
	cd $(STAGE) && PYTHONPATH=. $(if $(VENV),$(abspath $(PY)),$(PY)) \
	  -c 'from importlinter.cli import lint_imports_command as main; main()' --no-cache

# CUTLASS lies in a folder of its own: names in its package are close to those of the kernel compiler's packages.
CUTLASS := build/_deps/cutlass
native: $(STAMP) ## build and test the C++ library (no GPU needed); ARGS are CMake's: ARGS=-DFLASHATTN_HOPPER_VARIANTS=training
	@test -e $(CUTLASS)/cutlass_library || $(PIP) install --quiet --no-deps -c constraints.txt --target $(CUTLASS) nvidia-cutlass \
	  || echo "no CUTLASS headers: the tests that compare with CUTLASS will be skipped" >&2
	cmake -S . -B build/native -DPython3_EXECUTABLE=$(if $(VENV),$(abspath $(PY)),$(shell command -v $(PY))) $(ARGS)
	cmake --build build/native
	ctest --test-dir build/native --output-on-failure

bench: $(STAMP) ## measure: make bench ARGS="forward backward memory" (needs a Hopper GPU)
	$(PY) bench/run.py $(ARGS)

docs: $(STAMP) ## write the generated tables
	$(PY) docs/generate.py $(ARGS)

clean: ## remove build outputs and caches; runs/ and the environment stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find flashattn_hopper kernels tests bench docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environment
	$(if $(VENV),rm -rf $(VENV))
