"""Runs a row in eager and in compiled code, and says what came of it."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from compile_table.comparing import Known, describe, difference
from compile_table.forms import Row
from compile_table.kinds import KINDS, SIZES


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row.

    refused: the first line of torch's message, where torch does not compile the row as one graph.
    graphs: how often torch compiled for all sizes together; code without tensor operations counts, too.
    wrong: where compiled and eager code differ.
    """

    refused: str | None = None
    graphs: int = 0
    wrong: str | None = None

    def __str__(self) -> str:
        if self.wrong:
            return f"wrong: {self.wrong}"
        return f"refused: {self.refused}" if self.refused else f"graphs: {self.graphs}"


def run_row(row: Row) -> Outcome:
    """Run a row at each size in eager and in compiled code; errors of eager code are raised."""
    with _no_traces():
        compiled = torch.compile(row.form.call, backend="eager", fullgraph=True)
        for count in SIZES:
            expected = _observe(row, row.form.call, count)
            try:
                found = _observe(row, compiled, count)
            except (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode) as error:
                return Outcome(refused=read_first_line(error))
            except Exception as error:
                return Outcome(wrong=f"size {count}: compiled code raised {type(error).__name__}: {error}"[:600])
            if wrong := difference(expected, found):
                return Outcome(wrong=f"size {count}: {wrong}")
        return Outcome(graphs=len(_debug_get_cache_entry_list(row.form.call)))


def read_first_line(error: BaseException) -> str:
    """Torch's words, without addresses and sets, whose order differs from run to run."""
    text = str(error).strip()
    return re.sub(r"\{.*?\}", "{...}", text.splitlines()[0].split(" at 0x")[0]) if text else type(error).__name__


def _observe(row: Row, call: Any, count: int) -> dict[str, Any]:
    """Describe the result of a call, and its arguments after the call."""
    given = (KINDS[row.kind](count), *(row.form.given(row.kind, count) if row.form.given else ()))
    known = Known(given)
    torch.manual_seed(0)
    result = call(*given)
    return {"result": describe(result, known), "given": [describe(value, known) for value in given]}


# Dynamo formats the stack of each write for its log, which takes a fifth of the time, unless this setting turns it off.
_QUIET = {name: "silent" for name in ["side_effect_replay_policy"] if hasattr(torch._dynamo.config, name)}


@contextlib.contextmanager
def _no_traces() -> Iterator[None]:
    """Restore the state of torch afterwards: compiled code, and the check of distributions."""
    torch._dynamo.reset()
    # Torch turns it off when a process compiles first.
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with warnings.catch_warnings(), torch._dynamo.config.patch(_QUIET):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
        torch._dynamo.reset()
