"""The command line: ``jitattn`` or ``python -m jitattn``, one function for each subcommand.

Only argparse is imported here at the top; each subcommand imports what it needs, so that ``--help`` answers at once.
Exit status: 0; 1 if the work failed, with the reason on stderr; 2 for a command line that does not parse.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
CAUSAL = ("none", "top_left", "bottom_right")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit status."""
    arguments = parser().parse_args(argv)
    from .errors import JitattnError

    try:
        status = arguments.run(arguments)
        sys.stdout.flush()  # inside, so that a reader that has gone away is noticed here
        return status
    except JitattnError as error:
        print(f"jitattn: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # "jitattn show | head": not a fault. Python would flush stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(prog="jitattn", description="Exact attention, compiled for the call and the machine.")
    top.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str, under: Any = commands
    ) -> argparse.ArgumentParser:
        added = under.add_parser(name, help=help, description=help, formatter_class=_Formatter)
        added.set_defaults(run=run)
        return added

    _demo_options(command("demo", demo, "Train a small transformer on jitattn and on torch, and compare."))
    _json_option(command("doctor", doctor, "Say what this machine has and lacks, and try one call."))
    _show_options(command("show", show, "Print the source of one problem's kernels, or what it compiles to."))
    _bench_options(command("bench", bench, "Measure jitattn beside every other implementation here."))

    help = "Look after the compiled kernels."
    cache = commands.add_parser("cache", help=help, description=help).add_subparsers(required=True, metavar="COMMAND")
    _json_option(command("info", cache_info, "Where the kernels are, how many and how large.", cache))
    _json_option(command("ls", cache_ls, "One line for each kernel, the latest used first.", cache))
    _json_option(command("verify", cache_verify, "Check every kernel's bytes and remove what is damaged.", cache))
    _prune_options(command("prune", cache_prune, "Remove the least recently used kernels.", cache))
    return top


# ------------------------------------------------------------------------------------------------ demo


def _demo_options(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--steps", type=_positive, metavar="N", help="training steps (default: 360 on the CPU, 600 on a GPU)"
    )
    options.add_argument("--context", type=_positive, metavar="N", help="characters a window (default: 512, 1024)")
    options.add_argument("--batch", type=_positive, metavar="N", help="windows a step (default: 2, 16)")
    options.add_argument("--minutes", type=float, help="of training at most (default: 4)")
    options.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    options.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help="of the activations: float32 (default on the CPU), bfloat16 (on a GPU) or float16",
    )
    options.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    options.add_argument("--out", type=Path, metavar="DIR", default=Path("jitattn-demo"), help="folder for the results")


def demo(arguments: argparse.Namespace) -> int:
    from . import demo as work
    from . import doctor

    asked = {name: getattr(arguments, name) for name in ("steps", "context", "batch", "seed", "dtype", "minutes")}
    plan = work.plan_for(arguments.device or _default_device(), **asked)
    return work.run(plan, arguments.out, doctor.machine())


# ------------------------------------------------------------------------------------------------ doctor


def doctor(arguments: argparse.Namespace) -> int:
    from . import doctor as work

    passed, said = work.check()
    if arguments.json:
        print(json.dumps(work.as_data(passed, said), indent=1))
    else:
        print(work.report(passed, said))
    return 0 if passed else 1


# ------------------------------------------------------------------------------------------------ show


def _show_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--dtype", choices=DTYPES, default="float32")
    options.add_argument("--head-dim", type=_positive, metavar="N", default=64)
    options.add_argument("--head-dim-v", type=_positive, metavar="N", help="of the values (default: as --head-dim)")
    options.add_argument("--seq", type=_positive, metavar="N", default=1024, help="length of the queries")
    options.add_argument("--seq-kv", type=_positive, metavar="N", help="length of the keys (default: as --seq)")
    options.add_argument("--batch", type=_positive, metavar="N", default=1)
    options.add_argument("--heads", type=_positive, metavar="N", default=8, help="query heads")
    options.add_argument("--heads-kv", type=_positive, metavar="N", help="key heads (default: as --heads)")
    options.add_argument("--causal", action="store_true", help="aligned at the bottom right")
    options.add_argument("--backward", action="store_true", help="the backward kernels")
    options.add_argument("--deterministic", action="store_true", help="a backward that is bitwise reproducible")
    options.add_argument("--alignment", type=int, choices=(16, 8, 4, 2, 1), default=16, help="bytes, of rows on a GPU")
    options.add_argument("--target", default="host", help="what to compile for, such as host:x86-64-v3 or sm_90")
    what = options.add_mutually_exclusive_group()
    what.add_argument("--listing", "--sass", action="store_true", help="machine code instead of source")
    what.add_argument("--ptx", action="store_true", help="a GPU's portable assembly instead of source")
    what.add_argument("--resources", action="store_true", help="sizes and launches instead of source")
    _json_option(options)


