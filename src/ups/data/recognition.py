"""The files of data in a folder, and which family each belongs to: by its text `family`, or else by its name."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from ups.data.arrays import HDF5_SUFFIXES, SUFFIXES, open_data
from ups.data.families import Dataset, Family, base_of
from ups.data.hdf5 import WRITE_PLAIN, file_fault, open_dataset, read_label
from ups.data.layouts import arrays_of
from ups.data.pdebench import FAMILIES
from ups.data.remote import list_remote
from ups.errors import ConfigFault, DataFault, printable
from ups.files import NAME, is_remote

log = logging.getLogger(__name__)

LENGTH_TOLERANCE = 0.01
SLOW_BYTES = 2**26  # unpacked for one trajectory: a tenth of a second
# Lower-case suffix of data in a format that is read, or that resembles one -> that under which it is read, if any.
SPELLINGS = {suffix: suffix for suffix in SUFFIXES}
SPELLINGS |= {".hdf": ".hdf5", ".he5": ".hdf5", ".nc3": ".nc", ".nc4": ".nc", ".cdf": ".nc", ".npy": None}


def find_files(folder: Path) -> list[str]:
    """Sorted names of the files of data in a folder, without hidden and temporary ones; a zarr store is a folder.

    The log warns of files whose suffix is another spelling of one that is read: they are left out.
    """
    if not is_remote(folder) and not folder.is_dir():
        what = "is not a folder" if folder.exists() else "no such folder"
        raise file_fault(folder, what, "name the folder that holds the files of data")
    suffixes = HDF5_SUFFIXES if is_remote(folder) else SUFFIXES  # other formats are copied beside themselves
    found = list_remote(folder) if is_remote(folder) else [path.name for path in folder.iterdir()]
    shown = sorted(name for name in found if not name.startswith((".", "~")))
    for name in shown:
        if Path(name).suffix not in suffixes:
            _warn_of_suffix(folder / name, suffixes)
    names = [name for name in shown if Path(name).suffix in suffixes and _is_usable(folder / name)]
    if not names:
        what = f"holds no file *{', *'.join(suffixes)}"
        raise file_fault(folder, what, "put files of PDEBench or your own there, or name another folder")
    return names


def _warn_of_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    """Warn of a file that is left out although it seems to hold data."""
    if (suffix := path.suffix.lower()) in SPELLINGS:
        right = SPELLINGS[suffix]
        remedy = f"rename it to *{right}" if right in suffixes else "write it anew as HDF5, *.hdf5"
        log.warning("%s is left out for its suffix: %s", printable(str(path)), remedy)


def _is_usable(path: Path) -> bool:
    """Whether a file has a plain name and is neither pipe, device nor folder; the log says which are left out."""
    if not NAME.fullmatch(path.name):
        log.warning("%s is left out: rename it to letters, digits and . _ + - alone", printable(str(path)))
        return False
    if not (is_remote(path) or (path.is_dir() if path.suffix == ".zarr" else path.is_file())):
        log.warning("%s is left out: it is no file, but a pipe, device, folder or lost link", path)
        return False
    return True


def find_family(file_name: str) -> Family | None:
    """Family whose pattern the file name matches, or else the one, with the longest name, with which it begins."""
    patterns = {name: family.file_pattern or rf"{name}(?![A-Za-z0-9]).*" for name, family in FAMILIES.items()}
    matching = [FAMILIES[name] for name, pattern in patterns.items() if re.fullmatch(pattern, file_name)]
    return max(matching, key=lambda family: (family.file_pattern is not None, len(family.name)), default=None)


def family_of(file: h5py.File, path: Path) -> Family:
    """The family of a file: that of its text `family`, a name, a variant's or a definition in JSON, or of its own name.

    A definition that is not known yet is added to `FAMILIES`.

    Raises:
        DataFault: no family is known by the name, or the definition contradicts itself or the known one.
    """
    label = read_label(file, "family")
    if label is not None and label.startswith("{"):
        return _define(path, label)
    family = find_family(path.name) if label is None else FAMILIES.get(base_of(label))
    if family is None:
        raise _unknown(path, label)
    return family


def _unknown(path: Path, label: str | None) -> DataFault:
    if label is not None:
        remedy = f"define it in conf/base/families.yml, or correct the name; known: {', '.join(FAMILIES)}"
        return file_fault(path, f"is of the family {label[:80]!r}, which is not defined", remedy)
    names = ((family.file_pattern or family.name).split(".*")[0] for family in FAMILIES.values())
    remedy = f"rename it, or add the text `family` to it; known names: {'*, '.join(names)}*"
    return file_fault(path, "its name matches no known family, and it has no text `family`", remedy)


def _define(path: Path, definition: str) -> Family:
    try:
        family = Family.from_json(definition, "its definition of a family")
    except ConfigFault as fault:
        raise file_fault(path, str(fault), "write the file anew") from None
    known = FAMILIES.setdefault(family.name, family)
    if known.digest != family.digest:
        what = f"defines {family.name} otherwise than PDEBench, families.yml or another file"
        raise file_fault(path, what, "use one definition for all files, or another name")
    return known


def warn_of_lengths(datasets: Iterable[Dataset]) -> None:
    """Warn of datasets of one family, or variant, on domains of different lengths, which no input of a model says."""
    firsts: dict[str, Dataset] = {}
    for each in datasets:
        first = firsts.setdefault(each.family, each)
        if not np.allclose(first.lengths, each.lengths, rtol=LENGTH_TOLERANCE):
            one, other = (" x ".join(f"{length:g}" for length in found.lengths) for found in (first, each))
            what = "%s: its domain of length %s is that of %s of length %s for a model, which has no input that says it"
            log.warning(what, each.name, other, first.name, one)


def warn_of_chunks(folder: Path, datasets: Iterable[Dataset]) -> None:
    """Warn of compressed arrays whose chunks hold several trajectories: to read one, all of them are unpacked."""
    for each in datasets:
        family, path = FAMILIES[each.family], folder / each.files[0]
        if family.layout in ("groups", "batch"):
            continue
        with open_data(path) as file:
            for array in (open_dataset(file, name) for name in arrays_of(file, family)):
                count, chunk = (sizes[-2 - len(family.axes)] for sizes in (array.shape, array.chunks or array.shape))
                if array.compression and chunk > 1 and array.nbytes * chunk > SLOW_BYTES * count:
                    what = "%s: to read one trajectory of %s, %d are unpacked; %s, or with chunks of one"
                    log.warning(what, path, array.name, chunk, WRITE_PLAIN)


def digests_of(families: Iterable[str]) -> dict[str, str]:
    """Digests of families by name.

    Fingerprints contain them instead of the code of the table, so that a new family changes no fingerprint of others.
    """
    return {name: FAMILIES[name].digest for name in sorted(set(families))}
