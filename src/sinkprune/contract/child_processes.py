"""Choose the programs of child processes. Nothing in the current folder is ever run."""

from __future__ import annotations

import os
import shutil
import sys

# For -c and -m, Python puts the current folder first in `sys.path`. Its option -P needs Python 3.11, and -I would
# drop PYTHONPATH too.
_WITHOUT_CURRENT_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)\n"


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command that runs the Python source `program` in a new process of this Python.

    The child imports installed packages and those in PYTHONPATH, and nothing from the current folder.
    """
    return [sys.executable, "-c", _WITHOUT_CURRENT_FOLDER + program, *arguments]


def find_program(name: str) -> str | None:
    """Return the path of the program `name` in PATH, or None. Only entries of PATH that begin with / are searched.

    An empty entry and `.` mean the current folder.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, folders)))
