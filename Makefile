# Each target is one line; CONTRIBUTING.md says when to use which.
.PHONY: setup test quick lint docs bench

setup:
	python3.11 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[dev]'
test:
	python -m pytest -n auto
quick:
	python -m pytest -q -x -n auto -m "not slow"
lint:
	ruff check . && ruff format --check . && pyright && lint-imports
docs:
	mkdocs build --strict
bench:
	python experiments/benchmarks/cpu_step.py
