"""`make test` leaves out what takes long, but no line of the page of guarantees."""

from __future__ import annotations

from durations import long_tests

_PAGE = "| a guarantee | `code.py` | `tests/a.py`, `tests/c/` |\n| another | `code.py` | `tests/b.py` |\n"


def test_the_quickest_test_of_a_guarantee_stays() -> None:
    seconds = {"tests/a.py::x": 9.0, "tests/c/d.py::x": 5.0, "tests/b.py::x": 7.0, "tests/b.py::y": 0.1}
    assert long_tests({**seconds, "tests/e.py::x": 2.0}, 1.5, _PAGE) == {
        "tests/a.py::x",
        "tests/b.py::x",
        "tests/e.py::x",
    }
    assert long_tests(seconds, 10.0, _PAGE) == set()
