"""Checked access to HDF5 files of unknown origin.

A damaged or malicious file can refer to other files, plug-in filters, or shapes that exhaust the memory. Only
complete floating-point arrays that are stored in the file itself are read; anything else is a `DataFault` in one line.
HDF5 itself crashes or hangs on some damaged files: `ups.data.inspection` is the first to read a file for that reason.
"""

import errno
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5z

from ups.errors import DataFault
from ups.files import is_remote

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_ELEMENTS = 2**40  # of a dataset
MAX_SMALL_ELEMENTS = 2**24  # of an array that is read at once: coordinates, times
MAX_CHUNK_BYTES = 2**28  # unpacked
MAX_ATTRIBUTE_ELEMENTS = 2**10
MAX_TEXT_BYTES = 2**12  # of an attribute
MAX_LABEL_LENGTH = 2**14
PACKED, MISSING = ("scale_factor", "add_offset"), ("_FillValue", "missing_value")  # attributes, as NetCDF has them
PLAIN = "store floating-point numbers, NaN where some are missing, without such an attribute"
WRITE_PLAIN = "write it without compression (h5repack -f NONE)"
MAX_NAMES = 2**20  # at the root of a file
MAX_UNPACKED_RATIO, FREE_UNPACKED_BYTES = 32, 2**26  # an array may have 64 MiB, or 32 times the bytes of its file
MAX_REASON_LENGTH = 500
COPY_SUFFIX = ".hdf5"  # of `.NAME.hdf5`, the copy in HDF5 of the file NAME, see `ups.data.arrays`
PLAIN_FILTERS = {h5z.FILTER_DEFLATE, h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32, h5z.FILTER_SZIP, h5z.FILTER_LZF}
DIMENSION_ALONE = b"This is a netCDF dimension but not a netCDF variable"  # of the format's specification
ONE_NUMBER = "expected one finite number"
# Raised by h5py on damaged structures, for which it has no class of its own.
CORRUPTION = (OSError, RuntimeError, KeyError, ValueError, TypeError)


def before_access(path: str) -> None:
    """Called before every access to the content of a file; `ups.data.inspection` puts its limit of time here."""


def file_fault(path: Path | str, what: str, remedy: str = "download or generate the file again") -> DataFault:
    """A fault in one line: the file, of a copy in HDF5 its origin, what is wrong with it, and the remedy."""
    path = Path(path) if isinstance(path, Path) or path.startswith("/") else path
    if isinstance(path, Path) and path.name.startswith(".") and path.suffix == COPY_SUFFIX:
        path = path.with_name(path.name[1:].removesuffix(COPY_SUFFIX))
    if len(what) > MAX_REASON_LENGTH:  # names and types in a file may be megabytes long
        what = f"{what[:MAX_REASON_LENGTH]}..."
    shown = str(path).replace("s3:/", "s3://", 1) if is_remote(Path(path)) else path
    return DataFault(" ".join(f"{shown}: {what}; {remedy}".split()))


@contextmanager
def corruption_faults(stored: h5py.File | h5py.Dataset, what: str) -> Iterator[None]:
    """Turn the errors of h5py on a damaged file or dataset into a fault that says `what` is wrong with it."""
    before_access(stored.file.filename)
    try:
        yield
    except DataFault:  # a ValueError as well
        raise
    except CORRUPTION as error:
        name = f"{stored.name!r} " if isinstance(stored, h5py.Dataset) else ""
        raise file_fault(stored.file.filename, f"{name}{what} ({error})") from error


def open_file(path: Path) -> h5py.File:
    """Open an HDF5 file for reading; a file with another signature is refused before h5py opens it."""
    if not is_remote(path) and not path.is_file():
        what = "is no regular file" if path.exists() else "no such file"
        raise file_fault(path, what, "check the folder and the name, or download it")
    before_access(str(path))
    if is_remote(path):
        from ups.data.remote import RemoteFile  # which imports this module

        source = RemoteFile(path)
        head = source.read(80)
    else:
        source, head = path, head_of(path)
    if not head.startswith(SIGNATURE):
        raise file_fault(path, f"is {describe_content(head)}, not an HDF5 file")
    try:
        return h5py.File(source, "r", locking="best-effort")
    except DataFault:  # a ValueError as well
        raise
    except CORRUPTION as error:
        raise file_fault(path, f"cannot be opened, probably truncated ({error})") from error


