#!/usr/bin/env bash
# Check and measure what needs a GPU, in order of value, in the minutes that there are:
#
#     measure/gpu_session.sh --minutes 9
#
# Every step has a limit and prints one line. The same command, given again, skips the steps that
# have ended and continues with the others, on the same GPU, PyTorch and commit.
#
#     --minutes N    end before N minutes have passed (default: 60)
#     --device cpu   try those steps on a CPU that it can run, on tiny models (default: cuda)
#     --only NAME    only the steps whose names begin with NAME
#     --limit S      end every step after S seconds at the latest (default: its own limit)
#     --out DIR      copy results and logs to this folder at the end
#     --work DIR     logs, and what has ended (default: runs/gpu_session)
#     --list         print the steps without running them
#
# results/ gets gpu_session.json with the line of every step, one_gpu.json, and gpu.json.
# Exit code: 0 if all steps have succeeded, 1 if one has failed, 3 if some are left, 2 for a wrong flag.
set -u

minutes=60 device=cuda only="" limit=3600 out="" work=runs/gpu_session list=""

usage() {
    echo "gpu_session.sh: error: $1 (the first lines of measure/gpu_session.sh list the flags)" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --list) list=yes ; shift ; continue ;;
        --minutes | --device | --only | --limit | --out | --work) (($# > 1)) || usage "$1 needs a value" ;;
        *) usage "$1 is no flag of this program" ;;
    esac
    declare "${1#--}=$2"
    shift 2
done
[[ $minutes =~ ^[0-9]*\.?[0-9]+$ ]] || usage "--minutes $minutes is not a positive number"
[[ $limit =~ ^[1-9][0-9]*$ ]] || usage "--limit $limit is not a positive number"
[[ $device == cuda || $device == cpu ]] || usage "--device $device is neither cuda nor cpu"
work=$(realpath -m "$work")
[[ -z $out ]] || out=$(realpath -m "$out")
cd "$(dirname "$0")/.." || exit 2

python=$(command -v python || command -v python3)
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH
command -v python >/dev/null || usage "no program is called python; activate an environment, or link python3"
helper="python -m measure.gpu_session"
# A shell's background job ignores Ctrl-C, and so would all steps. Before coreutils 8.31 they do.
interruptible=""
! env --default-signal=INT true 2>/dev/null || interruptible="env --default-signal=INT"
total=$(awk "BEGIN { print int($minutes * 60) }")
spare=$((total < 60 ? total / 4 : 15))    # seconds before the end: nothing begins, results are copied
deadline=$((SECONDS + total - spare))
most=$limit                               # seconds of any step
at_once=$((($(nproc) + 2) / 4))           # steps that are not timed share the GPU
((at_once <= 4)) || at_once=4
running=0                                 # steps
names=()                                  # of all steps

# ------------------------------------------------------------------------------- running a step

has() { # whether a package of Python is installed
    python -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$1'))"
}

place_of() { # the files of a step, without their endings
    echo "$work/${1//[^A-Za-z0-9]/-}"
}

# step NAME SECONDS COMMAND [PACKAGE...]: run the command, beside others, in at most so many
# seconds. It is left out if one of the packages is missing.
step() {
    local name=$1 limit=$2 command=$3 package
    [[ $name == "$only"* ]] || return 0
    names+=("$name")
    shift 3
    if [[ $list ]]; then
        echo "$name: $command"
        return
    fi
    for package; do
        if ! has "$package"; then
            finish "$name" 0 "left out: $package is not installed"
            return
        fi
    done
    if [[ -f $(place_of "$name").line ]]; then
        printf '%-34s %s (before)\n' "$name" "$(cut -f 2 "$(place_of "$name").line")"
        return
    fi
    if ((running == at_once)); then
        wait -n
        ((running--))
    fi
    ((running++))
    run_step "$name" "$limit" "$command" &
}

alone() { # the same, while nothing else runs
    wait
    running=0
    step "$@"
    wait
    running=0
}

finish() { # NAME SECONDS OUTCOME: keep the line of a step, and print it
    printf '%s\t%s\t%s\n' "$2" "$3" "$1" >"$(place_of "$1").line"
    printf '%-34s %s\n' "$1" "$3"
}

run_step() { # in a subshell
    local name=$1 limit=$2 command=$3 log code pid seconds left began=$SECONDS
    log=$(place_of "$name").log
    left=$((deadline - SECONDS))
    [[ $device == cuda ]] || limit=$((5 * limit))
    ((limit <= most)) || limit=$most
    ((left > spare)) || return 0 # it is left for the next call
    ((left >= limit)) || limit=$left
    echo "$command" >"$(place_of "$name").command"
    $interruptible timeout --signal=INT --kill-after=40 "$limit" bash -c "$command" \
        >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill -INT $pid 2>/dev/null; wait $pid; exit 130' TERM INT
    wait $pid
    code=$?
    trap - TERM INT
    seconds=$((SECONDS - began))
    if ((code == 0)); then
        finish "$name" $seconds "$(grep -a . "$log" | tail -n 1)"
    elif ((code != 124 && code != 137)); then
        finish "$name" $seconds "failed: $(why "$log"); see $log"
    elif ((limit < left)); then
        finish "$name" $seconds "failed: over its limit of $limit s; see $log"
    fi # else the time of all steps was over: it is left for the next call
}

why() { # why a command failed, from its log
    local found
    found=$(grep -aE '^FAILED ' "$1" | cut -c 8-120 | head -n 3 | paste -sd ';')
    [[ $found ]] || found=$(grep -aE '^(\[rank[0-9]+\]: )?[A-Za-z_.]*(Error|Exception): |: error: ' "$1" | tail -n 1)
    [[ $found ]] || found=$(grep -a . "$1" | tail -n 1)
    echo "${found:-no output}" | cut -c 1-300
}

stop() {
    trap '' INT TERM
    kill -TERM $(jobs -p) 2>/dev/null
    wait
    echo "stopped; the same command continues" >&2
    exit 130
}

# ------------------------------------------------------------------------------------- commands

tiny="--dataset synthetic --model gpt-2x2x64 --context 32 --train-samples 256 --eval-samples 32"
tiny+=" --batch-size 16 --schedule none --print-freq 4 --device $device"

run() { # SCRIPT-WITH-FLAGS STEPS FOLDER [RANKS]: the command of some steps of a script
    local start="torchrun --standalone --nproc_per_node=${4:-1}"
    case $1 in
        pytorch_SingleGPU.py* | pytorch_DP.py* | pytorch_half* | pytorch_auto*) start=python ;;
        pytorch_DDP.py*)
            start="python -m torch.distributed.launch --nnodes=1 --nproc_per_node=${4:-1}"
            start+=" --master_port=$((20000 + RANDOM % 10000))"
            ;;
    esac
    echo "$start $1 $tiny --max-steps $2 --output-dir $3"
}

