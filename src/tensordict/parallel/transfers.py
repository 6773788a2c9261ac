"""Sending a container from one rank to another, and receiving it there.

The sender posts everything at once: the description, the messages with the tensors, and a wait for the verdict. The
receiver reads the description, posts the rest, and answers: `verdicts.py` draws the states.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.exceptions import StackError, TransferError
from tensordict.core.keys import Path, joined
from tensordict.io.specification import specification_of
from tensordict.parallel import verdicts, wire
from tensordict.parallel.channels import Channel
from tensordict.parallel.verdicts import LEFT, REFUSED, TAKEN, Verdict, refusal

FutureT = TypeVar("FutureT", Future[Any], concurrent.futures.Future[Any])

# --- sending ----------------------------------------------------------------------------------------------------------

# The messages of two containers that threads send under one tag must not mix.
_posting = threading.Lock()


class Sending:
    """A container that is being sent. :meth:`wait` ends it; if nobody calls it, a thread of its own does.

    Args:
        channel: where it goes.
        container: what goes there.
        allow_pickle: pickle the values that JSON cannot hold.
        problem: why there is nothing to send; the other side is told, and it is raised.

    Raises:
        SaveError: an entry cannot be sent; the other side is told.
    """

    # Until messages have been posted there is nothing to wait for.
    _done = True

    def __init__(
        self,
        channel: Channel,
        container: Any,
        allow_pickle: bool = False,
        problem: Exception | None = None,
    ) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        # The text and not the exception, whose frames would keep the process group alive until the program ends.
        self._problem = ""
        _raise_late(channel)
        try:
            if problem is not None:
                raise problem
            package = wire.Package(container, channel.devices.kind, allow_pickle)
            messages = package.messages(channel.devices.place)
        except Exception as error:  # Whatever it is, the other side must not wait for what never comes.
            self._post(refusal(error), [])
            _finish_apart(self, quiet=True)
            raise
        self.count = package.count
        self._post(package.head, messages)

    def _post(self, head: bytes, messages: list[Tensor]) -> None:
        channel = self._channel
        messages = [*wire.prologue(head, channel.devices.main_device), *messages]
        self._answer = channel.buffer(verdicts.LENGTH)
        with _posting:
            self._works = [channel.send(message) for message in messages]
            self._works.append(channel.recv(self._answer, answer=True))
        # A work of torch's knows its memory, and not always the tensor that owns it.
        self._messages = messages
        self._done = False

    def __del__(self) -> None:
        # Torch breaks the connection when works are dropped, and the other side may be reading the messages.
        if self._done:
            return
        if sys.is_finalizing():
            _abandoned(self._channel, "the program has ended")
        else:
            _finish_apart(self)

    def wait(self, timeout: object = None) -> bool:
        """Wait until the other side has the container.

        Args:
            timeout: accepted as by torch's own works; the timeout of the process group counts.

        Raises:
            TransferError: it refused it, and says why; or the connection broke or timed out.
        """
        with self._lock:
            if not self._done:
                try:
                    self._finish()
                except TransferError as error:
                    self._problem = f"{error}"
                finally:
                    self._done = True
                    self._works, self._messages = [], []
        if self._problem:
            raise TransferError(self._problem)
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` has been called and has returned."""
        return self._done

    def _finish(self) -> None:
        *works, last = self._works
        # First: a receiver that has no memory for the messages says so, and never takes them.
        self._channel.wait(last, "sending to")
        state, why = Verdict.read(self._answer)
        if state != LEFT:
            for work in works:
                self._channel.wait(work, "sending to")
        if state != TAKEN:
            raise TransferError(f"{self._channel.name} did not take what was sent: {why}")


# For what follows, and for `_pending`: whichever thread they are written by.
_registering = threading.Lock()
# What went wrong with containers that nobody waits for, by group and rank.
_late: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = weakref.WeakKeyDictionary()


