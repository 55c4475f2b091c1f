"""The one place that chooses which program a child process runs. Nothing in the current folder is ever run."""

from __future__ import annotations

import os
import shutil
import sys

# Python puts the current folder first in `sys.path` for -c and -m. Its switch against that, -P, is of Python 3.11,
# and -I would drop PYTHONPATH too.
_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)\n"


def python_command(program: str, *arguments: str) -> list[str]:
    """The words that run the Python source `program` in a new process of this Python.

    The child imports what is installed and what PYTHONPATH names, and nothing from the current folder.
    """
    return [sys.executable, "-c", _WITHOUT_CURRENT_FOLDER + program, *arguments]


def find_program(name: str) -> str | None:
    """The path of the program `name` in PATH, or None; entries of PATH that do not begin with / are skipped.

    An empty entry and `.` mean the current folder.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, folders)))
