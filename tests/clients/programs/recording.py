"""Named cases, each with its own seed and folder; the values, printed lines and files of each are compared."""

import contextlib
import enum
import hashlib
import io
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEED = 14
# Both sides write the same bytes into these files. Other formats may say the same in other bytes: cases read them back.
RAW = {".memmap", ".csv", ".txt"}


class Record:
    """The values that one case wrote down: tensors, numbers and strings, each under a path."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __call__(self, name: str, value: Any) -> None:
        """Writes `value` down; a container, mapping or sequence entry by entry."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            self._put(f"{name}.shape", tuple(value.shape))
        elif isinstance(value, torch.Tensor):
            self._put(name, value.detach().cpu().clone())
        elif isinstance(value, np.ndarray | np.generic):
            self._put(name, torch.as_tensor(np.array(value)))
        elif value is None or isinstance(value, bool | int | float):
            self._put(name, value)
        elif isinstance(value, str | type | enum.Enum | torch.dtype | torch.device):
            self._put(name, without_addresses(str(value)))
        elif hasattr(value, "batch_size") and hasattr(value, "keys"):
            self._put(f"{name}.batch_size", tuple(value.batch_size))
            for key in value.keys():
                self(f"{name}.{key}", value.get(key))
        elif isinstance(value, Mapping):
            for key in value:
                self(f"{name}.{key}", value[key])
        elif isinstance(value, list | tuple):
            self._put(f"{name}.length", len(value))
            for position, element in enumerate(value):
                self(f"{name}.{position}", element)
        elif hasattr(value, "tolist"):
            self(name, value.tolist())
        else:
            raise TypeError(f"cannot record {name}: {type(value).__name__} is neither data nor a container of data")

    def error(self, name: str, function: Callable[[], object]) -> None:
        """Calls `function` and writes down the type of the error that it raises; empty, if it raises none."""
        raised = ""
        try:
            function()
        except Exception as error:
            raised = type(error).__name__
        self._put(name, raised)

    def _put(self, name: str, value: Any) -> None:
        if name in self.values:
            raise ValueError(f"{name} is recorded already: a case gives each value a name of its own")
        self.values[name] = value


Case = Callable[[Record], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    """Marks a function as a case of its program."""
    CASES.append(function)
    return function


def slow_case(function: Case) -> Case:
    """Marks a case that takes more than two seconds: only `make test-clients-slow` runs it."""
    return case(function)


def without_addresses(text: str) -> str:
    """Removes what differs from run to run: addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", " at 0x", text)


def read_files(folder: Path) -> dict[str, str]:
    """Lists the files under `folder` by relative path, with a digest of the bytes of raw data."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix in RAW else "" for path in paths]
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, digests, strict=True)}


def seed() -> None:
    """Seeds every source of random numbers that the clients use."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def run() -> None:
    """Runs the cases that are named on the command line (all, if none is) and saves what they did.

    The first argument is the file to write: for each case what it recorded, the lines that it printed, the files that
    it left in its folder, which is the current one while it runs, and the text of its error.
    """
    path, *chosen = sys.argv[1:]
    path, started, outcomes = os.path.abspath(path), os.getcwd(), {}
    for function in CASES:
        if chosen and function.__name__ not in chosen:
            continue
        record, error, printed = Record(), "", io.StringIO()
        seed()
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(printed):
                    function(record)
            except Exception:
                error = traceback.format_exc()
            files = read_files(Path(folder))
            os.chdir(started)
        lines = without_addresses(printed.getvalue()).replace(folder, "FOLDER").splitlines()
        print(f"{function.__name__}: {time.perf_counter() - start:.1f} s {error}", flush=True)
        outcomes[function.__name__] = {"error": error, "values": record.values, "printed": lines, "files": files}
    torch.save(outcomes, path)
