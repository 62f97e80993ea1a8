#!/usr/bin/env bash
# Sets up a GPU host that has no network, runs the GPU tests, measures the goals, runs the demo.
#
# usage: scripts/gpu.sh --out DIR [--packs DIR] [--what tests,goals,demo] [--shard i/n] [...]
#        scripts/gpu.sh --status            which GPU tests have no passing record (no GPU needed)
#        scripts/gpu.sh --merge DIR         add the results of another run's --out to reports/
#
#   --packs DIR     packed archives: each folder DIR/NAME with a setup.sh is unpacked into the site
#                   folder; pure-Python wheels in DIR/wheels are installed beside them; a file
#                   DIR/NAME/part is a part of the demo's GGUF file, joined in the order of NAME.
#                   What an earlier call unpacked stays, so packs may come in several calls
#   --out DIR       where the results are copied: tests.json, goals.json, goals_rows.json, the
#                   demo's demo_float32.json, demo_bfloat16.json (GPU) and demo_cpu.json, logs
#   --what LIST     steps, of: setup (nothing else), tests, goals, demo, sanitize (default
#                   tests,goals); setup and demo need no GPU, and without one the demo runs on the
#                   CPU alone; sanitize runs the kernels under compute-sanitizer
#   --shard i/n     run the i-th of n parts of the tests; parts add up in reports/<gpu>/tests.json
#   --only-stale    leave out tests that have a passing record for today's sources
#   --jobs N        run tests that time nothing in N processes (needs pytest-xdist; default 1)
#   --large         also run the tests marked gpu_large (over 8 GiB of GPU memory each)
#   --tests PATH    tests to run (default tests/gpu)
#   --goals LIST    ids or patterns, separated by commas (default: all)
#   --model PATH    the demo's model (default: the joined parts, else the installed package)
#   --budget-s S    begin no row of the goals after S seconds
#   --commit SHA    what to write as the commit where git's folder did not travel
#   --site DIR      where packages are unpacked (default: fusedops-site in the temporary folder)
#   --python EXE    interpreter (default python3)
#   --dry-run       print the steps instead of running them
#
# The checkout is not installed: it goes on PYTHONPATH. Exit status: 0 all green, 1 a test or the
# demo failed or a goal that is built was not met, 2 bad input, 3 the setup failed.
set -euo pipefail

