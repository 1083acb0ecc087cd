# An exercise of docs/techniques/gradient_accumulation.md: its script without no_sync.
set -e
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
git ls-files -z ':!docs' ':!results' | xargs -0 cp --parents -t "$folder"
cd "$folder"
grep -q 'model.no_sync()' pytorch_gradient_accumulation.py  # or this would measure the script as it is
sed -i 's/model.no_sync()/contextlib.nullcontext()/' pytorch_gradient_accumulation.py
python estimate.py --model gpt-12x12x768 --context 256 -b 32 --gpus 2 --only gradient_accumulation --accumulate 4 "$@"
