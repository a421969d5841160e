#!/usr/bin/env bash
# Everything that needs a CUDA device, in ten steps of one call that takes at most 560 s. The output of each step is written to
# RESULTS/STEP.txt as it comes, and the last lines are the verdicts.
#
#   make gpu                                         # in the project's environment; results in build/gpu
#   BUNDLE=FOLDER benchmarks/gpu.sh RESULTS [STEP ...]    # where python3 has torch, and there is no network
#
# `make gpu-bundle` writes the bundle, build/gpu-bundle. A step that fails or takes too long costs no other step. SLOWER=10 makes
# all limits ten times as long, to try the steps on a busy machine over the emulated device.
set -uo pipefail
cd "$(dirname "$0")/.."
(($#)) || { echo "expected the folder for the results: benchmarks/gpu.sh RESULTS [STEP ...]" >&2 && exit 2; }
results=$1 && shift
steps=("$@")
((${#steps[@]})) || steps=(doctor kernels rounding placement shapes served tests faults training predictions)
mkdir -p "$results" && : >"$results/verdicts.txt" || exit
bundle=${BUNDLE:-build/gpu-bundle}
models=$bundle/models
slower=${SLOWER:-1}
end=$((SECONDS + ${LIMIT_S:-560} * slower))
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if [[ -n ${BUNDLE:-} ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  tar -xJf "$bundle/site.tar.xz" -C "$site" || exit
  export PYTHONPATH=$PWD:$site/site:${PYTHONPATH#*:}
  python3 setup.py --quiet egg_info || exit
fi

# Files with tests that need a device and no package beyond the bundle: naming them saves the time to collect all others.
tests=(tests/serve/engine/test_cuda_driver.py tests/serve/backends/onnx_runtime/test_session.py
  tests/serve/backends/onnx_runtime/test_backend.py tests/export/verification/test_cuda_kernels.py tests/export/verification/test_simulation.py
  tests/export/placement/test_audit.py tests/amp_core/grad_scaler/test_grad_scaler.py tests/amp_core/grad_scaler/test_loss_scale.py
  tests/amp_core/recorder/test_recorder.py tests/amp_core/recorder/test_observations.py tests/amp_core/policy/test_operations.py
  tests/amp_core/autocast/test_inside_torch.py tests/amp_core/test_random_state.py)

# limit SECONDS COMMAND ...: a step's own limit, within what is left of the call.
limit() {
  local left=$((end - SECONDS)) seconds=$(($1 * slower)) && shift
  ((left > 5)) || { echo "no time was left" && return 124; }
  timeout --kill-after 5 "$((seconds < left ? seconds : left))" "$@"
}

step() {
  case $1 in
    doctor) limit 25 python3 -m halfserve doctor ;;
    kernels) limit 20 python3 -m benchmarks.cuda_device.checks kernels ;;
    rounding) limit 25 python3 -m benchmarks.cuda_device.checks rounding ;;
    placement) limit 20 python3 -m benchmarks.cuda_device.checks placement --models "$models" ;;
    shapes) limit 40 python3 -m benchmarks.cuda_device.checks shapes --models "$models" ;;
    served) limit 130 python3 -m benchmarks.cuda --only served --models minilm,resnet --files fp16 --sizes 32 --networks "$models" ;;
    tests) limit 60 python3 -m pytest -q -m gpu --continue-on-collection-errors -p no:cacheprovider "${tests[@]}" ;;
    faults) limit 100 python3 -m benchmarks.cuda_faults ;;
    training) limit 60 python3 -m benchmarks.amp --device cuda --rounds 9 --only steps,scaler ;;
    predictions) limit 60 python3 -m benchmarks.cuda --only predictions --cases 60 ;;
    *) echo "there is no step $1" && return 2 ;;
  esac
}

verdicts=()
for name in "${steps[@]}"; do
  began=$SECONDS
  step "$name" >"$results/$name.txt" 2>&1 && ended="" || ended=" (exit status $?)"
  last=$(grep -a '^verdict: ' "$results/$name.txt" | tail -n 1)
  [[ -n $last ]] || last=$(grep -av '^[[:space:]]*$' "$results/$name.txt" | tail -n 1 | cut -c 1-200)
  verdicts+=("$name, $((SECONDS - began)) s$ended: ${last#verdict: }")
  echo "${verdicts[-1]}" >>"$results/verdicts.txt"
  echo "$name: $((SECONDS - began)) s, $results/$name.txt"
done
printf '%s\n' "" "${verdicts[@]}"
[[ ! ${verdicts[*]} == *"(exit status "* ]]
