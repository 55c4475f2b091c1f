"""What a robot policy acts on, as commands take it: files or folders of frames, and states."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import counted, escaped, format_value
from sinkprune.contract.command_line.options import CommandParser, PathOrName
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import ImageError, UsageError
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json, read_text
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.policy_facts import PolicyFacts
from sinkprune.policies.observation import in_trained_order, observed, short_name, unusual_state
from sinkprune.runtime.commands.reports import frame_files
from sinkprune.runtime.media.images import FileFacts
from sinkprune.runtime.media.picture_warnings import file_facts

NO_CAMERA = "none"
"""The word for a camera without a frame."""
_STATES_BYTES = 64 << 20
"""Seven hours of states of 32 numbers, ten times a second."""
_NO_LIST = "it is no JSON list of finite numbers"
_NAMED = re.compile(r"([^/=]+)=(.*)", re.DOTALL)
"""A name and a path. A path with = begins with ./ or / where it has no name."""
_NEGATIVE = re.compile(r"-\.?\d")


class Moment(NamedTuple):
    """The frames of all cameras at one time, and the robot's state."""

    cameras: tuple[Path | None, ...]
    state: tuple[float, ...]


class Observations(NamedTuple):
    """The moments of `--camera` and `--state`, and what they were read from."""

    moments: tuple[Moment, ...] = ()
    sources: tuple[Path | None, ...] = ()
    """The value of each `--camera`, as the cameras of `moments` are ordered."""
    names: tuple[str, ...] | None = None
    """The names that were given for the cameras; None if they were given in order."""
    files: tuple[Path, ...] = ()
    folders: tuple[Path, ...] = ()
    facts: tuple[tuple[Path, FileFacts], ...] = ()
    """The files of the folders, each with its facts."""

    def for_policy(self, policy: PolicyFacts) -> Observations:
        """Return these with the cameras in the order of the policy's training.

        Raises `UsageError` for other names than the bundle's.
        """
        if self.names is None:
            return self
        given = self.names

        def ordered(values: Sequence[Path | None]) -> tuple[Path | None, ...]:
            return tuple(in_trained_order(policy, dict(zip(given, values, strict=True))))

        moments = tuple(moment._replace(cameras=ordered(moment.cameras)) for moment in self.moments)
        return self._replace(moments=moments, sources=ordered(self.sources), names=policy.cameras)

    def print_order(self, policy: PolicyFacts) -> None:
        """Print what `--camera` gave for each camera, in the order in which the policy reads them."""
        words = [NO_CAMERA if source is None else str(source) for source in self.sources]
        if policy.cameras:
            words = [f"{short_name(name)}={word}" for name, word in zip(policy.cameras, words, strict=True)]
        sys.stderr.write(f"cameras: {escaped(', '.join(words))}\n")

    def check(self, manifest: Manifest, instruction: str, **options: Any) -> list[str]:
        """Check all moments before anything is loaded, with the `options` of `observed`.

        Prints and returns notes about frames that may not belong together, about units of the numbers and about the
        first unusual state. Raises `ImageError`, `PromptError` and `UsageError`.
        """
        notes, unusual = self._names_note(), ""
        if manifest.acting.units_note:
            notes.append(manifest.acting.units_note)
        for number, moment in enumerate(self.moments, 1):
            try:
                observation = observed(manifest, moment.cameras, instruction, moment.state, **options)
            except UsageError as error:
                if len(self.moments) == 1:
                    raise
                raise UsageError(f"moment {number} of {len(self.moments)}: {error}") from error
            if not unusual and (unusual := unusual_state(manifest.acting, observation.state) or ""):
                notes.append(f"moment {number}: {unusual}" if len(self.moments) > 1 else unusual)
        sys.stderr.writelines(f"{escaped(note)}\n" for note in notes)
        return notes

    def _names_note(self) -> list[str]:
        """Return a note if some moments have frames of one number and others do not, as after a frame was lost."""
        given = [{_numbers_in(path.stem) for path in moment.cameras if path is not None} for moment in self.moments]
        different = [number for number, own in enumerate(given, 1) if len(own) > 1]
        if not different or len(different) == len(given):
            return []
        names = " and ".join(path.name for path in self.moments[different[0] - 1].cameras if path is not None)
        return [
            f"moment {different[0]} has the frames {names}, and other moments have frames of one number. Frames "
            "belong together by their order: check that no folder lacks a frame."
        ]


