"""Jobs: what worker processes do with the chunks of a container, and what becomes of errors."""

from __future__ import annotations

import pickle
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.key_views import is_leaf_nontensor
from tensordict.memory.stored_tensors import StoredTensor
from tensordict.parallel.messages import CommonMemory, Message

T = TypeVar("T")


class Chunk(NamedTuple):
    """The elements from `start` to `stop` of a dim; `stop` is `None` for the single element at `start`."""

    number: int
    start: int
    stop: int | None

    def __str__(self) -> str:
        if self.stop is None:
            return f"chunk {self.number} (element {self.start} of the dim)"
        return f"chunk {self.number} (elements {self.start} to {self.stop - 1} of the dim)"


@dataclass(frozen=True)
class Job:
    """A function that is called with chunks of a container.

    fn: the function.
    container: what the chunks are of.
    dim: the dim along which they are cut.
    order: the elements of this dim in the order in which they are taken; `None` as they are.
    out: the container whose chunks take the results; `None` to have them sent back.
    """

    fn: Callable[[Any], Any]
    container: Any
    dim: int
    order: Tensor | None = None
    out: Any = None

    def piece(self, chunk: Chunk) -> Any:
        """The part of the container that the function gets: unlocked, over the same memory but with an `order`."""
        found = self.container[self.at(chunk)]
        return found.copy() if found._locked else found

    def at(self, chunk: Chunk) -> tuple[Any, ...]:
        """The index of a chunk."""
        index: Any = chunk.start if chunk.stop is None else slice(chunk.start, chunk.stop)
        if self.order is not None:
            index = self.order[index]
        return (*[slice(None)] * self.dim, index)

    def __call__(self, chunk: Chunk) -> object:
        return called(self.fn, self.piece(chunk), None if self.out is None else self.out[self.at(chunk)])

    def sendable(self, forked: bool) -> Job:
        """This job for a process that is forked, where a file that is open here must be opened anew, or for another."""
        if not forked:
            return replace(self, fn=Sent(self.fn))
        leaves = self.container._leaves()
        if not any(type(leaf) is StoredTensor for leaf in leaves):
            return self
        return replace(self, container=PickledMessage(bytes(ForkingPickler.dumps(self.container))))

    def received(self) -> Job:
        """This job in the process that it was sent to."""
        if isinstance(self.container, PickledMessage):
            return replace(self, container=self.container.value())
        fn: Any = self.fn
        return replace(self, fn=fn.value()) if isinstance(fn, PickledMessage) else self


class PickledMessage(NamedTuple):
    """A value as bytes, so that the receiver can say what is wrong with them."""

    content: bytes

    def value(self) -> Any:
        """What was pickled."""
        return pickle.loads(self.content)


class Sent:
    """A function on its way to a process that was not forked for it, where it is a `PickledMessage`."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self._fn = fn

    def __call__(self, argument: object) -> object:
        """Call the function, in the process that it comes from."""
        return self._fn(argument)

    def __reduce__(self) -> tuple[type[PickledMessage], tuple[bytes]]:
        try:
            content = bytes(ForkingPickler.dumps(self._fn))
        except Exception as error:
            raise pickle.PicklingError(
                f"{error}: workers import what is mapped, unless they are forked for it; define it at the top of a "
                "module, or map with mp_start_method='fork' and no pool"
            ) from error
        return PickledMessage, (content,)


def called(fn: Callable[[Any], object], piece: object, out: Any) -> object:
    """The result of a function for a piece; `None` where it is written into `out`, the part of `out=` that is for it.

    Raises:
        TypeError: the result is to be written, and is no container.
        RuntimeError: its shapes do not fit.
    """
    result = fn(piece)
    if out is None:
        return result
    if (part := fitting(result, out)) is not None:
        out.update_(part)
    return None


def fitting(result: object, piece: Any) -> Any:
    """The entries of a result that `piece` has too; `None` if there is no result.

    Raises:
        TypeError: it is no container.
        ValueError: its batch size is another one.
        KeyError: it has none of the entries.
    """
    if result is None:
        return None
    if not isinstance(result, Contract):
        raise TypeError(f"with out= the function gives containers or None, got {type(result).__name__}")
    if result._batch_size != piece._batch_size:
        raise ValueError(
            f"the function gave a batch size of {list(result._batch_size)}, but the chunk of out has "
            f"{list(piece._batch_size)}"
        )
    own: Any = result
    given = set(own.keys(True, True, is_leaf=is_leaf_nontensor))
    keys = [key for key in piece.keys(True, True, is_leaf=is_leaf_nontensor) if key in given]
    if not keys and not piece.is_empty():
        raise KeyError(f"the function gave {sorted(own.keys())}, and out has none of that: {sorted(piece.keys())}")
    return own.select(*keys)


def seed_all(seed: int) -> None:
    """Seed what draws random numbers."""
    if torch.accelerator.current_accelerator() is None:
        # `torch.manual_seed` formats a traceback for devices that it may seed later: 10 ms in a process that is new.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


# --- errors -----------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """An exception on its way to the caller, and where it was raised."""

    error: BaseException
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The exception that is handled at the moment."""
        # A generator of the caller would end by a StopIteration.
        return cls(_stand_in(error) if isinstance(error, StopIteration) else error, traceback.format_exc())


def _stand_in(error: Exception) -> Exception:
    """An exception that takes the place of one that cannot travel."""
    return RuntimeError(f"{type(error).__name__}: {error}")


def attempt(
    job: Callable[[T], object], argument: T, common: CommonMemory, inline: bool = False
) -> tuple[bool, Message]:
    """Whether a job was done, and its result; otherwise the `Failure`."""
    nothing = CommonMemory()
    try:
        return True, Message.of(job(argument), common, inline)
    except Exception as error:
        failure = Failure.of(error)
        try:
            message = Message.of(failure, nothing, inline=True)
            message.value(nothing)
        except Exception:
            # Not every exception can be pickled, or made again of its arguments.
            message = Message.of(Failure(_stand_in(error), failure.trace), nothing, inline=True)
        return False, message


def attempt_here(job: Callable[[T], object], argument: T) -> tuple[bool, LocalValue]:
    """As `attempt`, for a thread of the process that takes the result."""
    try:
        return True, LocalValue(job(argument))
    except Exception as error:
        return False, LocalValue(Failure.of(error))


class LocalValue(NamedTuple):
    """A value that stays in this process, where others travel as a `Message`."""

    content: Any

    def value(self, common: CommonMemory) -> Any:
        """The value itself."""
        return self.content


class RemoteTraceback(Exception):
    """The cause of an exception that a worker raised: which chunk it was, and the traceback there."""

    def __str__(self) -> str:
        return str(self.args[0])


def raise_failure(failure: Failure, chunk: Chunk) -> None:
    """Raise the exception of a worker, which names the chunk."""
    name_chunk(failure.error, chunk)
    raise failure.error from RemoteTraceback(f"in {chunk}\n\n{failure.trace}")


def name_chunk(error: BaseException, chunk: Chunk) -> None:
    """Put the chunk in front of the message of an exception, or in its place; other arguments stay as they are."""
    if not error.args:
        error.args = (f"{chunk}",)
    elif len(error.args) == 1 and type(error.args[0]) is str:
        error.args = (f"{chunk}: {error.args[0]}",)