def head_of(path: Path) -> bytes:
    """The first bytes of a file, or all if there are fewer; `DataFault` where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(80)
    except OSError as error:
        remedy = "raise the limit, see `ulimit -n`" if error.errno == errno.EMFILE else "check its permissions"
        raise file_fault(path, f"cannot be read ({error.strerror})", remedy) from error


def describe_content(head: bytes) -> str:
    """Kind of content that starts with the bytes `head`, for an error message."""
    if not head:
        return "empty"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"an HTML page ({head[:80].decode(errors='replace')!r})"
    return f"foreign content (starts with {head[:8]!r})"


def list_names(file: h5py.File) -> list[str]:
    """Sorted names of the groups and datasets at the root of a file."""
    with corruption_faults(file, "the list of its contents is damaged"):
        if len(file) > MAX_NAMES:
            raise file_fault(file.filename, f"holds {len(file)} groups and datasets, at most {MAX_NAMES} are read")
        names = list(file)
    if not all(isinstance(name, str) for name in names):
        raise file_fault(file.filename, "the list of its contents is damaged (names that are not text)")
    return sorted(names)


def has(file: h5py.File, name: str) -> bool:
    """Whether the root of a file has a group or dataset of this name."""
    with corruption_faults(file, f"{name!r} is damaged"):
        return file.get(name, getlink=True) is not None


def kind_of(file: h5py.File, name: str) -> type | None:
    """The class of h5py of what the root of a file has under a name; None for a link, which may lead elsewhere."""
    with corruption_faults(file, f"{name!r} is damaged"):
        is_inside = isinstance(file.get(name, getlink=True), h5py.HardLink)
        return file.get(name, getclass=True) if is_inside else None


def is_dimension(file: h5py.File, name: str) -> bool:
    """Whether a dataset only stands for the length of an axis: a dimension of NetCDF 4 without coordinates."""
    stored = open_dataset(file, name)
    with corruption_faults(file, f"{name!r} is damaged"):
        is_text = "NAME" in stored.attrs and _is_short_text(stored.attrs.get_id("NAME"))
        return is_text and bytes(stored.attrs["NAME"]).startswith(DIMENSION_ALONE)


def read_number(file: h5py.File, attribute: str) -> float | None:
    """A scalar attribute of the file, or else a dataset with one number; None where there is neither."""
    with corruption_faults(file, f"attribute {attribute!r} is damaged"):
        if attribute not in file.attrs:
            return _read_number_dataset(file, attribute) if has(file, attribute) else None
        stored = file.attrs.get_id(attribute)  # type and shape without the value, which may be huge
        if stored.dtype.kind not in "fiu" or math.prod(stored.shape) > MAX_ATTRIBUTE_ELEMENTS:
            what = f"attribute {attribute!r} is {stored.dtype} of shape {stored.shape}"
            raise file_fault(file.filename, what, ONE_NUMBER)
        value = np.asarray(file.attrs[attribute])
    if value.size == 0:
        return None
    if value.size != 1 or not np.isfinite(value).all():
        raise file_fault(file.filename, f"attribute {attribute!r} is {str(value)[:80]!r}", ONE_NUMBER)
    return float(value.item())


def _read_number_dataset(file: h5py.File, name: str) -> float:
    dataset = open_dataset(file, name)
    if dataset.shape not in ((), (1,)) or _dtype_of(dataset).kind not in "fiu":
        what = f"{name!r} is {_dtype_of(dataset)} of shape {dataset.shape}"
        raise file_fault(file.filename, what, f"{ONE_NUMBER}; data with other parameters need a file of their own")
    value = float(read_array(dataset, dataset.ndim, dtype=np.float64).item())
    if not math.isfinite(value):
        raise file_fault(file.filename, f"{name!r} is {value}", ONE_NUMBER)
    return value


def read_label(file: h5py.File, name: str) -> str | None:
    """A text, attribute or dataset without axes; None where there is neither. For `ups.data.inspection`.

    The size of a text shows only when it is read, which a process with limited memory should do.
    """
    with corruption_faults(file, f"{name!r} is damaged"):
        if name in file.attrs:
            value = file.attrs[name]
        elif has(file, name):
            value = open_dataset(file, name)[()]
        else:
            return None
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    if not isinstance(text, str) or len(text) > MAX_LABEL_LENGTH:
        raise file_fault(file.filename, f"{name!r} is no text of at most {MAX_LABEL_LENGTH} characters")
    return text


def read_text(file: h5py.File, attribute: str) -> str | None:
    """A text attribute of fixed length in ASCII, None where there is none; a text of variable length is refused."""
    with corruption_faults(file, f"attribute {attribute!r} is damaged"):
        if attribute not in file.attrs:
            return None
        stored = file.attrs.get_id(attribute)  # a text of variable length shows its size only when it is read
        if not _is_short_text(stored):
            what = f"attribute {attribute!r} is no text of fixed length with at most {MAX_TEXT_BYTES} bytes"
            raise file_fault(file.filename, what)
        return bytes(file.attrs[attribute]).decode("ascii")


def _is_short_text(stored: h5py.h5a.AttrID) -> bool:
    return stored.dtype.kind == "S" and stored.shape == () and stored.dtype.itemsize <= MAX_TEXT_BYTES


def open_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Open a dataset whose values are stored in this very file, without filters from plug-ins."""
    for path in accumulate(name.split("/"), "{}/{}".format):
        with corruption_faults(file, f"{path!r} is damaged"):
            link = file.get(path, getlink=True)
        if link is None:
            raise file_fault(file.filename, f"has no {path!r}, found {list_names(file)[:8]}")
        if not isinstance(link, h5py.HardLink):
            raise file_fault(file.filename, f"{path!r} is a soft or external link", "store the dataset itself")
    with corruption_faults(file, f"{name!r} is damaged"):
        dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise file_fault(file.filename, f"{name!r} is a group, expected a dataset")
    if dataset.external or dataset.is_virtual:
        raise file_fault(file.filename, f"{name!r} keeps its values in other files", "store them in the file itself")
    properties = dataset.id.get_create_plist()
    plugins = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())} - PLAIN_FILTERS
    if plugins:
        raise file_fault(file.filename, f"{name!r} needs the HDF5 filter {max(plugins)}", "use gzip or lzf")
    if dataset.chunks is not None and math.prod(dataset.chunks) * _dtype_of(dataset).itemsize > MAX_CHUNK_BYTES:
        raise file_fault(file.filename, f"{name!r} has absurd chunks of {dataset.chunks}")
    if (problem := _encoding_of(dataset)) is not None:
        raise file_fault(file.filename, f"{name!r} {problem}", PLAIN)
    return dataset


