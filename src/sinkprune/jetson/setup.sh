#!/usr/bin/env bash
# Prepares a Jetson with JetPack 6.2 or 7.2: a virtual environment with sinkprune that sees JetPack's TensorRT, and on
# request power mode, clocks, swap and a service. docs/jetson.md describes it.
#
# All checks come before all changes. Each change first records how to undo it. If a change fails, the script undoes
# all of them; if the script was killed, its next run does. A second run changes nothing that is already set up.
set -Eeuo pipefail

# Root may run this in any folder: never run its programs, and keep its modules out of Python with -I.
IFS=: read -ra folders <<<"$PATH"
trusted=''
for folder in "${folders[@]}"; do
  if [[ $folder == /* ]]; then trusted+=${trusted:+:}$folder; fi
done
PATH=$trusted

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root='' venv=/opt/sinkprune/venv source='' power_mode='' swap_gb='' clocks=no service=no dry_run=no
readonly extras=cpu,jetpack
readonly swap_file=/swapfile-sinkprune unit=sinkprune-doctor.service
readonly needed_mb=3000

usage() {
  cat <<'END'
usage: sudo jetson/setup.sh [options]

  --venv DIR         the virtual environment (default: /opt/sinkprune/venv)
  --source PATH      what pip installs: a checkout or a wheel (default: this checkout)
  --power-mode MODE  the name or number of a mode in /etc/nvpmodel.conf, for example MAXN_SUPER
  --clocks           hold the clocks at their maximum (jetson_clocks); with --service at every boot
  --swap GB          add a swap file of this size at /swapfile-sinkprune
  --service          write the report of sinkprune-doctor to /var/lib/sinkprune/machine.json at every boot
  --dry-run          print the changes without making them
  --root DIR         use DIR as the root of the system: for tests and for images
  --help             print this text

Exit codes: 0 done, or nothing to do; 2 rejected, nothing changed; 1 failed, all changes undone.
END
}

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

say() { printf '%s\n' "$*"; }

# --- undoing changes ------------------------------------------------------------------------------------------------

# The journal has a command on each line, written before the change that it undoes. Each command may run twice, or
# with nothing to undo.
will_undo() {
  mkdir -p -- "$(dirname "$journal")"
  { printf '%q ' "$@"; echo; } >>"$journal"
  sync -- "$journal" 2>/dev/null || true
}

undo_all() {
  [[ -e $journal ]] || return 0
  local lines line number
  mapfile -t lines <"$journal"
  for ((number = ${#lines[@]} - 1; number >= 0; number--)); do
    line=${lines[number]}
    eval "$line" || say "could not undo: $line" >&2
  done
  rm -f -- "$journal"
}

put_back() { # what was moved from $1 to $1.before
  if [[ -e $1.before ]]; then
    rm -rf -- "$1" && mv -- "$1.before" "$1"
  fi
}

swap_off() {
  if swap_is_on; then swapoff -- "$root$swap_file"; fi
  rm -f -- "$root$swap_file"
}

on_exit() {
  local code=$?
  trap - EXIT
  if [[ $code -ne 0 && -n ${changing:-} ]]; then
    say "failed: undoing what was begun" >&2
    undo_all
    code=1
  fi
  exit "$code"
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Runs a command, or prints it with --dry-run.
change() {
  if [[ $dry_run == yes ]]; then
    say "would run: $*"
  else
    "$@"
  fi
}

undo_with() { [[ $dry_run == yes ]] || will_undo "$@"; }

# --- checks ---------------------------------------------------------------------------------------------------------

read_options() {
  while (($#)); do
    case $1 in
      --venv | --source | --power-mode | --swap | --root)
        (($# > 1)) || refuse "$1 needs a value; see --help."
        case $1 in
          --venv) venv=$2 ;;
          --source) source=$2 ;;
          --power-mode) power_mode=$2 ;;
          --swap) swap_gb=$2 ;;
          --root) root=${2%/} ;;
        esac
        shift 2
        ;;
      --clocks) clocks=yes && shift ;;
      --service) service=yes && shift ;;
      --dry-run) dry_run=yes && shift ;;
      --help | -h) usage && exit 0 ;;
      *) refuse "unknown option '$1'; see --help." ;;
    esac
  done
  [[ $venv == /* ]] || refuse "--venv is '$venv', expected a path that begins with /."
  [[ -z $swap_gb || $swap_gb =~ ^[1-9][0-9]?$ ]] || refuse "--swap is '$swap_gb', expected GB from 1 to 99."
  [[ -z $root || -d $root ]] || refuse "--root '$root' is no folder."
}

check_board() {
  local tree=$root/proc/device-tree/compatible word
  [[ -r $tree ]] || refuse "this is no Jetson: there is no $tree. Nothing was changed."
  while IFS= read -r -d '' word; do
    if grep -qF -- "\"$word\"" "$here/boards.json"; then
      board=$word
      break
    fi
  done <"$tree"
  [[ -n ${board:-} ]] || refuse "this board is not known: $(tr '\0' ' ' <"$tree"). Nothing was changed."
}

check_release() {
  local file=$root/etc/nv_tegra_release text major=0 minor=0 patch=0
  local pattern='R([0-9]+) \(release\), REVISION: ([0-9]+)\.?([0-9]*)'
  text=$(head -n 1 -- "$file" 2>/dev/null || true)
  if [[ $text =~ $pattern ]]; then
    major=${BASH_REMATCH[1]} minor=${BASH_REMATCH[2]} patch=${BASH_REMATCH[3]:-0}
  fi
  if ((major == 36 && (minor > 4 || (minor == 4 && patch >= 3)))); then
    jetpack=6.2 python=python3.10
  elif ((major == 39 && minor >= 2)); then
    jetpack=7.2 python=python3.12
  else
    refuse "Jetson Linux '$major.$minor.$patch' ($file) is not of JetPack 6.2 or 7.2. Flash one of them. Nothing was changed."
  fi
}

check_python() {
  command -v "$python" >/dev/null || refuse "JetPack $jetpack has $python, which is not there. Install it: apt-get install $python"
  "$python" -I -c 'import venv, ensurepip' 2>/dev/null ||
    refuse "$python cannot make environments. Install what it needs: apt-get install $python-venv"
  "$python" -I -c 'import tensorrt' 2>/dev/null ||
    refuse "$python does not import TensorRT. Install it: apt-get install nvidia-jetpack python3-libnvinfer"
}

check_disk() { # that the disk of $1 has $2 MB
  local folder=$root$1 free
  while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
  [[ -w $folder ]] || refuse "'$folder' may not be written. Run this with sudo, or choose another place."
  free=$(df -Pm -- "$folder" | awk 'NR == 2 { print $4 }')
  ((free >= $2)) || refuse "$free MB are free at '$folder', $2 are needed. Free some, or choose another place."
}

check_power_mode() {
  local conf=$root/etc/nvpmodel.conf
  command -v nvpmodel >/dev/null || refuse "there is no nvpmodel here: leave out --power-mode."
  power_id=$(sed -nE "s/^< *POWER_MODEL +ID=([0-9]+) +NAME=([^ >]+).*/\1 \2/p" "$conf" 2>/dev/null |
    awk -v mode="$power_mode" '$1 == mode || $2 == mode { print $1; exit }')
  [[ -n $power_id ]] ||
    refuse "power mode '$power_mode' is none of: $(sed -nE 's/^< *POWER_MODEL .*NAME=([^ >]+).*/\1/p' "$conf" 2>/dev/null | paste -sd' ')."
}

