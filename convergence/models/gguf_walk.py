"""Do the numbers in front of a GGUF file fit its bytes? The package gguf believes them, and counts to 2^60 if told so.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# By type of a value: its size in bytes, and how it is unpacked where it is a whole number.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_WHOLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
_EXPERTS = 2**16  # no model has nearly as many
_DEEPEST = 4  # an array in an array in an array
_LARGEST = 2**31  # no dimension of a tensor is nearly as large


def check(path: Path) -> None:
    """See that the header's counts and lengths lie in the file, and that it has no more layers than tensors.

    Raises:
        ValueError: they do not.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(data).check()


class _Walk:
    """A place in the file, which moves on as it is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.order = data, 0, "<"

    def check(self) -> None:
        if self.skip(4) != _MAGIC:
            raise ValueError(f"its magic bytes are {self.data[:4]!r} and not {_MAGIC!r}")
        version = self.number("I")
        if version & 0xFFFF == 0:  # written on a machine that begins with the other end
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, and 2 and 3 are known")
        tensors, fields = self.count(24), self.count(13)
        for _ in range(fields):
            name = self.string()
            value = self.value(self.number("I"))
            most = {b"block_count": tensors, b"expert_count": _EXPERTS}.get(name.rpartition(b".")[2])
            if most is not None and not 0 <= (-1 if value is None else value) <= most:
                raise ValueError(f"its {name.decode(errors='replace')} is {value}; allowed is 0 to {most}")
        for _ in range(tensors):
            name, shape = self.string(), [self.number("Q") for _ in range(self.number("I", 4))]
            if not all(0 < size <= _LARGEST for size in shape):
                raise ValueError(f"its tensor {name.decode(errors='replace')} has the shape {shape}")
            self.number("I")
            if self.number("Q") > len(self.data):
                raise ValueError(f"its tensor {name.decode(errors='replace')} begins after the end of the file")

    def skip(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends at byte {len(self.data)}, and {size} more are announced at byte {self.at}")
        self.at += size
        return self.data[self.at - size : self.at] if size <= 2**10 else b""

    def number(self, kind: str, most: int = 2**64) -> int:
        (found,) = struct.unpack(self.order + kind, self.skip(struct.calcsize(self.order + kind)))
        if found > most:
            raise ValueError(f"{found} is announced at byte {self.at}, and at most {most} are allowed")
        return int(found)

    def count(self, least: int) -> int:
        """How many of something follow that has ``least`` bytes each."""
        return self.number("Q", (len(self.data) - self.at) // least)

    def string(self) -> bytes:
        return self.skip(self.count(1))

    def value(self, kind: int, depth: int = 0) -> int | None:
        """Read a value of this type; a whole number is returned."""
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY and depth < _DEEPEST:
            of = self.number("I")
            count = self.count(_SIZES.get(of, 8))
            if of in _SIZES:
                self.skip(count * _SIZES[of])
            else:
                for _ in range(count):
                    self.value(of, depth + 1)
        elif kind in _SIZES:
            raw = self.skip(_SIZES[kind])
            return int(struct.unpack(self.order + _WHOLE[kind], raw)[0]) if kind in _WHOLE else None
        else:
            raise ValueError(f"a value of type {kind} is announced at byte {self.at}, and there are types 0 to 12")
        return None