def open_array(file: h5py.File, name: str, rank: int, kind: str = "f") -> h5py.Dataset:
    """Open a complete, non-empty dataset of NumPy's kinds with `rank` axes, or with one more of length 1 in front."""
    dataset = open_dataset(file, name)
    shape = dataset.shape or ()
    if shape[: len(shape) - rank] not in ((), (1,)) or len(shape) < rank:
        raise file_fault(file.filename, f"{name!r} has shape {shape}, expected {rank} axes")
    if (dtype := _dtype_of(dataset)).kind not in kind:
        expected = "integers" if kind == "i" else "floating point"
        raise file_fault(file.filename, f"{name!r} has dtype {dtype}, expected {expected}")
    if math.prod(shape) == 0:
        raise file_fault(file.filename, f"{name!r} is empty, its shape is {shape}")
    if math.prod(shape) > (MAX_ELEMENTS if rank > 1 else MAX_SMALL_ELEMENTS):
        raise file_fault(file.filename, f"{name!r} claims the absurd shape {shape}")
    if not _is_stored(dataset):
        raise file_fault(file.filename, f"parts of {name!r} were never written")
    if dataset.nbytes > max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * file.id.get_filesize()):
        what = f"{name!r} unpacks to {dataset.nbytes} bytes, over {MAX_UNPACKED_RATIO} times the size of the file"
        raise file_fault(file.filename, what, f"download it again, or {WRITE_PLAIN}")
    return dataset


def expect_values(name: str, attributes: Mapping[str, Any]) -> None:
    """Refuse an array whose numbers are not its values, by a ValueError."""
    if (problem := _encoding(attributes)) is not None:
        raise ValueError(f"{name!r} {problem}; {PLAIN}")


def _encoding(attributes: Mapping[str, Any]) -> str | None:
    """Why the numbers of an array are not its values: they are packed, or one of them marks missing values."""
    if any(name in attributes for name in PACKED):
        return "is packed"
    for name in MISSING:
        value = np.asarray(attributes.get(name, np.nan))
        if value.dtype.kind in "fiu" and value.size == 1 and np.isfinite(value).all():
            return f"marks missing values by {value.item():g} ({name})"
    return None


def _encoding_of(dataset: h5py.Dataset) -> str | None:
    with corruption_faults(dataset, "has damaged attributes"):
        found = [name for name in (*PACKED, *MISSING) if name in dataset.attrs]
        sizes = {name: math.prod(dataset.attrs.get_id(name).shape) for name in found}
        return _encoding({name: dataset.attrs[name] for name in found if sizes[name] <= MAX_ATTRIBUTE_ELEMENTS})


def _dtype_of(dataset: h5py.Dataset) -> np.dtype:
    """Type of the values; h5py raises only here if the type is damaged."""
    with corruption_faults(dataset, "has a damaged type"):
        return dataset.dtype


def _is_stored(dataset: h5py.Dataset) -> bool:
    """Whether every value is stored: HDF5 returns zeros for values that were never written."""
    if dataset.chunks is None:
        return dataset.id.get_storage_size() >= dataset.nbytes
    num_chunks = math.prod(-(-n // chunk) for n, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return dataset.id.get_num_chunks() >= num_chunks


def read_array(
    dataset: h5py.Dataset, rank: int, index: tuple[Any, ...] = (), dtype: type[np.floating] = np.float32
) -> np.ndarray:
    """Values of a dataset, indexed along its last `rank` axes."""
    leading = (0,) * (dataset.ndim - rank)
    with corruption_faults(dataset, "cannot be read"):
        return dataset[(*leading, *index, ...)].astype(dtype, copy=False)
