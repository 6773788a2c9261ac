"""The examples in the docstrings of TorchRL's modules and objectives: what they print, and the tensors they leave."""

import contextlib
import doctest
import importlib
import inspect
import io
from collections.abc import Iterator
from typing import Any

import torch
from recording import Record, case, run, seed, slow_case, without_addresses
from torch import nn
from torch.nn.parameter import is_lazy

from tensordict import is_tensor_collection

# Environments without a seed: only what these print, and the errors, are the same in two runs.
UNSEEDED = {"GRUModule", "LSTMModule.make_tensordict_primer", "MultiStepActorWrapper"}
# These take seconds each.
SLOW = {"ACTLoss"}


def documented(module: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a module of TorchRL, and the methods of the classes."""
    found = importlib.import_module(module)
    for name in sorted(set(getattr(found, "__all__", None) or dir(found))):
        value = getattr(found, name)
        if not getattr(value, "__module__", "").startswith("torchrl") or name.startswith("_"):
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_") and (callable(method) or isinstance(method, property)):
                    yield f"{name}.{member}", method


def keep(record: Record, name: str, value: Any) -> None:
    """Writes down a variable that an example leaves; of a module its state and gradients."""
    if isinstance(value, nn.Module):
        if not any(map(is_lazy, [*value.parameters(), *value.buffers()])):
            record(f"{name} state", dict(value.state_dict()))
            record(f"{name} gradients", [parameter.grad for parameter in value.parameters()])
    elif not isinstance(value, type) and (
        isinstance(value, torch.Tensor | int | float | str) or is_tensor_collection(value)
    ):
        record(name, value)


def explain(record: Record, name: str, value: Any) -> None:
    """Runs the example in the docstring of `value`, line by line; a line that raises does not end it."""
    try:
        examples = doctest.DocTestParser().get_examples(inspect.getdoc(value) or "")
    except ValueError:
        # The prompts of a few docstrings are not aligned.
        return
    if not examples:
        return
    seed()
    printed, variables = io.StringIO(), {"__name__": "example"}
    for number, example in enumerate(examples):
        raised = "nothing"
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            try:
                exec(compile(example.source, name, "single"), variables)
            except Exception as error:
                raised = type(error).__name__
        record(f"{name} line {number} raises", raised)
    record(f"{name} prints", without_addresses(printed.getvalue()))
    if name not in UNSEEDED:
        for variable, left in variables.items():
            if not variable.startswith("__"):
                keep(record, f"{name} {variable}", left)


def explain_all(record: Record, module: str) -> None:
    for name, value in documented(module):
        if name not in SLOW:
            explain(record, name, value)


@case
def modules(record: Record) -> None:
    explain_all(record, "torchrl.modules")


@case
def objectives(record: Record) -> None:
    for module in ("torchrl.objectives", "torchrl.objectives.value"):
        explain_all(record, module)


@slow_case
def slow_objectives(record: Record) -> None:
    for name in sorted(SLOW):
        explain(record, name, getattr(importlib.import_module("torchrl.objectives"), name))


if __name__ == "__main__":
    run()
