#!/usr/bin/env bash
# Runs all parts of this project that need an NVIDIA GPU, and writes the results as one JSON and one table.
#
#     benchmarks/gpu.sh OUTPUT [PYTHON [SECONDS [VLLM_PYTHON]]]
#
# OUTPUT is a folder for results.json, results.md and a log of each part; PYTHON the interpreter of an environment with
# the packages (default: python3), and VLLM_PYTHON that of one with vLLM, which brings its own PyTorch. Parts: the chain on
# ort-cuda at llava-1.1b and, with 20 GB of GPU memory, llava-1.5-7b, which with 40 GB runs next to PyTorch and vLLM too,
# pi0 next to PyTorch, frames, the kernels, the gpu tests, and at llava-1.1b the TensorRT build, gate and profile. The
# report lists each as run, failed or not there, and none stops the others. It compares the targets of captured graphs.
# Weights are random: times are true, answers are noise.
#
# After SECONDS (480 for a lent machine) the running part is stopped, and no other begins. Parts with a target come first.
#
# Exit codes: 0 all parts that could run did; 1 a part failed; 2 wrong arguments; 3 no part could run.
set -u

if [ $# -lt 1 ] || [ $# -gt 4 ] || ! [[ ${3:-1} =~ ^[0-9]+$ ]]; then
    echo "usage: benchmarks/gpu.sh OUTPUT [PYTHON [SECONDS [VLLM_PYTHON]]]" >&2
    exit 2
fi
limit=${3:-}
export VLLM_PYTHON=${4:-}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=$(command -v "${2:-python3}") || {
    echo "error: there is no '${2:-python3}'. Give the interpreter of an environment with this project in it." >&2
    exit 2
}
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
# Commands of the same environment.
PATH=$(dirname "$python"):$PATH
picture=$root/demo/photos/coffee.jpg
work=$out/bundles
mkdir -p "$work" || exit 2
trap 'rm -rf "$work"' EXIT
# Remove the outputs of an earlier run.
for name in gpu-tests kernels ort-cuda-llava-1.1b ort-cuda-llava-1.5-7b pytorch-llava-1.5-7b pytorch-pi0 frames \
    vllm-llava-1.5-7b tensorrt-build tensorrt-gate tensorrt-profile; do
    rm -f "$out/$name".{state,log,json,xml}
done

# part NAME COMMAND...: run the command if gpu_parts.py gives no reason against it, and write its state.
part() {
    local name=$1 why code job alarm
    shift
    if ! why=$("$python" "$here/gpu/gpu_parts.py" "$name" --folder "$work" 2>&1); then
        why="gpu_parts.py fails with '$python': ${why##*$'\n'}"
    fi
    if [ -n "$why" ]; then
        printf 'not there\n%s\n' "$why" >"$out/$name.state"
        echo "$name: not there: $why"
        return
    fi
    if [ -n "$limit" ] && [ "$SECONDS" -ge "$limit" ]; then
        printf 'not there\nno time was left of %s seconds\n' "$limit" >"$out/$name.state"
        echo "$name: not there: no time was left of $limit seconds"
        return
    fi
    echo "$name: running, log in $out/$name.log"
    # A job of its own group, so that all of it can be stopped.
    set -m
    "$@" >"$out/$name.log" 2>&1 &
    set +m
    job=$!
    if [ -n "$limit" ]; then
        (sleep $((limit - SECONDS)) && kill -TERM -- "-$job") >/dev/null 2>&1 &
        alarm=$!
    fi
    wait "$job" 2>/dev/null
    code=$?
    [ -z "$limit" ] || kill "$alarm" 2>/dev/null
    if [ $code -eq 0 ]; then
        printf 'run\n' >"$out/$name.state"
    else
        printf 'failed\nexit code %s\n' $code >"$out/$name.state"
        echo "$name: failed with exit code $code"
    fi
}

gpu_tests() {
    (cd "$root" && "$python" -m pytest -m gpu -o faulthandler_timeout=3600 -q -rs -p no:cacheprovider --junitxml "$out/gpu-tests.xml")
}

kernels() {
    "$python" "$here/sanitizer_kernels.py" --json "$out/kernels.json"
}

# profile REPORT BUNDLE OPTION...: every budget and the unpruned engines, in turn.
profile() {
    local report=$1 bundle=$2 power=()
    shift 2
    if [ -z "$("$python" "$here/gpu/gpu_parts.py" power --folder "$work" 2>&1)" ]; then
        power=(--power nvml)
    fi
    sinkprune-profile "$bundle" --image "$picture" --prompt "What is in the cup, and what lies on the saucer?" \
        --new-tokens 16 --repeat 9 --warmup-rounds 2 --json "$report" ${power[@]+"${power[@]}"} "$@"
}

ort_cuda() {
    sinkprune-export "$1" --random-weights --precision fp16 --force -o "$work/$1" &&
        profile "$out/ort-cuda-$1.json" "$work/$1" --backend ort-cuda
}

# A frame of a camera, as the targets name it.
pytorch() {
    "$python" "$here/gpu/next_to_pytorch.py" "$1" "$work/$1" --json "$out/pytorch-$1.json" --rounds 9 --frame 1920x1080
}

pytorch_pi0() {
    sinkprune-export pi0 --random-weights --precision fp16 --max-images 3 --force -o "$work/pi0" &&
        "$python" "$here/gpu/next_to_pytorch.py" pi0 "$work/pi0" --json "$out/pytorch-pi0.json" --rounds 9 \
            --new-tokens 10 --dtype bfloat16
}

frames() {
    "$python" "$here/frames.py" --backend ort-cuda --size 1920x1080 --json "$out/frames.json"
}

vllm() {
    local name=vllm-$1 like=()
    [ ! -f "$out/pytorch-$1.json" ] || like=(--like "$out/pytorch-$1.json")
    PYTHONPATH=$here "$python" "$here/gpu/next_to_vllm.py" "$work/vllm" --write "$1" &&
        "$VLLM_PYTHON" "$here/gpu/next_to_vllm.py" "$work/vllm" --json "$out/$name.json" ${like[@]+"${like[@]}"}
}

tensorrt_build() {
    local dialect
    dialect=$("$python" "$here/gpu/gpu_parts.py" dialect) &&
        sinkprune-export llava-1.1b --random-weights --precision fp16 --dialect "$dialect" --force -o "$work/tensorrt" &&
        sinkprune-build "$work/tensorrt" -o "$work/engines" --target tensorrt --max-prompt 128 --max-new-tokens 64 --force
}

tensorrt_gate() {
    sinkprune-build "$work/tensorrt" -o "$work/checked" --target tensorrt --max-prompt 128 --max-new-tokens 64 --force \
        --check "$picture"
}

tensorrt_profile() {
    profile "$out/tensorrt-profile.json" "$work/engines"
}

part ort-cuda-llava-1.1b ort_cuda llava-1.1b
part ort-cuda-llava-1.5-7b ort_cuda llava-1.5-7b
part pytorch-llava-1.5-7b pytorch llava-1.5-7b
# 14 GB that nothing below needs.
rm -rf "$work/llava-1.5-7b"
part pytorch-pi0 pytorch_pi0
rm -rf "$work/pi0"
part frames frames
part vllm-llava-1.5-7b vllm llava-1.5-7b
part kernels kernels
part gpu-tests gpu_tests
part tensorrt-build tensorrt_build
part tensorrt-gate tensorrt_gate
part tensorrt-profile tensorrt_profile
"$python" "$here/gpu/gpu_results.py" "$out"
