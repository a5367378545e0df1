"""Object files: whether bytes are one, and which functions from outside its code calls.

LLVM asks neither: it crashes on what is no object, and at a call of a function that is missing.
"""

from __future__ import annotations

import struct

_ELF = struct.Struct("<16sHHIQQQIHHHHHH")  # the header: start, size and count of sections
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2  # the kind of section
_MACHO_MAGIC = b"\xcf\xfa\xed\xfe"
_MACHO = struct.Struct("<8I")
_MACHO_SYMBOL = struct.Struct("<IBBHQ")
_MACHO_TABLE = 2  # the kind of load command
# Names that relocations use and the loader itself provides.
_OF_LOADER = frozenset(["_GLOBAL_OFFSET_TABLE_"])


def is_object(code: bytes) -> bool:
    """Whether bytes are complete object code: ELF with its table of sections, or Mach-O."""
    if code[:4] == _MACHO_MAGIC:
        return True
    if code[:5] != b"\x7fELF\x02" or len(code) < _ELF.size:
        return False
    header = _ELF.unpack_from(code)
    start, size, count = header[6], header[11], header[12]
    return start > 0 and size == _SECTION.size and count > 0 and start + size * count <= len(code)


def missing_names(objects: list[bytes]) -> list[str]:
    """Names that some objects need and none of them has, in order."""
    needed, defined = set[str](), set[str]()
    for code in objects:
        for name, is_defined in _symbols(code):
            (defined if is_defined else needed).add(name)
    return sorted(needed - defined - _OF_LOADER)


def _symbols(code: bytes) -> list[tuple[str, bool]]:
    """The names of an object, and whether it defines them."""
    try:
        return _macho_symbols(code) if code[:4] == _MACHO_MAGIC else _elf_symbols(code)
    except struct.error as error:
        raise ValueError("the object file is cut off") from error


def _elf_symbols(code: bytes) -> list[tuple[str, bool]]:
    header = _ELF.unpack_from(code)
    start, count = header[6], header[12]
    sections = [_SECTION.unpack_from(code, start + i * _SECTION.size) for i in range(count)]
    found = []
    for kind, at, size, link in ((s[1], s[4], s[5], s[6]) for s in sections):
        if kind != _SYMBOL_TABLE:
            continue
        if link >= count:
            raise ValueError("the object file has no names")
        names = sections[link][4]
        for offset in range(at + _SYMBOL.size, at + size, _SYMBOL.size):  # the first is nothing
            name, _, _, section, *_ = _SYMBOL.unpack_from(code, offset)
            found.append((_text(code, names + name), section != 0))
    return [(name, is_defined) for name, is_defined in found if name]


def _macho_symbols(code: bytes) -> list[tuple[str, bool]]:
    offset, found = _MACHO.size, []
    for _ in range(_MACHO.unpack_from(code)[4]):
        command, size = struct.unpack_from("<2I", code, offset)
        if command == _MACHO_TABLE:
            at, count, names, _ = struct.unpack_from("<4I", code, offset + 8)
            for i in range(count):
                entry = _MACHO_SYMBOL.unpack_from(code, at + i * _MACHO_SYMBOL.size)
                # A leading underscore is the format's own; the lowest kinds bits say "undefined".
                name = _text(code, names + entry[0]).removeprefix("_")
                found.append((name, entry[1] & 0x0E != 0))
        offset += size
    return found


def _text(code: bytes, at: int) -> str:
    end = code.find(b"\0", at)
    if end < 0:
        raise ValueError("the object file is cut off")
    return code[at:end].decode("utf-8", "replace")
