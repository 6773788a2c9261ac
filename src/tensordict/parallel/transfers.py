"""Transfers: send a container from one rank to another, and receive it there.

The sender posts everything at once: the description, the messages with the tensors, and a buffer for the verdict. The
receiver reads the description, posts buffers for the messages, and answers with a verdict. `verdicts.py` draws the
steps of the receiver.
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

# Held while the messages of a container are posted, so that threads with the same tag do not mix their messages.
_posting = threading.Lock()


class Sending:
    """The sender's side of a transfer. :meth:`wait` completes it; if nobody calls it, a new thread does.

    Args:
        channel: the channel to send on.
        container: the container to send.
        allow_pickle: pickle the values that JSON cannot hold.
        problem: an error that prevents sending. The receiver gets a refusal, and the error is raised.

    Raises:
        SaveError: an entry cannot be sent. The receiver gets a refusal.
    """

    # True before messages are posted and after their end: `wait` has nothing to do.
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
        # The text of the error. The frames of the exception would keep the process group alive until the program ends.
        self._problem = ""
        _raise_late_error(channel)
        try:
            if problem is not None:
                raise problem
            package = wire.Package(container, channel.devices.kind, allow_pickle)
            messages = package.messages(channel.devices.place)
        except Exception as error:  # catch all: the receiver waits for a description
            self._post(refusal(error), [])
            _finish_in_thread(self, quiet=True)
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
        # Keep the tensors alive: a work of torch does not always do so.
        self._messages = messages
        self._done = False

    def __del__(self) -> None:
        # Deleting the works would break the connection while the receiver may still read the messages.
        if self._done:
            return
        if sys.is_finalizing():
            _warn_of_loss(self._channel, "the program has ended")
        else:
            _finish_in_thread(self)

    def wait(self, timeout: object = None) -> bool:
        """Wait until the receiver has the container.

        Args:
            timeout: accepted for compatibility with torch's works; the timeout of the process group applies.

        Raises:
            TransferError: the receiver refused the container (the error has its reason), or the connection broke or
                timed out.
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
        """Return whether :meth:`wait` has been called and has returned."""
        return self._done

    def _finish(self) -> None:
        *works, last = self._works
        # Wait for the verdict first. After `LEFT`, the receiver never takes the messages.
        self._channel.wait(last, "sending to")
        state, why = Verdict.read(self._answer)
        if state != LEFT:
            for work in works:
                self._channel.wait(work, "sending to")
        if state != TAKEN:
            raise TransferError(f"{self._channel.name} did not take what was sent: {why}")


# Held while a thread changes one of the following collections, or `_pending`.
_registering = threading.Lock()
# Errors of transfers that nobody waits for, by group and rank. The next call with this rank raises them.
_late_errors: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]] = weakref.WeakKeyDictionary()


def _finish_in_thread(sending: Sending, quiet: bool = False) -> None:
    """Wait for a transfer in a new thread, if the caller does not wait. The program does not end before the thread."""
    channel = sending._channel

    def run() -> None:
        try:
            sending.wait()
        except TransferError as error:
            if quiet:
                return
            if not threading.main_thread().is_alive():
                _warn_of_loss(channel, f"{error}")
                return
            with _registering:
                _late_errors.setdefault(channel.group, {})[channel.peer] = f"{error}"

    threading.Thread(target=run, name="tensordict-isend", daemon=False).start()


def _warn_of_loss(channel: Channel, why: str) -> None:
    """Warn that a transfer failed after the last moment at which the program could have noticed."""
    warnings.warn(f"isend to {channel.name} was abandoned: {why}", RuntimeWarning, stacklevel=2)


def _raise_late_error(channel: Channel) -> None:
    with _registering:
        problem = _late_errors.get(channel.group, {}).pop(channel.peer, None)
    if problem is not None:
        raise TransferError(f"an isend before this call failed: {problem}")


# The transfers that `isend` returned, and the thread that waits for them when the program ends.
_returned: weakref.WeakSet[Sending] = weakref.WeakSet()
_exit_thread: list[threading.Thread] = []


def finish_at_exit(sending: Sending) -> Sending:
    """Make sure that a transfer ends before the program, even if the caller never waits for it. Returns it."""
    with _registering:
        _returned.add(sending)
        if not _exit_thread:
            thread = threading.Thread(target=_wait_at_exit, name="tensordict-isend", daemon=False)
            thread.start()
            _exit_thread.append(thread)
    return sending


def _wait_at_exit() -> None:
    # Python waits for this thread at its exit, in the main process and in processes of `multiprocessing`.
    threading.main_thread().join()
    for sending in list(_returned):
        try:
            sending.wait()
        except TransferError as error:
            _warn_of_loss(sending._channel, f"{error}")


def _reset_after_fork() -> None:
    # The threads and their transfers belong to the parent.
    _exit_thread.clear()
    _returned.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


# --- receiving --------------------------------------------------------------------------------------------------------


