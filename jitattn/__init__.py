"""jitattn: exact attention for PyTorch, compiled at the first call for the shapes and flags in front of it.

    import jitattn
    out = jitattn.attention(q, k, v, causal=True)

Importing this package imports nothing else, touches no GPU and makes no folder: names load when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import cache as cache
    from .api import attention as attention
    from .errors import CompileError as CompileError
    from .errors import JitattnError as JitattnError
    from .errors import StoreWarning as StoreWarning
    from .errors import ToolchainMissing as ToolchainMissing
    from .errors import Unsupported as Unsupported
    from .pipeline import stats as stats
    from .service import explain as explain
    from .service import warmup as warmup

_MODULES = {
    "attention": "api",
    "explain": "service",
    "stats": "pipeline",
    "warmup": "service",
    "CompileError": "errors",
    "JitattnError": "errors",
    "StoreWarning": "errors",
    "ToolchainMissing": "errors",
    "Unsupported": "errors",
}

__all__ = ["attention", "cache", "explain", "stats", "warmup", *sorted(name for name in _MODULES if name[0].isupper())]


def __getattr__(name: str) -> Any:
    if name == "cache":
        return importlib.import_module(".cache", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
