"""Workers: processes that take chunks and send results, and how a job is spread over them.

`WorkerPool` starts processes of its own. Each has a pipe, so that the end of a process is noticed, whatever ended it; a
chunk travels as two numbers, since the processes have the container. `CallersPool` does the same with a pool of the
caller, which is given pieces of the container.

`concurrent.futures.ProcessPoolExecutor` does not do in the place of `WorkerPool`: it refuses a limit of tasks for
processes that are forked (and knows none before Python 3.11), cannot end a process that is busy, leaves its processes
behind when the caller is killed, and says neither which task a process had nor what ended it. Nor is it faster
throughout (best of 25, two workers): 92 ms against 85 for two chunks of 8 kB, 146 against 132 for 64 of 250 B, 146
against 140 for two of 2 MiB, but 96 against 130 for 16 of 256 KiB: it gives a process its next chunk before it is done
with one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import pickle
import queue
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection as pipes
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

import torch

from tensordict.core.exceptions import WorkerError, WorkerTimeoutError
from tensordict.core.logs import logger
from tensordict.parallel.jobs import (
    Chunk,
    Job,
    LocalValue,
    PickledMessage,
    Sent,
    attempt,
    attempt_here,
    called,
    name_chunk,
    seed_all,
)
from tensordict.parallel.messages import CommonMemory, Handle, Message, OwnDescriptor

# How often those who wait look whether a process is gone without a word, in seconds.
_PATROL = 0.5
# How long a process may take to end by itself.
_PATIENCE = 5.0
# A process sends this when it has started. The time for its first chunk counts from then.
_UP = b"up"

# A chunk, whether the job was done, and the result or the `Failure`.
Outcome = tuple[Chunk, bool, Any]
# What a pool of the caller gives: the number of a chunk, whether the job was done, and the result or the `Failure`; or
# why the pool could not have it done.
_FromPool = tuple[int, bool, "Message | LocalValue"] | BaseException
Take = Callable[[], "Chunk | None"]


class _Worker:
    """A process, and the chunk that it has at the moment."""

    def __init__(self, context: Any, job: Job, threads: int, seed: int, others: Sequence[_Worker]) -> None:
        self.pipe, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        # A forked process has our ends of the pipes, too. While it holds them, others do not see that we are gone.
        ours = [worker.pipe for worker in (*others, self)] if forked else []
        self.chunk: Chunk | None = None
        self.done = 0
        # `_is_up` says that the process has started, `_since` when it began its chunk.
        self._is_up = False
        self._since = math.inf
        self.process = context.Process(
            target=_work, args=(theirs, ours, job.sendable(forked), threads, seed), daemon=True
        )
        try:
            self.process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()

    def give(self, chunk: Chunk) -> None:
        self.chunk = chunk
        if self._is_up:
            self._since = time.monotonic()
        # A process that is gone is noticed when its result is waited for.
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(tuple(chunk)))

    def deadline(self, timeout: float) -> float:
        """Return the time at which the process will have had its chunk for `timeout` seconds."""
        return self._since + timeout

    def outcome(self) -> tuple[Chunk, bool, Message] | None:
        """Receive the result of the chunk, or `None` when the process has started and begins its first chunk.

        Raises:
            EOFError, OSError: the process is gone.
        """
        content = self.pipe.recv_bytes()
        if content == _UP:
            self._is_up, self._since = True, time.monotonic()
            return None
        done, head, parts, nbytes, shared = pickle.loads(content)
        try:
            descriptor = OwnDescriptor(recv_handle(self.pipe)) if nbytes else None
            handles = [Handle(size, is_block, OwnDescriptor(recv_handle(self.pipe))) for size, is_block in shared]
        except RuntimeError as error:
            raise EOFError from error
        assert self.chunk is not None
        chunk, self.chunk = self.chunk, None
        self.done += 1
        return chunk, done, Message(head, parts, nbytes, descriptor, handles)

    def is_gone(self) -> bool:
        return self.process.exitcode is not None

    def dismiss(self) -> float:
        """Tell the process to end, a busy one by a signal; returns when it will be killed."""
        self.pipe.close()
        if self.chunk is not None:
            self.process.terminate()
        return time.monotonic() + _PATIENCE

    def end(self, until: float) -> None:
        """Wait for the end of the process, and kill it if it still runs at that time."""
        self.process.join(max(0.0, until - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class WorkerPool:
    """Processes that do a job, as a context.

    Args:
        context: the `multiprocessing` context that starts them.
        job: what they do.
        count: how many there are at a time.
        seed: the seed of the first; each further one has the next.
        threads: how many threads torch has in each.
        limit: how many chunks one does before another takes its place; `None` for any number.
        chunks: how many chunks there are.
        timeout: how many seconds one may have a chunk; `None` for any number.
    """

    def __init__(
        self,
        context: object,
        job: Job,
        count: int,
        seed: int,
        threads: int,
        limit: int | None,
        chunks: int,
        timeout: float | None = None,
    ) -> None:
        self._context, self._job = context, job
        self.count = count
        self._seed, self._threads, self._limit = seed, threads, limit
        self._left, self._timeout = chunks, timeout
        self._common = CommonMemory(job.container)
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        # An iterator that is open when the program ends is closed after this: too late to end processes.
        self._dismiss = weakref.finalize(self, _dismiss, self._workers, os.getpid())
        # Numpy has it imported when it is first used, which would be in every process anew: 15 ms.
        importlib.import_module("numpy.random")
        return self

    def __exit__(self, *error: object) -> None:
        self._dismiss()

    def _hire(self) -> _Worker:
        worker = _Worker(self._context, self._job, self._threads, self._seed, self._workers)
        self._workers.append(worker)
        logger.debug("started the worker process %d", worker.process.pid)
        self._seed += 1
        return worker

    def outcomes(self, take: Take) -> Iterator[Outcome]:
        """The results as they come, of the chunks that `take` gives; `None` from it means that there is none for now.

        Raises:
            WorkerTimeoutError: a process has had its chunk for too long.
            WorkerError: a process ended before its work did.
        """
        self._supply(take)
        while any(worker.chunk is not None for worker in self._workers):
            for worker in self._ready():
                try:
                    outcome = worker.outcome()
                except (EOFError, OSError):
                    raise self._loss(worker) from None
                if outcome is None:
                    continue
                chunk, done, message = outcome
                # Before the caller does something with the result, so that the worker is not idle during that.
                self._supply(take)
                yield chunk, done, _opened(chunk, message, self._common)
            self._supply(take)

    def _supply(self, take: Take) -> None:
        """Give chunks to idle workers and, while there are too few, to new ones, which begin as others are started."""
        while self._left:
            worker = next((worker for worker in self._workers if worker.chunk is None), None)
            if worker is None and len(self._workers) == self.count:
                return
            chunk = take()
            if chunk is None:
                return
            if worker is not None and worker.done == self._limit:
                self._workers.remove(worker)
                worker.end(worker.dismiss())
                worker = None
            if worker is None:
                worker = self._hire()
            self._left -= 1
            worker.give(chunk)
        for worker in self._workers:
            if worker.chunk is None:
                # It ends while others work, and while the results are joined.
                worker.pipe.close()

    def _ready(self) -> list[_Worker]:
        """The workers that have sent something, or are gone."""
        busy = {worker.pipe: worker for worker in self._workers if worker.chunk is not None}
        while True:
            found = pipes.wait(list(busy), self._patrol(busy.values()))
            self._check_time(worker for pipe, worker in busy.items() if pipe not in found)
            if found:
                return [busy[pipe] for pipe in found]
            gone = [worker for worker in busy.values() if worker.is_gone() and not worker.pipe.poll()]
            if gone:
                raise self._loss(gone[0])

    def _patrol(self, busy: Iterable[_Worker]) -> float:
        """Return how many seconds to wait for a result: at most until the next deadline of a process."""
        if self._timeout is None:
            return _PATROL
        first = min(worker.deadline(self._timeout) for worker in busy)
        return max(0.0, min(_PATROL, first - time.monotonic()))

    def _check_time(self, busy: Iterable[_Worker]) -> None:
        """Raise a `WorkerTimeoutError` when a process has had its chunk for too long, and has sent no result."""
        if self._timeout is None:
            return
        now = time.monotonic()
        for worker in busy:
            # The result may have come while this process was doing something else: then it came in time.
            if worker.deadline(self._timeout) <= now and not worker.pipe.poll():
                raise WorkerTimeoutError(
                    f"{worker.chunk} took longer than timeout={self._timeout} seconds; its worker process "
                    f"{worker.process.pid} is ended. A longer timeout, or smaller chunks, leave it more time"
                )

    def _loss(self, worker: _Worker) -> WorkerError:
        worker.process.join(_PATIENCE)
        if worker.process.exitcode is None and worker.chunk is not None:
            return WorkerError(
                f"the result of {worker.chunk} did not arrive, though its process runs: what workers share comes "
                "as a file descriptor, and 'ulimit -n' says how many a process may have; larger chunks need fewer"
            )
        return lost(worker.process.pid, worker.process.exitcode, worker.chunk)


def _dismiss(workers: list[_Worker], owner: int) -> None:
    """End workers, in the process that has started them."""
    if os.getpid() != owner:
        return
    # All end while the first is waited for.
    untils = [worker.dismiss() for worker in workers]
    while workers:
        workers.pop().end(untils.pop())


def _opened(chunk: Chunk, message: Message | LocalValue, common: CommonMemory) -> Any:
    try:
        return message.value(common)
    except Exception as error:
        name_chunk(error, chunk)
        raise


def lost(pid: int | None, code: int | None, chunk: Chunk | None) -> WorkerError:
    """The error of a process that ended before its work did."""
    during = "" if chunk is None else f" while it had {chunk}"
    if code is not None and code < 0:
        return WorkerError(f"worker process {pid} was ended by signal {-code} ({signal.strsignal(-code)}){during}")
    return WorkerError(f"worker process {pid} ended with exit code {code}{during}; what it wrote to stderr says why")


def _work(pipe: Connection, others: Sequence[Connection], job: Job, threads: int, seed: int) -> None:
    """What a process of a `WorkerPool` does: chunks, until its pipe is closed."""
    for other in others:
        other.close()
    torch.set_num_threads(threads)
    seed_all(seed)
    run: Callable[[Chunk], object]
    try:
        run = job.received()
        common = CommonMemory(run.container)
    except Exception as error:
        run, common = _raising(error), CommonMemory()
    # A caller who is gone is noticed when the chunk is received.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send_bytes(_UP)
    while True:
        try:
            chunk = Chunk(*pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError, KeyboardInterrupt):
            return
        done, message = attempt(run, chunk, common)
        try:
            _send(pipe, done, message)
        except (BrokenPipeError, ConnectionResetError):
            # Nobody is left to take it.
            return


def _raising(error: Exception) -> Callable[[object], NoReturn]:
    """A job that cannot be done."""

    def run(chunk: object) -> NoReturn:
        raise error

    return run


def _send(pipe: Connection, done: bool, message: Message) -> None:
    handles = [(handle.nbytes, handle.is_block) for handle in message.handles]
    content = (done, message.head, message.parts, message.nbytes, handles)
    pipe.send_bytes(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
    if message.nbytes:
        send_handle(pipe, message.fd, None)
    for handle in message.handles:
        send_handle(pipe, handle.descriptor.detach(), None)


class CallersPool:
    """A `multiprocessing.Pool` of the caller, or one of threads, which does a job and stays as it is.

    Args:
        pool: the pool.
        job: what it does.
    """

    def __init__(self, pool: object, job: Job) -> None:
        if not hasattr(pool, "apply_async"):
            raise TypeError(f"pool is a multiprocessing.Pool, got {type(pool).__name__}")
        self._pool, self._job = pool, job
        self._has_threads = isinstance(pool, ThreadPool)
        self.count = int(getattr(pool, "_processes", None) or os.cpu_count() or 1)
        # A process that ends after its last chunk can no longer be asked for the memory of what it sent.
        self._inline = getattr(pool, "_maxtasksperchild", None) is not None
        self._watched: dict[int | None, BaseProcess] = {}

    def __enter__(self) -> CallersPool:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the pool to its owner."""

    def outcomes(self, take: Take) -> Iterator[Outcome]:
        """As `WorkerPool.outcomes`."""
        job, results = self._job, queue.SimpleQueue[_FromPool]()
        given: dict[int, tuple[Chunk, object]] = {}
        self._look()
        while True:
            while len(given) < 2 * self.count and (chunk := take()) is not None:
                piece, out = job.piece(chunk), None if job.out is None else job.out[job.at(chunk)]
                given[chunk.number] = chunk, piece
                refused = functools.partial(_refused, results, chunk)
                call: Any = _in_thread if self._has_threads else functools.partial(_in_pool, inline=self._inline)
                arguments = (job.fn if self._has_threads else Sent(job.fn), piece, out, chunk.number)
                self._pool.apply_async(call, arguments, callback=results.put, error_callback=refused)
            if not given:
                return
            found = self._next(results, given)
            if isinstance(found, BaseException):
                # What the pool itself has to say, such as that the function cannot be pickled.
                raise found
            number, done, message = found
            chunk, piece = given.pop(number)
            # By now, the pool has moved the tensors of the piece to shared memory.
            yield chunk, done, _opened(chunk, message, CommonMemory(piece))

    def _next(self, results: queue.SimpleQueue[_FromPool], given: dict[int, tuple[Chunk, object]]) -> _FromPool:
        while True:
            try:
                return results.get(timeout=_PATROL)
            except queue.Empty:
                # The pool puts new processes in the place of the dead, and never says what these had to do.
                for process in self._look():
                    if process.exitcode not in (None, 0):
                        names = ", ".join(f"{chunk}" for chunk, _ in given.values())
                        error = lost(process.pid, process.exitcode, None)
                        raise WorkerError(f"{error}; not done are {names}") from None

    def _look(self) -> list[BaseProcess]:
        """All processes of the pool that were seen so far; threads are not lost."""
        if self._has_threads:
            return []
        for process in list(getattr(self._pool, "_pool", ())):
            self._watched.setdefault(process.pid, process)
        return list(self._watched.values())


def _refused(results: queue.SimpleQueue[_FromPool], chunk: Chunk, error: BaseException) -> None:
    """Pass on what a pool has to say of a chunk that it could not send."""
    name_chunk(error, chunk)
    results.put(error)


def _in_pool(fn: PickledMessage, piece: object, out: object, number: int, inline: bool) -> tuple[int, bool, Message]:
    """What a process of a pool does with a chunk."""
    return number, *attempt(lambda given: called(fn.value(), given, out), piece, CommonMemory(piece), inline)


def _in_thread(fn: Callable[[object], object], piece: object, out: object, number: int) -> tuple[int, bool, LocalValue]:
    """What a thread of a pool does with a chunk."""
    return number, *attempt_here(lambda given: called(fn, given, out), piece)
