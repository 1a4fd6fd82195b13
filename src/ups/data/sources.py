"""Raw files that are downloaded or lie in a folder of the user, with size and MD5 of each."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any

from ups.data.arrays import Stamps, changed, expect_stamps, gone, stamp
from ups.data.download import download_file, lock
from ups.data.families import Family
from ups.data.inspection import inspect
from ups.data.partial import fetch_trajectories
from ups.data.pdebench import FAMILIES
from ups.data.plan import DownloadPlan, PlannedFile
from ups.data.published import refuse_outdated_md5
from ups.data.recognition import find_files
from ups.data.remote import identify
from ups.errors import DataFault
from ups.files import digest_of, files_in, is_remote, read_json, write_json

Files = dict[str, dict[str, Any]]
"""File name relative to the raw folder -> {"bytes", "md5", "family"}."""

SUPPLEMENT = "supplement"  # folder, below that of simulated files, with trajectories for small training splits
CHECKSUMS = "checksums.json"


@dataclass(frozen=True)
class Checksum:
    """A file in `checksums.json`; `stamp` is what `arrays.stamp` says of it."""

    stamp: tuple[int, int]
    md5: str


def is_added(name: str) -> bool:
    """Whether a file of a dataset was simulated for its training split; others lie in the raw folder itself."""
    return SUPPLEMENT in Path(name).parts[:-1]


def download_files(
    plan: DownloadPlan, advance: Callable[[str, int], object], *, base_url: str | None, parallel: int
) -> Files:
    """Fetch the missing files of a plan, `parallel` at a time; the first failure stops all; the same call resumes.

    `advance` receives the name of a file and the bytes of it that arrived. The MD5 of a file is computed once and kept
    in `checksums.json`: sizes are not enough, an outdated version may have the size of the current one.
    """
    checksums, stop = ChecksumCache(plan.folder / CHECKSUMS), Event()

    def fetch(planned: PlannedFile) -> str:
        """Fetch a file unless it is complete; store its MD5 at once, whatever befalls other files, and return it."""
        md5 = provide(planned)
        checksums.add(plan.folder / planned.name, md5)
        return md5

    def provide(planned: PlannedFile) -> str:
        def progress(count: int) -> None:
            if stop.is_set():
                raise CancelledError
            advance(planned.name, count)

        file, path = planned.file, plan.folder / planned.name
        known = checksums.find(path)
        if planned.trajectories is not None:
            fetch_trajectories(file, path, range(planned.trajectories), base_url=base_url, advance=progress)
            md5 = known or digest_of(path, "md5")
            return checksums.expect(path, md5) if planned.is_complete else md5
        if known == file.md5:
            progress(planned.arrived)
        else:
            download_file(file.address(base_url), file.md5, path, progress, num_bytes=file.bytes)
        return file.md5

    with ThreadPoolExecutor(parallel) as pool:
        running = {pool.submit(fetch, planned): planned for planned in plan.files}
        try:
            for future in as_completed(running):
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    sizes = {planned.name: (plan.folder / planned.name).stat().st_size for planned in plan.files}
    return {each.name: entry_of(sizes[each.name], done.result(), each.file.family) for done, each in running.items()}


class ChecksumCache:
    """MD5 of files, kept in a JSON file; an entry is valid while the file has the same size and modification time.

    Files beside the JSON file have an entry by name, which stays true when their folder is moved. A damaged JSON file
    is a fault, not an empty one: it is all that says which bytes of a partial file were fetched.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = self._read()
        self._lock = Lock()

    def find(self, path: Path) -> str | None:
        """MD5 of a file; None if it is not known or the file has changed."""
        entry = self._entries.get(self._key(path))
        return entry.md5 if entry and path.exists() and entry.stamp == stamp(path) else None

    def expect(self, path: Path, md5: str) -> str:
        """The MD5 of a file that nothing else describes; another one than when it was fetched is a `DataFault`."""
        entry = self._entries.get(self._key(path))
        if entry and entry.md5 != md5:
            raise DataFault(f"{path}: MD5 is {md5}, was {entry.md5} when it was fetched; delete it to fetch it anew")
        return md5

    def add(self, path: Path, md5: str) -> None:
        """Store the MD5 of a file, beside those that other processes have stored meanwhile."""
        with self._lock, lock(self.path, lambda num_bytes: None):
            self._entries |= self._read() | {self._key(path): Checksum(stamp(path), md5)}
            write_json(self.path, {key: asdict(entry) for key, entry in self._entries.items()})

    def _read(self) -> dict[str, Checksum]:
        return read_json(self.path, dict[str, Checksum]) if self.path.is_file() else {}

    def _key(self, path: Path) -> str:
        return path.name if path.parent == self.path.parent else str(path)