class Receiving:
    """The receiver's side of a transfer.

    Args:
        channel: the channel to receive on.
        container: the container to write into; `None` for a new one.
        device: the device of a new container; by default the device of the messages.
        allow_pickle: load values that were sent pickled.
        problem: an error that prevents writing into the container. The sender gets it as the verdict.
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
        # Set once all messages of this container have buffers. Then the next transfer may post its buffers.
        self._has_buffers = threading.Event()
        with _registering:
            self._previous = _pending.get(self._key)
            _pending[self._key] = self

    @property
    def _key(self) -> tuple[int, int, int]:
        return id(self._channel.group), self._channel.peer, self._channel.tag

    def run(self) -> Any:
        """Receive the container.

        Returns:
            the container that was written into, or the new one.

        Raises:
            TransferError: the received container does not fit or cannot be loaded, or the connection broke or timed
                out.
        """
        with self._channel.devices.use_device():
            return self._run()

    def _run(self) -> Any:
        channel = self._channel
        if self._previous is not None:
            self._previous._has_buffers.wait()
            self._previous = None
        try:
            _raise_late_error(channel)
            header, finish, works = self._post_buffers(self._receive_description())
            self._has_buffers.set()
            for work in works:
                channel.wait(work, "receiving from")
        finally:
            self.give_up()
        self.count = len(header.rows)
        try:
            with torch.no_grad():
                made = finish()
        except Exception as error:  # catch all: the sender waits for a verdict
            self._answer(REFUSED, f"{error}")
            raise TransferError(f"receiving from {channel.name}: {error}") from error
        self._answer(TAKEN)
        return made

    def give_up(self) -> None:
        """Let the next transfer go on, without receiving this one."""
        self._has_buffers.set()
        with _registering:
            if _pending.get(self._key) is self:
                del _pending[self._key]

    def _receive_description(self) -> bytes:
        channel = self._channel
        first = channel.buffer(wire.PROLOGUE)
        channel.wait(channel.recv(first), "receiving from")
        head, more = wire.read_prologue(first)
        if more:
            try:
                rest = channel.buffer(more)
            except Exception as error:  # torch raises different errors for sizes beyond any memory
                self._answer(LEFT, f"no memory for a description of {more} bytes")
                raise TransferError(
                    f"receiving from {channel.name}: no memory for a description of {more} bytes: {error}"
                ) from error
            channel.wait(channel.recv(rest), "receiving from")
            head += wire.content_of(rest)
        return head

    def _post_buffers(self, head: bytes) -> tuple[wire.Header, Callable[[], Any], list[dist.Work]]:
        """Post buffers for the messages that a description announces.

        Returns:
            the header, a function that finishes the container when the buffers are full, and the works to wait for.
        """
        channel = self._channel
        try:
            header = wire.Header(head)
            own, actions = self._find_target(header)
            target = own or wire.NewBuffers(header, channel.devices.place)
        except Exception as error:  # catch all: the sender waits for a verdict
            self._answer(LEFT, f"{error}")
            raise TransferError(f"receiving from {channel.name}: {error}") from error
        works = [channel.recv(buffer) for buffer in target.buffers]
        if isinstance(target, wire.NewBuffers):
            return header, partial(self._finish_new, target), works
        return header, partial(self._finish_in_place, target, actions), works

    def _find_target(self, header: wire.Header) -> tuple[wire.TargetBuffers | None, list[Callable[[], None]]]:
        """Return buffers in the memory of the container, and functions that write its values.

        Returns no buffers if the container has another structure.
        """
        if self._problem is None and self._container is not None:
            try:
                sketch = wire.Sketch(self._container, self._allow_pickle)
                if wire.TargetBuffers.fits(header, sketch):
                    actions = plan_value_writes(self._container, header, sketch, self._allow_pickle)
                    return wire.TargetBuffers(header, sketch, self._channel.devices.place), actions
            except Exception as error:  # any error becomes the verdict, once the messages have been received
                self._problem = error
        return None, []

    def _finish_in_place(self, target: wire.TargetBuffers, actions: list[Callable[[], None]]) -> Any:
        target.copy_to_leaves()
        for action in actions:
            action()
        return self._container

    def _finish_new(self, target: wire.NewBuffers) -> Any:
        if self._problem is not None:
            raise self._problem
        made = target.make_container(self._allow_pickle)
        if self._container is None:
            return made if self._device is None else made.to(self._device)
        _check_same_entries(self._container, made)
        _check_writable(self._container)
        self._container.update_(made)
        return self._container

    def _answer(self, state: int, why: str = "") -> None:
        channel = self._channel
        answer = Verdict(state, why).message(channel.devices.main_device)
        channel.wait(channel.send(answer, answer=True), "answering")


# The latest unfinished transfer for each group, rank and tag.
_pending: dict[tuple[int, int, int], Receiving] = {}


def receive_in_thread(receiving: Receiving) -> Future[Any]:
    """Receive a container in a new thread. The result of the future is the container."""
    return _receive_into_future(receiving, Future())


def _receive_into_future(receiving: Receiving, future: FutureT) -> FutureT:
    try:
        return _run_in_thread(receiving.run, future)
    except RuntimeError:
        # No thread could be started.
        receiving.give_up()
        raise


def _run_in_thread(call: Callable[[], object], future: FutureT) -> FutureT:
    """Call a function in a new thread and put its result into a future of torch or Python, which is returned.

    An event loop has few threads. If all of them waited for transfers, another call that these depend on would never
    start.
    """

    def run() -> None:
        try:
            result = call()
        except Exception as error:  # catch all: the future raises the error
            # The frames of the exception would keep the future and the process group alive.
            error.__cause__ = None
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(result)

    threading.Thread(target=run, name="tensordict-transfer", daemon=True).start()
    return future


async def wait_async(sending: Sending) -> None:
    """Wait until the receiver has the container, without blocking the event loop."""
    await asyncio.wrap_future(_run_in_thread(sending.wait, _make_running_future()))


async def receive_async(receiving: Receiving) -> Any:
    """Receive a container without blocking the event loop."""
    return await asyncio.wrap_future(_receive_into_future(receiving, _make_running_future()))


def _make_running_future() -> concurrent.futures.Future[Any]:
    """Make a future that cannot be cancelled, so that its thread completes the transfer."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


