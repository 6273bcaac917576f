#!/usr/bin/env bash
# Makes the virtual environment for a target of the Makefile, and installs the system packages that it needs where
# root allows: setup_environment.sh demo|build|realtime|test|test-all|gpu|bench|docs|lint. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
target="${1:?usage: setup_environment.sh demo|build|realtime|test|test-all|gpu|bench|docs|lint}"

# Every target needs these; the rest is left out where it is missing, by what needs it.
case "${python##*/}" in
  python3.*) packages=(g++ "${python##*/}-venv") ;; # not the system's: that of a name with a version
  *) packages=(g++ python3-venv) ;;
esac
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
  "$venv/bin/python" tools/tensorflow_versions.py > /dev/null || {
    ! "$python" tools/tensorflow_versions.py > /dev/null 2>&1 ||
      echo "It is the Python of the environment in '$venv'; for another one, '$python', first: rm -r '$venv'" >&2
    exit 1
  }
elif command -v "$python" > /dev/null; then
  "$python" tools/tensorflow_versions.py > /dev/null
elif [ "${python##*/}" != python3 ]; then
  echo "error: PYTHON is '$python', but there is no such program." >&2 && exit 1
fi

# pip may be missing after an interrupted set-up, or in an environment that another Python made.
has_environment() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version > /dev/null 2>&1; }
can_make_environments() { has_environment || "$python" -c 'import ensurepip, venv' 2> /dev/null; }
can_compile() {
  local compiler="${CXX:-g++}" # "ccache g++" has arguments
  command -v "${compiler%% *}" > /dev/null || command -v c++ > /dev/null || command -v clang++ > /dev/null
}

missing=()
for package in "${packages[@]}"; do
  case $package in
    g++) can_compile || missing+=(g++) ;;
    python3*-venv) can_make_environments || missing+=("$package") ;;
    *) ! command -v dpkg-query > /dev/null ||
      dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package") ;;
  esac
done
if [ "${#missing[@]}" -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "Missing for 'make $target', installed with apt-get: ${missing[*]}"
    # Without network most of the build works: what needs a package that is missing says so.
    log="${TMPDIR:-/tmp}/monolith-apt.$$.log"
    apt_install() {
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >> "$log" 2>&1
    }
    apt-get update -qq > "$log" 2>&1 || true # sources that cannot be reached may not be the ones needed
    failed=()
    # One that the distribution does not have keeps apt-get from installing any.
    apt_install "${missing[@]}" || for package in "${missing[@]}"; do
      apt_install "$package" || failed+=("$package")
    done
    if [ "${#failed[@]}" -gt 0 ]; then
      echo "apt-get could not install ${failed[*]} ($log): parts that need them are left out." >&2
    else
      rm -f "$log"
    fi
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
if ! has_environment; then
  if "$venv/bin/python" -c '' 2> /dev/null; then
    "$venv/bin/python" -m venv "$venv"
  else
    # Links to a Python that is gone, as after an upgrade of the system, would stay; and what was
    # installed for it does not count.
    rm -f "$venv"/bin/python* "$venv"/.for-*
    "$python" -m venv "$venv"
  fi
fi

# The packages that tools/requirements.py names, read from there so that it is written once.
requirements=$("$venv/bin/python" tools/requirements.py "${groups[@]}")
printf '%s\n' "$requirements" > "$venv/requirements-$target.txt"
"$venv/bin/python" tools/install_requirements.py -r "$venv/requirements-$target.txt"

# The checkout itself on the path: what `pip install -e .` does, without running the build here. The
# path of an environment inside is a relative one, so that both may be moved, or copied.
"$venv/bin/python" - << 'END'
import os, sysconfig

site, here = (os.path.realpath(path) for path in (sysconfig.get_path("purelib"), "."))
inside = site.startswith(os.path.join(here, ""))
with open(f"{site}/monolith-checkout.pth", "w", encoding="utf-8") as stream:
  print(os.path.relpath(here, site) if inside else here, file=stream)
END
