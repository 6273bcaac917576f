#!/usr/bin/env bash
# Installs system packages (where root allows) and makes the virtual environment. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv="${VENV:-.venv}"

# GoogleTest and Google Benchmark for the C++ tests, nghttp2 and the headers of OpenSSL for the model
# server in C++, ZooKeeper for the discovery tests, Bazel for the second build.
packages=(g++ python3-venv libgtest-dev libbenchmark-dev libnghttp2-dev libssl-dev zookeeper default-jre-headless)
missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
      missing+=("$package")
  done
fi
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "Not root: if the build or a test misses something, run" \
      "'sudo apt-get install ${missing[*]}'." >&2
  # Without network most of the build works: what needs a package that is missing says so.
  elif ! { apt-get update -qq &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; then
    echo "apt-get could not install ${missing[*]}: parts that need them are left out." >&2
  fi
fi

if ! "$python" -c 'import sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 11))'; then
  echo "error: Monolith needs Python 3.9, 3.10 or 3.11, but $python is" \
    "$("$python" -V 2>&1); set PYTHON=/path/to/python3.11." >&2
  exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# What pyproject.toml names, read from there so that it is written once.
requirements=$("$venv/bin/python" tools/requirements.py build runtime test lint kafka parquet serving debugging cuda docs)
printf '%s\n' "$requirements" > "$venv/requirements.txt"
"$venv/bin/python" tools/install_requirements.py -r "$venv/requirements.txt"

# The checkout itself on the path: what `pip install -e .` does, without running the build here.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pwd > "$site/monolith-checkout.pth"
