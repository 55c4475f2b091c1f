"""The console that commands print their tables with."""

from __future__ import annotations

from rich.console import Console


class TableConsole(Console):
    """Prints on standard output, by default wider than most terminals: a wrapped row is worse than a long one."""

    def __init__(self, width: int = 250, *, soft_wrap: bool = True) -> None:
        """With `width` in columns; `soft_wrap` leaves longer lines to the terminal."""
        super().__init__(width=width, soft_wrap=soft_wrap, highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, which `run_command` expects where a reader goes away; rich would exit with 1."""
        raise BrokenPipeError