check_all() {
  check_board
  check_release
  check_python
  # Never by name: no registry has this package, so the name may become a stranger's.
  if [[ -z $source && -f $here/../../../pyproject.toml ]]; then source=$here/../../..; fi
  [[ -n $source ]] || refuse "there is no checkout around this script. Name one, or a wheel, with --source."
  [[ -e $source ]] || refuse "--source is '$source', which is not there. Expected a checkout or a wheel."
  source=$(realpath -- "$source")
  if [[ -e $root$venv && ! -f $root$venv/pyvenv.cfg ]]; then
    refuse "'$root$venv' is there and no environment. Choose another place with --venv."
  fi
  check_disk "$venv" "$needed_mb"
  check_disk "$(dirname "$journal_place")" 1
  [[ -z $power_mode ]] || check_power_mode
  [[ $clocks == no ]] || command -v jetson_clocks >/dev/null || refuse "there is no jetson_clocks here: leave out --clocks."
  [[ $service == no ]] || command -v systemctl >/dev/null || refuse "there is no systemctl here: leave out --service."
  if [[ -n $swap_gb ]] && ! swap_is_on; then
    check_disk "$swap_file" $((swap_gb * 1000 + needed_mb))
  fi
}

# --- changes --------------------------------------------------------------------------------------------------------

