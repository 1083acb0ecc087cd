# An exercise of docs/techniques/TP.md: pytorch_TP.py whose plan does not prepare the input of attention and MLP.
set -e
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
git ls-files -z ':!docs' ':!results' | xargs -0 cp --parents -t "$folder"
cd "$folder"
grep -q 'PrepareModuleInput(\*\*whole)' pytorch_TP.py  # or this would measure the script as it is
sed -i '/PrepareModuleInput(\*\*whole)/d' pytorch_TP.py
python estimate.py --model llama3-8b --context 4096 -b 1 --gpus 8 --memory H100 --only TP --dtype bfloat16 "$@"