def _finish_apart(sending: Sending, quiet: bool = False) -> None:
    """Wait in a thread of its own, for a caller who does not. The program goes on until it is done."""
    channel = sending._channel

    def run() -> None:
        try:
            sending.wait()
        except TransferError as error:
            if quiet:
                return
            if not threading.main_thread().is_alive():
                _abandoned(channel, f"{error}")
                return
            with _registering:
                _late.setdefault(channel.group, {})[channel.peer] = f"{error}"

    threading.Thread(target=run, name="tensordict-isend", daemon=False).start()


def _abandoned(channel: Channel, why: str) -> None:
    """Say that nobody will know what became of a container."""
    warnings.warn(f"what isend was to send to {channel.name} was abandoned: {why}", RuntimeWarning, stacklevel=2)


def _raise_late(channel: Channel) -> None:
    with _registering:
        problem = _late.get(channel.group, {}).pop(channel.peer, None)
    if problem is not None:
        raise TransferError(f"an isend before this call failed: {problem}")


# The transfers of which the program has a handle, and the thread that waits for them when the program ends.
_held: weakref.WeakSet[Sending] = weakref.WeakSet()
_keeper: list[threading.Thread] = []


def held(sending: Sending) -> Sending:
    """A transfer for a caller who may wait for it; if it never does, the program goes on until it is done."""
    with _registering:
        _held.add(sending)
        if not _keeper:
            thread = threading.Thread(target=_keep, name="tensordict-isend", daemon=False)
            thread.start()
            _keeper.append(thread)
    return sending


def _keep() -> None:
    # Ends where Python waits for its threads, in the main process and in those of `multiprocessing`.
    threading.main_thread().join()
    for sending in list(_held):
        try:
            sending.wait()
        except TransferError as error:
            _abandoned(sending._channel, f"{error}")


def _forked() -> None:
    # Threads, and what they wait for, stay with the parent.
    _keeper.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


# --- receiving --------------------------------------------------------------------------------------------------------


