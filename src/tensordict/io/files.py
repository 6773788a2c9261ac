"""Moving the bytes of tensors to and from files, by positioned writes and never through a mapping."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tensordict.errors import SaveError
from tensordict.keys import Path, joined

# One system call moves at most this much, so that an interrupt or a failing sibling thread is noticed in between.
CHUNK = 64 << 20
# What is not contiguous CPU memory is gathered in pieces of this size: the extra memory that such a leaf costs.
SLAB = 8 << 20

_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def create(path: str) -> int:
    """A descriptor of the new, empty file `path`; `FileExistsError` when there is one (or a link) already."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def temporary_name(folder: str) -> str:
    """An unused path in `folder` that no encoded entry name equals (`%t` is no percent-encoding)."""
    return f"{folder}/%tmp-{secrets.token_hex(8)}"


def is_direct(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is, byte for byte, what its file holds."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def write_tensor(fd: int, tensor: Tensor, offset: int = 0) -> None:
    """Write the elements of `tensor` (any device, any strides) at byte `offset` of the file."""
    if is_direct(tensor):
        write_range(fd, tensor, 0, tensor.nbytes, offset)
        return
    for slab in _slabs(tensor):
        packed = slab.detach().cpu().resolve_conj().resolve_neg().contiguous()
        write_range(fd, packed, 0, packed.nbytes, offset)
        offset += packed.nbytes


def write_range(fd: int, tensor: Tensor, start: int, stop: int, offset: int) -> None:
    """Write the bytes from `start` to `stop` of a tensor's own memory (see `is_direct`) at byte `offset`."""
    if start == stop:
        return
    # A ctypes view costs a tenth of a NumPy one (0.4 against 3.3 us), and knows no dtypes.
    buffer = (ctypes.c_char * (stop - start)).from_address(tensor.data_ptr() + start)
    size = stop - start
    if size <= CHUNK:
        done = os.pwrite(fd, buffer, offset)
        if done == size:
            return
    else:
        done = 0
    view = memoryview(buffer).cast("B")
    while done < size:
        done += os.pwrite(fd, view[done : done + CHUNK], offset + done)


def to_bytes(tensor: Tensor) -> bytes:
    """The elements of `tensor`, as its file would hold them."""
    packed = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.numel() else b""


def allocate(fd: int, nbytes: int) -> None:
    """Make the file `nbytes` long with the space reserved, so that a full disk is an error now and no crash later."""
    if not nbytes:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        # The file system cannot reserve space; all that is left is a sparse file.
        os.ftruncate(fd, nbytes)


def copy_file(source: int, target: int, nbytes: int) -> None:
    """Copy the first `nbytes` of one file to another inside the kernel."""
    done = 0
    while done < nbytes:
        try:
            step = os.copy_file_range(source, target, nbytes - done, done, done)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            os.lseek(target, done, os.SEEK_SET)
            step = os.sendfile(target, source, done, nbytes - done)
        if step == 0:
            raise OSError(errno.EIO, "the source file became shorter while it was copied")
        done += step


def write_file(path: str, content: bytes) -> None:
    """Put `content` at `path` in one step: a reader sees the old file or the new one."""
    temporary = temporary_name(os.path.dirname(path))
    fd = create(temporary)
    try:
        try:
            done = 0
            while done < len(content):
                done += os.write(fd, content[done:])
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def named_os_error(error: OSError, doing: str, path: str, key: Path = ()) -> OSError:
    """`error` again, of the same kind, saying which entry and path it concerns."""
    if isinstance(error, SaveError):
        return error
    entry = f"entry {joined(key)!r}: " if key else ""
    if error.errno is None:
        return SaveError(f"{entry}cannot {doing} {path!r}: {error}")
    reason = os.strerror(error.errno)
    return OSError(error.errno, f"{entry}cannot {doing} ({reason})", path)


def run_all(jobs: Sequence[Callable[[], None]], num_threads: int) -> None:
    """Run the jobs, in `num_threads` threads when that is more than one; the first error stops the rest."""
    if num_threads <= 1 or len(jobs) < 2:
        for job in jobs:
            job()
        return
    queue = deque(jobs)
    failed = threading.Event()

    def work() -> None:
        while not failed.is_set():
            try:
                job = queue.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(min(num_threads, len(jobs)), thread_name_prefix="tensordict-save") as pool:
        workers = [pool.submit(work) for _ in range(min(num_threads, len(jobs)))]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            failed.set()
            raise


def _slabs(tensor: Tensor) -> Iterator[Tensor]:
    """Pieces of at most `SLAB` bytes (or one element) that follow one another in C order."""
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= SLAB:
        yield tensor
        return
    row = tensor[0].numel() * tensor.element_size()
    if row > SLAB:
        for part in torch.unbind(tensor):
            yield from _slabs(part)
        return
    count = SLAB // row
    for start in range(0, tensor.shape[0], count):
        yield tensor[start : start + count]
