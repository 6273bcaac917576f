#!/usr/bin/env bash
# Makes the virtual environment for a target of the Makefile, and installs the system packages that it needs where
# root allows: setup_environment.sh demo|build|realtime|test|test-all|gpu|bench|docs|lint. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
target="${1:?usage: setup_environment.sh demo|build|realtime|test|test-all|gpu|bench|docs|lint}"

# Every target needs these; the rest is left out where it is missing, by what needs it.
packages=(g++ python3-venv)
groups=(build runtime)
server=(libnghttp2-dev libssl-dev) # for the model server
extras=(kafka parquet serving debugging report)
case $target in
  demo) ;;
  build) packages+=("${server[@]}") groups+=("${extras[@]}") ;;
  realtime) packages+=("${server[@]}" default-jre-headless) groups+=("${extras[@]}" realtime) ;;
  # GoogleTest for the tests in C++, ZooKeeper for those of discovery, sshd for jobs on several hosts.
  test) packages+=("${server[@]}" libgtest-dev libbenchmark-dev zookeeper default-jre-headless openssh-server)
    groups+=("${extras[@]}" realtime test docs) ;;
  test-all) packages+=("${server[@]}" libgtest-dev libbenchmark-dev zookeeper default-jre-headless openssh-server)
    groups+=("${extras[@]}" realtime test docs lint cuda) ;;
  gpu) packages+=("${server[@]}" libgtest-dev) groups+=("${extras[@]}" test cuda) ;;
  bench) packages+=("${server[@]}" libbenchmark-dev) groups+=("${extras[@]}" realtime test) ;;
  docs) groups+=(docs) ;;
  lint) groups+=("${extras[@]}" realtime test lint) ;;
  *) echo "error: no set-up for '$target'." >&2 && exit 2 ;;
esac

# First what no package manager can mend.
if [ -x "$venv/bin/python" ]; then
  "$venv/bin/python" tools/tensorflow_versions.py > /dev/null
elif command -v "$python" > /dev/null; then
  "$python" tools/tensorflow_versions.py > /dev/null
fi

can_make_environments() { [ -x "$venv/bin/python" ] || "$python" -c 'import ensurepip, venv' 2> /dev/null; }
can_compile() { command -v "${CXX:-g++}" > /dev/null || command -v c++ > /dev/null || command -v clang++ > /dev/null; }

missing=()
for package in "${packages[@]}"; do
  case $package in
    g++) can_compile || missing+=(g++) ;;
    python3-venv) can_make_environments || missing+=(python3-venv) ;;
    *) ! command -v dpkg-query > /dev/null ||
      dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package") ;;
  esac
done
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "Missing for 'make $target', installed with apt-get: ${missing[*]}"
    # Without network most of the build works: what needs a package that is missing says so.
    { apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        > "${TMPDIR:-/tmp}/monolith-apt.$$.log" 2>&1 && rm -f "${TMPDIR:-/tmp}/monolith-apt.$$.log"; } ||
      echo "apt-get could not install ${missing[*]} (${TMPDIR:-/tmp}/monolith-apt.$$.log):" \
        "parts that need them are left out." >&2
  else
    echo "Missing for 'make $target': ${missing[*]} (Debian and Ubuntu: sudo apt-get install ${missing[*]})." >&2
  fi
  can_compile && can_make_environments || {
    echo "error: without a C++17 compiler and Python's venv there is nothing to do." >&2
    exit 1
  }
  # A Python that came just now.
  [ -x "$venv/bin/python" ] || "$python" tools/tensorflow_versions.py > /dev/null
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# The packages that tools/requirements.py names, read from there so that it is written once.
requirements=$("$venv/bin/python" tools/requirements.py "${groups[@]}")
printf '%s\n' "$requirements" > "$venv/requirements-$target.txt"
"$venv/bin/python" tools/install_requirements.py -r "$venv/requirements-$target.txt"

# The checkout itself on the path: what `pip install -e .` does, without running the build here.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
pwd > "$site/monolith-checkout.pth"
