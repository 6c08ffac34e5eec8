"""A file mapped into memory: arrays are views of it, and their pages can be given back."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from lean_engine.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"


class MappedFile:
    """A read-only memory map of one file; it lives as long as the arrays made from it.

    Raises:
        CheckpointError: the file cannot be opened, is empty, or is a Git LFS pointer in place of the real file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                if self.num_bytes == 0:
                    raise CheckpointError(f"{path}: is empty")
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        if self.buffer[: len(_LFS_POINTER)] == _LFS_POINTER:
            raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` to fetch it")

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """A read-only view from byte offset on (a copy where the file does not align the elements)."""
        view = np.ndarray(shape, np.dtype(dtype), buffer=self.buffer, offset=offset)
        return view if view.flags.aligned else view.copy()

    def release(self, offset: int, num_bytes: int) -> None:
        """Drop the resident pages that lie wholly inside a range; they are read again when touched."""
        if not hasattr(mmap, "MADV_DONTNEED"):  # Windows
            return
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self.buffer.madvise(mmap.MADV_DONTNEED, first, end - first)
