# make demo, make test: on a fresh machine (python >= 3.10, a C++ compiler) each sets up all it needs in .venv.
# Variables: PYTHON (interpreter to start from), VENV (where the environment goes), TORCH (what pip installs as torch),
# and the environment's SPEC_KERNELS_BUILD, SPEC_KERNELS_CUDA_ARCHS (setup.py).

VENV ?= .venv
TORCH ?= torch==2.13.0
PYTHON ?=
DIST ?= dist
TEST_SECONDS ?= 1200
TESTS ?= tests
TEST_JOBS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?= --out gpu-report

PY := $(VENV)/bin/python
BUILD := $(PY) setup.py -q build_ext --inplace

# The caller's Python settings must not leak into the environment made here.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONSAFEPATH VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test sanitize lint format bench gpu wheel build libraries clean distclean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make demo    decode real text on 8 ranks, plainly and speculatively"
	@echo "make test    run the test suite (TESTS=path narrows it, TEST_JOBS=4 takes as many processes)"
	@echo "make sanitize  malformed calls for every CPU op, and the CUDA sources run on the host, under AddressSanitizer and UBSan (gcc)"
	@echo "make lint    ruff and clang-format, check only; make format applies them"
	@echo "make bench   check, then time, every op (BENCH_ARGS=--help)"
	@echo "make gpu     on a machine with a GPU: check, capture and time every kernel in five minutes (GPU_ARGS)"
	@echo "make wheel   build a wheel into $(DIST)/"
	@echo "make clean   remove what was built; make distclean also removes $(VENV)"

demo: build
	@$(PY) -m spec_kernels decode $(DEMO_ARGS)

# The time limit ends a hung run; coreutils' timeout is absent on some systems, and the run is then unlimited.
test: build
	@limit=$$(command -v timeout || true); \
	$${limit:+"$$limit" --foreground -k 30 $(TEST_SECONDS)} $(PY) -m pytest -q -rfEs -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(TESTS); code=$$?; \
	[ $$code -ne 124 ] || echo "make test: ended after $(TEST_SECONDS) s"; exit $$code

# Compiles into build/sanitize, apart from the package; SANITIZE_ARGS=--simd takes this machine's instruction set.
sanitize: $(VENV)/ready
	@$(PY) tests/sanitize.py build/sanitize $(SANITIZE_ARGS)
	@$(PY) tests/sanitize.py --cuda-on-host $(SANITIZE_HOST_ARGS)

CXX_FILES = git ls-files -z -- '*.h' '*.cpp' '*.cu' '*.cuh'

lint: $(VENV)/ready
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(CXX_FILES) | xargs -0 -r $(VENV)/bin/clang-format --dry-run -Werror
	@echo "lint: clean"

format: $(VENV)/ready
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(CXX_FILES) | xargs -0 -r $(VENV)/bin/clang-format -i

bench: build
	@$(PY) benchmarks/run.py $(BENCH_ARGS)

gpu: build
	@$(PY) benchmarks/gpu_check.py $(GPU_ARGS)

wheel: $(VENV)/ready
	@$(PY) -m pip wheel -q --no-build-isolation --no-deps -w $(DIST) .
	@ls -1 $(DIST)/*.whl

# CMake knows what is out of date; with nothing to do this takes about a second.
build: $(VENV)/ready
	@$(BUILD)

# Compiles with no more than torch and the build's own tools: with make -j beside the packages, which want one core.
# Installing the package removes libraries, so that build has the last word.
libraries: $(VENV)/made-for
	@$(BUILD)

# An environment made elsewhere, for another torch or from another Python is made again; other edits only add packages.
$(VENV)/ready: pyproject.toml $(VENV)/made-for
	@echo "installing the packages that pyproject.toml names into $(VENV)"
	@echo "torch==$$($(PY) -c 'from importlib.metadata import version; print(version("torch"))')" > $(VENV)/constraints.txt
	@SPEC_KERNELS_BUILD=none $(PY) -m pip install -q --no-build-isolation -c $(VENV)/constraints.txt -e '.[test,dev]'
	@touch $@

$(VENV)/made-for: FORCE
	@python=; for p in $(PYTHON) $(if $(PYTHON),,python3 python3.13 python3.12 python3.11 python3.10 python); do \
	  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { python=$$p; break; }; done; \
	[ -n "$$python" ] || { echo "make: no Python >= 3.10 found (make PYTHON=/path/to/python3.12)"; exit 1; }; \
	wanted="$(CURDIR) $(TORCH) $$("$$python" -V)"; \
	if [ "$$(cat $@ 2>/dev/null)" = "$$wanted" ] && $(PY) -c '' 2>/dev/null; then exit 0; fi; \
	echo "making $(VENV) with $$("$$python" -V), installing $(TORCH) (minutes where no CPU build is at hand)"; rm -rf $(VENV); \
	{ "$$python" -m venv $(VENV) && $(PY) -m pip install -q "$(TORCH)" 'setuptools>=70.1' 'cmake>=3.18' ninja; } || { rm -rf $(VENV); exit 1; }; \
	echo "$$wanted" > $@

clean:
	rm -rf build $(DIST) *.egg-info spec_kernels/_C_*.so spec_kernels/_host*.so

distclean: clean
	rm -rf $(VENV)
