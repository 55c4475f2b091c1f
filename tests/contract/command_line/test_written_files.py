"""Results of a command that are written one after the other."""

from __future__ import annotations

import pytest

from sinkprune.contract.command_line.options import write_each
from sinkprune.contract.errors import OutputError


@pytest.mark.parametrize("error", [OutputError("the disk is full"), OSError("closed"), ValueError("a bug of ours")])
def test_what_follows_a_failed_writer_is_written_and_the_first_error_is_raised(error: Exception) -> None:
    written = list[str]()

    def fail(failed: Exception) -> None:
        raise failed

    with pytest.raises(type(error)) as raised:
        write_each(lambda: fail(error), lambda: written.append("report"), lambda: fail(KeyError("later")))
    assert raised.value is error and written == ["report"]
