"""The Dockerfiles of the repository: their instructions, and what `.dockerignore` keeps from them."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import PurePosixPath

from support.programs.repository import ROOT

X86 = "docs/containers/Dockerfile"
JETPACK_6, JETPACK_7 = "jetson/Dockerfile.jetpack6", "jetson/Dockerfile.jetpack7"
DOCKERFILES = (X86, JETPACK_6, JETPACK_7)


def instructions(path: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in order: the keyword, and the rest with lines joined."""
    # A comment may stand between the lines of an instruction.
    lines = [line for line in (ROOT / path).read_text("utf-8").splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(words[0], words[1]) for words in (line.split(maxsplit=1) for line in joined.splitlines())]


def values(path: str, keyword: str) -> list[str]:
    """Return the rest of each instruction with this keyword."""
    return [rest for word, rest in instructions(path) if word == keyword]


def arguments(path: str) -> dict[str, str]:
    """Return the build arguments and their defaults, which may be empty."""
    return {name: default for name, _, default in (rest.partition("=") for rest in values(path, "ARG"))}


def command(path: str) -> list[str]:
    """Return the words of the command, in the form that needs no shell."""
    [words] = values(path, "CMD")
    return list(json.loads(words))


def health_check(path: str) -> list[str]:
    """Return the words of the health check's command, in the form that needs no shell."""
    [check] = values(path, "HEALTHCHECK")
    return list(json.loads(check.split(" CMD ", 1)[1]))


def copied(path: str) -> list[str]:
    """Return what an image copies from the repository."""
    copies = [shlex.split(rest) for rest in values(path, "COPY")]
    return [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]


def is_ignored(path: str) -> bool:
    """Return whether `.dockerignore` keeps a path, or a folder of it, out of the image."""
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    parts = PurePosixPath(path).parts
    paths = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatch(each, pattern) or fnmatch(f"x/{each}", pattern) for each in paths for pattern in patterns)
