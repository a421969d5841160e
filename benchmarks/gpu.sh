#!/usr/bin/env bash
# Everything that needs a CUDA device, in steps. The output of each is in RESULTS/STEP.txt before the next one begins.
#
#   make gpu                                               # in the project's environment; results in build/gpu
#   WHEELS=FOLDER benchmarks/gpu.sh RESULTS [STEP ...]     # where python3 has torch, and there is no network
#
# With WHEELS, python3 gets the wheels that lie there, in a folder of their own. A step that fails or takes too long costs no
# other step. The last line names those that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
(($#)) || { echo "expected the folder for the results: benchmarks/gpu.sh RESULTS [STEP ...]" >&2 && exit 2; }
results=$1 && shift
steps=("$@")
((${#steps[@]})) || steps=(tests predictions served faults training checkerboard tuning)
mkdir -p "$results" || exit

if [[ -n ${WHEELS:-} ]]; then
  site=$(mktemp -d)
  python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$WHEELS"/*.whl || exit
  export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
  python3 setup.py --quiet egg_info || exit
fi
export PYTHONUNBUFFERED=1

step() {
  case $1 in
    # A test file that needs another package is named, and the others run.
    tests) timeout 300 python3 -m pytest -m gpu --continue-on-collection-errors -p no:cacheprovider tests ;;
    predictions) timeout 300 python3 -m benchmarks.cuda --only predictions ;;
    served) timeout 400 python3 -m benchmarks.cuda --only accuracy,served,limits,lengths ;;
    faults) timeout 200 python3 -m benchmarks.cuda_faults ;;
    training) timeout 200 python3 -m benchmarks.amp --device cuda ;;
    checkerboard) timeout 100 python3 -m halfserve.examples.checkerboard --device cuda --json --out "$results/checkerboard.png" ;;
    tuning) timeout 400 python3 -m benchmarks.cuda --only alone,options,memory ;;
    *) echo "there is no step $1" >&2 && return 2 ;;
  esac
}

failed=()
for name in "${steps[@]}"; do
  began=$SECONDS
  step "$name" >"$results/$name.txt" 2>&1 || failed+=("$name")
  echo "$name: $((SECONDS - began)) s, $results/$name.txt"
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2 && exit 1; }
