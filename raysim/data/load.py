"""Where the samples of a data set are: in memory, in a cache's files that are mapped, or left where they are."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

from raysim.data.cache import cached
from raysim.data.dataset import Dataset, FileHashes
from raysim.data.encoded import Encoded
from raysim.data.errors import DataError
from raysim.data.sources.base import EncodedSource, Source

Storage = Literal["memory", "stream"]
OF_FILES = "files "  # begins the hash of data known only by their labels and the files' names and sizes


def load(
    source: Source, root: Path | None, storage: Storage = "memory", stream_bytes: int = 0, cache: Path | None = None
) -> Dataset:
    """The data set of `source`, stored as the settings of these names in the section `data` say. Raises DataError."""
    data = _load(source, root, storage, stream_bytes, cache)
    if not (files := source.files(root)):
        return data
    digest = data.begin_digest()
    digest.update(json.dumps([(name, size) for name, size, _ in files]).encode())
    digest.update(data.y.data)
    hashes = FileHashes(OF_FILES + digest.hexdigest(), hashlib.sha256(json.dumps(files).encode()).hexdigest())
    return replace(data, files=hashes, digest=hashes.sha256 if storage == "stream" else data.digest)


def _load(source: Source, root: Path | None, storage: Storage, stream_bytes: int, cache: Path | None) -> Dataset:
    if cache is not None and source.files(root):
        return cached(source, root, cache)
    if storage == "memory":
        return source.load(root)
    if not isinstance(source, EncodedSource):
        raise DataError(
            f"data.storage: {type(source).__name__} cannot be read in parts; leave it at memory"
            + (", or set data.cache" if source.files(root) else "")
        )
    data = source.open(root)
    assert isinstance(data.x, Encoded)
    data.x.files.held_bytes = stream_bytes
    return data
