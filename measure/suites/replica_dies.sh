# Three replicas train. One is killed, and its torchrun starts it again. What another one prints
# until all three train again: half a minute on two cores.
#
#     sh measure/suites/replica_dies.sh
set -e
folder=$(mktemp -d)
started=
trap 'kill $started; wait; rm -r "$folder"' EXIT

wait_for() { # so many lines with a pattern, in a file
    for _ in $(seq 600); do
        if [ "$(grep -c "$2" "$3")" -ge "$1" ]; then return; fi
        sleep 0.2
    done
    cat "$3" >&2
    exit 1
}

python pytorch_fault_tolerance.py --serve 0 > "$folder/store" & # on a port that is free
started=$!
wait_for 1 port "$folder/store"
port=$(sed 's/.*port \([0-9]*\).*/\1/' "$folder/store")
for replica in 0 1 2; do
    torchrun --standalone --nproc_per_node=1 --max-restarts=9 pytorch_fault_tolerance.py \
        --store "localhost:$port" --replicas 3 --patience 3 --batch-size 24 \
        --model gpt-2x4x64 --context 128 --dataset synthetic --epochs 99 --device cpu \
        --output-dir "$folder/$replica" > "$folder/$replica.log" 2>&1 &
    victim=$! # the last one
    started="$started $victim"
done
wait_for 1 '^step 0' "$folder/0.log"
sleep 4 # some steps
pkill -KILL -P "$victim" # the rank, not torchrun
wait_for 3 '^step' "$folder/0.log"
grep '^step' "$folder/0.log"