class Receiving:
    """A container that is to be received.

    Args:
        channel: where it comes from.
        container: what is written to; `None` for a new one.
        device: the device of a new one; by default that of the memory that messages are in.
        allow_pickle: load values that were sent pickled.
        problem: why the container cannot be written to, whatever comes; the sender is told.
    """

    def __init__(
        self,
        channel: Channel,
        container: Any = None,
        device: torch.device | None = None,
        allow_pickle: bool = False,
        problem: Exception | None = None,
    ) -> None:
        self._channel = channel
        self._container = container
        self._device = device
        self._allow_pickle = allow_pickle
        self._problem = problem
        self.count = 0
        # Whether all messages of this container have buffers, so that those of the next one may be posted.
        self._posted = threading.Event()
        with _registering:
            self._before = _pending.get(self._key)
            _pending[self._key] = self

    @property
    def _key(self) -> tuple[int, int, int]:
        return id(self._channel.group), self._channel.peer, self._channel.tag

    def run(self) -> Any:
        """Receive it.

        Returns:
            the container that was given, or the new one.

        Raises:
            TransferError: it does not fit, it cannot be loaded here, or the connection broke or timed out.
        """
        with self._channel.devices.guard():
            return self._run()

    def _run(self) -> Any:
        channel = self._channel
        if self._before is not None:
            self._before._posted.wait()
            self._before = None
        try:
            _raise_late(channel)
            header, finish, works = self._posted_for(self._head())
            self._posted.set()
            for work in works:
                channel.wait(work, "receiving from")
        finally:
            self.give_up()
        self.count = len(header.rows)
        try:
            with torch.no_grad():
                made = finish()
        except Exception as error:  # Whatever was in it, the sender waits for an answer.
            self._answer(REFUSED, f"{error}")
            raise TransferError(f"receiving from {channel.name}: {error}") from error
        self._answer(TAKEN)
        return made

    def give_up(self) -> None:
        """Let those that wait for this one go on; for one that will not be run."""
        self._posted.set()
        with _registering:
            if _pending.get(self._key) is self:
                del _pending[self._key]

    def _head(self) -> bytes:
        channel = self._channel
        first = channel.buffer(wire.PROLOGUE)
        channel.wait(channel.recv(first), "receiving from")
        head, more = wire.opened(first)
        if more:
            try:
                rest = channel.buffer(more)
            except Exception as error:  # Torch has several for what no memory could hold.
                self._answer(LEFT, f"no memory for a description of {more} bytes")
                raise TransferError(
                    f"receiving from {channel.name}: no memory for a description of {more} bytes: {error}"
                ) from error
            channel.wait(channel.recv(rest), "receiving from")
            head += wire.content_of(rest)
        return head

    def _posted_for(self, head: bytes) -> tuple[wire.Header, Callable[[], Any], list[dist.Work]]:
        """Post the buffers for what a description announces; with what is to be done when they are full."""
        channel = self._channel
        try:
            header = wire.Header(head)
            own, actions = self._own_target(header)
            target = own or wire.NewBuffers(header, channel.devices.place)
        except Exception as error:  # Whatever was in it, the sender waits for an answer.
            # Nothing follows that could be received.
            self._answer(LEFT, f"{error}")
            raise TransferError(f"receiving from {channel.name}: {error}") from error
        works = [channel.recv(buffer) for buffer in target.buffers]
        if isinstance(target, wire.NewBuffers):
            return header, partial(self._anew, target), works
        return header, partial(self._within, target, actions), works

    def _own_target(self, header: wire.Header) -> tuple[wire.TargetBuffers | None, list[Callable[[], None]]]:
        """The memory of the container as a target, and what writes its values; `None` if it has another structure."""
        if self._problem is None and self._container is not None:
            try:
                sketch = wire.Sketch(self._container, self._allow_pickle)
                if wire.TargetBuffers.fits(header, sketch):
                    actions = new_values(self._container, header, sketch, self._allow_pickle)
                    return wire.TargetBuffers(header, sketch, self._channel.devices.place), actions
            except Exception as error:  # As above.
                self._problem = error
        return None, []

    def _within(self, target: wire.TargetBuffers, actions: list[Callable[[], None]]) -> Any:
        target.spread()
        for action in actions:
            action()
        return self._container

    def _anew(self, anew: wire.NewBuffers) -> Any:
        if self._problem is not None:
            raise self._problem
        made = anew.container(self._allow_pickle)
        if self._container is None:
            return made if self._device is None else made.to(self._device)
        check_alike(self._container, made, "here", "in what was sent")
        _check_writable(self._container)
        self._container.update_(made)
        return self._container

    def _answer(self, state: int, why: str = "") -> None:
        channel = self._channel
        answer = Verdict(state, why).message(channel.devices.main_device)
        channel.wait(channel.send(answer, answer=True), "answering")


# The last transfer that was begun for every group, rank and tag, until it has all that it waits for.
_pending: dict[tuple[int, int, int], Receiving] = {}


def received_apart(receiving: Receiving) -> Future[Any]:
    """Receive in a thread of its own; the future gives the container."""
    return _receive_apart(receiving, Future())


def _receive_apart(receiving: Receiving, future: FutureT) -> FutureT:
    try:
        return _run_apart(receiving.run, future)
    except RuntimeError:
        # No thread could be started.
        receiving.give_up()
        raise


def _run_apart(call: Callable[[], object], future: FutureT) -> FutureT:
    """Call in a thread of its own, for a future of torch's or of Python's, which is returned.

    The threads of an event loop are few, and would all wait while what they wait for needs another one.
    """

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # Whatever it is, it belongs to whoever waits.
            # Its frames would keep the future, and with it the process group, alive for ever.
            error.__cause__ = None
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(result)

    threading.Thread(target=run, name="tensordict-transfer", daemon=True).start()
    return future


async def sent(sending: Sending) -> None:
    """Wait until the other side has the container; the event loop goes on meanwhile."""
    await asyncio.wrap_future(_run_apart(sending.wait, _uncancelled()))


