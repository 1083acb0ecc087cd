# An exercise of docs/techniques/FSDP.md: pytorch_FSDP.py without the two lines that shard the blocks.
set -e
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
git ls-files -z ':!docs' ':!results' | xargs -0 cp --parents -t "$folder"
cd "$folder"
grep -q 'for unit in units_of(model)' pytorch_FSDP.py  # or this would measure the script as it is
sed -i '/for unit in units_of(model)/,+1d' pytorch_FSDP.py
python estimate.py --model llama3-8b --context 8192 -b 8 --gpus 8 --memory H100 --only FSDP "$@"
