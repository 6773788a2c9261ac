"""Moving the bytes of tensors to and from files, by positioned writes and never through a mapping."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, entry_of
from tensordict.memory import system
from tensordict.memory.stored_tensors import StoredTensor, in_memory

# One system call moves at most this much, so that an interrupt or a failing sibling thread is noticed in between.
CHUNK = 64 << 20
# What is not contiguous CPU memory is gathered in pieces of this size: the extra memory that such a leaf costs.
SLAB = 8 << 20
# Saves of at least so many bytes are written by several threads, unless one was asked for.
_LARGE = 64 << 20
# What is on a GPU and at least this large goes through pinned buffers, which cost more than they save for less.
_STREAMED = 1 << 20
# What is watched is written in pieces of this size, which the processor's cache holds while they are looked at.
_WATCHED = 1 << 20

# Is given all that is written, in order and in pieces: see `write_tensor`.
Watch = Callable[[memoryview], None]

# The most buffers that one system call takes.
_VECTORS = 1024
# Tensors of up to this many bytes are written several at a time.
_TOGETHER = 1 << 20

_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def create(path: str) -> int:
    """A descriptor of the new, empty file `path`; `FileExistsError` when there is one (or a link) already."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | system.CLOEXEC, 0o666)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """A block at whose end a descriptor is closed."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_file(path: str) -> int:
    """A descriptor of the file `path`, to be read; an `OSError` that names it."""
    try:
        # Not blocking, so that a pipe of that name cannot hang the loader.
        return os.open(path, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)
    except OSError as error:
        raise named_os_error(error, "read the file", path) from error


def temporary_name(folder: str) -> str:
    """An unused path in `folder` that no encoded entry name equals (`%t` is no percent-encoding)."""
    return f"{folder}/%tmp-{secrets.token_hex(8)}"


