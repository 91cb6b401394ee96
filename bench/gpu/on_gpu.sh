#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and benchmarks on a machine with a GPU, from what `./dev gpu-pack` packed; nothing is built there.
#
#   run tests [NAME...]      every GPU test
#   run sanitize [TOOL...]   compute-sanitizer's tools (memcheck where none is given) over the tests, four at once
#   run bench [NAME...]      every benchmark, as $OUT/NAME.json
#
# A line for each part: ok, skipped or FAILED, and its seconds. Logs and results go to $OUT (default: results); exit code 1 where
# a part failed. Tests and benchmarks over real caches need TIERKV_DUMPS at packing time.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
OUT=$(realpath -m "${OUT:-results}")
COMMIT=$(cat commit)
mkdir -p "$OUT"
export LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Extracts of real caches, if there are any.
TIERKV_ATTENTION_EXTRACTS=$(ls extract_*.bin 2>/dev/null | paste -sd: || true)
export TIERKV_ATTENTION_EXTRACTS
failed=0

part() {  # part LOG COMMAND...
  local log=$1 start=$SECONDS status word=ok
  shift
  "$@" >"$OUT/$log.log" 2>&1
  status=$?
  if [ $status -eq 77 ]; then word=skipped; elif [ $status -ne 0 ]; then word=FAILED failed=1; fi
  printf '%-8s %4d s  %s\n' "$word" $((SECONDS - start)) "$log"
  if [ "$word" = FAILED ]; then grep -E 'FAILED|Failure|rror' "$OUT/$log.log" | head -n 12; fi
}

wanted() {  # wanted NAME LIST...: where no list is given, everything
  local name=$1 x
  shift
  [ $# -eq 0 ] && return 0
  for x in "$@"; do [ "$x" = "$name" ] && return 0; done
  return 1
}

run_tests() {
  local t
  for t in test_gpu_*; do
    if wanted "${t#test_gpu_}" "$@"; then part "$t" "./$t"; fi
  done
}

# Runs a test's cases named Small*, or all where it has none. The attention kernels have more barriers than synccheck follows where
# it is not told otherwise; it then breaks the kernel.
sanitize_test() {  # sanitize_test TOOL TEST
  local tool=$1 t=$2 filter='*' options=(--error-exitcode 9)
  if "./$t" --gtest_filter='*Small*' --gtest_list_tests | grep -q '^ '; then filter='*Small*'; fi
  if [ "$tool" = synccheck ]; then options+=(--num-cuda-barriers 16384); fi
  failed=0
  part "$tool.$t" compute-sanitizer --tool "$tool" "${options[@]}" "./$t" --gtest_filter="$filter"
  return $failed
}

run_sanitize() {
  local tool t
  export -f part sanitize_test
  export OUT
  for tool in "${@:-memcheck}"; do
    for t in test_gpu_*; do printf '%s\0%s\0' "$tool" "$t"; done
  done | xargs -0 -n 2 -P 4 bash -c 'sanitize_test "$@"' sanitize_test || failed=1
}

run_bench() {
  local b name
  nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,temperature.gpu --format=csv >"$OUT/gpu.csv" 2>&1
  for b in bench_*; do
    name=${b#bench_}
    wanted "$name" "$@" || continue
    case $name in
      weighted_attention)
        part "${b}_64" "./$b" --codes weighted_64.bin --out "$OUT/${name}_64.json" --commit "$COMMIT"
        if [ -e weighted.bin ]; then part "$b" "./$b" --codes weighted.bin --out "$OUT/$name.json" --commit "$COMMIT"; fi
        ;;
      *) part "$b" "./$b" --out "$OUT/$name.json" --commit "$COMMIT" ;;
    esac
  done
  for name in peers peers_prompt; do
    if [ -d python ] && wanted "$name" "$@"; then
      part "$name" env PYTHONPATH=python python3 -B "${name}_torch.py" --out "$OUT/$name.json" --commit "$COMMIT"
    fi
  done
}

command=${1:-help}
[ $# -gt 0 ] && shift
case $command in
  tests) run_tests "$@" ;;
  sanitize) run_sanitize "$@" ;;
  bench) run_bench "$@" ;;
  *) sed -n '2,/^set /p' "$0" | grep '^#' | cut -c3- ;;
esac
exit $failed
