# shellcheck shell=bash
# What both emulated processors are checked for. A script that reads this file gets two words: BIN, an environment of
# this machine with the `dev` extra, and FOLDER, where everything is kept and used again.
set -euo pipefail
[[ $(uname -sm) == "Linux x86_64" ]] || { echo "error: expected Linux on x86-64, found $(uname -sm)" >&2 && exit 2; }
mkdir -p "$2"
bin=$(cd "$1" && pwd)
folder=$(cd "$2" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
checkout=$(cd "$here/../.." && pwd)

fail() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# Write scenes, bundles and the answers of this machine, all natively: emulated exports would take hours.
hand_over() {
  rm -rf "$folder/handed-over"
  mkdir -p "$folder/scenes" "$folder/handed-over"
  local -x PYTHONPATH=$checkout/src:$checkout/tests
  "$bin/python" -m sinkprune.demo.write_scenes "$folder/scenes" 4
  "$bin/python" -c 'from sinkprune.entry_points import export; raise SystemExit(export())' \
    "$checkout/demo/pocket" -o "$folder/pocket" --force
  "$bin/python" "$here/answers.py" "$folder"
  "$bin/python" "$here/handed_over.py" "$folder/handed-over"
}

# Run the tests that are listed in the files $2... with the emulated Python at $1.
run_tests() {
  local python=$1 tests
  shift
  mapfile -t tests < <(sed -E 's/#.*//; /^[[:space:]]*$/d' "$@")
  (
    cd "$checkout" || exit
    HANDED_OVER=$folder/handed-over "$python" -m pytest --noconftest -p emulated.handed_over -p no:cacheprovider \
      -o faulthandler_timeout=900 -q --durations=10 -m "not slow and not gpu and not intel_gpu" "${tests[@]}"
  )
}
