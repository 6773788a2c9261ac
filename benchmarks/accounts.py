"""Says where the work of one call goes: instructions of Python by function, and calls of C functions.

    .venv/bin/python benchmarks/accounts.py                           # a line per call
    .venv/bin/python benchmarks/accounts.py --only 'td[0]' --functions
    .venv/bin/python benchmarks/accounts.py --families lazy,modules   # of every workload of these families
    .venv/bin/python benchmarks/accounts.py --markdown                # the table in benchmarks/README.md

Counting is exact and repeatable, on a busy machine too; one instruction takes 10 to 30 ns, a C call of torch 200 and
more. What Python does inside of C functions (torch's own, mostly) is theirs: it is in "C calls".
"""

from __future__ import annotations

import argparse
import collections
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from families import IN_MEMORY
from workload import Context

import tensordict

Counts = tuple[collections.Counter[str], ...]
OF_EACH_FAMILY = (
    ("construction", "flat, 10 keys"),
    ("construction", "from containers, 10 x 10 keys"),
    ("access", "td[key], flat"),
    ("access", "td[key] = leaf, flat"),
    ("access", "set(key, leaf), flat"),
    ("views", "keys(nested, leaves), 10 x 10 keys"),
    ("views", "items(nested, leaves), flat, 10 keys"),
    ("indexing", "td[3], 10 leaves"),
    ("indexing", "td[3] = row, 1 leaf"),
    ("pieces", "stack, 2 items, 1 leaf"),
    ("copies", "clone(), 10 keys"),
    ("copies", "update(dict), 10 keys"),
    ("copies", "update_(td), 10 keys"),
    ("copies", "flatten_keys, 10 keys"),
    ("locking", "lock_, unlock_, 10 keys"),
    ("apply", "apply(identity), 10 keys"),
    ("settings", "write through view(-1)"),
    ("settings", "set_ through view(-1)"),
    ("lazy", "list(keys)"),
    ("lazy", "td[0]"),
    ("ragged", "jagged: set, 10 leaves"),
    ("ragged", "merge_tensordicts of 3"),
    ("tensorclass", "init, 1 field"),
    ("tensorclass", "read a tensor"),
    ("tensorclass", "write a tensor"),
    ("tensorclass", "write a value"),
    ("functional", "from_dict, 10 leaves"),
    ("functional", "to_namedtuple"),
    ("functional", "params: get"),
    ("modules", "a function, by position"),
    ("modules", "3 results"),
    ("modules", "dispatch, by keyword"),
)
"""The workloads of the table: of each family those that are common, or far above their floor."""


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="", help="all workloads of these, instead of some of each")
    parser.add_argument("--only", default="", help="workloads whose name contains this text")
    parser.add_argument("--functions", action="store_true", help="the functions and C calls of each")
    parser.add_argument("--markdown", action="store_true", help="a table with what most instructions are in")
    options = parser.parse_args()
    families = options.families.split(",") if options.families else IN_MEMORY
    if options.markdown:
        print("| family | call | instructions | Python calls | C calls | the most of it |\n|---|---|---|---|---|---|")
    else:
        print(f"{'':60}{'instructions':>14}{'Python calls':>14}{'C calls':>9}")
    for (family, name), run in calls(families).items():
        if options.only not in name or not (options.families or options.only or (family, name) in OF_EACH_FAMILY):
            continue
        instructions, entered, outside = count(run)
        sums = [sum(counter.values()) for counter in (instructions, entered, outside)]
        if options.markdown:
            most = "; ".join(f"{number} in `{place}`" for place, number in instructions.most_common(3))
            print(f"| {family} | {name} | {sums[0]} | {sums[1]} | {sums[2]} | {most} |")
            continue
        print(f"{family + ': ' + name:60}{sums[0]:14}{sums[1]:14}{sums[2]:9}")
        if options.functions:
            for place, number in instructions.most_common():
                print(f"    {number:5}  {place}, {entered[place]} calls")
            print("    C: " + ", ".join(f"{called} {number}" for called, number in outside.most_common()))


def count(run: Callable[[], object]) -> Counts:
    """Count instructions by function, calls of Python functions and calls of C functions, without `run` itself.

    `run` is called twice before, to fill caches.
    """
    run(), run()
    instructions: collections.Counter[str] = collections.Counter()
    entered: collections.Counter[str] = collections.Counter()
    outside: collections.Counter[str] = collections.Counter()
    here = (__name__, "workload", "families")

    def place(frame: FrameType) -> str:
        module = frame.f_globals.get("__name__", "?").removeprefix("tensordict.")
        code: Any = frame.f_code
        return f"{module}.{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_globals.get("__name__", "?").partition(".")[0] in here:
            return trace if frame.f_code is not run.__code__ else None  # type: ignore[attr-defined]
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


def calls(families: tuple[str, ...] | list[str]) -> dict[tuple[str, str], Callable[[], object]]:
    """The workloads of these families, each as a call that sets itself up when it is called first."""
    found: dict[tuple[str, str], Callable[[], object]] = {}
    context = Context(quick=True, folder=Path(tempfile.gettempdir()))
    for family in families:
        torch.manual_seed(0)
        for workload in importlib.import_module(f"families.{family}").workloads(context):
            found[family, workload.name] = _call(workload)
    return found


def _call(workload: Any) -> Callable[[], object]:
    states: list[Any] = []

    def run() -> object:
        if not states:
            states.append(workload.setup(tensordict))
        return workload.run(states[0])

    return run


if __name__ == "__main__":
    main()
