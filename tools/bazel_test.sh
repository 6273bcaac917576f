#!/usr/bin/env bash
# Builds and tests with Bazel, then fails when the two builds register different ops.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v bazel >/dev/null; then
  if [ "$(id -u)" != 0 ]; then
    echo "error: bazel is missing: sudo apt-get install bazel-bootstrap" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bazel-bootstrap
fi

export PYTHON_BIN_PATH="$PWD/.venv/bin/python"
export PROTOC="$PWD/.venv/bin/protoc"
bazel build //...
library=monolith/native_training/runtime/ops/libtfkernel_monolith_ops_for_load.so
.venv/bin/python tools/compare_ops.py "$library" "bazel-bin/$library"
bazel test //...