fail() {
  echo "gpu.sh: $2" >&2
  exit "$1"
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
packs='' out='' what=tests,goals shard='' only_stale='' large='' tests=tests/gpu goals='' budget=''
commit='' jobs='' model='' site="${TMPDIR:-/tmp}/fusedops-site" python=python3 dry_run='' status='' merge=''
while (($#)); do
  case $1 in
    --packs | --out | --what | --shard | --tests | --goals | --budget-s | --commit | --site | \
      --python | --merge | --jobs | --model)
      (($# > 1)) || fail 2 "$1 needs a value"
      name=${1#--}
      printf -v "${name%-s}" %s "$2"
      shift 2
      ;;
    --only-stale) only_stale=1 && shift ;;
    --large) large=1 && shift ;;
    --dry-run) dry_run=1 && shift ;;
    --status) status=1 && shift ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail 2 "unknown option $1; --help lists the options" ;;
  esac
done
[[ -z $jobs || $jobs =~ ^[1-9][0-9]*$ ]] || fail 2 "--jobs $jobs; accepted is a number from 1"
for step in ${what//,/ }; do
  [[ $step =~ ^(setup|tests|goals|demo|sanitize)$ ]] ||
    fail 2 "unknown step '$step'; accepted are setup, tests, goals, demo, sanitize"
done
asked() {
  [[ ,$what, == *,$1,* ]]
}
[[ -z $shard || $shard =~ ^[0-9]+/[0-9]+$ ]] || fail 2 "--shard $shard; accepted is i/n, e.g. 2/4"

# Paths that the caller gave are relative to where it stands.
absolute() {
  [[ $1 == /* ]] && printf %s "$1" || printf %s "$PWD/$1"
}
[[ -z $packs ]] || packs=$(absolute "$packs")
[[ -z $out ]] || out=$(absolute "$out")
[[ -z $merge ]] || merge=$(absolute "$merge")
[[ -z $model ]] || model=$(absolute "$model")
cd "$root"

run() {
  if [[ $dry_run ]]; then
    printf '+%s\n' "$(printf ' %q' "$@")"
  else
    "$@"
  fi
}

# A sourced file changes this shell, so it cannot go through run.
load() {
  if [[ $dry_run ]]; then
    echo "+ source $1"
  else
    set +u
    # shellcheck disable=SC1090
    source "$1"
    set -u
  fi
}

export PYTHONUNBUFFERED=1
[[ -z $commit ]] || export FUSEDOPS_COMMIT=$commit

# Where the GPU's results lie; reports of the reference GPU are shown where there is none.
reports_of_this_gpu() {
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" - <<'P'
import torch

from fusedops.bench.environment import gpu_slug

found = torch.cuda.is_available()
print("reports/" + gpu_slug(torch.cuda.get_device_name() if found else "NVIDIA H200"))
P
}

if [[ $status ]]; then
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  [[ $dry_run ]] && reports=reports/GPU || reports=$(reports_of_this_gpu)
  run exec "$python" -m pytest "$tests" -q -p no:cacheprovider -m 'gpu or gpu_large' \
    --stale "$reports/tests.json"
  exit 0
fi

if [[ $merge ]]; then
  export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
  run exec "$python" -m fusedops.bench.merge "$merge"
  exit 0
fi

[[ $out ]] || fail 2 "--out DIR is missing: results of a host that is given back must go somewhere"

# 1. The packages that this host lacks.
join_parts() {
  local joined=$site/model/$demo_file parts=("$site"/model/*.part)
  [[ -e ${parts[0]} ]] || return 0
  echo "the demo's model: $joined, joined from $(basename -a -s .part "${parts[@]}" | paste -sd ' ')"
  cat "${parts[@]}" >"$joined.tmp" && mv "$joined.tmp" "$joined"
}
# The name that the demo's report shows, as in the package that the parts were cut from.
demo_file=SmolLM2-135M-Instruct.Q4_1.gguf
if [[ $packs ]]; then
  [[ -d $packs || $dry_run ]] || fail 2 "--packs $packs is no folder"
  for setup in "$packs"/*/setup.sh; do
    [[ -e $setup ]] || continue
    run bash "$setup" "$site" || fail 3 "$setup failed"
  done
  for part in "$packs"/*/part; do
    [[ -e $part ]] || continue
    run mkdir -p "$site/model"
    run cp "$part" "$site/model/$(basename "$(dirname "$part")").part"
  done
fi
[[ $dry_run ]] || join_parts
if [[ $packs || -d $site ]]; then
  # FlashInfer's environment loads the plain one too: one of them is enough.
  for environment in env_flashinfer.sh env.sh; do
    if [[ -f $site/$environment || $dry_run ]]; then
      load "$site/$environment"
      break
    fi
  done
  wheels=("$packs"/wheels/*.whl)
  if [[ $packs && -e ${wheels[0]} ]]; then
    run "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade \
      --target "$site/site-packages" "${wheels[@]}" || fail 3 "the wheels could not be installed"
  fi
  [[ ! -d $site/site-packages || :${PYTHONPATH:-}: == *":$site/site-packages:"* ]] ||
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$site/site-packages"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

run mkdir -p "$out"
[[ $dry_run ]] && reports=reports/GPU || reports=$(reports_of_this_gpu)
gpu=1
if [[ ! $dry_run && $what != setup ]]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || gpu=''
  if [[ ! $gpu ]] && { asked tests || asked goals || asked sanitize; }; then
    fail 3 "torch sees no CUDA device here; without one only setup and demo run"
  fi
fi

# Rows are kept as they come, so what a run that is cut off has measured is not lost.
keep_results() {
  local names=()
  asked tests && names+=(tests.json)
  asked goals && names+=(goals.json goals_rows.json)
  for name in ${names[@]+"${names[@]}"}; do
    if [[ -f $reports/$name || $dry_run ]]; then
      run cp "$reports/$name" "$out/$name"
    fi
  done
}
trap keep_results EXIT
trap 'exit 143' TERM

# 2. The steps. Each leaves its log and goes on, so that the table at the end is whole.
logged() {
  local log=$1 state=0
  shift
  if [[ $dry_run ]]; then
    printf '+%s\n' "$(printf ' %q' "$@")"
    return 0
  fi
  "$@" 2>&1 | tee "$log" || state=${PIPESTATUS[0]}
  return "$state"
}

tests_state='not asked for' goals_state=$tests_state demo_state=$tests_state
sanitize_state=$tests_state red=0
if asked tests; then
  marks='gpu and not gpu_large'
  [[ $large ]] && marks='gpu or gpu_large'
  options=(-q -p no:cacheprovider --record "$reports/tests.json")
  [[ $shard ]] && options+=(--shard "$shard")
  [[ $only_stale ]] && options+=(--only-stale)
  tests_state=passed
  # Times are void beside other processes, so tests that take any come last and alone.
  passes=("$marks")
  ((${jobs:-1} > 1)) && passes=("($marks) and not timing" "($marks) and timing")
  for index in "${!passes[@]}"; do
    parallel=()
    ((${#passes[@]} > 1 && index == 0)) && parallel=(-n "$jobs" --dist worksteal)
    logged "$out/tests$index.log" "$python" -m pytest "$tests" "${options[@]}" \
      ${parallel[@]+"${parallel[@]}"} -m "${passes[index]}" || {
      code=$?
      # 5: no test belongs to this shard, or none is stale.
      if ((code != 5)); then tests_state="failed (pytest exit status $code)" red=1; fi
    }
  done
fi
if asked goals; then
  options=(--reports "$reports")
  [[ $budget ]] && options+=(--budget-s "$budget")
  patterns=()
  [[ $goals ]] && IFS=, read -ra patterns <<<"$goals"
  goals_state=met
  logged "$out/goals.log" "$python" scripts/goals.py ${patterns[@]+"${patterns[@]}"} \
    "${options[@]}" || goals_state='not all met' red=1
fi
if asked demo; then
  [[ $model || ! -f $site/model/$demo_file ]] || model=$site/model/$demo_file
  # On a GPU float32 too: there the tokens can be compared with transformers' exactly.
  runs=("cpu --device cpu --dtype float32")
  [[ $gpu ]] && runs=("float32 --device cuda --dtype float32" \
    "bfloat16 --device cuda --dtype bfloat16" "${runs[@]}")
  demo_state=''
  for line in "${runs[@]}"; do
    read -ra words <<<"$line"
    name=demo_${words[0]}
    state=ran
    logged "$out/$name.log" "$python" -m fusedops demo "${words[@]:1}" \
      ${model:+--model "$model"} --json "$out/$name.json" || state=failed red=1
    demo_state+="${demo_state:+, }$name $state"
  done
fi
if asked sanitize; then
  sanitize_state=''
  # First without the tool, which would watch the compiler too.
  logged "$out/sanitize.log" "$python" scripts/sanitize.py || sanitize_state='wrong results, ' red=1
  for tool in memcheck racecheck initcheck; do
    state=clean families=(gemm quant csrc)
    # The inputs of csrc's cases are written by the driver alone, so that initcheck knows of them.
    [[ $tool == initcheck ]] && families=(csrc)
    # A kernel's parameters are asked for until the driver says that there are no more: that answer
    # is an error of the API to memcheck.
    options=(--tool "$tool" --error-exitcode 9)
    [[ $tool != memcheck ]] || options+=(--report-api-errors no)
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 logged "$out/$tool.log" compute-sanitizer "${options[@]}" \
      "$python" scripts/sanitize.py "${families[@]}" || state=errors red=1
    sanitize_state+="$tool $state, "
  done
fi

# 3. One short table last.
[[ $dry_run ]] && exit 0
lines_of() {
  grep -hE "${!#}" "${@:1:$#-1}" 2>/dev/null | paste -sd ';' || true
}
echo
printf '%-8s %s\n' step result
printf '%-8s %s\n' tests "$tests_state $(lines_of "$out"/tests*.log 'GPU tests recorded')"
printf '%-8s %s\n' goals "$goals_state"
printf '%-8s %s\n' demo "$demo_state"
printf '%-8s %s\n' sanitize "${sanitize_state%, }"
printf '%-8s %s\n' results "$out"
exit "$red"
