#!/usr/bin/env bash
# Runs this project on an emulated x86-64 processor: `make test-x86-64 CPU=Haswell`. docs/hardware.md has what was found.
#
# usage: x86_64.sh BIN FOLDER CPU; BIN is an environment with the `dev` extra, CPU a model of `qemu-x86_64 -cpu help`.
# shellcheck source=tests/emulated/checks.sh
source "$(dirname "$0")/checks.sh"
# shellcheck source=tests/emulated/debian_packages.sh
source "$here/debian_packages.sh"

cpu=$3
unpack_qemu "$folder" x86_64
environment=$folder/$cpu
real=$(readlink -f "$bin/python")
packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# The libraries are those of BIN: the same files, on another processor.
# Without these features, which qemu lacks: it would print a warning for each to every program's stderr.
features=-pcid,-x2apic,-tsc-deadline,-hle,-rtm,-invpcid
make_environment "$environment" "$real" "$folder/qemu-x86_64" -cpu "$cpu,$features"
own=$environment/lib/$(basename "$(dirname "$packages")")/site-packages
mkdir -p "$own"
printf '%s\n' "$packages" >"$own/libraries.pth"

hand_over
export PYTHONPATH=$checkout/src:$checkout/tests PYTHONDONTWRITEBYTECODE=1
run_tests "$environment/bin/python" "$here/tests.txt"
