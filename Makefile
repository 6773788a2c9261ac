# Every target works alone on a machine with only make and Python 3.10 or newer: it creates the environment it needs.
# A stamp file remembers what was installed, so that nothing is installed twice until pyproject.toml or
# constraints.txt change.

PYTHON ?= python3
# In how many processes the tests run, a file in each at a time: many tests wait for other processes.
JOBS ?= 4
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# What is installed is compiled as it is imported first, and that is kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo demo-rl docs environments test test-fast redis chromium test-slow test-pythons test-torches test-clients test-clients-slow differ \
	lint format bench bench-keep bench-compare bench-clients bench-programs bench-remote bench-rows
.DEFAULT_GOAL := help

help:
	@echo "make demo           train on a memory-mapped data set, save and reload (under a minute)"
	@echo "make demo-rl        train an agent with TorchRL (at most two minutes)"
	@echo "make docs           build the documentation site in build/docs (its first page: build/docs/index.html)"
	@echo "make test           run the tests;                choose with TESTS='-k index'"
	@echo "make test-fast      run the tests that need torch alone, in about two minutes; it takes TESTS, too"
	@echo "make test-slow      run the tests that take minutes, which make test leaves out"
	@echo "make test-wheels    install the wheel, with all it needs, into clean environments of every Python that is found"
	@echo "make test-pythons   run the tests with every Python that is found; choose with PYTHONS='3.10 3.14'"
	@echo "make test-torches   run what depends on torch with 2.11, 2.13, 2.14 and 2.15; choose with TORCHES='2.11 2.15'"
	@echo "make redis          install the server that the tests start, where there is none"
	@echo "make chromium       install the browser in which the tests open pages, where there is none"
	@echo "make test-clients   run programs of TorchRL and BenchMARL here and on the reference"
	@echo "make test-clients-slow   run those that take more than two seconds each, which make test-clients leaves out"
	@echo "make differ         run random programs here and on the reference; choose with DIFFER='--seconds 60 --seed 7'"
	@echo "make lint           check format, style, types and the plan of the house"
	@echo "make format         bring the code in format"
	@echo "make bench          measure against the reference; choose with BENCH='--families indexing'"
	@echo "make bench-keep     keep the figures of the last make bench in benchmarks/kept"
	@echo "make bench-compare  say what moved in the last make bench since the run that is kept"
	@echo "make bench-clients  measure TorchRL on this package and on the reference"
	@echo "make bench-remote   measure saving, loading and training over a slow link beside other libraries"
	@echo "make bench-rows     measure a data set of 10^9 rows in 10^5 shards"
	@echo "make bench-programs sample whole programs of TorchRL, verl, rsl_rl: what takes the time of a step"

demo: .venv-demo/installed
	.venv-demo/bin/python examples/digits.py

demo-rl: .venv-clients/installed
	.venv-clients/bin/python examples/rl.py

# Warnings are errors; the gallery runs, so it is quicker where nothing has changed. DOCS='-E' reads every page afresh.
docs: .venv-docs/installed
	OMP_NUM_THREADS=1 .venv-docs/bin/python -m sphinx -W --keep-going -j 2 -d build/doctrees -b html $(DOCS) docs build/docs
	@echo "open build/docs/index.html, or: python -m http.server --directory build/docs"

# The tests of both directions of the disk formats need the reference beside us, those of containers on servers a server.
test: .venv/installed .venv-reference/installed .venv-mds/installed redis chromium
	.venv/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

# Tests that need torch alone, in an environment that has torch, numpy and pytest: the contract of all containers in
# memory, and the files of these rooms. Kinds of containers whose library is missing are skipped.
FAST = contract core memory/test_pickling.py nn ops $(addprefix containers/test_,\
	concatenated.py lazy_stacks.py nontensor.py parsing.py tensorclass.py unbatched.py uneven_stacks.py)
# These need h5py, scipy, matplotlib or pyarrow, or start processes.
NOT_FAST = core/test_torch_internals.py nn/test_distributions.py $(addprefix contract/test_,\
	every_method.py plotting.py saving.py stateful.py table_files.py)
