"""Verdicts: the receiver of a container tells the sender how the transfer ended.

The sender posts everything at once: the description, the messages with the tensors, and a buffer for the verdict. The
receiver goes through these steps, ends in one of three states, and sends this state as its verdict::

    receive the description ------> LEFT      the description is broken, or the messages do not fit into memory
              |
              v
    receive the messages
              |
              v
    write the container ----------> REFUSED   the container does not fit, or a value cannot be loaded
              |
              v
            TAKEN

On `TAKEN`, the sender is done. On `REFUSED` and `LEFT`, it raises the reason in the verdict. After `LEFT`, the receiver
ignores the messages, so the sender does not wait for them. A sender that cannot send a container sends a `refusal`
instead of a description, and the receiver answers `LEFT`.

Collectives have no single receiver. After each step (allocating memory, making the container), `settle` exchanges the
verdicts of all ranks. If one is not `TAKEN`, all ranks raise, so that none of them waits for the next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tensordict.core.exceptions import TransferError
from tensordict.parallel.channels import MessageDevices, gather_messages
from tensordict.parallel.wire import as_message, content_of

T = TypeVar("T")

TAKEN, REFUSED, LEFT = 1, 2, 3
# The length of a verdict as a message.
LENGTH = 2048


class Verdict(NamedTuple):
    """The state in which a transfer ended on a rank, and the reason if it is not `TAKEN`."""

    state: int
    why: str = ""

    def message(self, device: torch.device) -> Tensor:
        """Return the verdict as a message. A long reason is cut off."""
        content = (bytes([self.state]) + self.why.encode(errors="replace"))[:LENGTH]
        return as_message(content.ljust(LENGTH, b"\0"), device)

    @classmethod
    def read(cls, message: Tensor) -> Verdict:
        """Read the verdict from a message."""
        content = content_of(message)
        return cls(content[0], content[1:].rstrip(b"\0").decode(errors="replace"))


def refusal(error: Exception) -> bytes:
    """Return the message to send instead of a description when a container cannot be sent."""
    return json.dumps({"refusal": f"{error}"}).encode()


def attempt(step: Callable[[], T], rank: int) -> tuple[T | None, TransferError | None]:
    """Run a step with the data of a rank. Returns its result, or the error to pass to `settle`."""
    try:
        return step(), None
    except Exception as error:  # catch all: the other ranks wait for a verdict
        problem = TransferError(f"from rank {rank}: {error}")
        problem.__cause__ = error
        return None, problem


def exchange(problem: object, group: dist.ProcessGroup, call: str) -> list[Verdict]:
    """Return the verdicts of all ranks of a group, in their order. Without a problem, this rank sends `TAKEN`."""
    own = Verdict(REFUSED if problem else TAKEN, f"{problem}")
    device = MessageDevices(group).main_device
    return [Verdict.read(message) for message in gather_messages(own.message(device), group, call)]


def settle(problem: Exception | None, group: dist.ProcessGroup, call: str) -> None:
    """Exchange the verdicts of all ranks, and raise if a step failed on one of them.

    Raises:
        TransferError: another rank failed; the error names it and the reason.
    """
    verdicts = exchange(problem, group, call)
    if problem is not None:
        raise problem
    for rank, (state, why) in enumerate(verdicts):
        if state != TAKEN:
            raise TransferError(f"{call}: rank {rank} of the group did not take it: {why}")
