# Two commands do everything: `make compare` and `make test`. Both use the active conda environment
# (unless it is conda's base), or create .venv with what this machine can use.
PYTHON ?= python3
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n "s/.*CUDA Version: *\([0-9]*\).*/\1/p")
ifeq ($(CUDA_MAJOR),)
  EXTRAS ?= host,nvrtc
else ifeq ($(CUDA_MAJOR),12)
  EXTRAS ?= cuda12
else
  EXTRAS ?= cuda13
endif
ifneq ($(filter-out base,$(CONDA_DEFAULT_ENV)),)
  RUN := python
else
  RUN := .venv/bin/python
  READY := .venv/ready
endif

WORKERS ?= 2

.PHONY: compare test lint clean
compare: $(READY)
	$(RUN) -m experiments compare $(ARGS)

test: $(READY)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[$(EXTRAS),torch,test]'
	touch $@

clean:
	rm -rf .venv
