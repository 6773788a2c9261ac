"""Collectives: `broadcast`, `all_gather`, `all_reduce`, `reduce`, `gather_and_stack` and `scatter` of containers.

All ranks of a group must make the same call. An error on one rank is raised on all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from tensordict.parallel.channels import (
    Channel,
    MessageDevices,
    as_group,
    broadcast_all,
    gather_messages,
    rank_in,
    wait_for,
)
from tensordict.parallel.transfers import Receiving, Sending, describe_differences, receive_in_thread
from tensordict.parallel.verdicts import attempt, refusal, settle

# Tensors of up to this many bytes are copied into one tensor for each dtype, and reduced together.
_SMALL = 256 << 10
# The dtypes that torch reduces, by operation. Other operations take ints and floating point numbers.
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
# The tags of messages of `gather_and_stack` and `scatter`.
_STACK, _SCATTER = (1 << 28) - 1, (1 << 28) - 2
# Before more bytes than this are sent to all ranks, the ranks tell each other whether they have the memory.
_ROOM = 1 << 20


# --- broadcasting and gathering ---------------------------------------------------------------------------------------


def broadcast(
    container: object, src: int, group: dist.ProcessGroup, device: torch.device | None, allow_pickle: bool
) -> Any:
    """Send the container of rank `src` to all ranks; see `TensorDict.broadcast`."""
    is_source = rank_in(group, src, "src") == group.rank()
    devices = MessageDevices(group)
    target: wire.NewBuffers | None = None
    problem: Exception | None = None
    if is_source:
        head, messages, error = _pack(container, devices, allow_pickle)
        broadcast_all(wire.prologue(head, devices.main_device), src, group)
        if error is not None:
            raise error
        nbytes = sum(message.numel() for message in messages)
    else:
        first = new_bytes(wire.PROLOGUE, devices.main_device)
        broadcast_all([first], src, group)
        header = _read_header(_receive_rest(first, src, group), src)
        nbytes = header.nbytes
        target, problem = attempt(lambda: wire.NewBuffers(header, devices.place), src)
    if nbytes > _ROOM or problem is not None:
        settle(problem, group, "broadcast")
    broadcast_all(messages if target is None else target.buffers, src, group)
    if target is not None:
        container, problem = attempt(lambda: _make_container(target, device, allow_pickle), src)
    settle(problem, group, "broadcast")
    return container


def all_gather(container: Contract, group: dist.ProcessGroup, allow_pickle: bool) -> list[Any]:
    """Return the containers of all ranks; see `TensorDict.all_gather`."""
    devices = MessageDevices(group)
    head, messages, error = _pack(container, devices, allow_pickle)
    heads = _gather_descriptions(head, devices, group)
    if error is not None:
        raise error
    headers = [_read_header(content, rank) for rank, content in enumerate(heads)]
    targets: list[wire.NewBuffers | None] = []
    problem: Exception | None = None
    for rank, header in enumerate(headers):
        target = None
        if rank != group.rank() and problem is None:
            target, problem = attempt(partial(wire.NewBuffers, header, devices.place), rank)
        targets.append(target)
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
            made, problem = attempt(partial(_make_container, target, None, allow_pickle), rank)
            found.append(made)
    settle(problem, group, "all_gather")
    return found


def _pack(
    container: object, devices: MessageDevices, allow_pickle: bool
) -> tuple[bytes, list[Tensor], Exception | None]:
    """Return the description and the messages of a container; or, if it cannot be sent, a refusal and the error."""
    try:
        package = wire.Package(container, devices.kind, allow_pickle=allow_pickle)
        return package.head, package.messages(devices.place), None
    except Exception as error:  # Any error: the other ranks wait for a description.
        return refusal(error), [], error


def _receive_rest(first: Tensor, src: int, group: dist.ProcessGroup) -> bytes:
    """Receive the rest of a description after its first message, and return the whole description."""
    head, more = wire.read_prologue(first)
    if more:
        try:
            rest = new_bytes(more, first.device)
        except Exception as error:  # torch raises different errors for sizes beyond any memory
            raise TransferError(f"from rank {src}: no memory for a description of {more} bytes: {error}") from error
        broadcast_all([rest], src, group)
        head += wire.content_of(rest)
    return head


def _gather_descriptions(head: bytes, devices: MessageDevices, group: dist.ProcessGroup) -> list[bytes]:
    """Return the descriptions of all ranks."""
    first, *rest = wire.prologue(head, devices.main_device)
    own = dist.get_rank(group)
    found = []
    for rank, begin in enumerate(gather_messages(first, group, "all_gather")):
        src = dist.get_global_rank(group, rank)
        if rank == own:
            broadcast_all(rest, src, group)
            found.append(head)
        else:
            found.append(_receive_rest(begin, src, group))
    return found


def _read_header(head: bytes, rank: int) -> wire.Header:
    try:
        return wire.Header(head)
    except TransferError as error:
        raise TransferError(f"from rank {rank}: {error}") from error


def _make_container(target: wire.NewBuffers, device: torch.device | None, allow_pickle: bool) -> Any:
    container = target.make_container(allow_pickle)
    return container if device is None else container.to(device)


# --- reducing ---------------------------------------------------------------------------------------------------------


class PendingReduction:
    """A running in-place reduction of tensors. Call :meth:`wait` to complete it.

    Args:
        work: the work of torch.
        call: the name of the call, for errors.
        after: called once the work is done, to copy the result into the tensors.
    """

    def __init__(self, work: dist.Work, call: str, after: Callable[[], None] | None = None) -> None:
        self._work: dist.Work | None = work
        self._call = call
        self._after = after
        self._problem = ""

    def wait(self, timeout: object = None) -> bool:
        """Wait until the tensors of the container have been reduced.

        Args:
            timeout: accepted for compatibility with torch's works; the timeout of the process group applies.

        Raises:
            TransferError: the connection broke or timed out.
        """
        if self._work is not None:
            work, self._work = self._work, None
            try:
                wait_for([work], self._call)
            except TransferError as error:
                # Keep the text only: the frames of the exception would keep the process group alive.
                self._problem = f"{error}"
            else:
                if self._after is not None:
                    self._after()
        if self._problem:
            raise TransferError(self._problem)
        return True

    def is_completed(self) -> bool:
        """Return whether the reduction is complete. If torch's work is done, this completes it, as :meth:`wait` does.

        Raises:
            TransferError: the connection broke or timed out.
        """
        return self._work is None or (self._work.is_completed() and self.wait())


def reduce(
    container: Contract, dst: int | None, op: object, group: dist.ProcessGroup, bucket_bytes: float | None = None
) -> list[PendingReduction]:
    """Begin to reduce a container over the ranks of a group, in place; see `TensorDict.all_reduce`.

    Args:
        container: the container.
        dst: the global rank that gets the result; `None` for all ranks.
        op: the reduction; `None` for the sum.
        group: the process group.
        bucket_bytes: the largest size of tensors that are packed, and of a pack. `None` for `_SMALL`, and packs of any
            size.

    Raises:
        TransferError: the containers of the ranks differ. All ranks raise it, and nothing has changed.
    """
    call = "all_reduce" if dst is None else "reduce"
    op = dist.ReduceOp.SUM if op is None else op
    tensors = _agree_on_tensors(container, group, call, op, dst, bucket_bytes)
    largest, room = (_SMALL, math.inf) if bucket_bytes is None else (bucket_bytes, bucket_bytes)
    writes = dst is None or dist.get_rank() == dst
    devices = MessageDevices(group)
    start: Callable[..., dist.Work] = dist.all_reduce if dst is None else partial(dist.reduce, dst=dst)

    def begin(tensor: Tensor) -> dist.Work:
        try:
            return start(tensor, op=op, group=group, async_op=True)
        except RuntimeError as error:
            raise TransferError(f"{call}: {error}") from error

    found = []
    packs: list[list[Tensor]] = []
    # For each dtype and device, the pack that is being filled, and the bytes that it has room for.
    unfilled: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], float]] = {}
    with torch.no_grad():
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            if nbytes > largest and tensor.is_contiguous() and devices.kind(tensor.device.type) == tensor.device.type:
                # On a rank without a result, torch may overwrite the memory. Give it a copy.
                found.append(PendingReduction(begin(tensor if writes else tensor.clone()), call))
            elif nbytes:
                kind = (tensor.dtype, tensor.device)
                pack, rest = unfilled.get(kind, ([], 0.0))
                if nbytes > rest:
                    pack, rest = [], room
                    packs.append(pack)
                pack.append(tensor)
                unfilled[kind] = pack, rest - nbytes
        for pack in packs:
            flat = torch.cat([tensor.reshape(-1) for tensor in pack]).to(devices.place(pack[0].device.type))
            found.append(PendingReduction(begin(flat), call, _make_unpack(flat, pack) if writes else None))
    return found


def _make_unpack(flat: Tensor, pack: list[Tensor]) -> Callable[[], None]:
    """Return a function that copies the parts of `flat` into the tensors of `pack`."""

    def unpack() -> None:
        parts = torch.split(flat, [tensor.numel() for tensor in pack])
        with torch.no_grad():
            foreach.copy_(pack, [part.view(tensor.shape) for part, tensor in zip(parts, pack, strict=True)])

    return unpack


def _agree_on_tensors(
    container: Contract,
    group: dist.ProcessGroup,
    call: str,
    op: object,
    dst: int | None,
    bucket_bytes: float | None,
) -> list[Tensor]:
    """Return the tensors to reduce, after checking that all ranks make the same call with the same tensors.

    The ranks first exchange digests of their calls. Only if these differ do they exchange the calls themselves, so that
    the error can name the difference.
    """
    error: Exception | None = None
    tensors: list[Tensor] = []
    summary: dict[str, Any] = {}
    devices = MessageDevices(group)
    try:
        name = _name_reduction(op)
        tensors, table = _list_reducible(container, call, name, devices)
        if bucket_bytes is not None and not bucket_bytes > 0:
            raise ValueError(f"{call}: bucket_bytes is a positive number of bytes, got {bucket_bytes}")
        options = {"dst": dst, "bucket_bytes": bucket_bytes}
        given = "".join(f", {option}={value}" for option, value in options.items() if value is not None)
        summary = {"call": f"{call}(op={name}{given})", "table": table}
    except Exception as problem:  # Any error: the other ranks wait for a digest.
        error = problem
        summary = {"refusal": f"{error}"}
    content = json.dumps(summary).encode()
    own = wire.as_message(_digest(content), devices.main_device)
    digests = gather_messages(own, group, call)
    if error is None and all(torch.equal(digest, own) for digest in digests):
        return tensors
    heads = _gather_descriptions(content, devices, group)
    if error is not None:
        raise error
    other = next(number for number, head in enumerate(heads) if head != content)
    raise TransferError(f"{call}: {_explain_difference(summary, heads[other], group.rank(), other)}")


def _explain_difference(summary: dict[str, Any], content: bytes, own: int, rank: int) -> str:
    """Return the text of the error that this rank cannot reduce together with another one."""
    try:
        other = parse_json(content)
        if "refusal" in other:
            return f"rank {rank} of the group cannot take part: {other['refusal']}"
        if other["call"] != summary["call"]:
            return f"rank {own} of the group called {summary['call']}, and rank {rank} {other['call']}"
        return describe_differences(summary["table"], other["table"], f"on rank {own}", f"on rank {rank}", _parse_path)
    except Exception as error:  # the network may deliver any bytes
        return f"rank {rank} of the group sent broken data: {error!r:.200}"


def _name_reduction(op: object) -> str:
    """Return the name of a reduction.

    Raises:
        TypeError: `op` is not a reduction.
    """
    # `op` is a `RedOpType`, or a `ReduceOp` that has one as `op`. Reductions with a factor are refused.
    kind = op if type(op) is dist.ReduceOp.RedOpType else getattr(op, "op", None)
    if type(kind) is not dist.ReduceOp.RedOpType or op is dist.ReduceOp.PREMUL_SUM:
        raise TypeError(f"op is a torch.distributed.ReduceOp such as ReduceOp.SUM, got {op!r:.80}")
    return str(kind.name)


def _list_reducible(
    container: Contract, call: str, op: str, devices: MessageDevices
) -> tuple[list[Tensor], dict[str, str]]:
    """Return the tensors of a container, sorted by key, and a description of each.

    Raises:
        TransferError: a tensor cannot be reduced.
    """
    found: dict[str, Tensor] = {}
    table: dict[str, str] = {}
    counts: dict[Path, int] = {}
    for path, leaf in container._walk():
        # The members of a lazy stack have leaves with the same path. Number them.
        counts[path] = counts.get(path, -1) + 1
        name = json.dumps([path, counts[path]])
        form = str(leaf.dtype)[6:]
        if leaf.is_nested:
            sizes = ragged.row_sizes(leaf)
            form += f" of {len(sizes)} rows of the sizes {_digest(sizes.numpy().tobytes()).hex()}"
        else:
            shape = list(leaf.shape)
            form += f" {shape}"
            strides = leaf.stride() if leaf.layout is torch.strided and leaf.numel() else ()
            if 0 in strides:
                # The elements of an expanded tensor share memory, and torch would reduce it several times.
                leaf = leaf[tuple(slice(None) if stride else 0 for stride in strides)]
                expanded = [dim for dim, stride in enumerate(strides) if not stride and shape[dim] > 1]
                form += f" expanded along {expanded}" if expanded else ""
        if not _is_plain(leaf):
            raise TransferError(f"{call}: entry {joined(path)!r} ({type(leaf).__name__}, {form}) has no plain memory")
        takes = _TAKES.get(op, _INTS | _FLOATS)
        # For averages, Gloo divides in place, which fails for ints.
        if leaf.dtype not in (takes if devices.place(leaf.device.type).type == "cpu" else takes | _INTS):
            raise TransferError(
                f"{call}: entry {joined(path)!r} is {form}, of a dtype that torch.distributed does not reduce so "
                f"({op}): cast it first, or leave it out"
            )
        table[name] = form
        found[name] = ragged.pack_elements(leaf).detach().as_subclass(Tensor)
    order = sorted(found)
    return [found[name] for name in order], {name: table[name] for name in order}


def _is_plain(leaf: Tensor) -> bool:
    """Return whether a write to `ragged.pack_elements(leaf)` changes the leaf, and each element once."""
    if leaf.is_nested:
        return ragged.compact(leaf) is leaf
    if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or 0 in leaf.stride():
        return False
    return type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _parse_path(name: str) -> Path:
    """Return the path of a name in the table of `_list_reducible`."""
    return tuple(json.loads(name)[0])


# --- stacking and scattering ------------------------------------------------------------------------------------------


def gather_and_stack(container: Any, dst: int, group: object, allow_pickle: bool) -> Any:
    """Write the containers of the other ranks into the rows of the container of rank `dst`."""
    group = as_group(group)
    target = rank_in(group, dst, "dst")
    if group.rank() != target:
        Sending(_make_channel(group, target, _STACK), container, allow_pickle).wait()
        return None
    others = [rank for rank in range(group.size()) if rank != target]
    problem: Exception | None = None
    size = container._batch_size
    if not size or size[0] != len(others):
        problem = TransferError(
            f"gather_and_stack: the container of rank {dst} has the batch size {list(size)}, which must begin with "
            f"{len(others)}, one for each of the other ranks"
        )
    rows = []
    for row, rank in enumerate(others):
        part = container[row] if problem is None else None
        receiving = Receiving(_make_channel(group, rank, _STACK), part, allow_pickle=allow_pickle, problem=problem)
        # Receive from all ranks at the same time: otherwise the others would time out while one rank is missing.
        rows.append((row, part, receive_in_thread(receiving)))
    problems = []
    for row, part, future in rows:
        try:
            future.wait()
            if part is not None and not _writes_to_row(part, container, row):
                container[row] = part
        except (TransferError, RuntimeError) as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return container


def _writes_to_row(part: Contract, container: Any, row: int) -> bool:
    """Return whether a write to `part`, read from `container[row]`, has changed this row of the container."""
    if part._wrapped_container() is container[row]._wrapped_container():
        # Both are the same member of a lazy stack.
        return True
    leaves = part._leaves()
    if shared_memory.has_values(part) or any(leaf.is_nested for leaf in leaves):
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
    """Send one container to every rank; see `TensorDict.scatter`."""
    own, source = group.rank(), rank_in(group, src, "src")
    if own != source:
        return Receiving(_make_channel(group, source, _SCATTER), None, device, allow_pickle).run()
    problem = _find_problem(containers, group.size())
    problems = [] if problem is None else [problem]
    given: Sequence[Contract | None] = (
        [None] * group.size() if containers is None or problem is not None else containers
    )
    sendings = []
    for rank, container in enumerate(given):
        if rank != own:
            try:
                sendings.append(Sending(_make_channel(group, rank, _SCATTER), container, allow_pickle, problem))
            except Exception as error:  # this rank got a refusal; send the others their containers
                problems.append(error)
    for sending in sendings:
        try:
            sending.wait()
        except TransferError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return given[own]


def _find_problem(containers: Sequence[object] | None, count: int) -> Exception | None:
    """Return the error if `containers` are not one container for each of `count` ranks."""
    if containers is None or len(containers) != count:
        given = "none" if containers is None else len(containers)
        return ValueError(f"scatter needs one container for each of the {count} ranks, got {given}")
    for position, container in enumerate(containers):
        if not isinstance(container, Contract):
            return TypeError(f"scatter takes containers only, got {type(container).__name__} at position {position}")
    return None


def _make_channel(group: dist.ProcessGroup, rank: int, tag: int) -> Channel:
    return Channel.of(group, None, rank, tag, False, "rank")
