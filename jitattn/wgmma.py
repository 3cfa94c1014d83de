"""The functions behind kernel_src/arch/sm90/wgmma.h: an instruction whose operands are counted by its shape."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["functions"]


def functions(element: str, columns: Iterable[int]) -> list[str]:
    """Lines of C++ with both forms of the product, its left side in shared memory and in registers.

    :param element: "bf16" or "f16"
    :param columns: of the right side, multiples of 8 up to 256
    """
    return [line for n in sorted(set(columns)) for line in (*_of_shared(element, n), *_of_registers(element, n))]


def _of_shared(element: str, n: int) -> list[str]:
    return _function(
        element, n, "bool add, bool b_by_rows, bool a_by_rows = false", "u64 a", "%{0}", ["a"], "l",
        "1, 1, %{a_by_rows}, %{b_by_rows}",
    )  # fmt: skip


def _of_registers(element: str, n: int) -> list[str]:
    words = [f"a[{i}]" for i in range(4)]
    return _function(
        element, n, "bool add, bool b_by_rows", "const u32 (&a)[4]", "{{%{0}, %{1}, %{2}, %{3}}}", words, "r",
        "1, 1, %{b_by_rows}",
    )  # fmt: skip


def _function(
    element: str, n: int, choices: str, left: str, left_text: str, left_words: list[str], kind: str, immediates: str
) -> list[str]:  # fmt: skip
    """`left_text` and `immediates` are filled in with the numbers of their operands."""
    sums = n // 2
    constants = [choice.split()[1] for choice in choices.split(", ")]
    number = {name: sums + i for i, name in enumerate([*left_words, "b", *constants])}
    d = ", ".join(f"%{i}" for i in range(sums))
    a = left_text.format(*(number[word] for word in left_words))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element}"
    given = [f'"{kind}"({word})' for word in left_words] + ['"l"(b)', '"r"((i32)now)']
    given += [f'"n"((i32){name})' for name in constants[1:]]

    def product(sign: str) -> list[str]:
        return [
            f'    asm volatile("{{.reg .pred add; setp.ne.b32 add, %{number["add"]}, 0; {instruction} "',
            f'                 "{{{d}}}, {a}, %{number["b"]}, add, {immediates.format(**number)};}}"',
            "                 : " + ", ".join(f'"{sign}f"(d[{i}])' for i in range(sums)),
            "                 : " + ", ".join(given) + ");",
        ]

    return [
        f"template <{choices}>",
        f"FN void wgmma({element}, float (&d)[{sums}], {left}, u64 b, bool now = add) {{",
        "  if constexpr (add) {",
        *product("+"),
        "  } else {",  # what d was before must not keep its registers from being used for other things
        *product("="),
        "  }",
        "}",
    ]