def _numbers_in(stem: str) -> tuple[int, ...]:
    """Return the numbers in a frame's name. What stands between them may name the camera."""
    return tuple(map(int, re.findall("[0-9]+", stem)))


def add_cameras(group: Any, note: str = "", *, required: bool = False) -> None:
    """Add `--camera` to a parser or a group of options that exclude each other; `note` is for the help."""
    group.add_argument(
        "--camera",
        type=PathOrName,
        action="append",
        metavar="[NAME=]PICTURE",
        **({"required": True} if required else {}),
        help=f"the last frame of a camera{note}; once for each, with the names of the policy's cameras, or without "
        f"names in the order of its training; {NO_CAMERA} for a camera without one",
    )


def add_state(parser: CommandParser) -> None:
    """Add `--state`. Whether the policy reads one is known when its bundle is open."""
    # The first number may be negative. argparse takes "-0.1,0.2" for an option, before Python 3.14.
    parser._negative_number_matcher = _NEGATIVE
    parser.group("picture and question").add_argument(
        "--state",
        metavar="N,N,...",
        help="the robot's state, in its own units, or a file of states: a line for each moment, as CSV or as "
        "JSON lists; one line is for all",
    )


def given_observations(cameras: Sequence[str] | None, state: str | None) -> Observations:
    """Return the moments of the options `--camera` and `--state`; none without cameras.

    Raises `ImageError` for folders of different numbers of frames and for files in them that are no pictures, and
    `UsageError` for states.
    """
    if not cameras:
        return Observations()
    names, paths = _named(cameras)
    folders = tuple(path for path in paths if path is not None and path.is_dir())
    with status("checking the frames"):
        # The order of files gives the moments, so that another file among them would move all later ones.
        frames = {folder: frame_files(folder) for folder in folders}
        facts = {file: file_facts(file) for own in frames.values() for file in own}
    sets = _frames(paths, frames)
    states, source = _states(state)
    if len(states) not in (1, len(sets)):
        raise UsageError(
            f"'{source}' has {counted(len(states), 'state')}, and the cameras have {counted(len(sets), 'moment')}. "
            "Give a state for each, or one for all."
        )
    states *= len(sets) // len(states)
    moments = tuple(Moment(frames, own) for frames, own in zip(sets, states, strict=True))
    files = [path for cameras in sets for path in cameras if path is not None] + ([source] if source else [])
    return Observations(moments, tuple(paths), names, tuple(files), folders, (*facts.items(),))


def _named(words: Sequence[str]) -> tuple[tuple[str, ...] | None, list[Path | None]]:
    pairs = [_NAMED.fullmatch(word) for word in words]
    given = [pair for pair in pairs if pair]
    if given and len(given) < len(pairs):
        other = words[pairs.index(None)]
        raise UsageError(
            f"--camera {format_value(given[0][0])} has a name and {format_value(other)} has none. Name all cameras "
            "or none of them. Begin a path that has = with ./ to give it without a name."
        )
    for pair in given:
        if not pair[2]:
            raise UsageError(f"--camera {format_value(pair[0])} has no picture, expected NAME=PICTURE or NAME=none.")
    names = tuple(pair[1] for pair in given)
    if doubled := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--camera names {format_value(doubled[0])} twice, expected each camera once.")
    paths = [pair[2] for pair in given] or words
    return names or None, [None if path == NO_CAMERA else Path(path) for path in paths]


