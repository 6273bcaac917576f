# Every target does its own set-up: a virtual environment with what this target needs, system packages where root
# allows, and an incremental build of the op library in the source tree. A new environment gets the newest TensorFlow
# that its Python has; `make TENSORFLOW=2.18 build` takes another, in an environment of its own, and so does
# `MONOLITH_TENSORFLOW=2.18 make build`.
SHELL := /bin/bash
TENSORFLOW ?= $(MONOLITH_TENSORFLOW)
ifndef PYTHON
PYTHON := $(shell python3 tools/tensorflow_versions.py --python $(TENSORFLOW) 2>/dev/null || echo python3)
endif
VENV := .venv$(if $(TENSORFLOW),-tf$(TENSORFLOW))
export MONOLITH_TENSORFLOW := $(TENSORFLOW)
RUN := $(VENV)/bin/python
JOBS ?= $(shell nproc)
# Each target and version has a file of its own; tools/tested_page.py makes rows of them.
RESULTS = --target $@ --results build/results/$@$(VENV:.venv%=%).json

# A build has steps in an order, and compiles on all cores by itself.
.NOTPARALLEL:

.PHONY: set-up help build runnable native server gpu gpu-test horovod torch jax demo demo-sync demo-realtime demo-realtime-faults test test-all test-chosen test-keras test-versions test-all-versions cpp-test soak sanitize sanitize-ops bazel-test lint format layers docs bench plots wheel clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

SET_UP := $(addprefix tools/,requirements.py tensorflow_versions.py setup_environment.sh install_requirements.py)
# Also where its Python is gone, as after an upgrade of the system.
$(VENV)/.for-%: $(SET_UP) $(if $(realpath $(RUN)),,set-up)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/setup_environment.sh $*
	@touch $@

# Compiled modules and op wrappers start every process a second sooner, also where Python is told to
# write no bytecode.
define compile_modules
	@env -u PYTHONDONTWRITEBYTECODE $(RUN) -m compileall -q monolith idl
	@env -u PYTHONDONTWRITEBYTECODE $(RUN) -c 'from monolith.native_training.runtime.ops import gen_monolith_ops'
endef

build: $(VENV)/.for-build native ## virtual environment in .venv, everything compiled in place, GPU kernels where there is a GPU; TENSORFLOW=2.18 for another TensorFlow than the newest
	$(compile_modules)

runnable: $(VENV)/.for-demo ## like build, with no more installed than the demos need
	$(RUN) tools/native_build.py --jobs $(JOBS)
	$(compile_modules)

native: ## the op library and protobuf modules only, in an environment that exists
	$(RUN) tools/native_build.py --jobs $(JOBS)

server: $(VENV)/.for-build native ## the model server, which build has too, and fails where nghttp2 is missing
	$(RUN) tools/native_build.py --server --jobs $(JOBS)

gpu: $(VENV)/.for-gpu ## like build, and fails where the GPU kernels cannot be compiled
	$(RUN) tools/native_build.py --cuda --jobs $(JOBS)

gpu-test: gpu ## every test that needs a GPU; says so where there is none
	$(RUN) tests/gpu/run.py

demo: runnable ## train the demo models; ARGS=--gpu with the dense parts on a GPU
	$(RUN) -m monolith.native_training.demo $(ARGS)

demo-sync: runnable ## train the ranking model of the demo on two ranks, with Horovod where make horovod was
	$(RUN) -m monolith.native_training.demos.sync

demo-realtime: $(VENV)/.for-realtime runnable ## a click to a served row in seconds: broker, joiner, trainer, replicas, every process killed once
	$(RUN) -m examples.realtime.demo

demo-realtime-faults: $(VENV)/.for-realtime runnable ## each promise of real time put to the test: kills, processes that stand still, poison, all at once
	$(RUN) -m examples.realtime.demo --faults=all --seconds=30

