"""Functions of each element, operators, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cases import OF_ONE, TESTS
from compile_table.calls import assign_in_place, call_method
from compile_table.forms import EVERY, MAIN, MOST, NESTED, WRITABLE, Form
from compile_table.kinds import KINDS, a_tensor, another

OF_TWO = ["add", "sub", "mul", "div", "pow", "clamp_max", "clamp_min", "maximum", "minimum"]
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": lambda x, y: x + y,
    "__sub__": lambda x, y: x - y,
    "__mul__": lambda x, y: x * y,
    "__truediv__": lambda x, y: x / y,
    "__floordiv__": lambda x, y: x // y,
    "__mod__": lambda x, y: x % y,
    "__pow__": lambda x, y: x**y,
    "__lt__": lambda x, y: x < y,
    "__le__": lambda x, y: x <= y,
    "__gt__": lambda x, y: x > y,
    "__ge__": lambda x, y: x >= y,
    "__eq__": lambda x, y: x == y,
    "__ne__": lambda x, y: x != y,
}
# The functions that run on all kinds: one of each family, since the others take the same way.
SOME = dict.fromkeys(
    ["exp", "sqrt", "isnan", "add", "pow", "maximum", "__add__", "__pow__", "__eq__", "__lt__"], WRITABLE
)
BITS: dict[str, Callable[[Any, Any], Any]] = {
    "__and__": lambda x, y: x & y,
    "__or__": lambda x, y: x | y,
    "__xor__": lambda x, y: x ^ y,
}


def with_number(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda td: function(td, 2)


def number_with(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda td: function(2, td)


def another_flipped(kind: str, count: int) -> tuple[Any]:
    """A second container of integers or masks."""
    return (KINDS[kind](count).apply(lambda leaf: leaf.flip(0)),)


FORMS = [
    *(
        Form(name, call_method(name), SOME.get(name, NESTED), quick="lazy" if name == "exp" else None)
        for name in (*OF_ONE, *TESTS)
    ),
    *(Form(f"{name}_", call_method(f"{name}_"), SOME.get(name, NESTED)) for name in OF_ONE),
    *(Form(f"{name}: container", call_method(name), SOME.get(name, NESTED), another) for name in OF_TWO),
    *(Form(f"{name}: tensor", call_method(name), SOME.get(name, NESTED), a_tensor) for name in OF_TWO),
    *(
        Form(f"{name}: number", call_method(name, 2), SOME.get(name, NESTED))
        for name in ("add", "sub", "mul", "div", "pow")
    ),
    *(Form(f"{name}_: container", call_method(f"{name}_"), SOME.get(name, NESTED), another) for name in OF_TWO),
    *(
        Form(f"{name}_: number", call_method(f"{name}_", 2), SOME.get(name, NESTED))
        for name in ("add", "sub", "mul", "div", "pow")
    ),
    *(Form(f"{name}_: tensor", call_method(f"{name}_"), NESTED, a_tensor) for name in ("add", "mul")),
    *(Form(f"{name}: container", function, SOME.get(name, NESTED), another) for name, function in OPERATORS.items()),
    *(Form(f"{name}: number", with_number(function), SOME.get(name, NESTED)) for name, function in OPERATORS.items()),
    *(Form(f"{name}: tensor", function, ("nested", "tensorclass"), a_tensor) for name, function in OPERATORS.items()),
    *(
        Form(f"__r{name[2:]}: number", number_with(OPERATORS[name]), NESTED)
        for name in ("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__pow__")
    ),
    *(
        Form(f"__i{name}__", assign_in_place(f"{sign}="), SOME.get(f"__{name}__", NESTED))
        for name, sign in {
            "add": "+",
            "sub": "-",
            "mul": "*",
            "truediv": "/",
            "pow": "**",
            "floordiv": "//",
            "mod": "%",
        }.items()
    ),
    *(
        Form(f"__i{name}__: container", assign_in_place(f"{sign}="), NESTED, another)
        for name, sign in {"add": "+", "mul": "*"}.items()
    ),
    *(
        Form(f"{name}: masks", lambda td, other, f=function: f(td > 0.3, other > 0.3), MAIN, another)
        for name, function in BITS.items()
    ),
    *(Form(f"{name}: container", function, ("masks", "ints"), another_flipped) for name, function in BITS.items()),
    *(Form(f"__r{name[2:]}: number", number_with(function), ("ints",)) for name, function in BITS.items()),
    *(
        Form(f"__i{name}__", assign_in_place(f"{sign}="), ("ints",))
        for name, sign in {"and": "&", "or": "|", "xor": "^"}.items()
    ),
    Form("__neg__", lambda td: -td, MAIN),
    Form("__pos__", lambda td: +td, MAIN),
    Form("__abs__", lambda td: abs(td), MAIN),
    Form("__invert__", lambda td: ~td, ("masks", "ints")),
    Form("bitwise_and", lambda td, other: (td > 0.3).bitwise_and(other > 0.3), NESTED, another),
    Form("logical_and", lambda td, other: (td > 0.3).logical_and(other > 0.3), NESTED, another),
    Form("mod", lambda td: td.mod(0.3), MAIN),
    Form("rsub", lambda td, other: td.rsub(other), NESTED, another),
    Form("rsub: alpha", lambda td: td.rsub(1, alpha=2), MAIN),
    Form("add: alpha", lambda td, other: td.add(other, alpha=2), NESTED, another),
    Form("sub: alpha", lambda td, other: td.sub(other, alpha=2), NESTED, another),
    Form("add_: alpha", lambda td, other: td.add_(other, alpha=2), NESTED, another),
    Form("sub_: alpha", lambda td: td.sub_(1, alpha=2), MAIN),
    Form("add: default", lambda td: td.add(td.select("a"), default=0.0), NESTED),
    Form("mul: intersection", lambda td: td.select("a").mul(td, default="intersection"), NESTED),
    Form("addcdiv", lambda td, other: td.addcdiv(other, other, value=2), NESTED, another),
    Form("addcdiv_", lambda td, other: td.addcdiv_(other, other, value=2), NESTED, another),
    Form("addcmul", lambda td, other: td.addcmul(other, other, value=2), MAIN, another),
    Form("addcmul_", lambda td, other: td.addcmul_(other, other, value=2), MAIN, another),
    Form("lerp", lambda td, other: td.lerp(other, 0.5), MOST, another),
    Form("lerp: container", lambda td, other: td.lerp(other, other), MAIN, another),
    Form("lerp_", lambda td, other: td.lerp_(other, 0.5), MAIN, another),
    Form("clamp", lambda td: td.clamp(0.2, 0.5), MOST, quick="nested"),
    Form("clamp: one bound", lambda td: td.clamp(min=0.2), MAIN),
    Form("softmax", lambda td: td.softmax(0), MOST),
    Form("fill_", lambda td: td.fill_("a", 2.0), MAIN),
    Form("zero_", lambda td: td.zero_(), WRITABLE),
    Form("__add__: every kind", lambda td: td + 1, EVERY, quick="params"),
    Form("__mul__: scalar tensor", lambda td: td * torch.tensor(2.0), MAIN),
    Form("__rmul__: tensor", lambda td, other: other * td, NESTED, a_tensor),
    Form("__lt__: sum of both", lambda td, other: ((td < other) | (td > other)).all(), MAIN, another),
]
