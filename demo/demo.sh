#!/usr/bin/env bash
# The whole way on one machine: export, ask, look at what was kept, measure. `make demo` runs it.
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

python "$here/photo.py" "$out/coffee.jpg"
step sinkprune-export "$here/tiny-llava.json" --random-weights -o "$out/bundle" --force
step sinkprune-run "$out/bundle" --image "$out/coffee.jpg" --prompt "What is in the cup?" \
    --budget retain-64 --temperature 1 --seed 1 --max-new-tokens 12 --overlay "$out/kept.png"
step sinkprune-profile "$out/bundle" --image "$out/coffee.jpg" --prompt "What is in the cup?" \
    --json "$out/profile.json" --plot "$out/profile.png"

cat <<END

The model's weights are random, so its words mean nothing; what was kept, counted and timed is real. Look at
  $out/kept.png      which visual tokens were kept, and which stage dropped the others
  $out/profile.png   where the time of each budget goes
  $out/profile.json  the same for programs
END
