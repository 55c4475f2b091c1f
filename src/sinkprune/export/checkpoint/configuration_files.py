"""The JSON files of a checkpoint, in transformers' form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkprune.export.checkpoint.folder import has_entry, read_json
from sinkprune.export.checkpoint.lerobot import check_tokenizer, is_lerobot, translated_files


class ConfigurationFiles:
    """The JSON files of a checkpoint folder by name. Those of LeRobot's form are translated to transformers'."""

    def __init__(self, source: str, folder: Path) -> None:
        """Read config.json; raises `CheckpointError`. `source` names the checkpoint in messages."""
        config = read_json(folder, "config.json")
        self._source, self._folder, self._lerobot = source, folder, is_lerobot(config)
        self._read = translated_files(source, folder, config) if self._lerobot else {"config.json": config}

    def __contains__(self, name: object) -> bool:
        return name in self._read or (isinstance(name, str) and has_entry(self._folder, name))

    def read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the file `name`; raises `CheckpointError`."""
        return self._read[name] if name in self._read else read_json(self._folder, name)

    def check_tokenizer(self) -> None:
        """Raise `CheckpointError` for a checkpoint whose tokenizer is somewhere else."""
        if self._lerobot:
            check_tokenizer(self._source, self._folder)
