#!/usr/bin/env bash
# The whole way on one machine: export, ask, look at what was kept, measure time and accuracy. `make demo` runs it.
set -euo pipefail
out=${1:-demo-output}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

# Show a command as it would be typed, then run it.
step() {
    printf '\n$'
    for word in "$@"; do
        case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    "$@"
}

# Sums of all that the demo wrote: a file that somebody else wrote, or changed, is not overwritten.
record=$out/.demo-files
results=(kept.png profile.json profile.png accuracy.json accuracy.png)
sums() (cd "$out" && sha256sum -- "$@")

new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
python -m sinkprune.demo.write_scenes "$new" 12 >/dev/null
python -m sinkprune.demo.example_files "$new"
mapfile -t files < <(cd "$new" && find . -type f -printf '%P\n')
foreign=()
for name in "${files[@]}" "${results[@]}"; do
    [[ -e $out/$name ]] || continue
    cmp -s "$new/$name" "$out/$name" || grep -qxF -- "$(sums "$name")" "$record" 2>/dev/null || foreign+=("$name")
done
[[ ! -e $out/demo || -L $out/demo ]] || foreign+=(demo)
if ((${#foreign[@]})); then
    echo "error: the demo did not write ${foreign[*]} in '$out', or they were changed since. Move them, or choose" \
        "another folder: bash demo/demo.sh FOLDER" >&2
    exit 2
fi
cp -r "$new/." "$out"
sums "${files[@]}" >>"$record"

# Pages export demo/pocket; with the link that works in this folder too.
ln -sfn "$here" "$out/demo"
if [[ -e $out/bundle ]]; then
    echo "$out/bundle is there already, and keeps the budgets that you added. To export it anew, remove it first."
else
    step sinkprune-export "$here/pocket" -o "$out/bundle" --max-images 2
fi
step sinkprune-run "$out/bundle" --image "$out/scene-0.png" --prompt "What colour is the circle?"
step sinkprune-run "$out/bundle" --image "$out/scene-6.png" --prompt "How many yellow objects are there?" --budget retain-64
step sinkprune-run "$out/bundle" --image "$out/scene-2.png" --prompt "What is written on the purple plate?" \
    --budget retain-64 --overlay "$out/kept.png"
sums kept.png >>"$record"
printf '\nThese times are cold. The profile measures warm requests, with none and retain-64 side by side.\n'
step sinkprune-profile "$out/bundle" --image "$out/scene-6.png" --prompt "How many yellow objects are there?" \
    --repeat 20 --json "$out/profile.json" --plot "$out/profile.png"
sums profile.json profile.png >>"$record"
step sinkprune-evaluate "$out/bundle" --data "$out/scenes.jsonl" \
    --json "$out/accuracy.json" --plot "$out/accuracy.png"
sums accuracy.json accuracy.png >>"$record"

cat <<END

Look at
  $out/scene-0.png to scene-11.png   the pictures of the questions
  $out/kept.png                      which visual tokens were kept, and which stage dropped the others
  $out/profile.png                   where the time of each budget goes
  $out/accuracy.png                  how many answers are still right
The .json files say the same for programs.
scenes.jsonl is a part of the test set. To calibrate on others: python -m sinkprune.demo.write_scenes FOLDER 64 validation
The pictures, questions and the clip that the README names lie there too: cd $out before you paste its commands.
END
