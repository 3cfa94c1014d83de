"""Kernel configuration -> one self-contained translation unit.

The text is the key: it carries the configuration, the launch struct, the flattened kernel_src with #line marks, and in
its banner the target, the flags and the compiler's identity. Whatever could change the binary changes the text.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from . import params, settings, wgmma
from .artifact import key_of
from .config import KernelConfig, KernelName
from .errors import JitattnError
from .target import Target

__all__ = ["Source", "assemble", "kernel_src", "table_of"]

_ELEMENTS = {"float32": "float", "bfloat16": "bf16", "float16": "f16"}

# Kernel name -> the file and class template of the algorithm, and its launch parameters.
_KERNELS = {
    "forward": ("attn/forward.h", "Forward", params.FORWARD),
    "forward_warpgroups": ("attn/forward_warpgroups.h", "ForwardWarpgroups", params.FORWARD_BY_BOXES),
    "combine": ("attn/combine.h", "Combine", params.FORWARD),
    "largest": ("attn/largest.h", "Largest", params.FORWARD),
    "largest_backward": ("attn/largest.h", "LargestOfBackward", params.BACKWARD),
    "delta": ("attn/delta.h", "Delta", params.BACKWARD),
    "backward": ("attn/backward.h", "Backward", params.BACKWARD),
    "backward_warpgroups": ("attn/backward_warpgroups.h", "BackwardWarpgroups", params.BACKWARD_BY_BOXES),
    "backward_wide": ("attn/backward_wide.h", "BackwardWide", params.BACKWARD_BY_BOXES),
    "grad_query": ("attn/grad_query.h", "GradQuery", params.BACKWARD),
    "store_grad_query": ("attn/store_grad_query.h", "StoreGradQuery", params.BACKWARD),
    "reduce_grad_query": ("attn/reduce.h", "ReduceGradQuery", params.BACKWARD),
}

# What JITATTN_ENTRY of an architecture calls the function that a runtime looks for.
_ENTRIES = {"host": "jitattn_work", "cuda": "jitattn_kernel"}

_INCLUDE = re.compile(r'^#include\s+"([^"]+)"\s*$')


@dataclass(frozen=True, slots=True)
class Source:
    """A translation unit. Its digest is the key of everything made from it."""

    text: str
    entry: str
    flags: tuple[str, ...]
    digest: str
    overridden: bool = False


def table_of(kernel: KernelName) -> params.Table:
    """The launch parameters of a kernel."""
    return _KERNELS[kernel][2]


def assemble(config: KernelConfig, target: Target, compiler: str) -> Source:
    """The translation unit of a kernel for a target, to be compiled by the compiler of that identity.

    With JITATTN_OVERRIDE set, a file DIGEST.cpp in that folder stands in for the text of that digest.
    """
    file, algorithm, table = _KERNELS[config.kernel]
    banner = [
        f"// jitattn {config}",
        f"// target {target}: {' '.join(target.compile_flags)}",
        f"// compiler {compiler}",
    ]
    flatten = _Flattening(target.overlay, config)
    entry = "JITATTN_ENTRY_OF_CLUSTERS" if dict(config.constants).get("cluster", 1) > 1 else "JITATTN_ENTRY"
    text = "\n".join([
        *banner,
        *flatten("base/types.h"),
        '#line 1 "<config>"',
        _config_struct(config),
        table.cpp(),
        *flatten(file),
        *flatten("launch.h"),
        '#line 1 "<entry>"',
        f"using Algorithm = attn::{algorithm}<Config, Params>;",
        f"{entry}(Algorithm, Params)",
        "",
    ])  # fmt: skip
    return _overridden(Source(text, _ENTRIES[target.vendor], target.compile_flags, key_of(text)))


def _config_struct(config: KernelConfig) -> str:
    members = [(name, getattr(config, name)) for name in ("head_dim", "head_dim_v", "causal", "block_m", "block_n")]
    lines = [f"  using Element = {_ELEMENTS[config.dtype]};"]
    for name, value in (*members, *config.constants):
        lines.append(
            f"  static constexpr bool {name} = {str(value).lower()};"
            if isinstance(value, bool)
            else f"  static constexpr i32 {name} = {value};"
        )
    return "\n".join(["struct Config {", *lines, "};"])


class _Flattening:
    """Files of kernel_src with everything that they include, each file once for all calls."""

    def __init__(self, overlay: tuple[str, ...], config: KernelConfig) -> None:
        self._overlay, self._config = overlay, config
        self._seen: set[str] = set()

    def __call__(self, name: str) -> list[str]:
        path = _find(name, self._overlay)
        text = _read(path) if path else _GENERATED[name](self._config)
        path = path or f"generated/{name}"
        if path in self._seen:
            return []
        self._seen.add(path)
        mark = f'"kernel_src/{path}"'
        lines = [f"#line 1 {mark}"]
        for number, line in enumerate(text, 1):
            if match := _INCLUDE.match(line):
                lines += [*self(match[1]), f"#line {number + 1} {mark}"]
            elif line.startswith("#include"):
                raise JitattnError(f"kernel_src/{path}:{number}: kernel text includes no system header")
            else:
                lines.append("" if line == "#pragma once" else line)
        return lines


def _wgmma_shapes(config: KernelConfig) -> list[str]:
    """The products' columns: those of scores, in a backward pass query rows, and the head dims of sums."""
    heads = {-(-dim // 16) * 16 for dim in (config.head_dim, config.head_dim_v)}
    columns = {
        "forward_warpgroups": {config.block_n} | heads,
        "backward_warpgroups": {config.block_m, 32, 64} | heads,
        "backward_wide": {64} | heads,
    }[config.kernel]
    return ["namespace ptx {", *wgmma.functions(_ELEMENTS[config.dtype], columns), "}"]


# Files that depend on the configuration.
_GENERATED = {"wgmma_shapes.h": _wgmma_shapes}


@functools.cache
def _find(name: str, overlay: tuple[str, ...]) -> str | None:
    """The path of the nearest file of that name; None for one that is generated."""
    for folder in overlay:
        if (kernel_src() / folder / name).is_file():
            return (Path(folder) / name).as_posix()
    if name in _GENERATED:
        return None
    raise JitattnError(f"kernel_src has no {name} for {overlay}")


@functools.cache
def _read(path: str) -> tuple[str, ...]:
    return tuple((kernel_src() / path).read_text(encoding="utf-8").splitlines())


@functools.cache
def kernel_src() -> Path:
    """The folder of kernel sources: inside an installed package, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernel_src", here.parent / "kernel_src"):
        if (folder / "attn").is_dir():
            return folder
    raise JitattnError("this installation lacks its kernel_src folder: install jitattn again")


def _overridden(source: Source) -> Source:
    folder = settings.current().override
    path = folder / f"{source.digest}.cpp" if folder else None
    if path is None or not path.is_file():
        return source
    text = path.read_text(encoding="utf-8")
    return Source(text, source.entry, source.flags, key_of(text), overridden=True)
