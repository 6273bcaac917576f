#!/usr/bin/env bash
# Builds the op library with AddressSanitizer and runs tests on it: `sanitize_ops.sh [TEST FILE...]`,
# by default those of tables, of parsing and distribution ops, and of bad input to all ops. VENV is the
# environment, .venv by default.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${VENV:-.venv}/bin/python"
"$python" tools/native_build.py --sanitize address --jobs "${JOBS:-$(nproc)}"

tests=("$@")
if [ "${#tests[@]}" = 0 ]; then
  tests=(
    tests/native_training/*hash*_test.py
    tests/native_training/tables/*hash*_test.py
    tests/native_training/distribution_ops*_test.py
    tests/native_training/runtime/ops/op_bad_input*_test.py
    tests/native_training/data
  )
fi
MONOLITH_OP_LIBRARY="$PWD/build/tf$("$python" tools/tensorflow_versions.py --target)/ops-address/libtfkernel_monolith_ops_for_load.so"
export MONOLITH_OP_LIBRARY
export MONOLITH_PARQUET_LIBRARY="$PWD/monolith/native_training/runtime/ops/libmonolith_parquet.so"
# Python and TensorFlow are not instrumented: the runtime has to be there before them, and with it the
# C++ library whose exceptions it intercepts; what they never free is not ours to report.
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1:${ASAN_OPTIONS:-}"
cxx="${CXX:-g++}"
preload="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so.6)"
LD_PRELOAD="$preload" "$python" -m pytest "${tests[@]}"
