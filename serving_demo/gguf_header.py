"""The header of a GGUF file: metadata and tensor list, with every length checked against the file.

``gguf.GGUFReader`` keeps a numpy view for each of the 100,000 strings of a vocabulary, which takes
seconds; this reads the same bytes (GGUF specification, versions 2 and 3, little endian) in tenths.
Types and block sizes are the ``gguf`` package's own.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedops.errors import LoadError
from serving_demo.files import require_content

__all__ = ["GgufHeader", "GgufTensor", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""``GGUFValueType`` of a scalar -> how ``struct`` reads it."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor list.

    Attributes:
        name: its name in the file.
        shape: rows first, as torch has it (the file stores the innermost size first).
        type_name: ``GGMLQuantizationType``'s name, e.g. ``Q4_1``.
        start, stop: its bytes in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    stop: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself: ``metadata`` (key -> value) and ``tensors`` by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values in order; running past the end is a truncated file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.at = 0

    def _take(self, count: int, what: str) -> int:
        start, self.at = self.at, self.at + count
        if self.at > len(self._data):
            raise LoadError(
                f"{self._path} is truncated or damaged: {what} ends at byte {self.at:,}, but the "
                f"file has {len(self._data):,} bytes. Fetch the file again."
            )
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self._take(struct.calcsize(code), what)
        return struct.unpack_from(code, self._data, start)[0]

    def string(self, what: str) -> str:
        length = self.scalar("<Q", what)
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise LoadError(f"{self._path} is damaged: {what} is not UTF-8.") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        code = _SCALARS.get(kind)
        if code is None:
            raise LoadError(f"{self._path} is damaged: {what} has the unknown type {kind}.")
        return self.scalar(code, what)

    def _array(self, what: str) -> list[Any]:
        kind, count = self.scalar("<I", what), self.scalar("<Q", what)
        code = _SCALARS.get(kind)
        if code is None:
            # Each element takes 8 bytes or more, which bounds a damaged count before the loop.
            self._take(8 * count, what)
            self.at -= 8 * count
            return [self.value(kind, what) for _ in range(count)]
        start = self._take(struct.calcsize(code) * count, what)
        return list(struct.unpack_from(f"<{count}{code[1]}", self._data, start))


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF file's header; the tensors' bytes must lie inside the file.

    Raises:
        LoadError: the file is missing, no GGUF file, of another version, truncated or damaged.
    """
    try:
        with path.open("rb") as file:
            require_content(path)
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise LoadError(
                    f"{path} is no GGUF file: it starts with {magic!r}, not with {_MAGIC!r}. "
                    "Accepted with --model are a GGUF file or a Hugging Face folder."
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path), path, len(data))
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}.") from None


def _parse(cursor: _Cursor, path: Path, size: int) -> GgufHeader:
    cursor.at = 4
    version = cursor.scalar("<I", "the version")
    if version not in _VERSIONS:
        raise LoadError(f"{path} has GGUF version {version}; accepted are 2 and 3, little endian.")
    n_tensors = cursor.scalar("<Q", "the tensor count")
    n_values = cursor.scalar("<Q", "the metadata count")
    metadata: dict[str, Any] = {}
    for index in range(n_values):
        key = cursor.string(f"the key of metadata value {index}")
        what = f"the metadata value {key!r}"
        metadata[key] = cursor.value(cursor.scalar("<I", what), what)
    entries = [_tensor_entry(cursor, path, index) for index in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise LoadError(f"{path} is damaged: general.alignment is {alignment!r}.")
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_name, offset, n_bytes in entries:
        start = data_start + offset
        if start + n_bytes > size:
            raise LoadError(
                f"{path} is truncated: the tensor {name!r} ends at byte {start + n_bytes:,}, but "
                f"the file has {size:,} bytes. Fetch the file again."
            )
        if name in tensors:
            raise LoadError(f"{path} is damaged: it lists the tensor {name!r} twice.")
        tensors[name] = GgufTensor(name, shape, type_name, start, start + n_bytes)
    return GgufHeader(path, metadata, tensors)


def _tensor_entry(
    cursor: _Cursor, path: Path, index: int
) -> tuple[str, tuple[int, ...], str, int, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string(f"the name of tensor {index}")
    what = f"the entry of tensor {name!r}"
    n_dims = cursor.scalar("<I", what)
    if n_dims > _MAX_DIMENSIONS:
        raise LoadError(f"{path} is damaged: the tensor {name!r} has {n_dims} dimensions.")
    sizes = [cursor.scalar("<Q", what) for _ in range(n_dims)]
    kind, offset = cursor.scalar("<I", what), cursor.scalar("<Q", what)
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise LoadError(
            f"{path}: the tensor {name!r} has the type {kind}, which this version of the gguf "
            "package does not know."
        ) from None
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    elements = 1
    for n in sizes:
        elements *= n
    if not sizes or sizes[0] % block_size:
        raise LoadError(
            f"{path} is damaged: the tensor {name!r} has rows of {sizes[:1]} elements, no multiple "
            f"of {quantization.name}'s block of {block_size}."
        )
    n_bytes = elements // block_size * block_bytes
    return name, tuple(reversed(sizes)), quantization.name, offset, n_bytes
