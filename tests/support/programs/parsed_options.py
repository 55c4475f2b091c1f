"""Whether a command accepts options, without running it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from support.programs.commands import run


class Parsed(Exception):
    """A command's options were accepted."""


def check_options(command: str, *words: str) -> argparse.Namespace:
    """Return what a command's parser makes of the words. The test fails if the parser rejects them."""
    found: list[argparse.Namespace] = []
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **named: Any) -> argparse.Namespace:
        found.append(parse(self, *given, **named))
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        run(command, *words)
    return found[0]
