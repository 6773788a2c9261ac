"""Verdicts: how ranks tell each other whether a container was taken, so that all of them raise and nobody hangs.

A sender posts everything at once: the description, the messages with the tensors, and a wait for the verdict. The
receiver ends in one of three states, and tells the sender which one it is::

                 description read          messages received           written
    DESCRIPTION ------------------> POSTED ------------------> FULL ------------> TAKEN
         |                                                      |
         | it is broken,                                        | it does not fit,
         | or there is no memory                                | or cannot be loaded
         v                                                      v
        LEFT                                                 REFUSED

The messages of a container that was `LEFT` are never received, and the sender does not wait for them. A sender that
cannot send sends a `refusal` in place of a description; the receiver answers `LEFT`.

In a group, each rank takes a step (it makes room, or makes the container), and `settle` exchanges the verdicts of all
ranks. One that is not `TAKEN` ends the call on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tensordict.core.exceptions import TransferError
from tensordict.parallel.channels import MessageDevices, from_all
from tensordict.parallel.wire import as_message, content_of

T = TypeVar("T")

TAKEN, REFUSED, LEFT = 1, 2, 3
# The length of a verdict as a message.
LENGTH = 2048


class Verdict(NamedTuple):
    """The state in which a container ended on a rank, and the reason when it was not taken."""

    state: int
    why: str = ""

    def message(self, device: torch.device) -> Tensor:
        """The verdict as a message; a long reason is cut off."""
        content = (bytes([self.state]) + self.why.encode(errors="replace"))[:LENGTH]
        return as_message(content.ljust(LENGTH, b"\0"), device)

    @classmethod
    def read(cls, message: Tensor) -> Verdict:
        """The verdict in a message."""
        content = content_of(message)
        return cls(content[0], content[1:].rstrip(b"\0").decode(errors="replace"))


def refusal(error: Exception) -> bytes:
    """Return the message that takes the place of a description when a container cannot be sent."""
    return json.dumps({"refusal": f"{error}"}).encode()


def attempt(step: Callable[[], T], rank: int) -> tuple[T | None, TransferError | None]:
    """Take a step with the data of a rank. Return its result, or the error to `settle`."""
    try:
        return step(), None
    except Exception as error:  # The other ranks wait to hear of any error.
        problem = TransferError(f"from rank {rank}: {error}")
        problem.__cause__ = error
        return None, problem


def exchange(problem: object, group: dist.ProcessGroup, call: str) -> list[Verdict]:
    """Collect the verdicts of all ranks of a group, in their order. Without a problem, this rank says `TAKEN`."""
    own = Verdict(REFUSED if problem else TAKEN, f"{problem}")
    device = MessageDevices(group).main_device
    return [Verdict.read(message) for message in from_all(own.message(device), group, call)]


def settle(problem: Exception | None, group: dist.ProcessGroup, call: str) -> None:
    """Raise on all ranks what went wrong on any of them.

    Raises:
        TransferError: what it was, and on which rank.
    """
    verdicts = exchange(problem, group, call)
    if problem is not None:
        raise problem
    for rank, (state, why) in enumerate(verdicts):
        if state != TAKEN:
            raise TransferError(f"{call}: rank {rank} of the group did not take it: {why}")
