#!/usr/bin/env bash
# Measure all that a release shows, on a machine that does nothing else. The comments have the
# minutes that each part took on two cores, two hours together; published, course and site had other
# work beside them. A part that fails is named at the end, and the others go on; run its command
# again by itself.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()

part() { # NAME COMMAND...
    local name=$1 started=$SECONDS
    shift
    echo "== $name: $*"
    "$@" || failed+=("$name")
    echo "== $name: $(((SECONDS - started + 30) / 60)) min"
}

for suite in gpt shakespeare peers collectives; do # 8, 12, 4 and 1
    part "$suite" python benchmark.py --suite "$suite"
done
for suite in outputs front published course; do # 8, 6, 22 and 33
    part "$suite" python benchmark.py --suite "$suite"
done
part site python website/make_data.py                                              # 25
part faults python measure/faults/inject.py --trials 100 --seed "$RANDOM" --jobs 4 # 5
part saves python measure/faults/inject.py --trials 20 --seed "$RANDOM" --kinds kill \
    --phases "during write" "before rename" "after rename" \
    --script "pytorch_checkpoint.py --async-save --resume auto" # 2
part hangs python measure/faults/hang.py                        # 1
part render python benchmark.py --render
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
