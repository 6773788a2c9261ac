"""Counts the Python functions of this package that common calls run through.

python tests/house/flows.py  # prints a line for each flow: how many calls, of how many functions, in how many files

Each flow runs twice, and the second run is counted, in all threads: the first one imports modules and fills caches. A
comprehension does not count. A generator counts once, however often it is resumed.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import tensordict
from tensordict import DatasetWriter, TensorDict, open_dataset, tensorclass

_PACKAGE = str(Path(tensordict.__file__).parent)
# Python before 3.12 runs these in a frame; later versions do not.
_COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


class Count(NamedTuple):
    calls: int
    functions: int
    files: int


@tensorclass
class Step:
    observation: torch.Tensor
    reward: torch.Tensor


def count_calls(flow: Callable[[], Any]) -> Count:
    """Count the calls of one run of `flow`, in the caller's thread and in threads that it starts."""
    called: list[CodeType] = []
    generators: list[FrameType] = []

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_PACKAGE) or code.co_name in _COMPREHENSIONS:
            return
        # A frame that has run before is a generator that goes on. Keeping it alive keeps its identity.
        if code.co_flags & 0x20:
            if any(frame is other for other in generators):
                return
            generators.append(frame)
        called.append(code)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        flow()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Count(len(called), len(set(called)), len({code.co_filename for code in called}))


def _two_leaves() -> TensorDict:
    return TensorDict({"a": torch.zeros(4, 3), "b": torch.zeros(4)}, [4])


def _count_in_a_folder(flow: Callable[[Path], Any], prepare: Callable[[Path], Any] | None = None) -> Count:
    """Counts a flow that is given a folder: each time a new one, which `prepare` has filled."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            path = Path(folder, name)
            if prepare is not None:
                prepare(path)
            count = count_calls(lambda path=path: flow(path))
    return count


def count_flows() -> dict[str, Count]:
    """How much of the package each flow runs through."""
    td, steps = _two_leaves(), Step(torch.zeros(4, 3), torch.zeros(4), batch_size=[4])
    for _ in range(2):
        index = count_calls(lambda: td[0])
        stack = count_calls(lambda: torch.stack([steps, steps]))
    found = {
        "td[0]": index,
        "stack of two tensorclasses": stack,
        "memmap of two leaves": _count_in_a_folder(td.memmap),
        "load_memmap of two leaves": _count_in_a_folder(TensorDict.load_memmap, td.memmap),
        "to_zarr of two arrays": _count_in_a_folder(td.to_zarr),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            writer = DatasetWriter(Path(folder, name))
            found["append to a data set"] = count_calls(lambda writer=writer: writer.append(td))
            found["first flush of a data set"] = count_calls(writer.flush)
            writer.close()
        for _ in range(2):
            found["open a data set"] = count_calls(lambda: open_dataset(Path(folder, "second")))
        rows = open_dataset(Path(folder, "second"))
        for _ in range(2):
            found["batch of a data set"] = count_calls(lambda: rows[torch.tensor([0, 0])])
    return found


def main() -> None:
    for name, count in count_flows().items():
        print(f"{name}: {count.calls} calls of {count.functions} functions in {count.files} files")


if __name__ == "__main__":
    main()
