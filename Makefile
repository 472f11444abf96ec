# What a newcomer runs: make demo, make test. The rest is described in CONTRIBUTING.md.

PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin

# All that the extension module is built from.
SOURCES := Cargo.toml Cargo.lock pyproject.toml README.md $(shell find rust -name '*.rs' -o -name Cargo.toml)

.PHONY: demo test test-rust test-loom test-python test-peers check format wheel bench clean
.DEFAULT_GOAL := test

demo: $(VENV)/.installed
	$(BIN)/kvsplice demo

test: test-rust test-loom test-python

test-rust: toolchain
	cargo test --release -p kvsplice

test-loom: toolchain
	RUSTFLAGS="--cfg loom" cargo test --release -p kvsplice --lib --target-dir target/loom -- --test-threads=1 models

test-python: $(VENV)/.test
	$(BIN)/python -m pytest

# Everything that needs gigabytes: LMCache, torch.
test-peers: $(PEERS)/.installed $(PEERS)/lmcache-0.5.2
	LMCACHE_TRACK_USAGE=false $(PEERS)/bin/python -m pytest tests/peers tests/test_lmcache_adapter.py

check: $(VENV)/.check wheel
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTFLAGS="--cfg loom" cargo clippy -p kvsplice --lib --tests --target-dir target/loom -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	cd $(VENV) && bin/python -m mypy.stubtest kvsplice._core
	$(BIN)/python .ci/check_docs.py
	$(BIN)/python .ci/check_unsafe.py
	$(PYTHON) .ci/check_wheel.py dist/*.whl

format: $(VENV)/.check
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# One wheel for all Pythons from 3.10 and all Linux systems with glibc 2.28 or newer. Zig serves as the linker, so the
# system that builds it may be newer.
wheel: $(VENV)/.wheel
	rm -rf dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin build --release --locked --zig --compatibility manylinux_2_28 --out dist

bench: $(PEERS)/.installed
	cargo bench -p kvsplice
	LMCACHE_TRACK_USAGE=false $(PEERS)/bin/python benches/compare_lmcache_matcher.py
	LMCACHE_TRACK_USAGE=false $(PEERS)/bin/python benches/compare_lmcache_engine.py

clean:
	rm -rf $(VENV) $(PEERS) dist target

.PHONY: toolchain
toolchain:
	@command -v cargo >/dev/null || { echo "kvsplice is built with Rust 1.88 or newer: see https://rustup.rs" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "Rust needs a C compiler to link with: install gcc or clang" >&2; exit 1; }

%/.made:
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES) | toolchain
	$(BIN)/python -m pip install --quiet --editable ".[text,plot]"
	touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group test
	touch $@

$(VENV)/.check: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --group check
	touch $@

$(VENV)/.wheel: $(VENV)/.made pyproject.toml | toolchain
	$(BIN)/python -m pip install --quiet --group wheel
	touch $@

$(PEERS)/.installed: $(PEERS)/.made tests/peers/requirements.txt $(SOURCES) | toolchain
	$(PEERS)/bin/python -m pip install --quiet --no-deps --requirement tests/peers/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --editable . --group test
	touch $@

# An earlier LMCache, for the same environment: its blend module still runs without compiled operations.
$(PEERS)/lmcache-0.5.2: $(PEERS)/.made
	$(PEERS)/bin/python -m pip install --quiet --no-deps --target $@ lmcache==0.5.2

.PRECIOUS: %/.made
