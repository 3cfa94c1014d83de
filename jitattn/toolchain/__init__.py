"""Text in, bytes out: the seam between the assembled source and the compilers.

One module a compiler. Each offers a class with the two methods of ``Toolchain``; nothing above this package
knows how any of them works, and none of them knows what it compiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..errors import ToolchainMissing

__all__ = ["Binary", "Toolchain", "find"]


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compiler made of one translation unit."""

    data: bytes
    """The loadable file's content: a shared library on the host."""
    log: str
    """Whatever the compiler printed, warnings included."""
    seconds: float
    """Wall time from the call to the bytes."""


class Toolchain(Protocol):
    """A compiler for one kind of target."""

    def identity(self) -> str:
        """One line that changes whenever equal text could give other bytes: the compiler's full version, what
        it makes code for, the options that it adds by itself. No path: equal machines have equal lines."""
        ...

    def compile(self, text: str, flags: tuple[str, ...]) -> Binary:
        """Compile one self-contained translation unit with the target's flags. Threads that call it compile
        side by side.

        :raises CompileError: the compiler refused; it carries the log and the path of the kept source.
        :raises ToolchainMissing: the compiler is gone.
        """
        ...


def find(vendor: str) -> Toolchain:
    """This machine's compiler for a target's vendor.

    :raises ToolchainMissing: there is none; the message says what to install.
    """
    if vendor == "host":
        from . import host

        return host.find()
    raise ToolchainMissing(f"no compiler for {vendor} kernels in this version")
