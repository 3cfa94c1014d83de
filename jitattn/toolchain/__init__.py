"""Text in, bytes out: the seam between the assembled source and the compilers.

One module a compiler. Each offers a class with the methods of ``Toolchain``; nothing above this package knows how any
of them works, and none of them knows what it compiles.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .. import settings
from ..errors import ToolchainMissing
from ..target import Target

__all__ = ["Binary", "Toolchain", "find", "keep_refused"]


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compiler made of one translation unit."""

    data: bytes
    """The loadable file's content: a shared library on the host, a cubin or PTX for CUDA."""
    log: str
    """Whatever the compiler printed, warnings included."""
    seconds: float
    """Wall time from the call to the bytes."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What the kernel takes of the machine, as far as the compiler tells, in JSON values."""


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

    def listing(self, binary: bytes) -> str:
        """The machine code of what it compiled as text, or a line that says which tool would show it."""
        ...


def find(target: Target) -> Toolchain:
    """This machine's compiler for a target.

    :raises ToolchainMissing: there is none; the message says what to install.
    """
    if target.vendor == "host":
        from . import host

        return host.find()
    if target.vendor == "cuda":
        from . import nvrtc

        return nvrtc.find(target.arch)
    raise ToolchainMissing(f"no compiler for {target.vendor} kernels in this version")


def keep_refused(text: str, suffix: str) -> Path | None:
    """Leave a source that a compiler refused where it can be read; None if that is nowhere."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16] + suffix
    try:
        return _written(settings.current().cache_dir / "failed", name, text)
    except OSError:
        pass
    try:
        return _written(Path(tempfile.mkdtemp(prefix="jitattn-")), name, text)
    except OSError:
        return None


def _written(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
