"""Worker pools: processes that call a job with chunks and send the results, for `map` and `map_iter`.

`WorkerPool` starts its own processes. The processes have the container, so a chunk is sent as a few numbers. Each
process has its own pipe, which breaks when the process ends for any reason. `CallersPool` uses a pool of the caller,
and sends it pieces of the container.

`concurrent.futures.ProcessPoolExecutor` cannot replace `WorkerPool`:

- it has no limit of tasks for forked processes, and before Python 3.11 no limit at all;
- it cannot end a busy process, and its processes survive when the caller is killed;
- its errors name neither the task of a process nor the signal that ended it;
- it is mostly slower (best of 25, two workers): 92 ms against 85 for two chunks of 8 kB, 146 against 132 for 64 chunks
  of 250 B, 146 against 140 for two chunks of 2 MiB. For 16 chunks of 256 KiB it takes 96 ms against 130, because it
  sends a process its next chunk in advance.
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
    SentFunction,
    call_function,
    name_chunk,
    run_job,
    run_job_in_thread,
    seed_all,
)
from tensordict.parallel.messages import CommonMemory, Handle, Message, OwnDescriptor

# While waiting for results, check every so many seconds whether a process has ended.
_POLL_SECONDS = 0.5
# How many seconds a process may take to end by itself.
_END_SECONDS = 5.0
# A process sends this when it has started. The timeout of its first chunk counts from then.
_UP = b"up"

# A chunk; `True` and the result, or `False` and the `Failure`.
Outcome = tuple[Chunk, bool, Any]
# An outcome with the number of its chunk, from a pool of the caller; or an error of the pool itself.
_FromPool = tuple[int, bool, "Message | LocalValue"] | BaseException
Take = Callable[[], "Chunk | None"]


class _Worker:
    """A worker process, and its current chunk."""

    def __init__(self, context: Any, job: Job, threads: int, seed: int, others: Sequence[_Worker]) -> None:
        self.pipe, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        # A forked process inherits our ends of all pipes. It must close them, or no worker would notice our end.
        ours = [worker.pipe for worker in (*others, self)] if forked else []
        self.chunk: Chunk | None = None
        self.done = 0
        # True once the process has started.
        self._is_up = False
        # The time at which the process began its chunk.
        self._since = math.inf
        self.process = context.Process(
            target=_run_worker, args=(theirs, ours, job.prepare_to_send(forked), threads, seed), daemon=True
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
        # If the process has ended, `outcome` raises the error.
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(tuple(chunk)))

    def deadline(self, timeout: float) -> float:
        """Return the time at which the process will have had its chunk for `timeout` seconds."""
        return self._since + timeout

    def outcome(self) -> tuple[Chunk, bool, Message] | None:
        """Receive the result of the chunk; or `None` when the process reports that it has started.

        Raises:
            EOFError, OSError: the process has ended.
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

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def dismiss(self) -> float:
        """Tell the process to end; a busy one gets a signal. Returns the time until which `end` should wait."""
        self.pipe.close()
        if self.chunk is not None:
            self.process.terminate()
        return time.monotonic() + _END_SECONDS

    def end(self, until: float) -> None:
        """Wait for the end of the process, and kill it at the time `until`."""
        self.process.join(max(0.0, until - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class WorkerPool:
    """A context with worker processes for a job.

    Args:
        context: the `multiprocessing` context that starts the processes.
        job: the job.
        count: the maximum number of processes at a time.
        seed: the random seed of the first process. Each further one has the next seed.
        threads: the number of torch's threads in each process.
        limit: the number of chunks after which a process is replaced by a new one; `None` for no limit.
        chunks: the number of all chunks.
        timeout: how many seconds a process may take for a chunk; `None` for no limit.
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
        # At the end of the program, an open iterator is closed too late to end the processes. The finalizer runs first.
        self._dismiss = weakref.finalize(self, _dismiss, self._workers, os.getpid())
        # NumPy imports this on first use. Import it before forking, to save 15 ms in every process.
        importlib.import_module("numpy.random")
        return self

    def __exit__(self, *error: object) -> None:
        self._dismiss()

    def _start_worker(self) -> _Worker:
        worker = _Worker(self._context, self._job, self._threads, self._seed, self._workers)
        self._workers.append(worker)
        logger.debug("started the worker process %d", worker.process.pid)
        self._seed += 1
        return worker

    def outcomes(self, take: Take) -> Iterator[Outcome]:
        """Run the job for the chunks that `take` returns, and iterate over the outcomes as they arrive.

        Args:
            take: returns the next chunk, or `None` if it has no chunk at the moment.

        Raises:
            WorkerTimeoutError: a process takes too long for its chunk.
            WorkerError: a process ended before its chunk was done.
        """
        self._give_chunks(take)
        while any(worker.chunk is not None for worker in self._workers):
            for worker in self._wait_for_workers():
                try:
                    outcome = worker.outcome()
                except (EOFError, OSError):
                    raise self._make_loss_error(worker) from None
                if outcome is None:
                    continue
                chunk, done, message = outcome
                # Give the worker its next chunk before the caller handles the result, so that it is not idle.
                self._give_chunks(take)
                yield chunk, done, _read_message(chunk, message, self._common)
            self._give_chunks(take)

    def _give_chunks(self, take: Take) -> None:
        """Give chunks to idle workers. While there are fewer than `count`, start new ones.

        A new worker gets its chunk at once, so it begins while the others are being started.
        """
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
                worker = self._start_worker()
            self._left -= 1
            worker.give(chunk)
        for worker in self._workers:
            if worker.chunk is None:
                # All chunks have been given out. This worker ends while others work and results are joined.
                worker.pipe.close()

    def _wait_for_workers(self) -> list[_Worker]:
        """Wait until workers have sent something or closed their pipes, and return these workers."""
        busy = {worker.pipe: worker for worker in self._workers if worker.chunk is not None}
        while True:
            found = pipes.wait(list(busy), self._seconds_to_wait(busy.values()))
            self._check_time(worker for pipe, worker in busy.items() if pipe not in found)
            if found:
                return [busy[pipe] for pipe in found]
            ended = [worker for worker in busy.values() if worker.has_ended() and not worker.pipe.poll()]
            if ended:
                raise self._make_loss_error(ended[0])

    def _seconds_to_wait(self, busy: Iterable[_Worker]) -> float:
        """Return how many seconds to wait for a result: at most until the next deadline of a process."""
        if self._timeout is None:
            return _POLL_SECONDS
        first = min(worker.deadline(self._timeout) for worker in busy)
        return max(0.0, min(_POLL_SECONDS, first - time.monotonic()))

    def _check_time(self, busy: Iterable[_Worker]) -> None:
        """Raise a `WorkerTimeoutError` if a process takes too long for its chunk, and has not sent a result."""
        if self._timeout is None:
            return
        now = time.monotonic()
        for worker in busy:
            # A result that arrived while this process was busy has arrived in time.
            if worker.deadline(self._timeout) <= now and not worker.pipe.poll():
                raise WorkerTimeoutError(
                    f"{worker.chunk} took longer than timeout={self._timeout} seconds; its worker process "
                    f"{worker.process.pid} is ended. A longer timeout, or smaller chunks, leave it more time"
                )

    def _make_loss_error(self, worker: _Worker) -> WorkerError:
        worker.process.join(_END_SECONDS)
        if worker.process.exitcode is None and worker.chunk is not None:
            return WorkerError(
                f"the result of {worker.chunk} did not arrive, though its process runs: shared memory is sent "
                "as a file descriptor, and 'ulimit -n' limits how many a process may have; larger chunks need fewer"
            )
        return make_exit_error(worker.process.pid, worker.process.exitcode, worker.chunk)


def _dismiss(workers: list[_Worker], owner: int) -> None:
    """End workers. In a forked copy of the process that started them, do nothing."""
    if os.getpid() != owner:
        return
    # Tell all of them to end before waiting for the first.
    untils = [worker.dismiss() for worker in workers]
    while workers:
        workers.pop().end(untils.pop())


def _read_message(chunk: Chunk, message: Message | LocalValue, common: CommonMemory) -> Any:
    try:
        return message.value(common)
    except Exception as error:
        name_chunk(error, chunk)
        raise


def make_exit_error(pid: int | None, code: int | None, chunk: Chunk | None) -> WorkerError:
    """Make the error for a process that ended before its work was done."""
    during = "" if chunk is None else f" while it had {chunk}"
    if code is not None and code < 0:
        return WorkerError(f"worker process {pid} was ended by signal {-code} ({signal.strsignal(-code)}){during}")
    return WorkerError(f"worker process {pid} ended with exit code {code}{during}; see its output on stderr")


def _run_worker(pipe: Connection, others: Sequence[Connection], job: Job, threads: int, seed: int) -> None:
    """Receive chunks and send results until the pipe is closed: the main function of a process of a `WorkerPool`."""
    for other in others:
        other.close()
    torch.set_num_threads(threads)
    seed_all(seed)
    run: Callable[[Chunk], object]
    try:
        run = job.restore()
        common = CommonMemory(run.container)
    except Exception as error:
        run, common = _make_failing_job(error), CommonMemory()
    # If the caller has ended, receiving the chunk fails.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.send_bytes(_UP)
    while True:
        try:
            chunk = Chunk(*pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError, KeyboardInterrupt):
            return
        done, message = run_job(run, chunk, common)
        try:
            _send(pipe, done, message)
        except (BrokenPipeError, ConnectionResetError):
            # The caller has ended.
            return
        # Free the memory of the result before the next one is computed.
        del message


def _make_failing_job(error: Exception) -> Callable[[object], NoReturn]:
    """Make a job that raises an error for every chunk."""

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
    """A `multiprocessing.Pool` or `ThreadPool` of the caller, used for a job and left open.

    Args:
        pool: the pool.
        job: the job.
    """

    def __init__(self, pool: object, job: Job) -> None:
        if not hasattr(pool, "apply_async"):
            raise TypeError(f"pool is a multiprocessing.Pool, got {type(pool).__name__}")
        self._pool, self._job = pool, job
        self._has_threads = isinstance(pool, ThreadPool)
        self.count = int(getattr(pool, "_processes", None) or os.cpu_count() or 1)
        # A result may refer to shared memory that the receiver must request from the worker process. With
        # `maxtasksperchild`, the process may have ended by then, so send the whole result in the message.
        self._inline = getattr(pool, "_maxtasksperchild", None) is not None
        self._watched: dict[int | None, BaseProcess] = {}

    def __enter__(self) -> CallersPool:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the pool open; it belongs to the caller."""

    def outcomes(self, take: Take) -> Iterator[Outcome]:
        """Run the job for the chunks that `take` returns; see `WorkerPool.outcomes`."""
        job, results = self._job, queue.SimpleQueue[_FromPool]()
        given: dict[int, tuple[Chunk, object]] = {}
        self._list_processes()
        while True:
            while len(given) < 2 * self.count and (chunk := take()) is not None:
                piece, out = job.cut_piece(chunk), None if job.out is None else job.out[job.index_of(chunk)]
                given[chunk.number] = chunk, piece
                report = functools.partial(_report_error, results, chunk)
                run: Any = _run_in_thread if self._has_threads else functools.partial(_run_in_pool, inline=self._inline)
                arguments = (job.fn if self._has_threads else SentFunction(job.fn), piece, out, chunk.number)
                self._pool.apply_async(run, arguments, callback=results.put, error_callback=report)
            if not given:
                return
            found = self._next(results, given)
            if isinstance(found, BaseException):
                # An error of the pool itself, for example that the function cannot be pickled.
                raise found
            number, done, message = found
            chunk, piece = given.pop(number)
            # The pool has moved the tensors of the piece to shared memory.
            yield chunk, done, _read_message(chunk, message, CommonMemory(piece))

    def _next(self, results: queue.SimpleQueue[_FromPool], given: dict[int, tuple[Chunk, object]]) -> _FromPool:
        while True:
            try:
                return results.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                # A pool replaces a process that died, and never reports the chunk of that process.
                for process in self._list_processes():
                    if process.exitcode not in (None, 0):
                        names = ", ".join(f"{chunk}" for chunk, _ in given.values())
                        error = make_exit_error(process.pid, process.exitcode, None)
                        raise WorkerError(f"{error}; not done are {names}") from None

    def _list_processes(self) -> list[BaseProcess]:
        """Return all processes of the pool since the start of the job, also ended ones; none for a pool of threads."""
        if self._has_threads:
            return []
        for process in list(getattr(self._pool, "_pool", ())):
            self._watched.setdefault(process.pid, process)
        return list(self._watched.values())


def _report_error(results: queue.SimpleQueue[_FromPool], chunk: Chunk, error: BaseException) -> None:
    """Put an error of the pool itself into the results, for a chunk that it could not send."""
    name_chunk(error, chunk)
    results.put(error)


def _run_in_pool(
    fn: PickledMessage, piece: object, out: object, number: int, inline: bool
) -> tuple[int, bool, Message]:
    """Run the function for a chunk, in a process of a pool."""
    return number, *run_job(lambda given: call_function(fn.value(), given, out), piece, CommonMemory(piece), inline)


def _run_in_thread(
    fn: Callable[[object], object], piece: object, out: object, number: int
) -> tuple[int, bool, LocalValue]:
    """Run the function for a chunk, in a thread of a pool."""
    return number, *run_job_in_thread(lambda given: call_function(fn, given, out), piece)