def is_direct(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` is, byte for byte, what its file holds."""
    return (
        tensor.is_cpu
        and type(tensor) is not StoredTensor
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def write_tensor(fd: int, tensor: Tensor, offset: int = 0, watch: Watch | None = None) -> None:
    """Write the elements of `tensor` (any device, any strides) at byte `offset` of the file, which `watch` sees too."""
    if is_direct(tensor):
        write_range(fd, tensor, 0, tensor.nbytes, offset, watch)
        return
    for packed in _packed(tensor):
        write_range(fd, packed, 0, packed.nbytes, offset, watch)
        offset += packed.nbytes


def write_range(fd: int, tensor: Tensor, start: int, stop: int, offset: int, watch: Watch | None = None) -> None:
    """Write the bytes from `start` to `stop` of a tensor's own memory (see `is_direct`) at byte `offset`."""
    if start == stop:
        return
    # A ctypes view costs a tenth of a NumPy one (0.4 against 3.3 us), and knows no dtypes.
    buffer = (ctypes.c_char * (stop - start)).from_address(tensor.data_ptr() + start)
    size = stop - start
    done, step = 0, CHUNK
    if watch is not None:
        step = _WATCHED
    elif size <= CHUNK:
        done = system.pwrite(fd, buffer, offset)
        if done == size:
            return
    view = memoryview(buffer).cast("B")
    while done < size:
        written = system.pwrite(fd, view[done : done + step], offset + done)
        if watch is not None:
            watch(view[done : done + written])
        done += written


def see(tensor: Tensor, watch: Watch) -> None:
    """Show `watch` what `write_tensor` would write."""
    for packed in (tensor,) if is_direct(tensor) else _packed(tensor):
        if packed.numel():
            view = memoryview((ctypes.c_char * packed.nbytes).from_address(packed.data_ptr())).cast("B")
            for start in range(0, len(view), _WATCHED):
                watch(view[start : start + _WATCHED])


def write_tensors(fd: int, tensors: Sequence[Tensor], offset: int, watches: Sequence[Watch | None] = ()) -> None:
    """Write tensors one behind the other, the first at byte `offset`; all must be `is_direct`.

    Many small ones go in one system call: 0.6 instead of 1.7 us for one of 1 KiB.
    """
    for start in range(0, len(tensors), _VECTORS):
        part = [tensor for tensor in tensors[start : start + _VECTORS] if tensor.numel()]
        buffers = [(ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) for tensor in part]
        end = offset + sum(map(len, buffers))
        done = system.pwritev(fd, buffers, offset) if buffers else 0
        if offset + done < end:
            # The system took only a part: the rest goes one tensor at a time.
            for tensor in part:
                skip = min(max(done, 0), tensor.nbytes)
                write_range(fd, tensor, skip, tensor.nbytes, offset + skip)
                done -= tensor.nbytes
                offset += tensor.nbytes
        offset = end
    for tensor, watch in zip(tensors, watches, strict=False):
        if watch is not None:
            see(tensor, watch)


def write_row(
    fd: int, tensors: Sequence[Tensor], offset: int, num_threads: int = 0, watches: Sequence[Watch | None] = ()
) -> None:
    """Write tensors (any device, any strides) one behind the other, the first at byte `offset`.

    Each is seen by the one of `watches` in its place, if there are any.
    """
    jobs: list[Callable[[], None]] = []
    small: list[Tensor] = []
    seeing: list[Watch | None] = []
    start = offset
    for position, tensor in enumerate(tensors):
        watch = watches[position] if watches else None
        nbytes = tensor.numel() * tensor.itemsize
        is_small = nbytes <= _TOGETHER and is_direct(tensor)
        if small and (not is_small or offset - start > CHUNK):
            jobs.append(partial(write_tensors, fd, small, start, seeing))
            small, seeing = [], []
        if is_small:
            start = start if small else offset
            small.append(tensor)
            seeing.append(watch)
        elif num_threads > 1 and is_direct(tensor) and watch is None:
            for begin in range(0, nbytes, CHUNK):
                jobs.append(partial(write_range, fd, tensor, begin, min(begin + CHUNK, nbytes), offset + begin))
        else:
            jobs.append(partial(write_tensor, fd, tensor, offset, watch))
        offset += nbytes
    if small:
        jobs.append(partial(write_tensors, fd, small, start, seeing))
    run_all(jobs, num_threads)


def write_bytes(fd: int, content: bytes | memoryview, offset: int = 0) -> None:
    """Write all of `content` at byte `offset`."""
    done = 0
    while done < len(content):
        done += system.pwrite(fd, content[done:], offset + done)


def sync_folder(folder: str) -> None:
    """Have the names in a folder survive a loss of power, where folders can be opened."""
    if system.DIRECTORY:
        sync_file(folder)


def sync_file(path: str) -> None:
    """Have the content of a file survive a loss of power."""
    with closing(os.open(path, os.O_RDONLY | system.CLOEXEC)) as fd:
        os.fsync(fd)


def to_bytes(tensor: Tensor) -> bytes:
    """The elements of `tensor`, as its file would hold them."""
    packed = _compact(in_memory(tensor)).cpu()
    return ctypes.string_at(packed.data_ptr(), packed.nbytes) if packed.numel() else b""


def allocate(fd: int, nbytes: int, reserve: bool = True) -> None:
    """Make a new file `nbytes` long, without content.

    Args:
        fd: a descriptor of the file.
        nbytes: its length.
        reserve: have the disk keep room for it. Without, and on file systems that cannot reserve, it is sparse.

    Raises:
        OSError: the disk has no room for it, with `reserve`.
    """
    if nbytes and not (reserve and system.reserve(fd, 0, nbytes)):
        os.ftruncate(fd, nbytes)


def copy_file(source: int, target: int, nbytes: int) -> None:
    """Copy the first `nbytes` of one file to another, inside the kernel where it can."""
    done = 0
    while done < nbytes:
        try:
            step = os.copy_file_range(source, target, nbytes - done, done, done)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_KERNEL_COPY:
                raise
            step = system.pwrite(target, system.pread(source, min(SLAB, nbytes - done), done), done)
        if step == 0:
            raise OSError(errno.EIO, "the source file became shorter while it was copied")
        done += step


def write_new(path: str, content: bytes, durable: bool = False) -> None:
    """Make the file `path`, which must not be there; `durable` has it reach the disk.

    Raises:
        OSError: the file system refuses; the file is named.
    """
    try:
        with closing(create(path)) as fd:
            write_bytes(fd, content)
            if durable:
                os.fsync(fd)
    except OSError as error:
        raise named_os_error(error, "write the file", path) from error


def write_file(path: str, content: bytes, modified: int | None = None, durable: bool = False) -> None:
    """Put `content` at `path` in one step: a reader sees the old file or the new one.

    `modified` is the time of its modification in ns; `None` leaves it to the file system. `durable` has all of it
    reach the disk.
    """
    folder = os.path.dirname(path)
    temporary = temporary_name(folder)
    try:
        write_new(temporary, content, durable)
        if modified is not None:
            os.utime(temporary, ns=(modified, modified))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(folder)


def named_os_error(error: OSError, doing: str, path: str, key: Path = ()) -> OSError:
    """`error` again, of the same kind, saying which entry and path it concerns."""
    if isinstance(error, SaveError):
        return error
    if error.errno is None:
        return SaveError(f"{entry_of(key)}cannot {doing} {path!r}: {error}")
    reason = os.strerror(error.errno)
    return OSError(error.errno, f"{entry_of(key)}cannot {doing} ({reason})", path)


@contextlib.contextmanager
def naming(doing: str, path: str, key: Path = ()) -> Iterator[None]:
    """A block whose errors of the system say what was done to which path, for which entry."""
    try:
        yield
    except OSError as error:
        raise named_os_error(error, doing, path, key) from error


def threads(num_threads: int, nbytes: int) -> int:
    """How many threads write: where none are asked for, large saves get those that torch's own operations have.

    Two of them write 64 x 16 MiB in 126 ms, where one takes 224.
    """
    return num_threads or (torch.get_num_threads() if nbytes >= _LARGE else 0)


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


def _packed(tensor: Tensor) -> Iterator[Tensor]:
    """The slabs of a tensor in CPU memory, as its file holds them; each is there until the next one is asked for."""
    if tensor.is_cuda and tensor.numel() * tensor.element_size() >= _STREAMED:
        yield from _streamed(tensor)
        return
    for slab in _slabs(tensor):
        yield _compact(in_memory(slab)).cpu()


def _compact(tensor: Tensor) -> Tensor:
    """The elements as they are in a file, one behind the other."""
    try:
        return tensor.detach().resolve_conj().resolve_neg().contiguous()
    except NotImplementedError:
        # Torch copies no elements that are less than a byte (int1, ...); as bytes it does.
        return tensor.detach().view(torch.uint8).contiguous()


def _streamed(tensor: Tensor) -> Iterator[Tensor]:
    """As `_packed`, through two pinned buffers: while one is written, the other is being filled."""
    size = min(SLAB, tensor.numel() * tensor.element_size())
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    stream = torch.cuda.current_stream(tensor.device)
    under_way: tuple[Tensor, torch.cuda.Event] | None = None
    for number, slab in enumerate(_slabs(tensor)):
        packed = _compact(slab)
        host = buffers[number % 2][: packed.nbytes].view(packed.dtype).view(packed.shape)
        host.copy_(packed, non_blocking=True)
        copied = stream.record_event()
        if under_way is not None:
            under_way[1].synchronize()
            yield under_way[0]
        under_way = host, copied
    if under_way is not None:
        under_way[1].synchronize()
        yield under_way[0]


def _slabs(tensor: Tensor) -> Iterator[Tensor]:
    """Pieces of at most `SLAB` bytes (or one element) that follow one another in C order."""
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= SLAB:
        yield tensor
        return
    row = tensor.numel() // len(tensor) * tensor.element_size()
    if row > SLAB:
        for position in range(len(tensor)):
            yield from _slabs(tensor[position])
        return
    count = SLAB // row
    for start in range(0, tensor.shape[0], count):
        yield tensor[start : start + count]