# --- comparing containers ---------------------------------------------------------------------------------------------


def plan_value_writes(
    container: Contract, header: wire.Header, sketch: wire.Sketch, allow_pickle: bool
) -> list[Callable[[], None]]:
    """Check the received values, and return functions that write the changed ones into `container`.

    Raises:
        SaveError: a value cannot be loaded.
        RuntimeError: a value does not fit.
    """
    actions: list[Callable[[], None]] = []
    for own, sent in zip(sketch.values, header.values, strict=True):
        key: Path = own["key"]
        if "json" in own and own.get("json") == sent.get("json"):
            continue
        if not key:
            raise TransferError("NonTensorData cannot be received in place: use from_remote_init()")
        parent = _get_node(container, key[:-1])
        current = parent._entries[key[-1]]
        holder = header.make_holder(sent, allow_pickle)
        actions.append(current._replacing(parent, key[-1], holder, (), current._batch_size, key))
    return actions


def _get_node(container: Contract, key: Path) -> Any:
    """Return the nested container at a key. The members of lazy stacks have the names of their specification."""
    node = container._wrapped_container()
    for name in key:
        node = specification_of(node).entries[name]._wrapped_container()
    return node


def _check_same_entries(own: object, sent: object) -> None:
    """Raise if two containers do not have the same entries, with the same shapes and dtypes."""
    left, right = dict(_outline(own, ())), dict(_outline(sent, ()))
    if left != right:
        raise TransferError(describe_differences(left, right, "here", "in what was sent", lambda key: key))


def _check_writable(container: Contract) -> None:
    """Raise if a tensor of the container is expanded. Several of its elements share memory and cannot be written."""
    for path, leaf in container._walk():
        if leaf.is_nested or leaf.layout is not torch.strided:
            continue
        if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)):
            raise TransferError(
                f"entry {joined(path)!r} is expanded here, its elements share memory and cannot be written to: clone() "
                "the container first"
            )


def describe_differences(
    own: Mapping[Any, str], other: Mapping[Any, str], here: str, there: str, path_of: Callable[[Any], Path]
) -> str:
    """Return a text that lists the differences of two tables of entries.

    Args:
        own, other: descriptions of the entries, by name.
        here, there: the places of the two tables, for the text.
        path_of: returns the path of an entry for its name.
    """
    found = []
    for name in sorted({*own, *other}):
        left, right = own.get(name, "missing"), other.get(name, "missing")
        if left != right:
            found.append(f"entry {joined(path_of(name))!r} is {left} {here} and {right} {there}")
    return "; ".join(found[:10]) + (f"; and {len(found) - 10} more" if len(found) > 10 else "")


def _outline(node: Any, prefix: Path) -> Iterator[tuple[Path, str]]:
    """Iterate over the (path, description) pairs of the leaves and values of a tree."""
    for name in node._structure():
        key = (*prefix, name)
        inner = node._node(name)
        if inner is None or isinstance(inner, Tensor):
            yield key, _describe_leaf(node, name)
        elif inner._is_non_tensor:
            yield key, "a value"
        else:
            yield from _outline(inner, key)


def _describe_leaf(node: Contract, name: str) -> str:
    try:
        leaf = node._entries[name]
    except StackError:
        return f"of shape {list(node._shape_of(name))}"
    if isinstance(leaf, Contract):
        leaf = leaf.as_subclass(Tensor)  # type: ignore[attr-defined]
    shape = f"of rows {ragged.row_sizes(leaf).tolist()!r:.60}" if leaf.is_nested else str(list(leaf.shape))
    return f"{str(leaf.dtype)[6:]} {shape}"
