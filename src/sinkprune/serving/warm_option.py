"""The option of `sinkprune-profile` for warm runs, in sessions."""

from __future__ import annotations

from sinkprune.contract.command_line.options import CommandParser
from sinkprune.runtime.commands.profile import ProfileExtension
from sinkprune.runtime.profiling.profile import NewSession
from sinkprune.serving.sessions import Session


class WarmOption(ProfileExtension):
    """`--warm` of `sinkprune-profile`."""

    @staticmethod
    def add_options(parser: CommandParser) -> None:
        parser.group("measurement").add_argument(
            "--warm",
            action="store_true",
            help="also measure the request as a second question about the picture in a session",
        )

    def new_session(self) -> NewSession | None:
        return Session if self.options.warm else None
