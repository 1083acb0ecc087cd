# An exercise of the course: what a command prints after the reader's edit of a script.
#
#     sh measure/suites/edited.sh SCRIPT SED_EXPRESSION COMMAND...
set -e
root=$PWD
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
git ls-files -z ':!docs' ':!results' | xargs -0 cp --parents -t "$folder"
cp "$1" "$folder/before"
mkdir -p runs
ln -s "$root/runs" "$folder/runs"
cd "$folder"
sed -i "$2" "$1"
if cmp -s before "$1"; then
    echo "$0: error: $2 changes nothing in $1" >&2
    exit 2
fi
shift 2
"$@"