async def received(receiving: Receiving) -> Any:
    """The container, once it is there; the event loop goes on meanwhile."""
    return await asyncio.wrap_future(_receive_apart(receiving, _uncancelled()))


def _uncancelled() -> concurrent.futures.Future[Any]:
    """A future whose thread ends the transfer even if nobody waits any more."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


# --- what fits what ---------------------------------------------------------------------------------------------------


def new_values(
    container: Contract, header: wire.Header, sketch: wire.Sketch, allow_pickle: bool
) -> list[Callable[[], None]]:
    """What writes the values that are other ones in what was sent, each once it is called; the checks come before.

    Raises:
        SaveError: a value cannot be loaded.
        RuntimeError: it does not fit.
    """
    actions: list[Callable[[], None]] = []
    for own, sent in zip(sketch.values, header.values, strict=True):
        key: Path = own["key"]
        if "json" in own and own.get("json") == sent.get("json"):
            continue
        if not key:
            raise TransferError("a value that is no tensor cannot be received in place: use from_remote_init()")
        parent = _entry_at(container, key[:-1])
        current = parent._entries[key[-1]]
        holder = header.holder(sent, allow_pickle)
        actions.append(current._replacing(parent, key[-1], holder, (), current._batch_size, key))
    return actions


def _entry_at(container: Contract, key: Path) -> Any:
    """The nested container of a key in which the members of lazy stacks have names."""
    node = container._wrapped_container()
    for name in key:
        node = specification_of(node).entries[name]._wrapped_container()
    return node


def check_alike(first: object, second: object, here: str, there: str) -> None:
    """Refuse containers that do not have the same entries, of the same shapes and dtypes.

    Raises:
        TransferError: they do not; lists all that differs.
    """
    left, right = dict(_outlined(first, ())), dict(_outlined(second, ()))
    if left != right:
        raise TransferError(differences(left, right, here, there, lambda key: key))


def _check_writable(container: Contract) -> None:
    """Refuse a container with tensors whose elements share memory, before any is written to."""
    for path, leaf in container._walk():
        if leaf.is_nested or leaf.layout is not torch.strided:
            continue
        if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise TransferError(
                f"entry {joined(path)!r} is expanded here, its elements share memory and cannot be written to: clone() "
                "the container first"
            )


def differences(
    own: Mapping[Any, str], other: Mapping[Any, str], here: str, there: str, path_of: Callable[[Any], Path]
) -> str:
    """What two tables of entries do not have in common.

    Args:
        own, other: what there is, by a name whose key `path_of` gives.
        here, there: where each of them is from.
    """
    found = []
    for name in sorted({*own, *other}):
        left, right = own.get(name, "missing"), other.get(name, "missing")
        if left != right:
            found.append(f"entry {joined(path_of(name))!r} is {left} {here} and {right} {there}")
    return "; ".join(found[:10]) + (f"; and {len(found) - 10} more" if len(found) > 10 else "")


def _outlined(node: Any, prefix: Path) -> Iterator[tuple[Path, str]]:
    """The (key, what there is) pairs of a tree, as it is read."""
    for name in node._structure():
        key = (*prefix, name)
        inner = node._node(name)
        if inner is None or isinstance(inner, Tensor):
            yield key, _described(node, name)
        elif inner._is_non_tensor:
            yield key, "a value"
        else:
            yield from _outlined(inner, key)


def _described(node: Contract, name: str) -> str:
    try:
        leaf = node._entries[name]
    except StackError:
        return f"of shape {list(node._shape_of(name))}"
    if isinstance(leaf, Contract):
        leaf = leaf.as_subclass(Tensor)  # type: ignore[attr-defined]
    shape = f"of rows {ragged.row_sizes(leaf).tolist()!r:.60}" if leaf.is_nested else str(list(leaf.shape))
    return f"{str(leaf.dtype)[6:]} {shape}"
