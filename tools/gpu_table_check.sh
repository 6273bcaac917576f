#!/bin/bash
# Builds the GPU table without TensorFlow and Python, checks it against the engine's table and
# measures it. Needs nvcc (on PATH, in CUDA_HOME or /usr/local/cuda), g++ and a GPU.
#
#   tools/gpu_table_check.sh FOLDER [all | build | check | long | sanitize | bench | variants]...
#
#   check      random calls against the engine, and what the table promises beside
#   long       the same with growth to 50 million rows, and ids chosen to collide
#   sanitize   compute-sanitizer's memcheck, racecheck and initcheck on small sequences, in two minutes
#   bench      the figures of benchmarks/README.md
#   variants   one line of the index at a time, or more
#
# Objects, the program and the logs go to FOLDER. MONO_GPU_ARCH: the architecture, sm_90 if unset.
set -euo pipefail

out=${1:?usage: tools/gpu_table_check.sh FOLDER [all | build | check | long | sanitize | bench | variants]...}
shift
what=" ${*:-all} "
cd "$(dirname "$0")/.."
mkdir -p "$out/objects"
out=$(cd "$out" && pwd)
nvcc=$(command -v nvcc || true)
for folder in "${CUDA_HOME:-}" /usr/local/cuda; do
  [ -n "$nvcc" ] || { [ -x "$folder/bin/nvcc" ] && nvcc=$folder/bin/nvcc; } || true
done
[ -n "$nvcc" ] || { echo "no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda" >&2; exit 1; }

runtime=monolith/native_training/runtime
arch=${MONO_GPU_ARCH:-sm_90}
compile() {  # the object of a source
  local object=$out/objects/$(echo "$1" | tr '/' '_').o
  case $1 in
    *.cc) g++ -std=c++17 -O3 -ffp-contract=off -I. -c "$1" -o "$object" ;;
    *.cu) "$nvcc" -std=c++17 -O3 --fmad=false -arch="$arch" -Xptxas -v -diag-suppress 2810 -I. -c "$1" -o "$object" \
      ${MONO_GPU_FLAGS:-} 2> "$object.log" || { cat "$object.log" >&2; return 1; } ;;
  esac
}
export -f compile
export out nvcc arch
find $runtime/{base,allocator,concurrency,hash_filter,hash_table} -name '*.cc' ! -name table_files.cc > "$out/sources"
ls $runtime/gpu/*table*.cu $runtime/gpu/{c_api,sort}.cu benchmarks/gpu_table.cu >> "$out/sources"
xargs -P "$(nproc)" -I{} bash -c 'compile {}' < "$out/sources"
"$nvcc" -arch="$arch" -o "$out/gpu_table" "$out"/objects/*.o -lpthread -ldl
grep -hE 'Compiling|Used' "$out"/objects/*.log | paste - - |
  sed -E "s/.*function '([^']*)'.*Used ([0-9]+) registers(.*)/\2 \3 \1/" > "$out/registers.txt" || true

run() { echo "== gpu_table $*"; timeout "${MONO_GPU_LIMIT:-60}" "$out/gpu_table" "$@"; }
status=0
wants() { case "$what" in *" all "* | *" $1 "*) return 0 ;; *) return 1 ;; esac; }
if wants check; then
  { run check && run check-skewed && run check-bad && run properties && run streams; } 2>&1 | tee "$out/check.txt" || status=1
fi
if wants long; then
  { run properties 50000000 && run adversarial 10000000; } 2>&1 | tee "$out/long.txt" || status=1
fi
if wants sanitize; then
  sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$nvcc")/compute-sanitizer")
  sanitize() {  # one tool on one mode; its output goes to a file, and how it ended is printed
    local log
    log=$out/sanitize.$(echo "$*" | tr ' ' '_').log
    local code=0
    MONOLITH_SANITIZED=1 timeout -s KILL "${MONO_GPU_LIMIT:-100}" "$sanitizer" --tool "$1" --error-exitcode 9 "$out/gpu_table" "${@:2}" \
      > "$log" 2>&1 || code=$?
    echo "== $1: gpu_table ${*:2}: $([ $code = 0 ] && echo passed || echo "FAILED with $code") after $SECONDS s"
    [ $code = 0 ] || tail -n 40 "$log"
    return $code
  }
  # They wait more than they compute, so all run at a time; a file tells of one that failed.
  SECONDS=0
  rm -f "$out/sanitize.failed"
  {
    for tool in memcheck racecheck initcheck; do
      # Together they launch every kernel of tables.
      modes=("check 0 2" "check 2 8" "check 8 14" "check 28 32" "check-skewed 0 7" "check-skewed 7 14" "check-bad 0 3"
        "check-bad 28 30" "check-bad 48 51" "properties 3000 sgd" "properties 3000 adagrad" "properties 3000 many" "properties 3000 sums"
        "properties 3000 refusal" "properties 3000 admission" "properties 3000 determinism" "properties 3000 memory"
        "properties 3000 growth" streams)
      # Half a minute for a dozen calls: what has every kernel whose lanes share memory.
      [ $tool != racecheck ] || modes=("check 2 3" "check-skewed 3 4" "check-bad 1 2" "properties 3000 many"
        "properties 3000 sums" streams)
      for mode in "${modes[@]}"; do
        # shellcheck disable=SC2086
        { sanitize $tool $mode || touch "$out/sanitize.failed"; } &
      done
    done
    wait
  } 2>&1 | tee "$out/sanitize.txt"
  [ ! -e "$out/sanitize.failed" ] || status=1
fi
if wants bench; then
  {
    run bench 16 10000000
    run bench 16 100000000
    run bench 64 10000000
    run bench 64 100000000
    run insert 16 100000000
    run tables 100
    run skewed 64
    run skewed 16
  } 2>&1 | tee "$out/bench.txt" || status=1
fi
case "$what" in
  *" variants "*)
    {
      run variants 16 100000000
      run variants 64 100000000
    } 2>&1 | tee "$out/variants.txt" || status=1
    ;;
esac
exit $status
