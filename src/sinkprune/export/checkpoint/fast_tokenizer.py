"""Folders of FAST tokenizers (arXiv 2501.09747), whose Python code is never run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import Number
from sinkprune.export.checkpoint.folder import TOKENIZER_FILES, file_of, locate, read_fields, read_json
from sinkprune.export.checkpoint.text import read_tokenizer

FAST_FILES = [*TOKENIZER_FILES, "processor_config.json"]
"""The files that are read."""


_USUAL = "lerobot/fast-action-tokenizer"


class _Fields(TypedDict):
    scale: Annotated[Number, Bounds(1e-6, 1e6)]
    min_token: Annotated[int, Bounds(-(1 << 20), 1 << 20)]


def fast_settings(
    source: str, folder: Path, config: Mapping[str, Any], own: str | None, given: str | None
) -> dict[str, Any]:
    """Return the fields of `FastTokens` of a policy in LeRobot's form with this `config`; raises `CheckpointError`.

    The FAST tokenizer is that of the option, `given`, or else in the policy's folder under the name `own`.
    """
    if config.get("temperature"):
        raise CheckpointError(
            f"checkpoint '{source}': temperature is {config['temperature']}, expected 0: the likeliest tokens become "
            "actions. Write 0 in config.json to export it so."
        )
    if not given and not own:
        raise CheckpointError(
            f"checkpoint '{source}': it has no FAST tokenizer, which makes actions of its tokens and which LeRobot "
            f"loads from the hub. Add --action-tokenizer {config.get('action_tokenizer_name', _USUAL)}, or a local "
            "folder with it."
        )
    place = locate(given, FAST_FILES) if given else file_of(folder, own or "")
    return {
        "most": config.get("max_decoding_steps", 256),
        "skip": config.get("fast_skip_tokens", 128),
        "begins": config.get("validate_action_token_prefix", True),
        **read_fast_tokenizer(place),
    }


def read_fast_tokenizer(folder: Path) -> dict[str, Any]:
    """Return the scale, the least coefficient and the bytes of each token; raises `CheckpointError`.

    Clean-up of spaces, which the universal tokenizer configures, is not applied: transformers 5 applies it to no BPE.
    """
    name, backend = "processor_config.json", read_tokenizer(folder).backend
    fields = read_fields(_Fields, read_json(folder, name), f"'{folder / name}'")
    bytes_of, pieces = _byte_letters(), list[bytes]()
    for token in range(backend.get_vocab_size()):
        text = backend.id_to_token(token) or ""
        known = all(letter in bytes_of for letter in text)
        pieces.append(bytes(bytes_of[letter] for letter in text) if known else text.encode())
        if backend.decode([token], skip_special_tokens=False) != pieces[-1].decode("utf-8", "replace"):
            raise CheckpointError(
                f"'{folder / 'tokenizer.json'}' decodes its token {token} to other bytes than byte-level BPE does. "
                "Give the folder of a FAST tokenizer."
            )
    return {**fields, "pieces": [piece.hex() for piece in pieces]}


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter that stands for one in byte-level BPE: bytes that do not print have later
    letters.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}