def entry_of(num_bytes: int, md5: str, family: str) -> dict[str, Any]:
    """What `Files` has of a file."""
    return {"bytes": num_bytes, "md5": md5, "family": family}


def list_files(folder: Path, checksum_file: Path) -> Files:
    """All files of data in a folder; their MD5 are kept in `checksum_file`, because the folder may be read-only.

    Of a file on S3, `remote.identify` says it.
    """
    checksums = ChecksumCache(checksum_file)
    files: Files = {}
    for name, family in find_families(folder, FAMILIES.given).items():
        path = folder / name
        num_bytes, md5 = identify(path) if is_remote(path) else _identify(path, checksums)
        refuse_outdated_md5(path, md5)
        files[name] = entry_of(num_bytes, md5, family)
    return files


def _identify(path: Path, checksums: ChecksumCache, expected: str | None = None) -> tuple[int, str]:
    """Bytes and MD5 of a file on disk; another MD5 than the expected one is not stored."""
    before, md5 = stamp(path), checksums.find(path)
    if md5 is None:
        md5 = md5_of(path)
        if stamp(path) != before:
            raise DataFault(f"{path}: it changes while it is read; wait until it is complete")
        if expected in (None, md5):
            checksums.add(path, md5)
    return before[0], md5


def stamps_of(folder: Path, sources: Files, data_root: Path) -> Stamps:
    """The stamps of described files, of those on disk; a sum that is known for a stamp is not taken again.

    Raises:
        DataFault: the content of a file is no longer that of which `sources`, from a receipt of datasets, has the MD5.
    """
    if is_remote(folder):
        return {}
    caches = [ChecksumCache(data_root / "01_raw" / CHECKSUMS)]
    with suppress(DataFault):  # in a folder of the user a file of this name may be another program's
        caches.append(ChecksumCache(folder / CHECKSUMS))
    stamps: Stamps = {}
    for name, entry in sources.items():
        path = folder / name
        if not path.exists():
            raise gone(path)
        stamps[name] = stamp(path)
        known = filter(None, (cache.find(path) for cache in caches))
        if (next(known, None) or _identify(path, caches[0], entry["md5"])[1]) != entry["md5"]:
            raise changed(path)
    return stamps


def sources_of(latent_cache: dict[str, Any]) -> Files:
    """The raw files of which latents were made, from the receipt of these; of each the MD5 alone."""
    return {name: {"md5": md5} for name, md5 in latent_cache["key"]["source files"].items()}


@contextmanager
def unchanged(folder: Path, sources: Files, data_root: Path) -> Iterator[None]:
    """What is read meanwhile are the files that were described; raises as `stamps_of`, before and at the end."""
    stamps = stamps_of(folder, sources, data_root)
    yield
    expect_stamps(folder, stamps)


def find_families(folder: Path, known: list[Family]) -> dict[str, str]:
    """The family of each file of data in a folder; definitions that files hold are added to `FAMILIES`.

    Raises:
        DataFault: a file belongs to no family, or defines one otherwise than PDEBench, `known` or another file.
    """
    definitions = [family.definition for family in known]
    found = inspect("recognize", folder=folder, names=find_files(folder), definitions=definitions)
    FAMILIES.define(*(Family(**definition) for definition in found["definitions"]))
    return found["families"]


def md5_of(path: Path) -> str:
    """MD5 of a file; of a folder that of the names and MD5 of its files."""
    if not path.is_dir():
        return digest_of(path, "md5")
    inner = ((str(each.relative_to(path)), digest_of(each, "md5")) for each in files_in(path))
    return hashlib.md5(repr(list(inner)).encode(), usedforsecurity=False).hexdigest()
