"""A process that compiles CUDA text by NVRTC for another process.

It is run as a file, not as a module of Treadle, and imports the standard library alone: a process
is ready in some 30 ms. A request is a line with the options and the length of the text, then the
text. An answer is a line with NVRTC's result and a length, then the cubin, or what NVRTC said.
"""

import ctypes
import os
import select
import sys
from typing import BinaryIO

PATIENCE = 60  # seconds without a request after which the process ends


class Nvrtc:
    """The few functions of the library that compiling needs."""

    def __init__(self, path: str):
        self.library = ctypes.CDLL(path)

    def compiled(self, text: bytes, options: list[bytes]) -> tuple[int, bytes]:
        """NVRTC's result, and the cubin; the log if the result is not 0."""
        call, program = self.library, ctypes.c_void_p()
        call.nvrtcCreateProgram(ctypes.byref(program), text, b"treadle.cu", 0, None, None)
        given = (ctypes.c_char_p * len(options))(*options)
        result = int(call.nvrtcCompileProgram(program, len(options), given))
        kind = "ProgramLog" if result else "CUBIN"
        found = self._bytes(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}")
        call.nvrtcDestroyProgram(ctypes.byref(program))
        return result, found

    def _bytes(self, program: ctypes.c_void_p, size: str, get: str) -> bytes:
        count = ctypes.c_size_t()
        getattr(self.library, size)(program, ctypes.byref(count))
        memory = ctypes.create_string_buffer(count.value)
        getattr(self.library, get)(program, memory)
        return memory.raw


def serve(nvrtc: Nvrtc, given: BinaryIO, found: BinaryIO) -> None:
    """Answer requests until there are no more."""
    while select.select([given], [], [], PATIENCE)[0]:
        head = given.readline().split()
        if not head:
            return  # the other process has closed the pipe
        text = b""
        while len(text) < int(head[0]):
            text += given.read(int(head[0]) - len(text))
        result, answer = nvrtc.compiled(text, head[1:])
        found.write(b"%d %d\n" % (result, len(answer)) + answer)
        found.flush()


def main() -> None:
    found = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the compiler may print
    serve(Nvrtc(sys.argv[1]), os.fdopen(0, "rb", buffering=0), found)


if __name__ == "__main__":
    main()
