"""Checkpoints that are downloaded by their names on the Hugging Face hub."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files.untrusted import url_of
from sinkprune.export.checkpoint.folder_kinds import described

_TRIAL = (
    "To try without a download, give demo/pocket of the clone, or for times alone a preset such as llava-1.5-7b with "
    "--random-weights."
)


def download(source: str, files: Sequence[str]) -> Path:
    """Return the folder with the download of `files` of the hub name `source`, which names no folder.

    Raises `CheckpointError` for a file, a URL and any other text, and for a failed download.
    """
    folder = Path(source)
    if folder.is_file():
        raise CheckpointError(
            f"'{source}' is a file, expected a folder in Hugging Face format. "
            f"{described(folder.parent, [folder.name]) or 'Give the folder that holds it.'}"
        )
    if url_of(source) and not folder.exists():
        name = re.match(r"https://(?:huggingface\.co|hf\.co)/(\w[\w.-]*/\w[\w.-]*)", source)
        remedy = f"Give its hub name: {name[1]}" if name else "Download it first, and give its folder."
        raise CheckpointError(f"checkpoint '{source}' is a URL. {remedy}")
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        raise CheckpointError(
            f"checkpoint '{source}': found no such folder. Give a local folder in Hugging Face format, or a hub name "
            f"such as llava-hf/llava-1.5-7b-hf. {_TRIAL}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(files)))
    except Exception as error:
        # Errors of the client, of the system and of its HTTP library, which differs from version to version.
        remedy = "Check the name and the network, or give a local folder."
        if isinstance(error, GatedRepoError):
            remedy = "Ask for access on the model's page, then log in with `hf auth login`."
        elif isinstance(error, RepositoryNotFoundError):
            remedy = "Check the name; for a private model log in with `hf auth login`."
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            remedy = "Free space, or have HF_HOME name a folder with room that you may write to."
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise CheckpointError(
            f"checkpoint '{source}' is no local folder and could not be downloaded: {reason}. {remedy} {_TRIAL}"
        ) from error