resume() { # SCRIPT-WITH-FLAGS FOLDER [RANKS]: eight steps; four, and four more; are they the same?
    local ranks=${3:-1}
    echo "$(run "$1" 8 "$2/straight" "$ranks") && $(run "$1" 4 "$2/half" "$ranks") &&" \
        "$(run "$1 --resume $2/half" 8 "$2/resumed" "$ranks") && $helper --compare $2"
}

# ------------------------------------------------------------------ the steps, in order of value

# What has never run on several GPUs
two_gpus() {
    local test
    for test in ND_parallel pytorch_PP; do
        alone "two GPUs: $test" 180 "$pytest -m multigpu -k $test" $of_pytest
    done
    step "two GPUs: resume ZeRO AdamW" 150 "$(resume "$zero --optimizer adamw" "$work/runs/two" 2)"
    step "two GPUs: ND_parallel --offload" 90 \
        "$(run "pytorch_ND_parallel.py --offload --experts 4 --balance bias" 2 "$work/runs/offload" 2)"
}

# tests/gpu_claims.txt
claims() {
    if [[ $device == cuda ]]; then
        alone claims 400 "$pytest -m claim -k 'not it_resumes'" $of_pytest
    else
        alone claims 200 "python -m pytest -q -n 0 -m claim -k which_gpus" $of_pytest
    fi
}

