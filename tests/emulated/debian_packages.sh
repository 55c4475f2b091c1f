# shellcheck shell=bash
# Unpacks Debian packages, those of other processors too, below a folder. No root is needed and nothing is installed.
# Needs `fail` of checks.sh. Uses the package sources of this machine, with lists of its own: `apt-get` here knows the machine's processor only.

# download_packages ARCHITECTURE FOLDER PACKAGE...: the packages and all they need, as FOLDER/archives/*.deb
download_packages() {
  local architecture=$1 folder=$2 options
  shift 2
  mkdir -p "$folder/state/lists/partial" "$folder/archives/partial"
  : >"$folder/status"
  options=(-qq -o "Dir::State=$folder/state" -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder"
    -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture" -o "APT::Sandbox::User=$(id -un)")
  apt-get "${options[@]}" update || fail "The package lists for $architecture cannot be read. Check the apt sources."
  apt-get "${options[@]}" -y --no-install-recommends --download-only install "$@" ||
    fail "No package of '$*' for $architecture. This needs the apt sources of Debian."
}

# The static emulator of the processor $2, unpacked to $1/qemu-$2
unpack_qemu() {
  local folder=$1 processor=$2
  [[ ! -x $folder/qemu-$processor ]] || return 0
  [[ -n $(type -P apt-get) && -n $(type -P dpkg-deb) ]] || fail "Expected apt-get and dpkg-deb. Run this on Debian."
  download_packages "$(dpkg --print-architecture)" "$folder/qemu-package" qemu-user-static
  dpkg-deb --fsys-tarfile "$folder"/qemu-package/archives/qemu-user-static_*.deb |
    tar -x -C "$folder" --strip-components=3 "./usr/bin/qemu-$processor-static"
  mv "$folder/qemu-$processor-static" "$folder/qemu-$processor"
  rm -rf "$folder/qemu-package"
}

# An environment at $1 of the Python at $2, which the command in the other words runs.
# Its `python` is a script: programs that tests start with `sys.executable` are emulated as well.
make_environment() {
  local environment=$1 python=$2
  shift 2
  mkdir -p "$environment/bin"
  {
    echo '#!/bin/sh'
    printf 'exec'
    printf ' %q' "$@"
    # shellcheck disable=SC2016  # the script expands them
    printf ' -0 "$0" %q "$@"\n' "$python"
  } >"$environment/bin/python"
  chmod +x "$environment/bin/python"
  printf 'home = %s\ninclude-system-site-packages = false\n' "$(dirname "$python")" >"$environment/pyvenv.cfg"
}