horovod: $(VENV)/.for-demo ## Horovod in the environment, built once and kept in ~/.cache/monolith
	$(RUN) -c 'import horovod.tensorflow' 2>/dev/null || \
	  $(RUN) tools/install_requirements.py ./third_party/horovod

# By pip, which knows the places where a build of PyTorch without CUDA may be kept.
torch: $(VENV)/.for-demo ## PyTorch in the environment, for monolith.torch
	$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install --quiet 'torch==2.13.0'

# Beside NumPy 1, which TensorFlow up to 2.17 needs, an older one.
jax: $(VENV)/.for-demo ## JAX in the environment, for monolith.jax
	$(RUN) -c 'import jax' 2>/dev/null || $(RUN) -m pip install --quiet \
	  "$$($(RUN) -c 'import numpy; print("jax<0.4.35" if numpy.__version__ < "2" else "jax==0.10.2")')"

test: $(VENV)/.for-test build ## what every change must pass: C++ tests, and all Python tests but those marked as thorough
	$(RUN) tools/native_build.py --cpp-tests --jobs $(JOBS)
	$(RUN) -m pytest tests --preload tests.preloaded --quick $(RESULTS)

# The kernels' sources are tested as loops everywhere; that nvcc takes them, here. JAX comes last: where it is
# installed, TensorFlow imports it, which takes each of the many processes of the other tests a second.
test-all: export MONOLITH_CUDA = 1
test-all: $(VENV)/.for-test-all build ## everything: C++ tests, Python tests, the wheel, ranks with Horovod
	$(MAKE) horovod || \
	  { echo "Horovod could not be installed: tests with several ranks are left out" >&2; [ "$$CI" != true ]; }
	$(MAKE) torch || \
	  { echo "PyTorch could not be installed: its tests are left out" >&2; [ "$$CI" != true ]; }
	$(RUN) tools/native_build.py --cpp-tests --jobs $(JOBS)
	$(RUN) -m pytest tests --preload tests.preloaded $(RESULTS)
	$(MAKE) jax || \
	  { echo "JAX could not be installed: its tests are left out" >&2; [ "$$CI" != true ]; }
	$(RUN) -m pytest tests/jax tests/docs/pages_test.py tests/examples/pytorch_test.py --preload tests.preloaded

test-chosen: $(VENV)/.for-test build ## the tests of tests/chosen.txt, a seventh; with TENSORFLOW=2.15 on that one
	$(RUN) -m pytest $$(grep '^tests' tests/chosen.txt) --preload tensorflow $(RESULTS)

test-keras: $(VENV)/.for-test build ## the tests of Keras with Keras 2, which newer TensorFlows have as tf_keras
	TF_USE_LEGACY_KERAS=1 $(RUN) -m pytest tests/keras --preload tests.preloaded $(RESULTS)

# Goes on after a version that fails, and ends with the names of those that did.
define on_versions
@failed=; for version in $$(python3 tools/tensorflow_versions.py $(1)); do \
  $(MAKE) TENSORFLOW=$$version $(2) || failed="$$failed $$version"; \
done; [ -z "$$failed" ] || { echo "$(2) failed on TensorFlow$$failed" >&2; exit 1; }
endef

test-versions: ## those on the oldest TensorFlow and on one in the middle, each in an environment of its own
	+$(call on_versions,--chosen,test-chosen)

test-all-versions: ## test-all on every TensorFlow, with the Pythons of PATH; hours
	+$(call on_versions,--all,test-all)

cpp-test: $(VENV)/.for-test build ## the engine's GoogleTest programs
	$(RUN) tools/native_build.py --cpp-tests --jobs $(JOBS)