# A run that resumes ends with the weights of one that was not stopped.
resumes() {
    local to="$work/runs/resume" stage2="--deepspeed_config config/zero_stage2_config.json"
    local half="pytorch_half_precision.py --dtype bfloat16 --master-weights"
    step "resume: SGD" 120 "$(resume "pytorch_SingleGPU.py --optimizer sgd" "$to-sgd")"
    step "resume: AdamW" 120 "$(resume "pytorch_SingleGPU.py --optimizer adamw" "$to-adamw")"
    step "resume: ZeRO AdamW" 120 "$(resume "$zero --optimizer adamw" "$to-zero-adamw")"
    step "resume: ZeRO SGD" 120 "$(resume "$zero --optimizer sgd" "$to-zero-sgd")"
    step "resume: sharded AdamW" 120 "$(resume pytorch_FSDP.py "$to-fsdp")"
    step "resume: Muon" 120 "$(resume pytorch_Muon.py "$to-muon")"
    step "resume: master weights" 120 "$(resume "$half" "$to-half")"
    step "resume: DeepSpeed" 180 "$(resume "pytorch_DeepSpeed.py $stage2" "$to-ds")" deepspeed
}

# Memory, speed and MFU: one rank of eight, then each script on ResNet-50 and GPT-2
timed() {
    alone "one rank alone" 900 "python benchmark.py --suite one_gpu"
    alone "each script, timed" 3600 "$helper --write-text data/gpt2.txt && python benchmark.py --suite gpu"
}

# Two steps of each script, with nccl
each_script() {
    local script name flags
    for script in $scripts; do
        name=${script#pytorch_} flags="" package=""
        case ${name%.py} in
            FSDP_TP) flags=" --tp 1" ;;
            DDP_ZeRO) flags=" --use_zero" ;;
            DeepSpeed) flags=" --deepspeed_config config/zero_stage2_config.json" package=deepspeed ;;
            float8) package=torchao ;;
        esac
        step "one rank: ${name%.py}" 120 "$(run "$script$flags" 2 "$work/runs/${name%.py}")" $package
    done
}

scripts=$(ls pytorch_*.py | grep -vE 'pytorch_(collectives|DTensor)\.py')
zero="pytorch_DDP_ZeRO.py --use_zero"
pytest="python -m pytest -q -n 4"
has xdist || pytest="python -m pytest -q -o addopts=" # pyproject.toml's options are those of xdist
of_pytest="pytest psutil yaml PIL tensorboard"
gpus=0
if [[ ! $list ]]; then
    mkdir -p "$work" || usage "--work $work cannot be written"
    trap stop INT TERM
    gpus=$($helper --begin "$device" --work "$work") || exit 2
fi
((gpus < 2)) || two_gpus
claims
resumes
[[ $device == cpu ]] || timed
each_script
wait
[[ ! $list ]] || exit 0
((${#names[@]})) || usage "--only $only: no step begins with it; --list prints their names"

# ------------------------------------------------------------------------------------ the report

failed=() left=()
for name in "${names[@]}"; do
    line=$(place_of "$name").line
    if [[ ! -f $line ]]; then
        left+=("$name")
    elif [[ $(cut -f 2 "$line") == failed:* ]]; then
        failed+=("$name")
    fi
done
results=results # of a whole session on a GPU
[[ $device == cuda && ! $only ]] || results=$work
$helper --report "$device" --work "$work" --results "$results" ${out:+--out "$out"}
join() { printf '%s\n' "$@" | paste -sd ';' | sed 's/;/; /g'; }
((!${#left[@]})) || echo "left for the next call, with the same command: $(join "${left[@]}")"
((!${#failed[@]})) || echo "failed: $(join "${failed[@]}")"
((!${#failed[@]})) || exit 1
((!${#left[@]})) || exit 3
echo "all ${#names[@]} steps have succeeded, or cannot run here"
