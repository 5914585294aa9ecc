"""Reading a published file whole, with its size and MD5 checked before anything looks inside."""

import dataclasses
import hashlib
import zlib
from pathlib import Path
from typing import final

from .errors import DataError

_AGAIN = "download it again"


@final
@dataclasses.dataclass(frozen=True)
class File:
    """A published file: its name, its size in bytes and, where one was published, its MD5."""

    name: str
    size: int | None = None
    md5: str | None = None

    def check(self, folder: Path) -> Path:
        """The path of the file in `folder`, present and of the right size; the content is not opened."""
        path = folder / self.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{path} is missing: {_AGAIN}.") from None
        except OSError as error:
            raise DataError(f"{path} could not be read ({error.strerror}): check its permissions.") from None
        if not path.is_file():
            raise DataError(f"{path} is not a file: remove it and put the published file there.")
        if self.size is not None and size != self.size:
            raise DataError(f"{path} has {size} bytes, the published file has {self.size}: {_AGAIN}.")
        return path

    def read(self, folder: Path) -> bytes:
        """The whole content, checked."""
        path = self.check(folder)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} could not be read ({error.strerror}): check its permissions.") from None
        verify(path, content, self.size, self.md5)
        return content


def verify(path: Path, content: bytes, size: int | None, md5: str | None) -> None:
    """Raise a DataError unless the content has the published size and MD5."""
    if size is not None and len(content) != size:
        raise DataError(f"{path} holds {len(content)} bytes, the published file holds {size}: {_AGAIN}.")
    if md5 is None:
        return
    got = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if got != md5:
        raise DataError(f"{path} is not the published file, its MD5 is {got} and not {md5}: {_AGAIN}.")


def gunzip(path: Path, content: bytes, limit: int) -> bytes:
    """Unpack gzip content of at most `limit` bytes, so that a small hostile file cannot fill the memory."""
    machine = zlib.decompressobj(wbits=31)  # 31: gzip header and trailing checksum
    try:
        plain = machine.decompress(content, limit + 1)
    except zlib.error:
        raise DataError(f"{path} is not a sound gzip file: {_AGAIN}.") from None
    if len(plain) > limit:
        raise DataError(f"{path} unpacks to more than the {limit} bytes it should hold: {_AGAIN}.")
    if not machine.eof:
        raise DataError(f"{path} is cut short: {_AGAIN}.")
    return plain
