"""The frame of an HDF5 file in memory."""

import io

import h5py
import numpy as np

from ups.data.sparse import SparseBuffer


def test_buffer_behaves_like_a_file(tmp_path):
    """Writes, overwrites, gaps, seeks and short reads agree with a real file."""
    sparse, plain = SparseBuffer(), (tmp_path / "plain").open("wb+", buffering=0)
    for file in (sparse, plain):
        for place, block in ((5, b"hello"), (20, b"world"), (8, b"12345"), (0, b"ab")):
            file.seek(place)
            assert file.write(block) == len(block)
        file.truncate(40)
    for place, num_bytes in ((0, 40), (3, 10), (9, 1), (25, 100), (50, 10)):
        for file in (sparse, plain):
            file.seek(place)
        assert sparse.read(num_bytes) == plain.read(num_bytes)
        assert place > 40 or sparse.tell() == plain.tell()
    assert sparse.seek(0, io.SEEK_END) == 40


def test_frame_of_a_large_dataset_is_small(tmp_path):
    """A file with a dataset of 8 GB that is not written takes a few kilobytes here, and is sound on disk."""
    frame = SparseBuffer()
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(frame, "w") as file:
        space = h5py.h5s.create_simple((2**31,))
        h5py.h5d.create(file.id, b"large", h5py.h5t.IEEE_F32LE, space, properties)
        file["small"] = np.arange(5)
    assert sum(len(block) for _, block in frame.pieces) < 20_000
    with (tmp_path / "file.hdf5").open("wb") as small:
        frame.write_to(small)
    with h5py.File(tmp_path / "file.hdf5") as file:
        assert file["large"].shape == (2**31,) and file["large"][-1] == 0
        assert file["small"][:].tolist() == [0, 1, 2, 3, 4]
