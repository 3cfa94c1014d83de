"""Every error and warning that jitattn raises on purpose.

One base class, so that ``except jitattn.JitattnError`` catches exactly what this library says about
itself and nothing that it merely ran into.
"""

from __future__ import annotations

from os import PathLike

__all__ = ["CompileError", "Damaged", "JitattnError", "StoreWarning", "ToolchainMissing", "Unsupported"]


class JitattnError(RuntimeError):
    """Base of every error that jitattn raises."""


class Unsupported(JitattnError):
    """The request is understood and not offered; the message gives the reason and the nearest thing that is.

    It is raised instead of quietly taking a slower path, dropping a gradient or rounding a request.
    """


class CompileError(JitattnError):
    """A compiler was found, ran and refused the source.

    ``log`` is everything that the compiler printed. ``source_path`` is where the whole translation unit
    was left for reading, None if it could not be written.
    """

    def __init__(self, message: str, log: str = "", source_path: str | PathLike[str] | None = None) -> None:
        # Only the message goes to args: the rest travels in __dict__, so the error survives pickling
        # on its way back from a worker process.
        super().__init__(message)
        self.log = log
        self.source_path = source_path

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.source_path is not None:
            parts.append(f"source: {self.source_path}")
        if self.log:
            parts.append(self.log.rstrip())
        return "\n".join(parts)


class ToolchainMissing(JitattnError):
    """No compiler for the target was found on this machine; the message says what to install."""


class Damaged(JitattnError):
    """An artifact's bytes fail their own check. The store takes it for a miss and replaces the entry."""


class StoreWarning(UserWarning):
    """The disk layer of the store failed; kernels still compile, they are only not kept."""
