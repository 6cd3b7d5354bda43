# Every target sets up what it needs: the virtual environment, the pinned dependencies, the native library.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
NATIVE := src/unequal/kernels/libunequal.so
PEERS  := .venv-peers

.PHONY: help train test test-gpu lint native bench peers cluster clean
help:      ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

$(STAMP): constraints.txt pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0 numpy setuptools
	command -v cmake >/dev/null || $(BIN)/pip install -q --disable-pip-version-check cmake
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[test,lint]"
	touch $@

$(NATIVE): $(STAMP) CMakeLists.txt $(wildcard csrc/*)
	PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B build -DCMAKE_BUILD_TYPE=Release >build.log 2>&1 \
	  && PATH="$(abspath $(BIN)):$$PATH" cmake --build build --parallel >>build.log 2>&1 || { cat build.log; rm -f build.log; exit 1; }
	@rm -f build.log
	@touch $@

native: $(NATIVE)  ## build the CPU kernels

train: $(NATIVE)   ## train the default recipe on generated data, on 2 ranks
	$(BIN)/unequal train default --ranks 2

# Files side by side in two processes; then, with nothing beside them, the tests that measure or bound time.
test: $(NATIVE)    ## run all tests
	$(BIN)/python -m pytest -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python -m pytest -m alone

# Straight from the source tree with the Python that is there: machines with GPUs often come with a torch of their own and let
# nothing be installed. PYTHON chooses another. Without a GPU the kernels run in Triton's interpreter and tests/gpu skips.
test-gpu:          ## run the tests of what runs on a GPU
	PYTHONPATH=src $(PYTHON) -m pytest tests/kernels tests/embeddings tests/width tests/gpu

lint: $(NATIVE)    ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

peers: $(PEERS)/installed  ## a second environment with TorchRec and FBGEMM, for side-by-side runs
$(PEERS)/installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
	$(PEERS)/bin/pip install -q --disable-pip-version-check --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
	$(PEERS)/bin/pip install -q --disable-pip-version-check tensordict torchmetrics==1.0.3 pyre-extensions iopath tqdm
	touch $@

cluster:           ## install what benchmarks/cluster.py needs: the commands ip and tc
	command -v ip >/dev/null && command -v tc >/dev/null || { apt-get update -qq && apt-get install -qq -y iproute2 >/dev/null; }

bench: $(NATIVE) $(PEERS)/installed cluster  ## remake the benchmarks beside FBGEMM and torch
	$(BIN)/python -m benchmarks

clean:
	rm -rf build $(VENV) $(PEERS) $(NATIVE)
