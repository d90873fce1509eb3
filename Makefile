# Two commands do everything on a fresh Debian 12, as root: `make demo` and `make test`. See scripts/ for the steps.

.DEFAULT_GOAL := help
.PHONY: help demo test wheels lint format build clean

help: ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## install, build, and compare eager, torch.compile and cuvil on a real model
	@scripts/demo.sh $(ARGS)

test: ## everything that continuous integration checks; STAGES="lint python" for some of it
	@scripts/test.sh $(STAGES)

wheels: ## one wheel for each of Python 3.11, 3.12 and 3.13 in dist/
	@scripts/wheels.sh

lint: ## formatting, style, types, layering
	@scripts/test.sh lint

format: ## rewrite what lint's formatters can
	@scripts/lint.sh "$$(scripts/python_env.sh "$$(scripts/find_python.sh 3.11 | sed -n 1p)")" --fix

build: ## an unstripped development build for one Python (PYTHON=python3.11) in build/dev
	@cmake -S . -B build/dev -G Ninja -DCUVIL_STRIP=OFF -DPython_EXECUTABLE="$$(command -v $(or $(PYTHON),python3.11))"
	@ninja -C build/dev

clean: ## remove build products; cached environments stay
	@rm -rf build dist
