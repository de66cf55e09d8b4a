"""Files that appear whole or not at all, and the JSON files that egx itself writes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from egx.errors import FormatError


def read_json(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """The JSON object of one of egx's own files, its format and version checked."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: damaged, or not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != kind:
        raise FormatError(f"{path}: not an {kind} file")
    if data.get("version") != version:
        raise FormatError(
            f"{path}: {kind} version {data.get('version')!r}; this egx reads version {version}"
        )
    return data


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, folders included; whatever happens, it is there whole or as it was before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
