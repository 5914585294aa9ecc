# `make test` and `make demo` do all the set-up on a fresh machine with python3, pip, make and git.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
# Half of the tests, by the time they take; the other half is all that is not here.
HALF := tests/benchmarks tests/lab tests/models

.PHONY: install test half rest demo lint docs package results clean

install: .venv/installed

# torch goes first and alone, so that nothing later chooses another build of it.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev,docs]"
	touch $@

test: install
	$(MAKE) --jobs=2 --keep-going half rest

half: install
	@echo "$(HALF): as soon as all of them are done"
	@$(BIN)/python -m pytest $(HALF) > .venv/half.log 2>&1; code=$$?; cat .venv/half.log; exit $$code

rest: install
	$(BIN)/python -m pytest $(HALF:%=--ignore=%)

demo: install
	$(BIN)/kerneq demo

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation site, in build/docs: open index.html. A warning is an error, and so is a link that leads nowhere.
docs: install
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	$(BIN)/python .ci/site.py

# The wheel and the sdist, installed and used outside of the repository; after `make docs`, whose notebooks are tried.
package: install
	$(BIN)/python .ci/package.py

# docs/results.md, its other pages and the accuracies of `kerneq models`, from the records of runs in this repository.
results: install
	rm -rf docs/results-pages
	$(BIN)/python -m records

clean:
	rm -rf .venv build docs/gallery *.egg-info .mypy_cache .pytest_cache .ruff_cache