def _frames(paths: Sequence[Path | None], frames: dict[Path, list[Path]]) -> list[tuple[Path | None, ...]]:
    """Return the frames of each moment, by camera; `frames` are those in folders."""
    folders = [*frames]
    if not folders:
        return [tuple(paths)]
    alone = [path for path in paths if path is not None and path not in folders]
    if alone:
        raise ImageError(
            f"'{folders[0]}' is a folder of frames, and '{alone[0]}' is none. Give a folder for each camera, a file "
            f"for each, or {NO_CAMERA}."
        )
    first = len(frames[folders[0]])
    for folder in folders:
        if len(frames[folder]) != first:
            raise ImageError(
                f"'{folders[0]}' has {counted(first, 'frame')} and '{folder}' {len(frames[folder])}, expected as "
                "many in each: frames belong together by the order of their names."
            )
    return [tuple(frames[path][number] if path else None for path in paths) for number in range(first)]


def _states(word: str | None) -> tuple[list[tuple[float, ...]], Path | None]:
    if word is None:
        return [()], None
    try:
        return [_numbers(word)], None
    except ValueError as error:
        wrong = str(error)
    if not word.strip():
        raise UsageError("--state is empty, expected numbers with commas between them, or a file of states.")
    path = Path(word)
    try:
        # Excel and PowerShell write a byte order mark.
        lines = read_text(path, _STATES_BYTES).removeprefix("\ufeff").splitlines()
    except UnreadableError as error:
        raise UsageError(
            f"--state is {format_value(word)}: {wrong}, and as a file it {error}. Expected numbers with commas "
            "between them, or a file of states."
        ) from error
    states = [_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not states:
        raise UsageError(f"the file of states '{path}' is empty, expected a line for each moment.")
    return states, path


def _line(path: Path, number: int, line: str) -> tuple[float, ...]:
    try:
        return _listed(line) if line.lstrip().startswith("[") else _numbers(line)
    except ValueError as error:
        raise UsageError(
            f"'{path}', line {number}: found {format_value(line)}: {error}. Expected numbers with commas between "
            "them, or a JSON list of numbers."
        ) from error


def _numbers(text: str) -> tuple[float, ...]:
    """Return the numbers in a comma-separated text; raises `ValueError` with the first that is not finite."""
    values = []
    for place, word in enumerate(text.split(","), 1):
        try:
            # Python reads 0_5, a slip of 0.5, as 5.
            values.append(float(word.replace("_", "?")))
        except ValueError as error:
            raise ValueError(f"{format_value(word)} at place {place} is no number") from error
        if not math.isfinite(values[-1]):
            raise ValueError(f"{format_value(word)} at place {place} is not finite")
    return tuple(values)


def _listed(line: str) -> tuple[float, ...]:
    try:
        values = parsed_json(line.encode())
        if all(type(value) in (int, float) for value in values):
            return tuple(map(float, values))
    except (UnreadableError, OverflowError) as error:
        raise ValueError(_NO_LIST) from error
    raise ValueError(_NO_LIST)


def check_kind_options(options: Any, bundle: Bundle, foreign: Iterable[str], needed: Iterable[str]) -> None:
    """Raise `UsageError` for given options of `foreign`, which are for the other kind of bundles.

    The message asks for the options of `needed` that are not given.
    """
    given = [f"--{name.replace('_', '-')}" for name in foreign if getattr(options, name) not in (None, False)]
    if not given:
        return
    missing = [f"--{name}" for name in needed if getattr(options, name) is None]
    kinds = "robot policies", f"a model that answers questions (family '{bundle.manifest.family}')"
    if bundle.manifest.policy is not None:
        kinds = "models that answer questions", f"a robot policy (family '{bundle.manifest.family}')"
    are, them = ("is", "it") if len(given) == 1 else ("are", "them")
    raise UsageError(
        f"{_listing(given)} {are} for {kinds[0]}, and '{bundle.path}' is {kinds[1]}. Leave {them} out"
        f"{(missing and f', and give {_listing(missing)}') or ''}."
    )


def _listing(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