def show(arguments: argparse.Namespace) -> int:
    kernels = _kernels(arguments)
    if arguments.json:
        print(json.dumps(kernels, indent=1))
        return 0
    for kernel in kernels:
        text = kernel.pop("listing", None) or kernel.pop("source", None)
        # The facts go to stderr beside a source or a listing, so that stdout can be compiled or compared.
        print(
            *(f"{name:16} {value}" for name, value in kernel.items()),
            sep="\n", end="\n\n", file=sys.stderr if text else sys.stdout, flush=True,
        )  # fmt: skip
        if text:
            print(text)
    return 0


def _kernels(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each kernel of the problem that the flags describe, in launch order, as facts and text."""
    from . import pipeline, plan, source, toolchain
    from .problem import Problem
    from .target import parse, portable

    seq_kv, heads_kv = arguments.seq_kv or arguments.seq, arguments.heads_kv or arguments.heads
    problem = Problem(
        direction="backward" if arguments.backward else "forward",
        dtype=arguments.dtype,
        head_dim=arguments.head_dim,
        head_dim_v=arguments.head_dim_v or arguments.head_dim,
        causal=arguments.causal,
        seq_q=arguments.seq,
        seq_kv=seq_kv,
        batch=arguments.batch,
        heads_q=arguments.heads,
        heads_kv=heads_kv,
        diagonal=seq_kv - arguments.seq,
        scale=arguments.head_dim**-0.5,
        alignment=arguments.alignment,
        deterministic=arguments.deterministic,
    )
    target = parse(arguments.target)
    if arguments.ptx:
        target = portable(target)
    compiler = toolchain.find(target)
    compiled = arguments.listing or arguments.ptx or arguments.resources
    shown: list[dict[str, Any]] = []
    for step in plan.make_plan(problem, target).steps:
        text = source.assemble(step.config, target, compiler.identity())
        facts = {"kernel": str(step.config), "target": str(target), "blocks": step.blocks, "key": text.digest}
        shown.append({**facts, "compiler flags": " ".join(text.flags)})
        if not compiled:
            shown[-1]["source"] = text.text
    if compiled:
        for facts, kernel in zip(shown, pipeline.resolve(problem, target).kernels, strict=True):
            meta = kernel.artifact.meta
            facts |= {"origin": kernel.origin, "compile seconds": meta["compile_seconds"], **meta["resources"]}
            if not arguments.resources:
                facts["listing"] = compiler.listing(kernel.artifact.binary)
    return shown


# ------------------------------------------------------------------------------------------------ bench


def _bench_options(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="DTYPE",
        default=["float32", "bfloat16"],
        help="of " + ", ".join(DTYPES),
    )
    options.add_argument("--seq", nargs="+", type=_positive, metavar="N", help="lengths (default: 128 1024 4096)")
    options.add_argument("--head-dim", nargs="+", type=_positive, metavar="N", help="head dimensions (default: 64 128)")
    options.add_argument("--batch", type=_positive, metavar="N", default=2)
    options.add_argument("--heads", type=_positive, metavar="N", default=8, help="query heads")
    options.add_argument(
        "--heads-kv", type=_positive, metavar="N", help="key heads, a divisor of --heads (default: as many)"
    )
    options.add_argument("--tokens", type=_positive, metavar="N", help="of a batch: --batch becomes N / length")
    options.add_argument(
        "--width", type=_positive, metavar="N", help="of the model: --heads becomes N / head dimension"
    )
    options.add_argument("--mask", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    options.add_argument(
        "--pass", nargs="+", choices=("fwd", "bwd", "fwd+bwd"), default=["fwd", "fwd+bwd"], dest="passes"
    )
    options.add_argument("--peers", nargs="*", metavar="NAME", help="names of those to compare with (default: all)")
    options.add_argument(
        "--threads", type=_positive, metavar="N", help="CPU threads of every implementation (default: torch's)"
    )
    options.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")
    options.add_argument("--seconds", type=float, default=2.0, help="for each implementation of each case")
    options.add_argument(
        "--suite", choices=("hopper",), help="the cases of docs/benchmarks/hopper.md in place of those asked for"
    )
    options.add_argument("--quick", action="store_true", help="two short lengths, one head dimension, little time")
    options.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("jitattn-bench"), help="folder for bench.json, bench.png"
    )


def bench(arguments: argparse.Namespace) -> int:
    import torch

    from . import bench as work
    from . import doctor

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    heads_kv = arguments.heads_kv or arguments.heads
    if arguments.heads % heads_kv:
        return _usage(f"--heads {arguments.heads} is not a multiple of --heads-kv {heads_kv}")
    unknown = set(arguments.peers or ()) - {peer.name for peer in work.PEERS}
    if unknown:
        known = ", ".join(peer.name for peer in work.PEERS)
        return _usage(f"--peers: no {', '.join(sorted(unknown))}; there are {known}")
    cases = (
        work.hopper()
        if arguments.suite == "hopper"
        else work.grid(
            arguments.dtype,
            arguments.seq or ([128, 512] if arguments.quick else [128, 1024, 4096]),
            arguments.head_dim or ([64] if arguments.quick else [64, 128]),
            [mask == "causal" for mask in arguments.mask],
            arguments.passes,
            batch=arguments.batch,
            heads=arguments.heads,
            heads_kv=heads_kv,
            tokens=arguments.tokens,
            width=arguments.width,
        )
    )
    seconds = min(arguments.seconds, 0.05) if arguments.quick else arguments.seconds
    device = torch.device(arguments.device or _default_device())
    return work.run(cases, device, arguments.out, doctor.machine(), peers=arguments.peers, seconds=seconds)


# ------------------------------------------------------------------------------------------------ cache


def cache_info(arguments: argparse.Namespace) -> int:
    from . import cache

    return _print(cache.info(), arguments.json)


def cache_ls(arguments: argparse.Namespace) -> int:
    from . import cache

    return _print(cache.ls(), arguments.json)


def cache_verify(arguments: argparse.Namespace) -> int:
    """Exit status 1 if there was damage, so that a script notices."""
    from . import cache

    verified = cache.verify()
    return _print(verified, arguments.json) or (1 if verified.removed else 0)


def _prune_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--max-size", type=_size, help="bytes to keep, such as 100M (default: the cache's own bound)")
    options.add_argument("--unused-days", type=float, help="remove also what was not used for so long")
    options.add_argument("--all", action="store_true", help="remove every kernel")
    _json_option(options)


def cache_prune(arguments: argparse.Namespace) -> int:
    from . import cache

    unused_for = None if arguments.unused_days is None else 86400 * arguments.unused_days
    return _print(cache.prune(arguments.max_size, unused_for, arguments.all), arguments.json)


def _print(result: Any, as_json: bool) -> int:
    print(json.dumps(asdict(result), indent=1, default=str) if as_json else result)
    return 0


# ------------------------------------------------------------------------------------------------ words


def _json_option(options: argparse.ArgumentParser) -> None:
    options.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


_positive.__name__ = "positive number"  # argparse says: invalid positive number value: '0'


def _size(text: str) -> int:
    from .settings import parse_bytes

    return parse_bytes(text)


_size.__name__ = "size"


def _default_device() -> str:
    """A GPU that torch has and jitattn has kernels for, else the CPU."""
    import torch

    from .errors import Unsupported
    from .launch import target_of

    try:
        return "cuda" if torch.cuda.is_available() and target_of(torch.device("cuda")) else "cpu"
    except Unsupported:
        return "cpu"


def _usage(message: str) -> int:
    print(f"jitattn: {message}", file=sys.stderr)
    return 2


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each default, but not that of a flag, nor one that the help states itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False):
            return action.help
        return super()._get_help_string(action) if action.help else "default: %(default)s"


class _Version(argparse.Action):
    """As argparse's own, but the version is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import jitattn

        print(f"jitattn {jitattn.__version__}")
        parser.exit()
