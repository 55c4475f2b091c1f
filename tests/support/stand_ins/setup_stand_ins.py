"""Stand-ins for the programs that `jetson/setup.sh` calls. Each logs its arguments, and does little else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.programs.repository import ROOT

SETUP = ROOT / "jetson" / "setup.sh"

# Variables name the program that fails, the one that hangs, the module that is missing, and the free MB.
_STAND_IN = r"""#!/usr/bin/env bash
name=$(basename "$0")
printf '%s\n' "$name $*" >>"$STAND_IN_LOG"
[[ $name != "${STAND_IN_HANGS:-}" ]] || { touch "$STAND_IN_LOG.hangs"; exec sleep 60; }
[[ $name != "${STAND_IN_FAILS:-}" ]] || { echo "$name: stand-in fails" >&2; exit 1; }
case $name in
  python3.*)
    if [[ $2 == -c ]]; then
      [[ $3 != *"${STAND_IN_LACKS:-nothing}"* ]]
    else
      place=${!#}
      mkdir -p "$place/bin"
      echo "include-system-site-packages = true" >"$place/pyvenv.cfg"
      cp "$0" "$place/bin/python"
    fi
    ;;
  python) printf '#!/bin/sh\n' >"$(dirname "$0")/sinkprune-doctor"; chmod +x "$(dirname "$0")/sinkprune-doctor" ;;
  df) printf 'Filesystem 1M-blocks Used Available Mounted\n/dev/x 99 9 %s /\n' "${STAND_IN_FREE:-90000}" ;;
  nvpmodel) printf 'pmode:%04d' "$2" >"$STAND_IN_ROOT/var/lib/nvpmodel/status" ;;
  jetson_clocks) [[ ${1:-} != --store ]] || echo kept >"$2" ;;
  fallocate) echo swap >"${!#}" ;;
  swapon) echo "${!#} file 1 0 -2" >>"$STAND_IN_ROOT/proc/swaps" ;;
  swapoff) sed -i "\|^${!#} |d" "$STAND_IN_ROOT/proc/swaps" ;;
  systemctl)
    enabled=$STAND_IN_ROOT/etc/systemd/system/enabled
    case $1 in
      is-enabled) [[ -e $enabled ]] ;;
      enable)
        touch "$enabled"
        [[ ${STAND_IN_FAILS:-} != half-enabled ]]
        ;;
      # systemctl cannot disable a unit without a file.
      disable) [[ -e $STAND_IN_ROOT/etc/systemd/system/$2 ]] && rm -f "$enabled" ;;
    esac
    ;;
esac
"""
_PROGRAMS = (
    *("python3.10", "python3.12", "df", "nvpmodel", "jetson_clocks", "fallocate", "mkswap", "swapon", "swapoff"),
    *("systemctl", "apt-get"),
)


@dataclass
class ScratchBoard:
    """A scratch root with stand-ins for a board's programs; `setup` runs the script there."""

    root: Path
    programs: Path

    def setup(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script to its end. `environment` controls the stand-ins, as in fails="mkswap"."""
        return subprocess.run(
            self.words(*options), env=self.environment_of(environment), capture_output=True, text=True, timeout=60
        )

    def begin(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        """Start the script in a process group of its own."""
        return subprocess.Popen(
            self.words(*options),
            env=self.environment_of(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def words(self, *options: str) -> list[str]:
        """Return the command that runs the script here."""
        return [str(SETUP), "--root", str(self.root), *options]

    def calls(self) -> list[str]:
        """Return the calls that change something since the last call of this method, without the root."""
        log = self.programs / "log"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        log.write_text("", encoding="utf-8")
        queries = ("df ", "python3.10 -I -c", "python3.12 -I -c", "systemctl is-enabled")
        return [line.replace(str(self.root), "") for line in lines if not line.startswith(queries)]

    def hangs(self) -> bool:
        """Return whether the stand-in that hangs was reached."""
        return (self.programs / "log.hangs").exists()

    def files(self) -> dict[str, str]:
        """Return the text of every file below the root."""
        return {
            str(path.relative_to(self.root)): path.read_text(encoding="utf-8")
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }

    def environment_of(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for the stand-ins, with those of `environment`."""
        controls = {f"STAND_IN_{name.upper()}": value for name, value in environment.items()}
        return {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "STAND_IN_LOG": str(self.programs / "log"),
            "STAND_IN_ROOT": str(self.root),
            **controls,
        }


def scratch_board(root: Path, programs: Path) -> ScratchBoard:
    """Return the tree at `root` as a board, with stand-ins for its programs in `programs`."""
    programs.mkdir()
    for name in _PROGRAMS:
        (programs / name).write_text(_STAND_IN, encoding="utf-8")
        (programs / name).chmod(0o755)
    return ScratchBoard(root, programs)
