"""Calls in which all ranks of a group take part: broadcasting, gathering and reducing containers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tensordict import foreach, ragged
from tensordict.errors import TransferError
from tensordict.keys import Path, joined
from tensordict.parallel import sharing
from tensordict.parallel.links import Carriers, Link, as_group
from tensordict.parallel.transfers import Receiving, Sending, differences
from tensordict.parallel.wire import PROLOGUE, Anew, Header, Package, opened, prologue, refusal

# Tensors of up to this many bytes are reduced together with the others of their dtype.
_SMALL = 256 << 10
_REAL = frozenset(
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64]
)
_COMPLEX = _REAL | {torch.complex64, torch.complex128}
# The tag of what `gather_and_stack` sends.
_STACK = (1 << 28) - 1


# --- broadcasting and gathering ---------------------------------------------------------------------------------------


def broadcast(container: Any, src: int, group: Any, device: torch.device | None, allow_pickle: bool) -> Any:
    """Bring the container of rank `src` to all ranks; see `TensorDict.broadcast`."""
    carriers = Carriers(group)
    if dist.get_rank() != src:
        first = torch.empty(PROLOGUE, dtype=torch.uint8, device=carriers.place(carriers.main))
        _broadcast([first], src, group)
        header = _header(_rest(first, src, group), src)
        anew = Anew(header, carriers.place)
        _broadcast(anew.buffers, src, group)
        made = _made(anew, src, allow_pickle)
        return made if device is None else made.to(device)
    head, messages, error = _packed(container, carriers, allow_pickle)
    _broadcast([*_heads(head, carriers), *messages], src, group)
    if error is not None:
        raise error
    return container


def all_gather(container: Any, group: Any, allow_pickle: bool) -> list[Any]:
    """The containers of all ranks; see `TensorDict.all_gather`."""
    carriers = Carriers(group)
    head, messages, error = _packed(container, carriers, allow_pickle)
    heads = _gathered(head, carriers, group)
    own = dist.get_rank(group)
    headers: list[Any] = []
    problems: list[Exception] = [] if error is None else [error]
    for rank, content in enumerate(heads):
        try:
            headers.append(_header(content, rank))
        except TransferError as broken:
            problems.append(broken)
    if problems:
        raise problems[0]
    targets = [None if rank == own else Anew(header, carriers.place) for rank, header in enumerate(headers)]
    works = []
    for rank, target in enumerate(targets):
        src = dist.get_global_rank(group, rank)
        for message in messages if target is None else target.buffers:
            works.append(dist.broadcast(message, src=src, group=group, async_op=True))
    _wait(works, "all_gather")
    return [
        container.clone() if target is None else _made(target, rank, allow_pickle)
        for rank, target in enumerate(targets)
    ]


def _packed(container: Any, carriers: Carriers, allow_pickle: bool) -> tuple[bytes, list[Tensor], Exception | None]:
    """The description and the messages of a container; why there are none, in a description, when it cannot be sent."""
    try:
        package = Package(container, carriers.kind, allow_pickle=allow_pickle)
        return package.head, package.messages(carriers.place), None
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        return refusal(error), [], error


def _heads(head: bytes, carriers: Carriers) -> list[Tensor]:
    place = carriers.place(carriers.main)
    return [part.to(place) for part in prologue(head) if part is not None]


def _rest(first: Tensor, src: int, group: Any) -> bytes:
    """The whole description, of which the first message is there."""
    head, more = opened(first.cpu())
    if more:
        rest = torch.empty(more, dtype=torch.uint8, device=first.device)
        _broadcast([rest], src, group)
        head += rest.cpu().numpy().tobytes()
    return head


def _gathered(head: bytes, carriers: Carriers, group: Any) -> list[bytes]:
    """The descriptions of all ranks."""
    first, *rest = _heads(head, carriers)
    firsts = [torch.empty_like(first) for _ in range(dist.get_world_size(group))]
    _wait([dist.all_gather(firsts, first, group=group, async_op=True)], "all_gather")
    own = dist.get_rank(group)
    found = []
    for rank, begun in enumerate(firsts):
        src = dist.get_global_rank(group, rank)
        if rank == own:
            _broadcast(rest, src, group)
            found.append(head)
        else:
            found.append(_rest(begun, src, group))
    return found


def _header(head: bytes, rank: int) -> Header:
    try:
        return Header(head)
    except TransferError as error:
        raise TransferError(f"from rank {rank}: {error}") from error


def _made(anew: Anew, rank: int, allow_pickle: bool) -> Any:
    try:
        return anew.container(allow_pickle)
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise TransferError(f"from rank {rank}: {error}") from error


def _broadcast(messages: Iterable[Tensor], src: int, group: Any) -> None:
    _wait([dist.broadcast(message, src=src, group=group, async_op=True) for message in messages], "broadcast")


def _wait(works: Iterable[Any], call: str) -> None:
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"{call}: {error}") from error


# --- reducing ---------------------------------------------------------------------------------------------------------


class Reduction:
    """Tensors that are being reduced in place. :meth:`wait` ends it, and has to be called.

    Args:
        work: what torch gave.
        after: what is to be done with the result.
    """

    def __init__(self, work: Any, call: str, after: Callable[[], None] | None = None) -> None:
        self._work = work
        self._call = call
        self._after = after

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the tensors of the container have been reduced.

        Args:
            timeout: accepted as by torch's own works; the timeout of the process group counts.

        Raises:
            TransferError: the connection broke or timed out.
        """
        if self._work is not None:
            work, self._work = self._work, None
            _wait([work], self._call)
            if self._after is not None:
                self._after()
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` has been called and has returned."""
        return self._work is None


def reduce(container: Any, dst: int | None, op: Any, group: Any) -> list[Reduction]:
    """Begin to reduce a container over the ranks of a group, in place; see `TensorDict.all_reduce`.

    Args:
        dst: the global rank that gets the result; `None` for all of them.

    Raises:
        TransferError: the containers of the ranks differ; all ranks raise, and nothing has been changed.
    """
    call = "all_reduce" if dst is None else "reduce"
    op = dist.ReduceOp.SUM if op is None else op
    tensors = _agreed(container, group, call, op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG))
    writes = dst is None or dist.get_rank() == dst
    carriers = Carriers(group)

    def begun(tensor: Tensor) -> Any:
        if dst is None:
            return dist.all_reduce(tensor, op=op, group=group, async_op=True)
        return dist.reduce(tensor, dst, op=op, group=group, async_op=True)

    found = []
    packs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            if nbytes > _SMALL and tensor.is_contiguous() and carriers.kind(tensor.device.type) == tensor.device.type:
                # A rank that gets no result may find something else in the memory it gave.
                found.append(Reduction(begun(tensor if writes else tensor.clone()), call))
            elif nbytes:
                packs.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (_, device), pack in packs.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in pack]).to(carriers.place(device.type))
            found.append(Reduction(begun(flat), call, _unpacking(flat, pack) if writes else None))
    return found


def _unpacking(flat: Tensor, pack: list[Tensor]) -> Callable[[], None]:
    def unpack() -> None:
        parts = torch.split(flat, [tensor.numel() for tensor in pack])
        with torch.no_grad():
            foreach.copy_(pack, [part.view(tensor.shape) for part, tensor in zip(parts, pack, strict=True)])

    return unpack


def _agreed(container: Any, group: Any, call: str, takes_complex: bool) -> list[Tensor]:
    """The tensors of a container to be reduced, once all ranks have the same ones."""
    error: Exception | None = None
    tensors: list[Tensor] = []
    table: Any = None
    carriers = Carriers(group)
    try:
        tensors, table = _reducible(container, call, _COMPLEX if takes_complex else _REAL)
    except (RuntimeError, ValueError, TypeError, OSError) as problem:
        error = problem
    content = json.dumps(table if error is None else {"refusal": f"{error}"}).encode()
    own = torch.frombuffer(bytearray(_digest(content)), dtype=torch.uint8).to(carriers.place(carriers.main))
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    _wait([dist.all_gather(digests, own, group=group, async_op=True)], call)
    if error is None and all(torch.equal(digest, own) for digest in digests):
        return tensors
    tables = [json.loads(head) for head in _gathered(content, carriers, group)]
    if error is not None:
        raise error
    for rank, other in enumerate(tables):
        if "refusal" in other:
            raise TransferError(f"{call}: rank {rank} of the group cannot take part: {other['refusal']}")
    rank = dist.get_rank(group)
    # The first that differs from rank 0; on rank 0 and on those like it, the first that differs from them.
    other = next(number for number, found in enumerate(tables) if found != table)
    found = differences(table, tables[other], f"on rank {rank}", f"on rank {other}", _path_of)
    raise TransferError(f"{call}: {found}")


def _reducible(container: Any, call: str, dtypes: frozenset[torch.dtype]) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a container in the order of their keys, and what they are."""
    found: dict[str, Tensor] = {}
    table: dict[str, str] = {}
    counts: dict[Path, int] = {}
    for path, leaf in container._walk():
        # The members of a lazy stack have leaves of the same path.
        counts[path] = counts.get(path, -1) + 1
        name = json.dumps([path, counts[path]])
        told = str(leaf.dtype)[6:]
        if leaf.is_nested:
            sizes = ragged.row_sizes(leaf)
            told += f" of {len(sizes)} rows of the sizes {_digest(sizes.numpy().tobytes()).hex()}"
        else:
            told += f" {list(leaf.shape)}"
        if not _is_plain(leaf):
            raise TransferError(f"{call}: entry {joined(path)!r} ({type(leaf).__name__}, {told}) has no plain memory")
        if leaf.dtype not in dtypes:
            raise TransferError(
                f"{call}: entry {joined(path)!r} is {told}, of a dtype that torch.distributed does not reduce so: cast "
                "it first, or leave it out"
            )
        table[name] = told
        found[name] = ragged.elements(leaf).detach().as_subclass(Tensor)
    order = sorted(found)
    return [found[name] for name in order], {name: table[name] for name in order}


def _is_plain(leaf: Any) -> bool:
    """Whether what is written to the elements of a leaf is written to the leaf."""
    if leaf.is_nested:
        return ragged.compact(leaf) is leaf
    if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or 0 in leaf.stride():
        return False
    return type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _path_of(name: str) -> Path:
    """The key of a name in a table of tensors."""
    return tuple(json.loads(name)[0])


# --- stacking ---------------------------------------------------------------------------------------------------------


def gather_and_stack(container: Any, dst: int, group: Any, allow_pickle: bool) -> Any:
    """Write the containers of the other ranks into the rows of that of rank `dst`: `gather_and_stack`."""
    group = as_group(group)
    if dist.get_rank() != dst:
        Sending(Link.of(group, dst, None, _STACK, False, "dst"), container, False, allow_pickle).wait()
        return None
    others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
    problem: Exception | None = None
    size = container._batch_size
    if not size or size[0] != len(others):
        problem = TransferError(
            f"gather_and_stack: the container of rank {dst} has the batch size {list(size)}, which has to begin with "
            f"{len(others)}, one for each of the other ranks"
        )
    problems = []
    for row, rank in enumerate(others):
        part = container[row] if problem is None else None
        link = Link.of(group, dist.get_global_rank(group, rank), None, _STACK, False, "src")
        try:
            Receiving(link, part, allow_pickle=allow_pickle, problem=problem).run()
            if part is not None and not _is_view(part, container):
                container[row] = part
        except (TransferError, RuntimeError) as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return container


def _is_view(part: Any, container: Any) -> bool:
    """Whether all of a row lies in the memory of its container."""
    leaves = part._leaves()
    if sharing.holds_values(part) or any(leaf.is_nested for leaf in leaves):
        return False
    known = {leaf.untyped_storage()._cdata for leaf in container._leaves() if _is_plain(leaf)}
    return all(leaf.untyped_storage()._cdata in known for leaf in leaves)