# Of the kinds of the contract suite, these are left out: they combine what other kinds have.
SLOW_KINDS = -named or -locked or -frozen or -on-device or -inside or -in-lazy or -dim-1 or unit-dim or [typed or tensorclass-lazy
test-fast: .venv-fast/installed
	TENSORDICT_TORCH_ALONE=1 .venv-fast/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q \
		-m "not slow and not seconds and not reference" -k "not ($(SLOW_KINDS))" $(NOT_FAST:%=--ignore=tests/%) $(FAST:%=tests/%) $(TESTS)

# Tests marked `slow`: hundreds of rounds of what `make test` runs a few of.
test-slow: .venv/installed .venv-jupyter/installed chromium
	.venv/bin/python -m pytest -n $(JOBS) -m slow $(TESTS)

# Python of other versions: on the PATH as python3.10 and so on, of pyenv, or in TENSORDICT_TEST_PYTHONS=path:path. `make
# test` does the same with torches that lie there already.
test-wheels: .venv/installed
	TENSORDICT_TEST_TORCH=1 .venv/bin/python -m pytest tests/wheels $(TESTS)

# The tests with each of these Pythons, in environments of their own (.venv-pythons); choose with PYTHONS='3.10 3.14'
# and TESTS.
test-pythons: .venv/installed redis
	.venv/bin/python tests/wheels/pythons.py $(PYTHONS) -- $(TESTS)

# Contract, compile, functional, nn, memmap, parallel and pickle tests with each of these torches, in environments of
# their own (.venv-torches, about 5 GB each); choose with TORCHES='2.11 2.15' and TESTS.
test-torches: .venv/installed redis
	.venv/bin/python tests/wheels/torches.py $(TORCHES) -- $(TESTS)

# All that `make lint`, `make test` and `make test-clients` need; `make --jobs 2 environments` installs two at a time.
environments: .venv/installed .venv-reference/installed .venv-mds/installed .venv-clients/installed \
	.venv-clients-reference/installed redis chromium

# The server of the system's package redis-server; what is on the PATH is taken as it is. Where there are no rights to
# install it, conda has one for every user.
redis:
	@command -v redis-server >/dev/null || { \
		echo "installing redis-server, which the tests start"; \
		if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
		$$sudo apt-get install --quiet --yes redis-server >/dev/null || { \
			$$sudo apt-get update --quiet >/dev/null && $$sudo apt-get install --quiet --yes redis-server >/dev/null; \
		} || { \
			echo "the tests need redis-server on the PATH, and it cannot be installed from here. With rights:" >&2; \
			echo "  apt-get install redis-server (Debian, Ubuntu), dnf install redis, brew install redis" >&2; \
			echo "without them: conda install -c conda-forge redis-server, and its bin folder on the PATH" >&2; \
			exit 1; \
		}; \
	}

# The browser of the system's packages chromium and chromium-driver, in which tests open what they built.
chromium:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		echo "installing chromium and chromium-driver, in which the tests open pages"; \
		if [ "$$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi; \
		$$sudo apt-get install --quiet --yes chromium chromium-driver >/dev/null || { \
			$$sudo apt-get update --quiet >/dev/null && $$sudo apt-get install --quiet --yes chromium chromium-driver >/dev/null; \
		} || { \
			echo "the tests need chromium and chromedriver on the PATH, and they cannot be installed from here. With rights:" >&2; \
			echo "  apt-get install chromium chromium-driver (Debian), dnf install chromium chromedriver" >&2; \
			exit 1; \
		}; \
	}

# Programs of libraries that are built on this API, each run on this package and on the reference.
test-clients: .venv/installed .venv-clients/installed .venv-clients-reference/installed
	.venv/bin/python -m pytest tests/clients $(TESTS)

# Those that take more than two seconds each: training, torch.compile.
test-clients-slow: .venv/installed .venv-clients/installed .venv-clients-reference/installed
	.venv/bin/python -m pytest -m slow tests/clients $(TESTS)

# Random programs, each run on this package and on the reference; prints where they differ.
differ: .venv/installed .venv-reference/installed
	.venv/bin/python tests/differ $(DIFFER)

lint: .venv/installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy --strict src/
	.venv/bin/python tests/house/check.py

format: .venv/installed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: .venv/installed .venv-reference/installed
	.venv/bin/python benchmarks/run.py $(BENCH)

bench-keep bench-compare: bench-%: .venv/installed
	.venv/bin/python benchmarks/kept.py $* $(BENCH)

bench-clients: .venv/installed .venv-clients/installed .venv-clients-reference/installed
	.venv/bin/python benchmarks/clients.py

bench-rows: .venv/installed
	.venv/bin/python benchmarks/many_rows.py $(BENCH)

bench-remote: .venv/installed .venv-remote/installed
	.venv-remote/bin/python benchmarks/remote.py $(BENCH)

bench-programs: .venv/installed .venv-clients/programs .venv-clients-reference/programs
	.venv/bin/python benchmarks/programs.py $(BENCH)

# verl and rsl_rl ask for other versions of this package, and for what their other parts need.
.venv-clients/programs .venv-clients-reference/programs: %/programs: %/installed
	$*/bin/python -m pip install --quiet --no-compile --no-deps verl==0.9.1 rsl-rl-lib==5.5.1
	$*/bin/python -m pip install --quiet --no-compile ray transformers omegaconf GitPython tensorboard py-spy==0.4.3 --constraint constraints.txt
	touch $@

# The pages show results of these extras, and of no others.
.venv-docs/installed: pyproject.toml constraints.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --editable '.[docs,zarr,h5,polars,hf,safetensors]' --constraint constraints.txt
	touch $@

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[dev]' --constraint constraints.txt
	touch $@

# Torch, numpy and what runs the tests.
.venv-fast/installed: pyproject.toml constraints.txt
	test -x .venv-fast/bin/python || $(PYTHON) -m venv .venv-fast
	.venv-fast/bin/python -m pip install --quiet --no-compile --editable . pytest pytest-xdist hypothesis --constraint constraints.txt
	touch $@

# What the demo needs and nothing else. Nothing is compiled ahead, and where Python's own pip can install into another
# environment (from 22.3 on) that gets none of its own: each would take a third of the time.
.venv-demo/installed: pyproject.toml constraints.txt
	test -x .venv-demo/bin/python || $(PYTHON) -m venv --without-pip .venv-demo
	@pip="$(PYTHON) -m pip --python .venv-demo/bin/python"; \
	$$pip --version >/dev/null 2>&1 || { \
		.venv-demo/bin/python -m ensurepip >/dev/null; pip=".venv-demo/bin/python -m pip"; \
	}; \
	set -x; $$pip install --quiet --no-compile --editable '.[demo]' --constraint constraints.txt
	touch $@

# The implementation that this one is measured against, never read: its public behaviour and speed only. Speed is that of
# 0.15.3, behaviour that of 0.14.3, which comes to lie beside it, on the same torch: .venv-behaviour has nothing but the
# way to it, before the way to the rest.
.venv-reference/installed: Makefile constraints.txt
	test -x .venv-reference/bin/python || $(PYTHON) -m venv .venv-reference
	.venv-reference/bin/python -m pip install --quiet --no-compile tensordict==0.15.3 torch numpy h5py zarr safetensors redis ray pandas pyarrow orjson importlib_metadata packaging --constraint constraints.txt
	.venv-reference/bin/python -m pip install --quiet --no-compile --no-deps --upgrade --target .venv-reference/tensordict-0.14.3 tensordict==0.14.3 --constraint constraints.txt
	.venv-reference/bin/python -m venv --without-pip .venv-behaviour
	printf '%s\n' $(CURDIR)/.venv-reference/tensordict-0.14.3 "$$(.venv-reference/bin/python -c $(PURELIB))" > "$$(.venv-behaviour/bin/python -c $(PURELIB))/reference.pth"
	touch $@

# MosaicML's streaming, whose requirements go against ours (numpy < 2.2), beside what .venv has: of these it needs few.
.venv-mds/installed: .venv/installed Makefile
	test -x .venv-mds/bin/python || .venv/bin/python -m venv --without-pip .venv-mds
	.venv/bin/python -c $(PURELIB) > "$$(.venv-mds/bin/python -c $(PURELIB))/base.pth"
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target "$$(.venv-mds/bin/python -c $(PURELIB))" \
		mosaicml-streaming==0.13.0 brotli catalogue cramjam pillow python-snappy zstd
	touch $@

# The libraries that `benchmarks/remote.py` compares with, beside MosaicML's streaming.
.venv-remote/installed: .venv-mds/installed Makefile
	test -x .venv-remote/bin/python || .venv/bin/python -m venv --without-pip .venv-remote
	printf '%s\n' $(CURDIR)/src "$$(.venv-mds/bin/python -c $(PURELIB))" "$$(.venv/bin/python -c $(PURELIB))" > "$$(.venv-remote/bin/python -c $(PURELIB))/base.pth"
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target "$$(.venv-remote/bin/python -c $(PURELIB))" \
		webdataset==1.0.2 braceexpand==0.1.7
	touch $@

# JupyterLab, beside what .venv has: its notebooks run on this package.
.venv-jupyter/installed: .venv/installed Makefile
	test -x .venv-jupyter/bin/python || .venv/bin/python -m venv .venv-jupyter
	.venv-jupyter/bin/python -m pip install --quiet --no-compile jupyterlab==4.6.6
	.venv/bin/python -c $(PURELIB) > "$$(.venv-jupyter/bin/python -c $(PURELIB))/base.pth"
	touch $@

# Client libraries over this package. BenchMARL asks for an older TorchRL, so its own requirements are left out; what it
# needs is in the extra `clients`. Nothing is compiled ahead: that would double the time.
.venv-clients/installed: pyproject.toml constraints.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --no-compile --editable '.[clients]' --constraint constraints.txt
	.venv-clients/bin/python -m pip install --quiet --no-compile --no-deps benchmarl --constraint constraints.txt
	touch $@

# The same versions of the same libraries, over the reference.
.venv-clients-reference/installed: .venv-clients/installed
	test -x .venv-clients-reference/bin/python || $(PYTHON) -m venv .venv-clients-reference
	.venv-clients/bin/python -m pip freeze --exclude-editable > .venv-clients-reference/requirements.txt
	.venv-clients-reference/bin/python -m pip install --quiet --no-compile --no-deps --requirement .venv-clients-reference/requirements.txt
	.venv-clients-reference/bin/python -m pip install --quiet --no-compile tensordict==0.14.3 --constraint constraints.txt
	touch $@
