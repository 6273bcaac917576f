#!/usr/bin/env bash
# Builds Horovod against the TensorFlow of the virtual environment and installs it there. Building takes
# minutes, so the wheel is kept in the user's cache, named after what it was built against.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${VENV:-.venv}"
python="$venv/bin/python"
version=0.28.1

if "$python" -c 'import horovod.tensorflow' 2>/dev/null; then
  exit 0
fi
key=$("$python" - <<'PY'
import importlib.metadata as m, platform, sys
print(f"tf{m.version('tensorflow')}-py{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}")
PY
)
cache="${XDG_CACHE_HOME:-$HOME/.cache}/monolith/horovod-$version-$key"
if ! compgen -G "$cache/horovod-*.whl" >/dev/null; then
  if ! command -v cmake >/dev/null; then
    if [ "$(id -u)" != 0 ]; then
      echo "error: building Horovod needs cmake: sudo apt-get install cmake" >&2
      exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends cmake make
  fi
  "$python" -m pip install --quiet --disable-pip-version-check \
    cloudpickle pyyaml psutil cffi packaging 'setuptools<81' wheel
  # Into a folder of its own first: an interrupted build must not look like a cached wheel.
  build=$(mktemp -d)
  trap 'rm -rf "$build"' EXIT
  HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 \
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$build" "horovod==$version"
  mkdir -p "$cache"
  mv "$build"/horovod-*.whl "$cache/"
fi
"$python" -m pip install --quiet --disable-pip-version-check \
  cloudpickle pyyaml psutil cffi packaging "$cache"/horovod-*.whl
