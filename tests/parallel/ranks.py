"""A group of processes that are ranks of one `torch.distributed` process group, and run what tests tell them to."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Forked from a process that has torch and has started no threads: 0.1 s each, where a new interpreter takes 2.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "tensordict"])


class Ranks:
    """Processes that wait for work.

    Args:
        count: how many.
        folder: where they meet.
        timeout: seconds, of the process group.
    """

    def __init__(self, count: int, folder: Any, timeout: float = 60) -> None:
        self.count = count
        self._folder = folder
        self._timeout = timeout
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        self._starts += 1
        for rank in range(self.count):
            near, far = _CONTEXT.Pipe()
            store = f"{self._folder}/store{self._starts}"
            process = _CONTEXT.Process(target=_serve, args=(rank, self.count, store, self._timeout, far), daemon=True)
            process.start()
            far.close()
            self._pipes.append(near)
            self._processes.append(process)

    def run(self, scenario: Callable[..., Any], *args: Any, patience: float = 90, dies: int | None = None) -> list[Any]:
        """Run a function of the module of a test, as `scenario(rank, *args)`, on all ranks.

        Args:
            patience: how many seconds to wait before a rank is taken to hang.
            dies: the rank that does not survive it.

        Returns:
            what it returned, by rank.
        """
        for pipe in self._pipes:
            pipe.send((scenario, args))
        end = time.monotonic() + patience
        found: list[Any] = []
        problems = []
        for rank, pipe in enumerate(self._pipes):
            if rank == dies:
                self._processes[rank].join(max(0, end - time.monotonic()))
                assert self._processes[rank].exitcode == -signal.SIGKILL
                found.append(None)
                continue
            if not pipe.poll(max(0, end - time.monotonic())):
                problems.append(f"rank {rank} hangs")
                continue
            try:
                good, result = pipe.recv()
            except EOFError:
                problems.append(f"rank {rank} has died")
                continue
            found.append(result)
            if not good:
                problems.append(f"rank {rank}: {result}")
        if problems:
            # Messages under way must not reach the next test.
            self.close()
            self._start()
        assert not problems, "\n".join(problems)
        return found

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()


def die() -> None:
    """End this process as the kernel ends it when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(rank: int, count: int, store: str, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            scenario, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, scenario(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    # A group whose peer was killed cannot say goodbye.
    os._exit(0)