make_environment() {
  local place=$root$venv wanted
  wanted="$python ${source}[$extras]"
  if [[ -x $place/bin/sinkprune-doctor && $(cat -- "$place/sinkprune-setup" 2>/dev/null) == "$wanted" ]]; then
    say "environment: as it should be, $place"
    return
  fi
  say "environment: $place, of $python"
  change mkdir -p -- "$(dirname "$place")"
  if [[ -e $place ]]; then
    undo_with put_back "$place"
    change mv -- "$place" "$place.before"
  else
    undo_with rm -rf -- "$place"
  fi
  change "$python" -I -m venv --system-site-packages "$place"
  change "$place/bin/python" -I -m pip install --no-input --disable-pip-version-check \
    "${source}[$extras]"
  [[ $dry_run == yes ]] || printf '%s\n' "$wanted" >"$place/sinkprune-setup"
}

set_power_mode() {
  local now
  now=$(sed -nE 's/.*pmode:0*([0-9]+).*/\1/p' "$root/var/lib/nvpmodel/status" 2>/dev/null || true)
  if [[ $now == "$power_id" ]]; then
    say "power mode: as it should be, $power_mode"
    return
  fi
  say "power mode: $power_mode"
  [[ -z $now ]] || undo_with nvpmodel -m "$now"
  # If a mode needs a reboot, nvpmodel asks on stdin.
  change nvpmodel -m "$power_id" </dev/null
}

hold_clocks() {
  say "clocks: held at their maximum until the next boot"
  local kept=$root/var/lib/sinkprune/clocks.before
  [[ $dry_run == yes ]] || rm -f -- "$kept"
  undo_with jetson_clocks --restore "$kept"
  change jetson_clocks --store "$kept"
  change jetson_clocks
}

swap_is_on() { grep -qE "^${root}${swap_file}[[:space:]]" "$root/proc/swaps" 2>/dev/null; }

add_swap() {
  local file=$root$swap_file table=$root/etc/fstab
  if swap_is_on; then
    say "swap: as it should be, $file"
    return
  fi
  say "swap: $swap_gb GB at $file"
  undo_with swap_off
  change rm -f -- "$file"
  change fallocate -l "${swap_gb}G" -- "$file"
  change chmod 600 -- "$file"
  change mkswap -- "$file"
  change swapon -- "$file"
  if ! grep -qE "^${swap_file}[[:space:]]" "$table" 2>/dev/null; then
    undo_with sed -i "\\|^$swap_file |d" "$table"
    if [[ $dry_run == yes ]]; then
      say "would add to $table: $swap_file none swap sw 0 0"
    else
      printf '%s none swap sw 0 0\n' "$swap_file" >>"$table"
    fi
  fi
}

install_service() {
  local place=$root/etc/systemd/system/$unit boot='' text
  [[ $clocks == no ]] || boot="ExecStartPre=$(command -v jetson_clocks)"
  text=$(sed -e "s|@VENV@|$venv|" -e "s|^@CLOCKS@\$|$boot|" "$here/$unit")
  if [[ -f $place && $(cat -- "$place") == "$text" ]] && systemctl is-enabled --quiet "$unit"; then
    say "service: as it should be, $unit"
    return
  fi
  say "service: $unit"
  if [[ -e $place ]]; then
    undo_with put_back "$place"
    change mv -- "$place" "$place.before"
  else
    undo_with rm -f -- "$place"
    undo_with systemctl disable "$unit"
  fi
  change mkdir -p -- "$(dirname "$place")"
  [[ $dry_run == yes ]] || printf '%s\n' "$text" >"$place"
  change systemctl daemon-reload
  change systemctl enable "$unit"
}

drop_former() { # what was replaced, when no journal can put it back any more
  rm -rf -- "$root$venv.before"
  rm -f -- "$root/etc/systemd/system/$unit.before"
}

main() {
  read_options "$@"
  readonly journal_place=/var/lib/sinkprune/setup.undo
  journal=$root$journal_place
  check_all
  say "board: $board, JetPack $jetpack"
  if [[ -e $journal && $dry_run == no ]]; then
    say "a former set-up was cut off: undoing it"
    undo_all
  fi
  if [[ $dry_run == no ]]; then
    drop_former
    changing=yes
  fi
  make_environment
  [[ -z $power_mode ]] || set_power_mode
  [[ $clocks == no ]] || hold_clocks
  [[ -z $swap_gb ]] || add_swap
  [[ $service == no ]] || install_service
  if [[ $dry_run == yes ]]; then
    say "nothing was changed"
    return
  fi
  # All changes are complete, and are not undone any more.
  rm -f -- "$journal"
  changing=''
  drop_former
  say "done. Next: $venv/bin/sinkprune-doctor"
}

main "$@"