soak: $(VENV)/.for-test build ## tests at full length, in C++ too: hundreds of kills, 300 random calls of every op, an attack on the model server, all examples and notebooks
	MONOLITH_SOAK=1 $(RUN) tools/native_build.py --cpp-tests --jobs $(JOBS)
	$(RUN) tools/native_build.py --server --sanitize address --jobs $(JOBS)
	MONOLITH_SOAK=1 $(RUN) -m pytest tests/reliability tests/examples tests/docs/deploy_test.py tests/docs/commands_test.py \
	  tests/agent_service/backends_sessions_test.py tests/keras/training_test.py tests/native_training/demo_test.py \
	  tests/native_training/demos/sync_test.py tests/realtime/trainer_test.py

sanitize: $(VENV)/.for-test build ## the GoogleTest programs under Address-, UndefinedBehavior- and ThreadSanitizer
	$(RUN) tools/native_build.py --cpp-tests --sanitize address --jobs $(JOBS)
	$(RUN) tools/native_build.py --cpp-tests --sanitize undefined --jobs $(JOBS)
	$(RUN) tools/native_build.py --cpp-tests --sanitize thread --jobs $(JOBS)

sanitize-ops: $(VENV)/.for-test build ## the op library under AddressSanitizer, with the tests of hostile input
	VENV="$(VENV)" bash tools/sanitize_ops.sh

bazel-test: $(VENV)/.for-test build ## build and test the same sources with Bazel
	VENV="$(VENV)" bash tools/bazel_test.sh

# The sources that mypy checks: a wrong type there would go unnoticed until a cluster runs.
TYPED := $(addprefix monolith/native_training/, checkpoints driver graph graph_estimator settings tables distributed_ps.py distributed_ps_factory.py distributed_ps_near.py \
  distributed_ps_sync.py embedding_combiners.py estimator.py feature.py feature_utils.py multi_type_hash_table.py native_model.py prefetch_queue.py \
  data layers model_export) \
  monolith/_tensorflow.py monolith/agent_service monolith/launch monolith/keras monolith/realtime monolith/row_log monolith/serving \
  monolith/table monolith/torch monolith/jax examples/realtime

# C++ streams meet the locale facets of another libstdc++ beside TensorFlow's x86-64 wheel, and crash. Exceptions of
# kernels end the process unless they are registered with REGISTER_GUARDED_KERNEL.
lint: $(VENV)/.for-lint ## ruff, mypy, clang-format, no C++ streams and no unguarded kernels in the op library
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) tools/native_build.py --protos --jobs $(JOBS)
	$(RUN) -m mypy $(TYPED)
	! git grep -nE '#include <(codecvt|fstream|iomanip|ios|iosfwd|iostream|istream|locale|ostream|regex|sstream|streambuf|strstream)>' \
	  -- monolith/native_training/runtime monolith/serving/native
	! git grep -n 'REGISTER_KERNEL_BUILDER' -- monolith/native_training/runtime
	git ls-files '*.h' '*.cc' '*.cu' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/.for-lint ## let ruff and clang-format mend what they can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	git ls-files '*.h' '*.cc' '*.cu' | xargs $(VENV)/bin/clang-format -i

layers: ## which folder imports which: floors, circles, edges that run up; drawn in build/layers.svg
	$(PYTHON) tools/import_layers.py --draw build/layers.svg

docs: $(VENV)/.for-docs ## the documentation as a site in build/site; fails at a broken link
	$(RUN) -m mkdocs build --strict

bench: $(VENV)/.for-bench build ## every benchmark, printed as ratios
	$(RUN) benchmarks/run.py

plots: ## tables and drawings of measured figures in README.md and docs/, from benchmarks/results.json
	python3 tools/figures.py

wheel: $(VENV)/.for-build ## a platform wheel in dist/
	MONOLITH_PORTABLE_WHEEL=1 $(RUN) -m pip wheel --no-deps --no-build-isolation -w dist .

clean: ## everything that was built
	rm -rf build dist *.egg-info bazel-*
	find monolith idl -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' \
	  -o -name '*.so' -o -name _build_info.py -o -path '*/__pycache__/*' | xargs rm -f
