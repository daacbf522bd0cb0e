# Two commands: `make demo` runs the whole pipeline on a real small model, `make test` checks everything.
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test setup clean

demo: setup
	$(PY) -m segrew demo --scale small --output_dir runs/demo --overwrite_output_dir true

test: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "segrew needs Python 3.11 or newer; python3 here is %d.%d" % sys.version_info[:2])'
	python3 -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs
