"""What installed packages register by entry points: families, methods, backends, commands, options and forms.

A package adds a name with a line in its pyproject.toml, as this one does, and the name works as ours do:

    [project.entry-points."sinkprune.methods"]
    every-second = "my_package.methods:every_second"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from sinkprune.contract.errors import SinkpruneError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """The names of an entry point group, sorted. What a name stands for is imported when it is read."""

    def __init__(self, group: str) -> None:
        """Read nothing yet: `group` is looked up when a name is.

        Reading a name raises `SinkpruneError` where the import of another package fails.
        """
        self._group, self._loaded = group, dict[str, T]()

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            point = _registered(self._group)[name]
            try:
                self._loaded[name] = point.load()
            except (ImportError, AttributeError) as error:
                if point.value.startswith("sinkprune."):
                    raise
                raise SinkpruneError(
                    f"the entry point '{name}' of the group '{self._group}' is {point.value}, and its import failed: "
                    f"{error}. Mend or uninstall its package."
                ) from error
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in _registered(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(_registered(self._group))

    def __len__(self) -> int:
        return len(_registered(self._group))


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; raises `SinkpruneError` for a name that stands for two things."""
    found = dict[str, EntryPoint]()
    for point in sorted(_all_entry_points().select(group=group), key=lambda point: point.name):
        # A package may be listed twice, as an editable one beside its sources is.
        if found.setdefault(point.name, point).value != point.value:
            raise SinkpruneError(
                f"two packages register '{point.name}' in the group '{group}': {found[point.name].value} and "
                f"{point.value}. Uninstall one of them."
            )
    return found


@cache
def _all_entry_points() -> Any:
    # One pass over the installed packages for all groups.
    return entry_points()


def load_object(place: str) -> Any:
    """Import what `place` names, as in `package.module:Class`."""
    module, _, name = place.partition(":")
    return reduce(getattr, name.split("."), import_module(module))
