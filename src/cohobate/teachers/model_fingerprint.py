# SPDX-License-Identifier: Apache-2.0
"""Which model is in a folder: its settings and the bytes of its weights, so that two of one name are told apart.

Read from the files, so that nothing need be loaded: about a second a gigabyte, once.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from cohobate.errors import ConfigError

_PIECE = 16 * 2**20
_NOT_THE_MODEL = ("_name_or_path", "transformers_version")  # of config.json


def config_fingerprint(folder: Path) -> str:
    """sha256 (hex) over the settings in `config.json`, whatever their order.

    Raises:
        ConfigError: there is none, or it is no JSON.
    """
    try:
        settings = json.loads((folder / "config.json").read_bytes())
        kept = {name: value for name, value in settings.items() if name not in _NOT_THE_MODEL}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read ({error}): it says what model this is.") from error
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def weights_fingerprint(folder: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """sha256 (hex) over the names and bytes of all safetensors files; `progress` is told (bytes done, bytes).

    Raises:
        ConfigError: there is none.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} has no safetensors weights.")
    digest, done, total = hashlib.sha256(), 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size};".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total)
    return digest.hexdigest()
