# One command each; all can be repeated. The first one makes an environment and installs raysim.
#   make quickstart    runs the main job
#   make test          runs the tests
#   make check         looks at the source: ruff, mypy
# PYTHON=python3.13 makes a new environment, and VENV=FOLDER is where it is. TORCH=cpu, or cu128, names the build of PyTorch's wheels.
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
# What is never imported need not be compiled.
PIP = "$(VENV)/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check

HERE = echo "== $(VENV), `"$(VENV)/bin/python" --version`"
OLD = sys.exit('raysim needs Python 3.11 or newer, and $(PYTHON) is ' + sys.version.split()[0] + '. Name another: PYTHON=python3.12')
PAIR = $(if $(TORCH),torch torchvision --index-url https://download.pytorch.org/whl/$(TORCH))

.PHONY: quickstart test check
.DELETE_ON_ERROR:

quickstart: $(VENV)/raysim
	@$(HERE): raysim run configs/quickstart.yaml
	@"$(VENV)/bin/raysim" run configs/quickstart.yaml

test: $(VENV)/raysim-dev
	@$(HERE): pytest, about twelve minutes on two cores
	@. "$(VENV)/bin/activate" && pytest -q -n 3 --dist worksteal

check: $(VENV)/raysim-dev
	@$(HERE): ruff, mypy
	@"$(VENV)/bin/ruff" check && "$(VENV)/bin/ruff" format --check && "$(VENV)/bin/mypy"

$(VENV)/raysim: pyproject.toml
	@"$(PYTHON)" -c "import sys; sys.version_info >= (3, 11) or $(OLD)"
	@[ -x "$(VENV)/bin/pip" ] || { echo "== $(VENV), a new environment"; "$(PYTHON)" -m venv "$(VENV)"; }
	@$(if $(PAIR),echo "== PyTorch ($(TORCH))" && $(PIP) $(PAIR))
	@echo "== raysim; PyTorch with CUDA takes 6 GB, with TORCH=cpu 1 GB"
	@$(PIP) -e ".[report]"
	@touch "$@"

$(VENV)/raysim-dev: pyproject.toml $(VENV)/raysim
	@echo "== what the tests need"
	@$(PIP) -e ".[dev]"
	@touch "$@"
