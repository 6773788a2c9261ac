"""Says where the work of one call goes: instructions of Python by function, and calls of C functions.

    .venv/bin/python benchmarks/accounts.py                # a line per call
    .venv/bin/python benchmarks/accounts.py --only 'td[0]' --functions

Counting is exact and repeatable, on a busy machine too; one instruction takes 10 to 30 ns, a C call of torch 200 and
more. What Python does inside of C functions (torch's own, mostly) is theirs: it is in "C calls".
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from tensordict import TensorClass, TensorDict


class Point(TensorClass):
    """Two fields, as small as a tensorclass comes."""

    x: torch.Tensor
    y: torch.Tensor


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name contains this text")
    parser.add_argument("--functions", action="store_true", help="the functions and C calls of each")
    options = parser.parse_args()
    print(f"{'':34}{'instructions':>14}{'Python calls':>14}{'C calls':>9}")
    for name, run in calls().items():
        if options.only not in name:
            continue
        # What is kept from the first call on is made.
        run(), run()
        instructions, entered, outside = count(run)
        print(f"{name:34}{sum(instructions.values()):14}{sum(entered.values()):14}{sum(outside.values()):9}")
        if options.functions:
            for place, number in instructions.most_common():
                print(f"    {number:5}  {place}, {entered[place]} calls")
            print("    C: " + ", ".join(f"{called} {number}" for called, number in outside.most_common()))


def count(run: Callable[[], object]) -> tuple[collections.Counter[str], ...]:
    """Instructions by function, calls of Python functions, calls of C functions; those of `run` itself left out."""
    instructions: collections.Counter[str] = collections.Counter()
    entered: collections.Counter[str] = collections.Counter()
    outside: collections.Counter[str] = collections.Counter()

    def place(frame: FrameType) -> str:
        module = frame.f_globals.get("__name__", "?").removeprefix("tensordict.")
        return (
            f"{module}.{frame.f_code.co_qualname}"
            if sys.version_info >= (3, 11)
            else f"{module}.{frame.f_code.co_name}"
        )

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is run.__code__:  # type: ignore[attr-defined]
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        name = place(frame)
        entered[name] += event == "call"
        instructions[name] += event == "opcode"
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument is not sys.setprofile:
            outside[getattr(argument, "__qualname__", repr(argument))] += 1

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before[0])
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before[1])
    return instructions, entered, outside


def calls() -> dict[str, Callable[[], object]]:
    """The calls that are accounted for, each on containers of 10 leaves but for tensorclasses, of two."""
    tree = {f"k{i}": torch.ones(32, 4) for i in range(10)}
    td, other, leaf = TensorDict(tree, [32]), TensorDict(tree, [32]).clone(), torch.ones(32, 4)
    nested = TensorDict({"n": td}, [32])
    point = Point(x=leaf, y=leaf, batch_size=[32])
    return {
        "TensorDict({}, [32])": lambda: TensorDict({}, [32]),
        "TensorDict(10 leaves, [32])": lambda: TensorDict(tree, [32]),
        'td["k0"]': lambda: td["k0"],
        'td["n", "k0"]': lambda: nested["n", "k0"],
        'td.get("k0")': lambda: td.get("k0"),
        'td["k0"] = leaf': lambda: td.__setitem__("k0", leaf),
        'td.set("k0", leaf)': lambda: td.set("k0", leaf),
        'td.set_("k0", leaf)': lambda: td.set_("k0", leaf),
        "td[0]": lambda: td[0],
        "td[:4]": lambda: td[:4],
        "td.clone()": lambda: td.clone(),
        "td.clone(False)": lambda: td.clone(False),
        "td.update(other)": lambda: td.update(other),
        "td.update_(other)": lambda: td.update_(other),
        "td.lock_().unlock_()": lambda: td.lock_().unlock_(),
        "td.apply(torch.neg)": lambda: td.apply(torch.neg),
        "td.keys()": lambda: list(td.keys()),
        "td.keys(True, True)": lambda: list(nested.keys(True, True)),
        "td.items()": lambda: list(td.items()),
        "Point(x=leaf, y=leaf)": lambda: Point(x=leaf, y=leaf, batch_size=[32]),
        "point.x": lambda: point.x,
        "point.x = leaf": lambda: setattr(point, "x", leaf),
        "point[0]": lambda: point[0],
        "point.clone()": lambda: point.clone(),
    }


if __name__ == "__main__":
    main()
