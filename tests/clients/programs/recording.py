"""What the programs share: named cases, each with its own seed, and the tensors that a case records, under paths."""

import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

SEED = 14


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
        elif value is None or isinstance(value, bool | int | float | str):
            self._put(name, value)
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


def seed() -> None:
    """Seeds every source of random numbers that the clients use."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def run() -> None:
    """Runs the cases that are named on the command line (all, if none is) and saves what they record.

    The first argument is the file to write: for each case its record, or the text of its error.
    """
    path, *chosen = sys.argv[1:]
    outcomes = {}
    for function in CASES:
        if chosen and function.__name__ not in chosen:
            continue
        record, error = Record(), ""
        seed()
        start = time.perf_counter()
        try:
            function(record)
        except Exception:
            error = traceback.format_exc()
        print(f"{function.__name__}: {time.perf_counter() - start:.1f} s {error}", flush=True)
        outcomes[function.__name__] = {"error": error, "values": record.values}
    torch.save(outcomes, path)
