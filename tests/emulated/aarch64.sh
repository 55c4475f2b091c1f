#!/usr/bin/env bash
# Runs this project on an emulated aarch64 processor: `make test-aarch64`. docs/hardware.md describes what is compared.
#
# usage: aarch64.sh BIN FOLDER; BIN is an environment with the `dev` extra, FOLDER is made once and used again.
# shellcheck source=tests/emulated/checks.sh
source "$(dirname "$0")/checks.sh"
# shellcheck source=tests/emulated/debian_packages.sh
source "$here/debian_packages.sh"

root=$folder/root environment=$folder/environment

# --- the emulator, a root with Python, an environment with the libraries of BIN in the same versions -------------------

unpack_qemu "$folder" aarch64
if [[ ! -e $root/.complete ]]; then
  rm -rf "$root"
  download_packages arm64 "$folder/packages" python3 libstdc++6
  mkdir -p "$root"
  for package in "$folder"/packages/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  rm -rf "$folder/packages"
  # ONNX Runtime and OpenVINO read which Arm core this is. Without these files the first crashes, as the machine's own
  # describe an x86-64 processor.
  mkdir -p "$root/proc"
  for core in 0 1; do
    identification=$root/sys/devices/system/cpu/cpu$core/regs/identification
    mkdir -p "$identification"
    echo 0x00000000413fd0b1 >"$identification/midr_el1"
    printf 'processor\t: %s\nBogoMIPS\t: 62.50\n' "$core"
    printf 'Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp\n'
    printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0b\nCPU revision\t: 1\n\n'
  done >"$root/proc/cpuinfo"
  touch "$root/.complete"
fi
version=$(basename "$(readlink -f "$root/usr/bin/python3")")
packages=$environment/lib/$version/site-packages

# This project's own wheel, made anew. setuptools would add what an earlier build left in build/lib.
rm -rf "$checkout/build/lib" "$folder/wheel" "$packages"/sinkprune "$packages"/sinkprune-*.dist-info
"$bin/pip" wheel --quiet --no-deps --wheel-dir "$folder/wheel" "$checkout"
rm -rf "$checkout/build/lib"
wheel=$(echo "$folder"/wheel/sinkprune-*.whl)

# pip takes wheels of the platforms that it is given, and these are what glibc of Debian 12 and later can run.
install=("$bin/pip" install --quiet --target "$packages" --only-binary=:all: --python-version "${version#python}"
  --platform manylinux2014_aarch64)
for glibc in 17 24 26 27 28 31 34 35; do install+=(--platform "manylinux_2_${glibc}_aarch64"); done

"$bin/pip" freeze --exclude-editable | grep '==' >"$folder/versions.new"
if ! { cmp -s "$folder/versions.new" "$folder/versions" && cmp -s "$checkout/pyproject.toml" "$folder/pyproject.toml"; }; then
  rm -rf "$environment" "$folder/versions"
  "${install[@]}" --constraint "$folder/versions.new" "${wheel}[cpu,openvino,video,sign]" pytest hypothesis
  cp "$checkout/pyproject.toml" "$folder"
  mv "$folder/versions.new" "$folder/versions"
else
  "${install[@]}" --no-deps "$wheel"
fi
make_environment "$environment" "$root/usr/bin/$version" "$folder/qemu-aarch64" -cpu cortex-a76 -L "$root"
python=$environment/bin/python

# --- what is checked --------------------------------------------------------------------------------------------------

hand_over
export PYTHONPATH=$checkout/tests PYTHONDONTWRITEBYTECODE=1
"$python" -c 'from sinkprune.entry_points import doctor; raise SystemExit(doctor())' "$folder/pocket"
run_tests "$python" "$here/tests.txt"
