"""Calls in which all ranks of a group take part: broadcasting, gathering and reducing containers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tensordict.core import foreach, ragged
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import TransferError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.memory.flat_buffers import new_bytes
from tensordict.parallel import shared_memory, wire
from tensordict.parallel.channels import Channel, MessageDevices, as_group, broadcast_all, from_all, rank_in, wait_for
from tensordict.parallel.transfers import Receiving, Sending, differences, received_apart
from tensordict.parallel.verdicts import attempt, refusal, settle

# Tensors of up to this many bytes are reduced together with the others of their dtype.
_SMALL = 256 << 10
# What torch reduces, by operation; the rest take ints and floating point numbers.
_INTS = frozenset([torch.int8, torch.uint8, torch.int32, torch.int64])
_FLOATS = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
_COMPLEX = frozenset([torch.complex64, torch.complex128])
_TAKES = {
    "SUM": _INTS | _FLOATS | _COMPLEX,
    "AVG": _FLOATS | _COMPLEX,
    "BAND": _INTS,
    "BOR": _INTS,
    "BXOR": _INTS,
}
# The tags of what `gather_and_stack` and `scatter` send.
_STACK, _SCATTER = (1 << 28) - 1, (1 << 28) - 2
# Before more bytes than this are sent to all ranks, they agree that each of them has the memory.
_ROOM = 1 << 20


# --- broadcasting and gathering ---------------------------------------------------------------------------------------


def broadcast(
    container: object, src: int, group: dist.ProcessGroup, device: torch.device | None, allow_pickle: bool
) -> Any:
    """Bring the container of rank `src` to all ranks; see `TensorDict.broadcast`."""
    is_source = rank_in(group, src, "src") == group.rank()
    devices = MessageDevices(group)
    anew: wire.NewBuffers | None = None
    problem: Exception | None = None
    if is_source:
        head, messages, error = _packed(container, devices, allow_pickle)
        broadcast_all(wire.prologue(head, devices.main_device), src, group)
        if error is not None:
            raise error
        nbytes = sum(message.numel() for message in messages)
    else:
        first = new_bytes(wire.PROLOGUE, devices.main_device)
        broadcast_all([first], src, group)
        header = _header(_rest(first, src, group), src)
        nbytes = header.nbytes
        anew, problem = attempt(lambda: wire.NewBuffers(header, devices.place), src)
    if nbytes > _ROOM or problem is not None:
        settle(problem, group, "broadcast")
    broadcast_all(messages if anew is None else anew.buffers, src, group)
    if anew is not None:
        container, problem = attempt(lambda: _made(anew, device, allow_pickle), src)
    settle(problem, group, "broadcast")
    return container


def all_gather(container: Contract, group: dist.ProcessGroup, allow_pickle: bool) -> list[Any]:
    """The containers of all ranks; see `TensorDict.all_gather`."""
    devices = MessageDevices(group)
    head, messages, error = _packed(container, devices, allow_pickle)
    heads = _gathered(head, devices, group)
    if error is not None:
        raise error
    headers = [_header(content, rank) for rank, content in enumerate(heads)]
    targets: list[wire.NewBuffers | None] = []
    problem: Exception | None = None
    for rank, header in enumerate(headers):
        anew = None
        if rank != group.rank() and problem is None:
            anew, problem = attempt(partial(wire.NewBuffers, header, devices.place), rank)
        targets.append(anew)
    if problem is not None or sum(header.nbytes for header in headers) > _ROOM:
        settle(problem, group, "all_gather")
    works = []
    for rank, target in enumerate(targets):
        src = dist.get_global_rank(group, rank)
        for message in messages if target is None else target.buffers:
            works.append(dist.broadcast(message, src=src, group=group, async_op=True))
    wait_for(works, "all_gather")
    found: list[Any] = []
    for rank, target in enumerate(targets):
        if target is None:
            found.append(container.clone())
        elif problem is None:
            made, problem = attempt(partial(_made, target, None, allow_pickle), rank)
            found.append(made)
    settle(problem, group, "all_gather")
    return found


def _packed(
    container: object, devices: MessageDevices, allow_pickle: bool
) -> tuple[bytes, list[Tensor], Exception | None]:
    """The description and the messages of a container; why there are none, in a description, when it cannot be sent."""
    try:
        package = wire.Package(container, devices.kind, allow_pickle=allow_pickle)
        return package.head, package.messages(devices.place), None
    except Exception as error:  # Whatever it is, the other ranks wait for a description.
        return refusal(error), [], error


def _rest(first: Tensor, src: int, group: dist.ProcessGroup) -> bytes:
    """The whole description, of which the first message is there."""
    head, more = wire.opened(first)
    if more:
        try:
            rest = new_bytes(more, first.device)
        except Exception as error:  # Torch has several for what no memory could hold.
            raise TransferError(f"from rank {src}: no memory for a description of {more} bytes: {error}") from error
        broadcast_all([rest], src, group)
        head += wire.content_of(rest)
    return head


def _gathered(head: bytes, devices: MessageDevices, group: dist.ProcessGroup) -> list[bytes]:
    """The descriptions of all ranks."""
    first, *rest = wire.prologue(head, devices.main_device)
    own = dist.get_rank(group)
    found = []
    for rank, begun in enumerate(from_all(first, group, "all_gather")):
        src = dist.get_global_rank(group, rank)
        if rank == own:
            broadcast_all(rest, src, group)
            found.append(head)
        else:
            found.append(_rest(begun, src, group))
    return found


def _header(head: bytes, rank: int) -> wire.Header:
    try:
        return wire.Header(head)
    except TransferError as error:
        raise TransferError(f"from rank {rank}: {error}") from error


def _made(anew: wire.NewBuffers, device: torch.device | None, allow_pickle: bool) -> Any:
    made = anew.container(allow_pickle)
    return made if device is None else made.to(device)


# --- reducing ---------------------------------------------------------------------------------------------------------


class PendingReduction:
    """Tensors that are being reduced in place. :meth:`wait` ends it, and has to be called.

    Args:
        work: what torch gave.
        after: what is to be done with the result.
    """

    def __init__(self, work: dist.Work, call: str, after: Callable[[], None] | None = None) -> None:
        self._work: dist.Work | None = work
        self._call = call
        self._after = after
        self._problem = ""

    def wait(self, timeout: object = None) -> bool:
        """Wait until the tensors of the container have been reduced.

        Args:
            timeout: accepted as by torch's own works; the timeout of the process group counts.

        Raises:
            TransferError: the connection broke or timed out.
        """
        if self._work is not None:
            work, self._work = self._work, None
            try:
                wait_for([work], self._call)
            except TransferError as error:
                # The text and not the exception, whose frames would keep the process group alive.
                self._problem = f"{error}"
            else:
                if self._after is not None:
                    self._after()
        if self._problem:
            raise TransferError(self._problem)
        return True

    def is_completed(self) -> bool:
        """Whether the tensors of the container have been reduced: :meth:`wait` has returned, or need not wait.

        Raises:
            TransferError: as :meth:`wait`.
        """
        return self._work is None or (self._work.is_completed() and self.wait())


def reduce(container: Contract, dst: int | None, op: object, group: dist.ProcessGroup) -> list[PendingReduction]:
    """Begin to reduce a container over the ranks of a group, in place; see `TensorDict.all_reduce`.

    Args:
        dst: the global rank that gets the result; `None` for all of them.

    Raises:
        TransferError: the containers of the ranks differ; all ranks raise, and nothing has been changed.
    """
    call = "all_reduce" if dst is None else "reduce"
    op = dist.ReduceOp.SUM if op is None else op
    tensors = _agreed(container, group, call, op, dst)
    writes = dst is None or dist.get_rank() == dst
    devices = MessageDevices(group)

    def begun(tensor: Tensor) -> dist.Work:
        try:
            work: dist.Work = (
                dist.all_reduce(tensor, op=op, group=group, async_op=True)
                if dst is None
                else dist.reduce(tensor, dst, op=op, group=group, async_op=True)
            )
            return work
        except RuntimeError as error:
            raise TransferError(f"{call}: {error}") from error

    found = []
    packs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            if nbytes > _SMALL and tensor.is_contiguous() and devices.kind(tensor.device.type) == tensor.device.type:
                # A rank that gets no result may find something else in the memory it gave.
                found.append(PendingReduction(begun(tensor if writes else tensor.clone()), call))
            elif nbytes:
                packs.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (_, device), pack in packs.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in pack]).to(devices.place(device.type))
            found.append(PendingReduction(begun(flat), call, _unpacking(flat, pack) if writes else None))
    return found


def _unpacking(flat: Tensor, pack: list[Tensor]) -> Callable[[], None]:
    def unpack() -> None:
        parts = torch.split(flat, [tensor.numel() for tensor in pack])
        with torch.no_grad():
            foreach.copy_(pack, [part.view(tensor.shape) for part, tensor in zip(parts, pack, strict=True)])

    return unpack


def _agreed(container: Contract, group: dist.ProcessGroup, call: str, op: object, dst: int | None) -> list[Tensor]:
    """The tensors of a container to be reduced, once all ranks have the same ones and mean the same call."""
    error: Exception | None = None
    tensors: list[Tensor] = []
    told: dict[str, Any] = {}
    devices = MessageDevices(group)
    try:
        name = _name_of(op)
        tensors, table = _reducible(container, call, name, devices)
        told = {"call": f"{call}(op={name}" + (")" if dst is None else f", dst={dst})"), "table": table}
    except Exception as problem:  # Whatever it is, the other ranks wait to hear of it.
        error = problem
        told = {"refusal": f"{error}"}
    content = json.dumps(told).encode()
    own = wire.as_message(_digest(content), devices.main_device)
    digests = from_all(own, group, call)
    if error is None and all(torch.equal(digest, own) for digest in digests):
        return tensors
    heads = _gathered(content, devices, group)
    if error is not None:
        raise error
    # The first that differs from rank 0; on rank 0 and on those like it, the first that differs from them.
    other = next(number for number, head in enumerate(heads) if head != content)
    raise TransferError(f"{call}: {_quarrel(told, heads[other], group.rank(), other)}")


def _quarrel(told: dict[str, Any], content: bytes, own: int, rank: int) -> str:
    """Why this rank cannot reduce together with another one."""
    try:
        other = parse_json(content)
        if "refusal" in other:
            return f"rank {rank} of the group cannot take part: {other['refusal']}"
        if other["call"] != told["call"]:
            return f"rank {own} of the group called {told['call']}, and rank {rank} {other['call']}"
        return differences(told["table"], other["table"], f"on rank {own}", f"on rank {rank}", _path_of)
    except Exception as error:  # Anything may come from the network.
        return f"what rank {rank} of the group sent is broken: {error!r:.200}"


def _name_of(op: object) -> str:
    """The name of a reduction.

    Raises:
        TypeError: it is none.
    """
    # Besides the plain ones there are those with a factor.
    kind = op if type(op) is dist.ReduceOp.RedOpType else getattr(op, "op", None)
    if type(kind) is not dist.ReduceOp.RedOpType or op is dist.ReduceOp.PREMUL_SUM:
        raise TypeError(f"op is a torch.distributed.ReduceOp such as ReduceOp.SUM, got {op!r:.80}")
    return str(kind.name)


def _reducible(container: Contract, call: str, op: str, devices: MessageDevices) -> tuple[list[Tensor], dict[str, str]]:
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
            shape = list(leaf.shape)
            told += f" {shape}"
            strides = leaf.stride() if leaf.layout is torch.strided and leaf.numel() else ()
            if 0 in strides:
                # Torch would reduce the memory behind an expanded tensor, too. Its own elements are reduced once.
                leaf = leaf[tuple(slice(None) if stride else 0 for stride in strides)]
                expanded = [dim for dim, stride in enumerate(strides) if not stride and shape[dim] > 1]
                told += f" expanded along {expanded}" if expanded else ""
        if not _is_plain(leaf):
            raise TransferError(f"{call}: entry {joined(path)!r} ({type(leaf).__name__}, {told}) has no plain memory")
        takes = _TAKES.get(op, _INTS | _FLOATS)
        # Gloo divides in place, which ints cannot be.
        if leaf.dtype not in (takes if devices.place(leaf.device.type).type == "cpu" else takes | _INTS):
            raise TransferError(
                f"{call}: entry {joined(path)!r} is {told}, of a dtype that torch.distributed does not reduce so "
                f"({op}): cast it first, or leave it out"
            )
        table[name] = told
        found[name] = ragged.elements(leaf).detach().as_subclass(Tensor)
    order = sorted(found)
    return [found[name] for name in order], {name: table[name] for name in order}


def _is_plain(leaf: Tensor) -> bool:
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


# --- stacking and scattering ------------------------------------------------------------------------------------------


def gather_and_stack(container: Any, dst: int, group: object, allow_pickle: bool) -> Any:
    """Write the containers of the other ranks into the rows of that of rank `dst`: `gather_and_stack`."""
    group = as_group(group)
    target = rank_in(group, dst, "dst")
    if group.rank() != target:
        Sending(_channel(group, target, _STACK), container, allow_pickle).wait()
        return None
    others = [rank for rank in range(group.size()) if rank != target]
    problem: Exception | None = None
    size = container._batch_size
    if not size or size[0] != len(others):
        problem = TransferError(
            f"gather_and_stack: the container of rank {dst} has the batch size {list(size)}, which has to begin with "
            f"{len(others)}, one for each of the other ranks"
        )
    rows = []
    for row, rank in enumerate(others):
        part = container[row] if problem is None else None
        receiving = Receiving(_channel(group, rank, _STACK), part, allow_pickle=allow_pickle, problem=problem)
        # At the same time: a rank that does not come must not keep the others waiting until they give up.
        rows.append((row, part, received_apart(receiving)))
    problems = []
    for row, part, future in rows:
        try:
            future.wait()
            if part is not None and not _is_row(part, container, row):
                container[row] = part
        except (TransferError, RuntimeError) as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return container


def _is_row(part: Contract, container: Any, row: int) -> bool:
    """Whether what is written to a part is written to the row of the container that it was read from."""
    if part._wrapped_container() is container[row]._wrapped_container():
        # The member of a lazy stack.
        return True
    leaves = part._leaves()
    if shared_memory.holds_values(part) or any(leaf.is_nested for leaf in leaves):
        return False
    known = {internals.storage_id(leaf.untyped_storage()) for leaf in container._leaves() if _is_plain(leaf)}
    return all(internals.storage_id(leaf.untyped_storage()) in known for leaf in leaves)


def scatter(
    containers: Sequence[Any] | None,
    src: int,
    group: dist.ProcessGroup,
    device: torch.device | None,
    allow_pickle: bool,
) -> Any:
    """Hand one container to every rank; see `TensorDict.scatter`."""
    own, source = group.rank(), rank_in(group, src, "src")
    if own != source:
        return Receiving(_channel(group, source, _SCATTER), None, device, allow_pickle).run()
    problem = _miscounted(containers, group.size())
    problems = [] if problem is None else [problem]
    given: Sequence[Contract | None] = (
        [None] * group.size() if containers is None or problem is not None else containers
    )
    sendings = []
    for rank, container in enumerate(given):
        if rank != own:
            try:
                sendings.append(Sending(_channel(group, rank, _SCATTER), container, allow_pickle, problem))
            except Exception as error:  # The rank has been told, and the others get theirs.
                problems.append(error)
    for sending in sendings:
        try:
            sending.wait()
        except TransferError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return given[own]


def _miscounted(containers: Sequence[object] | None, count: int) -> Exception | None:
    """Why these are not the containers for so many ranks."""
    if containers is None or len(containers) != count:
        given = "none" if containers is None else len(containers)
        return ValueError(f"scatter needs one container for each of the {count} ranks, got {given}")
    for position, container in enumerate(containers):
        if not isinstance(container, Contract):
            return TypeError(f"scatter takes containers only, got {type(container).__name__} at position {position}")
    return None


def _channel(group: dist.ProcessGroup, rank: int, tag: int) -> Channel:
    return Channel.of(group, None, rank, tag, False, "rank")
