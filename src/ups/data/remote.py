"""A remote file that can be read here and there, by HTTP ranges of one version of it."""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator

import requests

from ups.data.transfer import Answer, TransferError, ask, persist
from ups.errors import DataFault

PAGE_BYTES = 2**16
MAX_PAGES = 256


class RemoteReader(io.RawIOBase):
    """The file at a URL, seekable and read page by page; its `repr` is the URL, as h5py wants it for messages.

    What fails inside a call of h5py looks like damage to its caller: `fault` keeps the true reason.
    """

    def __init__(self, session: requests.Session, url: str, advance: Callable[[int], object]) -> None:
        self._session, self._url, self._advance = session, url, advance
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        self._position = 0
        self.validator: str | None = None
        self.fault: DataFault | None = None
        self.size: int | None = None
        self._page(0)

    def __repr__(self) -> str:
        return self._url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size or 0}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer, but for what lies behind the end of the file."""
        view = memoryview(buffer).cast("B")
        done = 0
        try:
            while done < len(view) and self._position < (self.size or 0):
                number, start = divmod(self._position, PAGE_BYTES)
                piece = self._page(number)[start : start + len(view) - done]
                view[done : done + len(piece)] = piece
                done += len(piece)
                self._position += len(piece)
        except DataFault as error:
            self.fault = self.fault or error
            raise
        return done

    def stream(self, start: int, stop: int, write: Callable[[bytes], object]) -> None:
        """Pass the bytes from `start` to `stop` to `write`, once each, whatever the connection does."""
        arrived = start

        def attempt() -> None:
            nonlocal arrived
            for block in self._blocks(arrived, stop):
                block = block[: stop - arrived]
                write(block)
                arrived += len(block)
                self._advance(len(block))
            if arrived < stop:
                raise TransferError(f"the connection closed at byte {arrived} of {stop}")

        persist(self._url, attempt, lambda: arrived, lambda: self._advance(0))

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            start, page = number * PAGE_BYTES, bytearray()
            self.stream(start, min(start + PAGE_BYTES, self.size or self._ask_size()), page.extend)
            self._pages[number] = bytes(page)
            if len(self._pages) > MAX_PAGES:
                self._pages.popitem(last=False)
        self._pages.move_to_end(number)
        return self._pages[number]

    def _ask_size(self) -> int:
        """Total size, from the answer to a request for the first byte."""

        def attempt() -> None:
            for _ in self._blocks(0, 1):
                pass

        persist(self._url, attempt, lambda: 0, lambda: self._advance(0))
        assert self.size is not None
        return self.size

    def _blocks(self, start: int, stop: int) -> Iterator[bytes]:
        with ask(self._session, self._url, start, stop, self.validator) as answer:
            self._expect_same_file(answer, start)
            yield from answer.blocks

    def _expect_same_file(self, answer: Answer, start: int) -> None:
        """Refuse a server without ranges, and a file that is replaced while it is read."""
        known = self.size is not None
        changed = known and (answer.validator != self.validator or answer.total not in (None, self.size))
        if changed:
            raise DataFault(f"{self._url}: has changed while it was read; run the same command again")
        if answer.start != start or answer.total is None or not answer.is_range:
            what = "the server does not send ranges of bytes"
            raise DataFault(f"{self._url}: {what}; fetch the whole file with download.trajectories: null")
        self.size, self.validator = answer.total, answer.validator
