"""A checkpoint's folder: what kind it is, its configuration and its tensors."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, TypeVar

import ml_dtypes  # noqa: F401  (teaches numpy bfloat16, which safetensors then returns)
from safetensors import SafetensorError, safe_open

from sinkprune.contract.checks import Bounds, SchemaError, format_value, from_json
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files import untrusted
from sinkprune.contract.files.untrusted import MissingError, UnreadableError
from sinkprune.contract.precision import Array

if TYPE_CHECKING:
    from sinkprune.export.source import ExportRequest

T = TypeVar("T")
Name = Annotated[str, Bounds(1, 200)]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_BYTES = 32 << 20
"""The limit of a shard's header: a hundred times the largest published."""
_SHARDS = 1000
_FLOATS = ("F64", "F32", "F16", "BF16")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*checkpoint.pt"]
TOKENIZER_FILES = ["tokenizer*.json", "special_tokens_map.json", "added_tokens.json"]

# transformers before and after 4.52 nest the same modules differently.
_RENAMINGS = [
    (re.compile(r"^model\."), ""),
    # pi0, by transformers and by LeRobot.
    (re.compile(r"^paligemma_with_expert\.paligemma\.(language_model\.)?lm_head\."), "tied_embedding."),
    (re.compile(r"^(vlm|paligemma_with_expert\.paligemma\.model|paligemma_with_expert\.paligemma)\."), ""),
    (re.compile(r"^paligemma_with_expert\.gemma_expert\.(model\.)?"), "dit."),
    (re.compile(r"^embed_action_time\."), ""),
    (re.compile(r"^language_model\.model\."), "language_model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
    (re.compile(r"^(embed_tokens|layers|norm)\."), r"language_model.\1."),
    # Cosmos3, whose folder has Qwen3-VL's modules without their prefixes, by the names of diffusers.
    (re.compile(r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\."), r"visual.\1."),
    (re.compile(r"\.self_attn\.to_([qkv])\."), r".self_attn.\1_proj."),
    (re.compile(r"\.self_attn\.to_out\.(0\.)?"), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.norm_([qk])\."), r".self_attn.\1_norm."),
]


_TIED_EMBEDDING = "tied_embedding.weight"
"""The embedding table as the head of LeRobot's policies, whose checkpoints may store the table only once."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
_READ = (".json", ".jinja", ".safetensors", ".pt")


def _check_pointers(folder: Path) -> None:
    """Raise `CheckpointError` for a folder that was cloned without Git LFS: its files are pointers to files."""
    pointers = [name for name in _names(folder) if name.endswith(_READ) and _is_pointer(folder / name)]
    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise CheckpointError(
            f"'{folder / pointers[0]}'{more} in place of the file has a pointer of Git LFS. Run `git lfs pull` in "
            f"'{folder}', or download the checkpoint with `hf download`."
        )


_OF_OTHERS = {"adapter_config.json", "config_sentence_transformers.json", "modules.json"}
"""Files that folders of other kinds have, some of them beside config.json."""


def check_kind(source: str, folder: Path) -> None:
    """Raise `CheckpointError` for a folder that is known to be something else than a checkpoint of a whole model."""
    names = _names(folder)
    if "config.json" not in names or not _OF_OTHERS.isdisjoint(names):
        from sinkprune.export.checkpoint.folder_kinds import check_other_kinds

        check_other_kinds(source, folder, names)


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir())
    return []


def _is_pointer(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _POINTER_BYTES:
            return False
        with closing(untrusted.open_regular(path, follow_links=False)) as file:
            return file.read(len(_POINTER)) == _POINTER
    except (OSError, untrusted.UnreadableError):
        return False


def locate(source: str, files: Sequence[str] = _FILES) -> Path:
    """Return the local folder of a checkpoint: `source` itself, or the download of `files` if it is a hub name."""
    folder = Path(source)
    if folder.is_dir():
        _check_pointers(folder)
        return folder
    from sinkprune.export.checkpoint.hub import download

    return download(source, files)


def has_entry(folder: Path, name: str) -> bool:
    """Return whether the checkpoint folder has an entry `name`, even a link to nothing."""
    return os.path.lexists(folder / name)


def file_of(folder: Path, name: str) -> Path:
    """Return the real path of the file `name` of a checkpoint folder, which need not exist. No other code follows
    links.

    A link may lead elsewhere in the folder or, in a hub cache, from a snapshot to its blobs. Raises `CheckpointError`
    for any other link, with which an untrusted archive could put files of this machine into the bundle.
    """
    root = Path(os.path.realpath(folder))
    # CACHE/models--OWNER--NAME/snapshots/REVISION, or a folder in it. Blobs may be links to blobs that models share.
    repository = next((above.parent for above in root.parents[:2] if above.name == "snapshots"), None)
    blobs = [repository / "blobs", repository.parent / "blobs"] if repository else []
    place = Path(os.path.realpath(folder / name))
    if not any(place.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise CheckpointError(
            f"'{folder / name}' is a link that leads out of the checkpoint folder, to '{place}'. Links are followed "
            "within a checkpoint and within a hub cache only. Put the file itself in its place."
        )
    return place


def read_text(folder: Path, name: str, limit: int) -> str:
    """Return the text in the file `name` of a checkpoint folder.

    Raises `CheckpointError` if it is no regular file, has more than `limit` bytes or is not UTF-8.
    """
    try:
        return untrusted.read_text(file_of(folder, name), limit, follow_links=False)
    except UnreadableError as error:
        raise _refused(folder / name, error) from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of a checkpoint folder; raises `CheckpointError`."""
    try:
        data = untrusted.read_json(file_of(folder, name), follow_links=False)
    except UnreadableError as error:
        raise _refused(folder / name, error) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"'{folder / name}' holds {format_value(data)}, expected a JSON object.")
    return data


def read_fields(kind: type[T], data: Any, where: str) -> T:
    """Return those fields of `data` that the TypedDict `kind` has. `where` names the file in messages.

    Raises `CheckpointError` with the file, the field, the value found and the expected values.
    """
    try:
        return from_json(kind, data)
    except SchemaError as error:
        raise CheckpointError(
            f"{where} is malformed at {error}. Correct it, or download the checkpoint again."
        ) from error


def _refused(path: Path, error: UnreadableError) -> CheckpointError:
    if isinstance(error, MissingError):
        return CheckpointError(
            f"'{path}' {error}. Give a checkpoint folder in Hugging Face format, downloaded completely."
        )
    return CheckpointError(f"'{path}' {error}. Download it again.")


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return a fingerprint of a configuration that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


class _Index(TypedDict):
    weight_map: Annotated[dict[str, Name], Bounds(1, 1 << 20)]


class FolderContent(NamedTuple):
    """A checkpoint folder that has more than transformers' files."""

    files: Mapping[str, dict[str, Any]]
    """JSON files as the family reads them, by name."""
    parts: Mapping[str, str]
    """Files of further tensors, in PyTorch's format, by the first part of their tensors' canonical names."""


ReadFolder = Callable[["ExportRequest", Path, Mapping[str, Any]], FolderContent]
"""Reads the folder of a request with this config.json. Raises `CheckpointError`."""


class SafetensorsWeights:
    """The tensors of a checkpoint folder, read one at a time under their canonical names.

    Opening reads every shard's header, so that a missing or truncated shard is reported before any work.
    """

    def __init__(
        self, folder: Path, named: str | None = None, parts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Open the weights that transformers reads; raises `CheckpointError`, also for a second set of weights.

        `named` is the file or index that config.json names (`transformers_weights`), and `parts` are those of
        `FolderContent`.
        """
        self.folder, self._named = folder, named
        self.owners: dict[str, tuple[Any, str]] = {}
        """The open file and the name there of each tensor, by canonical name."""
        with ExitStack() as self._stack:
            for shard in self._shards():
                handle = self._stack.enter_context(open_shard(folder, shard))
                for name in handle.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                    if _canonical(name) in self.owners:
                        raise self._error(
                            f"shard '{shard}' holds tensor '{name}', which has been there before, under this name or "
                            "another version's. Expected one of each; download it again."
                        )
                    self.owners[_canonical(name)] = (handle, name)
            for part, file in parts.items():
                # Few policies have such files.
                from sinkprune.export.checkpoint.torch_file import TorchFile

                torch_file = self._stack.enter_context(closing(TorchFile(file_of(folder, file))))
                self.owners |= {f"{part}.{name}": (torch_file, name) for name in torch_file.keys()}  # noqa: SIM118
            # Without an error they stay open.
            self._stack = self._stack.pop_all()
        if _TIED_EMBEDDING in self.owners:
            self.owners.setdefault("language_model.embed_tokens.weight", self.owners[_TIED_EMBEDDING])

    def close(self) -> None:
        self._stack.close()

    def __contains__(self, name: object) -> bool:
        return name in self.owners

    def tensor(self, name: str, shape: Sequence[int]) -> Array:
        """Return the floats `name`; raises `CheckpointError` if they are missing or not of `shape`."""
        return self._read(name, shape, _FLOATS, "F32, F16 or BF16. Give the unquantised checkpoint")

    def integers(self, name: str, shape: Sequence[int]) -> Array:
        """Return the 32-bit integers `name`; raises `CheckpointError` if they are missing or not of `shape`."""
        return self._read(name, shape, ("I32",), "I32. Download it again, or give the unquantised checkpoint")

    def _read(self, name: str, shape: Sequence[int], dtypes: Sequence[str], expected: str) -> Array:
        if name not in self.owners and f"{name.removesuffix('weight')}qweight" in self.owners:
            raise self._error(
                f"'{name}' was quantised, but config.json has no quantization_config. Add it (older "
                "tools wrote it to quantize_config.json), or give the unquantised one."
            )
        if name not in self.owners:
            raise self._error(
                f"holds no tensor '{name}', expected one of shape {list(shape)}. The configuration and the weights "
                "do not belong together, or a shard is missing."
            )
        handle, stored = self.owners[name]
        found = handle.get_slice(stored)
        if found.get_shape() != list(shape):
            raise self._error(
                f"tensor '{stored}' has shape {found.get_shape()}, expected {list(shape)} by config.json. They do "
                "not belong together."
            )
        if found.get_dtype() not in dtypes:
            raise self._error(f"tensor '{stored}' is {found.get_dtype()}, expected {expected}.")
        return handle.get_tensor(stored)

    def _shards(self) -> list[str]:
        """Return the files that transformers reads: the one that is named, else one file, else those of an index."""
        if self._named is not None:
            return [self._named] if self._named.endswith(".safetensors") else self._listed(self._named)
        listed = self._listed(_INDEX) if has_entry(self.folder, _INDEX) else []
        if not has_entry(self.folder, _SINGLE):
            if not listed:
                from sinkprune.export.checkpoint.folder_kinds import missing_weights

                downloading = self.folder / ".cache" / "huggingface" / "download"
                found = missing_weights(self.folder, _names(self.folder), _names(downloading))
                raise self._error(f"found neither {_SINGLE} nor {_INDEX}. {found}")
            return listed
        # save_pretrained leaves the index of earlier weights, and removes their shards.
        second = [shard for shard in listed if shard != _SINGLE and has_entry(self.folder, shard)]
        if second:
            raise self._error(
                f"found two sets of weights: {_SINGLE}, which transformers reads, and {len(second)} of {_INDEX}, "
                f"such as '{second[0]}'. Expected one. Move the set that is out of date, with its index, elsewhere."
            )
        return [_SINGLE]

    def _listed(self, index: str) -> list[str]:
        """Return the shards that an index names; raises `CheckpointError` for a name outside the folder."""
        where = f"'{self.folder / index}'"
        names = set(read_fields(_Index, read_json(self.folder, index), where)["weight_map"].values())
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{where} names the shard {name!r}, expected a .safetensors file within the folder. "
                    "Download it again."
                )
        if len(names) > _SHARDS:
            raise CheckpointError(
                f"{where} names {len(names)} shards, expected at most {_SHARDS}. Download it again."
            )
        return sorted(names)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint '{self.folder}': {what}")


def open_shard(folder: Path, shard: str) -> Any:
    """Open a safetensors file of a checkpoint folder, whose header is then known to fit; raises `CheckpointError`."""
    path = file_of(folder, shard)
    try:
        with closing(untrusted.open_regular(path, follow_links=False)) as file:
            size = int.from_bytes(file.read(8), "little")
        if size > _HEADER_BYTES:
            raise UnreadableError(f"has a header of {size} bytes, expected at most {_HEADER_BYTES}")
        return safe_open(path, framework="np")
    except MissingError as error:
        raise CheckpointError(
            f"checkpoint '{folder}': shard '{shard}' is missing, though another file names it. Download it again."
        ) from error
    except UnreadableError as error:
        raise _refused(folder / shard, error) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"'{folder / shard}' is damaged ({error}). It has {path.stat().st_size} bytes; download it again."
        ) from error


def _canonical(name: str) -> str:
    for pattern, replacement in _RENAMINGS:
        name = pattern.sub(replacement, name)
    return name
