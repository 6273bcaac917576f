#!/usr/bin/env bash
# Builds and tests with Bazel, then fails when the two builds register different ops. VENV is the environment, .venv by
# default.
set -euo pipefail
cd "$(dirname "$0")/.."
programs="$PWD/${VENV:-.venv}/bin"

if ! command -v bazel >/dev/null; then
  if [ "$(id -u)" != 0 ]; then
    echo "error: bazel is missing: sudo apt-get install bazel-bootstrap" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bazel-bootstrap
fi

export PYTHON_BIN_PATH="$programs/python"
export PROTOC="$programs/protoc"
bazel build //...
library=monolith/native_training/runtime/ops/libtfkernel_monolith_ops_for_load.so
"$programs/python" tools/compare_ops.py "$library" "bazel-bin/$library"
bazel test //...
