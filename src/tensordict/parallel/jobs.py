"""Jobs: the function that workers call with chunks of a container, and the errors that they send back."""

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
    """A function, and the container whose chunks it is called with.

    fn: the function.
    container: the container.
    dim: the dim along which chunks are cut.
    order: a permutation of the elements of this dim, for shuffled chunks; `None` keeps their order.
    out: the container that the results are written into; `None` to send them back.
    """

    fn: Callable[[Any], Any]
    container: Any
    dim: int
    order: Tensor | None = None
    out: Any = None

    def cut_piece(self, chunk: Chunk) -> Any:
        """Return the part of the container that the function is called with. It is not locked.

        Without an `order` it shares the memory of the container.
        """
        found = self.container[self.index_of(chunk)]
        return found.copy() if found._locked else found

    def index_of(self, chunk: Chunk) -> tuple[Any, ...]:
        """Return the index of a chunk."""
        index: Any = chunk.start if chunk.stop is None else slice(chunk.start, chunk.stop)
        if self.order is not None:
            index = self.order[index]
        return (*[slice(None)] * self.dim, index)

    def __call__(self, chunk: Chunk) -> object:
        return call_function(
            self.fn, self.cut_piece(chunk), None if self.out is None else self.out[self.index_of(chunk)]
        )

    def prepare_to_send(self, forked: bool) -> Job:
        """Return the job in a form that a new process can receive. `restore` undoes it there.

        A spawned process must unpickle the function. A forked process has the function and the container, but must open
        files again, so a container over a file is pickled.
        """
        if not forked:
            return replace(self, fn=SentFunction(self.fn))
        leaves = self.container._leaves()
        if not any(type(leaf) is StoredTensor for leaf in leaves):
            return self
        return replace(self, container=PickledMessage(bytes(ForkingPickler.dumps(self.container))))

    def restore(self) -> Job:
        """Return the job that `prepare_to_send` was called on, in the process that received it."""
        if isinstance(self.container, PickledMessage):
            return replace(self, container=self.container.value())
        fn: Any = self.fn
        return replace(self, fn=fn.value()) if isinstance(fn, PickledMessage) else self


class PickledMessage(NamedTuple):
    """A pickled value. The receiver unpickles it itself, so that it can report errors."""

    content: bytes

    def value(self) -> Any:
        """Unpickle the value."""
        return pickle.loads(self.content)


class SentFunction:
    """A function to send to a worker process that did not inherit it by a fork. Its pickle is a `PickledMessage`."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self._fn = fn

    def __call__(self, argument: object) -> object:
        """Call the function, in the process that sends it."""
        return self._fn(argument)

    def __reduce__(self) -> tuple[type[PickledMessage], tuple[bytes]]:
        try:
            content = bytes(ForkingPickler.dumps(self._fn))
        except Exception as error:
            raise pickle.PicklingError(
                f"{error}: workers import the function, unless they are forked for it; define it at the top of a "
                "module, or map with mp_start_method='fork' and no pool"
            ) from error
        return PickledMessage, (content,)


def call_function(fn: Callable[[Any], object], piece: object, out: Any) -> object:
    """Call a function with a piece and return its result, or write the result into `out`, the same part of `out=`.

    Raises:
        TypeError: with `out`, the result is not a container.
        RuntimeError: with `out`, the shapes do not fit.
    """
    result = fn(piece)
    if out is None:
        return result
    if (part := select_entries_of(out, result)) is not None:
        out.update_(part)
    return None


def select_entries_of(piece: Any, result: object) -> Any:
    """Return the entries of a result that `piece`, a part of `out=`, has too; `None` if the result is `None`.

    Raises:
        TypeError: the result is not a container.
        ValueError: its batch size differs.
        KeyError: it has no entry that `piece` has.
    """
    if result is None:
        return None
    if not isinstance(result, Contract):
        raise TypeError(f"with out= the function returns containers or None, got {type(result).__name__}")
    if result._batch_size != piece._batch_size:
        raise ValueError(
            f"the result has the batch size {list(result._batch_size)}, but the chunk of out has "
            f"{list(piece._batch_size)}"
        )
    own: Any = result
    given = set(own.keys(True, True, is_leaf=is_leaf_nontensor))
    keys = [key for key in piece.keys(True, True, is_leaf=is_leaf_nontensor) if key in given]
    if not keys and not piece.is_empty():
        raise KeyError(f"the result has the entries {sorted(own.keys())}, but out has {sorted(piece.keys())}")
    return own.select(*keys)


def seed_all(seed: int) -> None:
    """Seed the random number generators of torch, Python and NumPy."""
    if torch.accelerator.current_accelerator() is None:
        # `torch.manual_seed` formats a traceback for a device that it may seed later, which takes 10 ms in a new
        # process.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


# --- errors -----------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """An exception that a worker sends to the caller, and its traceback as text."""

    error: BaseException
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Make a failure from the exception that is being handled."""
        # A `StopIteration` would end a generator of the caller.
        return cls(_make_stand_in(error) if isinstance(error, StopIteration) else error, traceback.format_exc())


def _make_stand_in(error: Exception) -> Exception:
    """Make an exception with the same message, for an exception that cannot be sent."""
    return RuntimeError(f"{type(error).__name__}: {error}")


def run_job(
    job: Callable[[T], object], argument: T, common: CommonMemory, inline: bool = False
) -> tuple[bool, Message]:
    """Call a job. Returns `True` and a message with the result, or `False` and a message with the `Failure`."""
    nothing = CommonMemory()
    try:
        return True, Message.of(job(argument), common, inline)
    except Exception as error:
        failure = Failure.of(error)
        try:
            message = Message.of(failure, nothing, inline=True)
            message.value(nothing)
        except Exception:
            # Some exceptions cannot be pickled, or not be created again from their arguments.
            message = Message.of(Failure(_make_stand_in(error), failure.trace), nothing, inline=True)
        return False, message


def run_job_in_thread(job: Callable[[T], object], argument: T) -> tuple[bool, LocalValue]:
    """Do the same as `run_job` in a thread of the caller, without pickling the result."""
    try:
        return True, LocalValue(job(argument))
    except Exception as error:
        return False, LocalValue(Failure.of(error))


class LocalValue(NamedTuple):
    """A result that stays in this process, with the interface of a `Message`."""

    content: Any

    def value(self, common: CommonMemory) -> Any:
        """Return the value."""
        return self.content


class RemoteTraceback(Exception):
    """The cause of an exception that a worker raised. Its text has the chunk and the traceback in the worker."""


def raise_failure(failure: Failure, chunk: Chunk) -> None:
    """Raise the exception of a worker, with the chunk in its message."""
    name_chunk(failure.error, chunk)
    raise failure.error from RemoteTraceback(f"in {chunk}\n\n{failure.trace}")


def name_chunk(error: BaseException, chunk: Chunk) -> None:
    """Put the chunk in front of the message of an exception, or make it the message if there is none.

    An exception with other arguments is not changed.
    """
    if not error.args:
        error.args = (f"{chunk}",)
    elif len(error.args) == 1 and type(error.args[0]) is str:
        error.args = (f"{chunk}: {error.args[0]}",)
