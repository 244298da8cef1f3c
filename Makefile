.DEFAULT_GOAL := help
RUN := .venv/bin/python -m

help:  ## Show this list
	@sed -n 's/^\([a-z%-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
demo: setup  ## Train with and without trimtab, and compare (ARGS="--hold" keeps /metrics up)
	@$(RUN) trimtab demo $(ARGS)
test: setup  ## Run the tests (ARGS="-k name")
	@tools/setup_prometheus.sh
	@$(RUN) pytest $(ARGS)
check: lint types contracts protos-check floor wheel  ## Everything but the tests
lint: setup  ## Format and lint rules
	@.venv/bin/ruff format --check . && .venv/bin/ruff check .
types: setup  ## Static types
	@.venv/bin/mypy
contracts: setup  ## Who may import whom
	@.venv/bin/lint-imports --no-logo
protos: setup  ## Regenerate protos/*_pb2*
	@tools/protos.sh
protos-check: setup  ## Is the generated code fresh?
	@tools/protos.sh --check
policies: setup  ## Lay out policies/*.yaml, renew their pages and the JSON Schema
	@$(RUN) trimtab policy schema > policies/policy.schema.json
	@$(RUN) trimtab policy fmt policies/*.yaml
	@mkdir -p docs/policies && for file in policies/*.yaml; do $(RUN) trimtab policy docs $$file > docs/policies/$$(basename $$file .yaml).md; done
floor: setup  ## The agent on the oldest protobuf and grpcio
	@tools/floor.sh
wheel: setup  ## Build sdist and wheel, and look into the wheel
	@$(RUN) build --no-isolation --outdir dist . >/dev/null && $(RUN) pytest -q tests/test_packaging.py
bench: setup  ## Run the benchmarks (ARGS="--json")
	@set -e; for file in $$(grep -ls __main__ benchmarks/*.py); do $(RUN) benchmarks.$$(basename $$file .py) $(ARGS); done
bench-%: setup  ## Run one benchmark: make bench-probe
	@$(RUN) benchmarks.$* $(ARGS)
format: setup  ## Reformat
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .
clean:  ## Remove what was built
	@rm -rf .venv .venv-* build dist *.egg-info .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis trimtab-demo
setup:
	@tools/setup.sh

.PHONY: help demo test check lint types contracts protos protos-check policies floor wheel bench format clean setup
