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

# Pages export demo/pocket; with the link that works in this folder too.
ln -sfn "$here" "$out/demo"
python -m sinkprune.demo.write_scenes "$out" 12
python -m sinkprune.demo.example_files "$out"
step sinkprune-export "$here/pocket" -o "$out/bundle" --max-images 2 --force
step sinkprune-run "$out/bundle" --image "$out/scene-0.png" --prompt "What colour is the circle?"
step sinkprune-run "$out/bundle" --image "$out/scene-6.png" --prompt "How many yellow objects are there?" --budget retain-64
step sinkprune-run "$out/bundle" --image "$out/scene-2.png" --prompt "What is written on the purple plate?" \
    --budget retain-64 --overlay "$out/kept.png"
step sinkprune-profile "$out/bundle" --image "$out/scene-6.png" --prompt "How many yellow objects are there?" \
    --repeat 20 --json "$out/profile.json" --plot "$out/profile.png"
step sinkprune-evaluate "$out/bundle" --data "$out/scenes.jsonl" \
    --json "$out/accuracy.json" --plot "$out/accuracy.png"

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
