"""S3-compatible storage (extra `s3`): HDF5 files, read where bytes are asked for, and a folder that machines share.

Address and credentials come from where AWS's own programs have them, never from parameters: `AWS_ENDPOINT_URL`,
`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, or a profile in `~/.aws`. Requests are those of s3fs.
"""

import gc
import hashlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ups.data.hdf5 import file_fault
from ups.errors import ConfigFault, DataFault, StorageFault
from ups.files import publish

BLOCK_BYTES, MAX_BLOCKS = 2**16, 256  # of the structure of a file, kept in memory
TIMEOUT_SECONDS, ATTEMPTS = 15, 3  # s3fs makes each request up to five times: a dead network is a fault in four minutes
RUN_AGAIN = "run the same command again"
MADE_FROM = "made_from.json"


@contextmanager
def _storage_faults(path: Path, parameter: str = "raw_root", right: str = "read") -> Iterator[None]:
    """Turn what s3fs raises into a fault of one line, without text and trace: the address may have a password in it.

    The line names the `parameter` with the place, and the `right` that the request needs.
    """
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
    from s3fs.utils import FileExpired

    keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise file_fault(path, "there are no credentials for the storage", f"set {keys}") from None
    except FileNotFoundError:
        raise file_fault(path, "no such bucket, folder or file", f"check {parameter} and AWS_ENDPOINT_URL") from None
    except PermissionError:
        raise file_fault(path, "the storage denies access", f"check {keys}, and what they may {right}") from None
    except FileExpired:
        raise file_fault(path, "has changed while it was read", RUN_AGAIN) from None
    except DataFault:
        raise
    except (BotoCoreError, OSError, ValueError) as error:  # a time-out is an OSError, a wrong address a ValueError
        cause = error.__cause__
        kind = cause.response["Error"]["Code"] if isinstance(cause, ClientError) else type(error).__name__
        what = f"the storage does not answer as expected ({kind})"
        raise file_fault(path, what, f"check AWS_ENDPOINT_URL and the network, then {RUN_AGAIN}") from None


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep garbage collection out of the thread of s3fs: to free an object of h5py it would wait for the lock of h5py.

    That lock is held by the thread which waits for the bytes, so that both would wait for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _storage() -> Any:
    if find_spec("s3fs") is None:
        raise ConfigFault("files on S3 need the extra: pip install -e '.[s3]'")
    import fsspec

    options = {"connect_timeout": TIMEOUT_SECONDS, "read_timeout": TIMEOUT_SECONDS}
    options |= {"retries": {"total_max_attempts": ATTEMPTS}}
    return fsspec.filesystem("s3", config_kwargs=options, use_listings_cache=False)


def _key(path: Path) -> str:
    return "/".join(path.parts[1:])


def list_remote(folder: Path) -> list[str]:
    """Names of the files in a folder; raises `DataFault` if it is not there or cannot be read."""
    storage = _storage()
    with _storage_faults(folder):
        entries = storage.ls(_key(folder), detail=True)
    return [Path(entry["name"]).name for entry in entries if entry["type"] == "file" and entry["name"] != _key(folder)]


def identify(path: Path) -> tuple[int, str]:
    """Size in bytes and MD5 of a file; of one that was uploaded in several parts the MD5 of its ETag, not of its bytes.

    Neither reads the file: the ETag of a file that was uploaded at once is its MD5.
    """
    storage = _storage()
    with _storage_faults(path):
        entry = storage.info(_key(path))
    tag = entry["ETag"].strip('"')
    is_md5 = re.fullmatch("[0-9a-f]{32}", tag)
    return entry["size"], tag if is_md5 else hashlib.md5(tag.encode(), usedforsecurity=False).hexdigest()


class RemoteFile(io.RawIOBase):
    """One version of a file; h5py names it by its `repr`, and raises again what is raised here.

    Small reads, of the structure of a file, go through blocks that are kept. Large ones, of values, are one request.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position, storage = path, 0, _storage()
        blocks = {"cache_type": "blockcache", "cache_options": {"maxblocks": MAX_BLOCKS}}
        with _storage_faults(path):
            self._blocks = storage.open(_key(path), "rb", block_size=BLOCK_BYTES, **blocks)
            self._values = storage.open(_key(path), "rb", cache_type="none")

    def __repr__(self) -> str:
        return str(self._path)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._blocks.size}[whence]
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        source = self._blocks if len(buffer) < BLOCK_BYTES else self._values
        with _without_collection(), _storage_faults(self._path):
            source.seek(self._position)
            block = source.read(len(buffer))
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)


class SharedFolder:
    """A folder on S3 with files of a local folder under the same names, each of which is whole or not there.

    Files are named by their paths in the local folder. Whoever fetches some verifies them.
    """

    def __init__(self, remote: Path, local: Path) -> None:
        self.remote, self.local, self._storage = remote, local, _storage()

    @cached_property
    def _present(self) -> set[Path]:
        """All its files, listed once."""
        key = _key(self.remote)
        with self._faults(self.remote, "list"):
            names = self._storage.find(key)
        return {self.local / name.removeprefix(f"{key}/") for name in names}

    def has(self, paths: list[Path]) -> bool:
        """Whether all these files are there."""
        return self._present.issuperset(paths)

    def check(self, made_from: dict[str, Any], paths: list[Path]) -> None:
        """Check that its files are made from this, and that it may be written to unless it has all these files.

        Raises:
            DataFault: it is made from something else, or cannot be read.
            StorageFault: a file is missing, and it cannot be written to.
        """
        note, content = self.local / MADE_FROM, json.dumps(made_from, sort_keys=True, indent=1).encode()
        if self.has([note]) and self._read(note) != content:
            what = "the latents there are made from something else"
            raise file_fault(self._place(note), what, "name another launch.latent_store")
        if not self.has(paths):
            self._write(note, content)

    def fetch(self, paths: list[Path]) -> None:
        """Copy these files into the local folder."""
        for path in paths:
            content = self._read(path)
            with publish(path) as temporary:
                temporary.write_bytes(content)

    def upload(self, paths: list[Path]) -> None:
        """Add these files unless it has them all; some may be what is left of damaged ones, and are replaced."""
        for path in [] if self.has(paths) else paths:
            self._write(path, path.read_bytes())

    def damaged(self, path: Path) -> DataFault:
        """The fault that this file, or one that belongs to it, is damaged."""
        return file_fault(self._place(path), "it or its statistics are damaged", f"delete it, then {RUN_AGAIN}")

    def _place(self, path: Path) -> Path:
        return self.remote / path.relative_to(self.local)

    def _read(self, path: Path) -> bytes:
        with self._faults(self._place(path), "read"):
            return self._storage.cat_file(_key(self._place(path)))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with self._faults(self._place(path), "write"):
                self._storage.pipe_file(_key(self._place(path)), content)
        except DataFault as fault:
            raise StorageFault(str(fault)) from None
        self._present.add(path)

    def _faults(self, place: Path, right: str) -> AbstractContextManager[None]:
        return _storage_faults(place, "launch.latent_store", right)
