"""The mixin of `send`, `recv`, `broadcast`, `all_reduce` and their kin, on top of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch.distributed as dist
from torch.futures import Future

from tensordict.core.devices import as_device
from tensordict.core.signatures import refuse_unknown, spells
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel import collectives, transfers
from tensordict.parallel.channels import Channel, as_group, rank_in
from tensordict.parallel.sharded import gather_leaves
from tensordict.parallel.transfers import Receiving, Sending

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.core.annotations import No, On

    class _Tags(TypedDict, total=False):
        group: object
        init_tag: int
        pseudo_rand: bool
        consolidated: bool

    class _To(_Tags, total=False):
        group_dst: int | None
        allow_pickle: bool

    class _From(_Tags, total=False):
        group_src: int | None
        allow_pickle: bool


def _open_channel(
    role: str,
    peer: int | None,
    group_peer: int | None,
    *,
    group: object = None,
    init_tag: int = 0,
    pseudo_rand: bool = False,
    consolidated: bool = False,
) -> Channel:
    """Return the channel to another rank. A consolidated container is one message, which needs no tags."""
    tags = (0, False) if consolidated else (init_tag, pseudo_rand)
    return Channel.of(group, peer, group_peer, *tags, role)


class Communicating(Leaves):
    """`send`, `recv`, `broadcast`, `all_reduce` and their kin.

    A container is sent through torch's process groups, as one description and a few messages of bytes. All small
    tensors share one message. Each large tensor has a message of its own, without intermediate copies on either side.
    The argument `group` is a process group, a device mesh of one dim, or `None` for the default group.
    """

    # --- from one rank to another -----------------------------------------------------------------------------------

    @spells(_open_channel)
    def send(
        self, dst: int | None = None, *, group_dst: int | None = None, allow_pickle: bool = False, **tags: Unpack[_Tags]
    ) -> None:
        """Send this container to another rank, which calls :meth:`recv` or :meth:`from_remote_init`.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank):
            ...     import torch
            ...     from tensordict import TensorDict
            ...     td = TensorDict(a=torch.full((3,), float(rank)))
            ...     td.send(1) if rank == 0 else td.recv(0)
            ...     return td

        Args:
            dst: the global rank of the receiver.
            group: the process group.
            group_dst: the rank of the receiver in the group, instead of `dst`.
            init_tag: the tag of the messages, the same on both sides.
            pseudo_rand: use different tags for different callers; the same on both sides.
            consolidated: ignore `init_tag` and `pseudo_rand`; the same on both sides. Small tensors always share one
                message.
            allow_pickle: pickle the values that JSON cannot hold. The receiver must allow it too.

        Raises:
            TransferError: the receiver rejected the container (the error says why, and names the key), the connection
                broke, or the timeout of the process group passed. A `RuntimeError`.
            SaveError: an entry cannot be sent. Both sides raise an error. A `RuntimeError` too.
        """
        refuse_unknown(Communicating.send, tags)
        Sending(_open_channel("dst", dst, group_dst, **tags), self, allow_pickle).wait()

    @spells(_open_channel)
    def recv(
        self, src: int | None = None, *, group_src: int | None = None, allow_pickle: bool = False, **tags: Unpack[_Tags]
    ) -> int:
        """Receive a container from another rank, which calls :meth:`send`, and write it into the tensors of this one.

        Args:
            src: the global rank of the sender.
            group: the process group.
            group_src: the rank of the sender in the group, instead of `src`.
            init_tag: the tag of the messages, the same on both sides.
            pseudo_rand: the same as on the sender.
            consolidated: the same as on the sender.
            allow_pickle: unpickle values that were sent pickled. Unpickling can run any code.

        Returns:
            the tag of the last tensor, as if each tensor had its own; the next free tag is one higher.

        Raises:
            TransferError: the container does not fit or this one cannot be written to (the error names the keys), the
                sender could not send it, the connection broke, or the timeout of the process group passed. The sender
                raises an error too. A `RuntimeError`.

        The tensors of this container may be in memory, in shared memory or in files. Keys, shapes and dtypes must
        match. The order of keys, the names of dims and the kinds of containers may differ: a dense container can
        receive a lazy stack. If the container does not fit, nothing changes. If the connection breaks, a part may have
        been written. Non-tensor values are replaced by the received ones.
        """
        refuse_unknown(Communicating.recv, tags)
        channel = _open_channel("src", src, group_src, **tags)
        receiving = Receiving(channel, self, allow_pickle=allow_pickle)
        receiving.run()
        return channel.last_tag(receiving.count)

    @overload
    def isend(self, dst: int | None = ..., *, return_early: No = ..., **options: Unpack[_To]) -> int: ...
    @overload
    def isend(self, dst: int | None = ..., *, return_early: On, **options: Unpack[_To]) -> list[Sending]: ...
    @spells(_open_channel)
    def isend(
        self,
        dst: int | None = None,
        *,
        group_dst: int | None = None,
        return_early: bool = False,
        allow_pickle: bool = False,
        **tags: Unpack[_Tags],
    ) -> int | list[Sending]:
        """Send this container to another rank, like :meth:`send`, and with `return_early` do not wait for the receiver.

        Args:
            dst: as for :meth:`send`, like the other arguments.
            return_early: return at once. The tensors must not change until the transfer has ended.

        Returns:
            with `return_early`, a list of objects. Their `wait()` waits for the end of the transfer, and raises the
            errors of :meth:`send`. Otherwise the tag of the last tensor, as from :meth:`recv`.

        Raises:
            TransferError: as for :meth:`send`.

        If you never call `wait()`, the transfer still completes, and the program ends only afterwards. The next call
        that sends to that rank, or receives from it, raises its errors. At the end of the program, errors are written
        to standard error.
        """
        refuse_unknown(Communicating.isend, tags)
        channel = _open_channel("dst", dst, group_dst, **tags)
        sending = Sending(channel, self, allow_pickle=allow_pickle)
        if return_early:
            return [transfers.finish_at_exit(sending)]
        sending.wait()
        return channel.last_tag(sending.count)

    @overload
    def irecv(self, src: int | None = ..., *, return_premature: No = ..., **options: Unpack[_From]) -> None: ...
    @overload
    def irecv(self, src: int | None = ..., *, return_premature: On, **options: Unpack[_From]) -> list[Future[Self]]: ...
    @spells(_open_channel)
    def irecv(
        self,
        src: int | None = None,
        *,
        group_src: int | None = None,
        return_premature: bool = False,
        allow_pickle: bool = False,
        **tags: Unpack[_Tags],
    ) -> list[Future[Self]] | None:
        """Receive a container from another rank, like :meth:`recv`, and with `return_premature` in another thread.

        Args:
            src: as for :meth:`recv`, like the other arguments.
            return_premature: return at once. This container must not be used until the futures are done.

        Returns:
            with `return_premature`, a list of futures, whose `wait()` returns this container or raises the errors of
            :meth:`recv`; otherwise `None`.
        """
        refuse_unknown(Communicating.irecv, tags)
        receiving = Receiving(_open_channel("src", src, group_src, **tags), self, allow_pickle=allow_pickle)
        if return_premature:
            return [transfers.receive_in_thread(receiving)]
        receiving.run()
        return None

    async def asend(self, dst: int, *, group: object = None, init_tag: int = 0, allow_pickle: bool = False) -> None:
        """Send this container to another rank, like :meth:`send`, without blocking the event loop.

        Args:
            dst: the global rank of the receiver. The reference also takes UCXX pipes, which are not supported here.
            group: the process group.
            init_tag: the tag of the messages.
            allow_pickle: pickle the values that JSON cannot hold.

        Raises:
            TransferError: as for :meth:`send`.

        If the call is cancelled, the container still arrives.
        """
        channel = Channel.of(group, dst, None, init_tag, False, "dst")
        await transfers.wait_async(Sending(channel, self, allow_pickle=allow_pickle))

    async def arecv(
        self, src: int, *, device: object = None, group: object = None, init_tag: int = 0, allow_pickle: bool = False
    ) -> Self:
        """Receive a container from another rank, like :meth:`recv`, without blocking the event loop.

        Args:
            src: the global rank of the sender.
            device: the device of a new container.
            group: the process group.
            init_tag: the tag of the messages.
            allow_pickle: unpickle values that were sent pickled. Unpickling can run any code.

        Returns:
            this container, written in place; a new container if this one is empty.

        Raises:
            TransferError: as for :meth:`recv`.

        Torch cannot cancel a receive. After a cancelled call, the next message with this tag is still written into this
        container.
        """
        channel = Channel.of(group, src, None, init_tag, False, "src")
        target = self if self._structure() else None
        place = None if device is None else as_device(device)
        return await transfers.receive_async(Receiving(channel, target, place, allow_pickle))  # type: ignore[no-any-return]

    def init_remote(
        self,
        dst: int | None = None,
        group: object = None,
        device: object = None,
        use_broadcast: bool = False,
        _tensorclass_type: str | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """Send this container to a rank that calls :meth:`from_remote_init`, which makes a new container.

        Args:
            dst: the global rank of the receiver; ignored with `use_broadcast`.
            group: the process group.
            device: move the container to this device before sending.
            use_broadcast: send it to all ranks of the group, which call `from_remote_init(..., use_broadcast=True)`.
            _tensorclass_type: accepted for compatibility.
            allow_pickle: pickle the values that JSON cannot hold. The receiver must allow it too.

        Raises:
            TransferError: as for :meth:`send`, or with `use_broadcast` as for :meth:`broadcast`.
        """
        container = self if device is None else self.to(as_device(device))
        if use_broadcast:
            collectives.broadcast(container, dist.get_rank(), as_group(group), None, allow_pickle)
        else:
            Sending(Channel.of(group, dst, None, 0, False, "dst"), container, allow_pickle=allow_pickle).wait()

    @classmethod
    def from_remote_init(
        cls,
        src: int,
        group: object = None,
        device: object = None,
        use_broadcast: bool = False,
        *,
        allow_pickle: bool = False,
    ) -> Self:
        """Receive a new container from rank `src`, which calls :meth:`init_remote` or :meth:`send`.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank, td=None):
            ...     from tensordict import TensorDict
            ...     return td.init_remote(dst=1) if rank == 0 else TensorDict.from_remote_init(src=0)

        Args:
            src: the global rank of the sender.
            group: the process group.
            device: the device of the result.
            use_broadcast: the same as on the sender.
            allow_pickle: unpickle values that were sent pickled. Unpickling can run any code.

        Returns:
            a new container of the same kind, with all tensors in one storage (:meth:`is_consolidated`).

        Raises:
            TransferError: this program cannot load it, for example a tensorclass that it has not imported (the sender
                raises an error too); the connection broke; or the timeout of the process group passed.
        """
        place = None if device is None else as_device(device)
        if use_broadcast:
            return collectives.broadcast(None, src, as_group(group), place, allow_pickle)  # type: ignore[no-any-return]
        return Receiving(Channel.of(group, src, None, 0, False, "src"), None, place, allow_pickle).run()  # type: ignore[no-any-return]

    # --- over all ranks ---------------------------------------------------------------------------------------------

    def broadcast(
        self,
        src: int,
        *,
        group: object = None,
        device: object = None,
        _tensorclass_type: str | None = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Send the container of rank `src` to all ranks of a group. On other ranks use the return value.

        Unlike :meth:`all_reduce`, it does not fill `self`, whose keys and shapes may differ there.
        `td.update_(td.broadcast(0))` writes into the tensors of `td`.

        Args:
            src: the global rank of the sender.
            group: the process group.
            device: the device of the result on the other ranks.
            _tensorclass_type: accepted for compatibility.
            allow_pickle: pickle the values that JSON cannot hold, and unpickle them; the same on all ranks.

        Returns:
            on `src` this container; on other ranks a new container of the same kind, with all tensors in one storage.
            There, `self` is not changed.

        Raises:
            TransferError: the container cannot be sent, or a rank cannot load it (out of memory, an unknown
                tensorclass, a pickled value without `allow_pickle`). All ranks raise it; it names the key or the rank.
                Or the connection broke or timed out.
            ValueError: `src`, or this rank, is not in the group.
        """
        place = None if device is None else as_device(device)
        return collectives.broadcast(self, src, as_group(group), place, allow_pickle)  # type: ignore[no-any-return]

    def all_gather(self, *, group: object = None, allow_pickle: bool = False) -> list[Self]:
        """Collect the containers of all ranks of a group on every rank. They may differ in keys, shapes and kinds.

        Args:
            group: the process group.
            allow_pickle: pickle the values that JSON cannot hold, and unpickle them; the same on all ranks.

        Returns:
            one container per rank, in the order of the ranks. Each has its own memory.

        Raises:
            TransferError: a container cannot be sent, or a rank cannot load it. All ranks raise it; it names the key or
                the rank. Or the connection broke or timed out.
        """
        return collectives.all_gather(self, as_group(group), allow_pickle)

    def scatter(
        self,
        src: int,
        tensordicts: Sequence[object] | None = None,
        *,
        group: object = None,
        device: object = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Send one container to every rank of a process group, from a list on rank `src`.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank, parts=None):
            ...     from tensordict import TensorDict
            ...     return TensorDict().scatter(0, parts if rank == 0 else None)

        Args:
            src: the global rank of the sender.
            tensordicts: on `src`, one container per rank of the group, in the order of the ranks. They may differ in
                keys, shapes and kinds. Ignored on other ranks.
            group: the process group.
            device: the device of the results on the other ranks.
            allow_pickle: pickle the values that JSON cannot hold, and unpickle them; the same on all ranks.

        Returns:
            the container of this rank. On `src` it is the element of the list; on other ranks it is a new container of
            the same kind, with all tensors in one storage.

        Raises:
            ValueError: on `src`, the list does not have one container per rank. Nothing is sent, and other ranks raise
                `TransferError`.
            TypeError: on `src`, the list has elements that are not containers; likewise.
            TransferError: a container could not be sent or loaded. Its rank and `src` raise it; other ranks receive
                their containers. Or the connection broke or timed out.
        """
        place = None if device is None else as_device(device)
        return collectives.scatter(tensordicts, src, as_group(group), place, allow_pickle)  # type: ignore[no-any-return]

    def gather_and_stack(self, dst: int, group: object = None, *, allow_pickle: bool = False) -> Self | None:
        """Write the containers of all other ranks into the rows of the container on rank `dst`, in the order of ranks.

        Args:
            dst: the global rank of the receiver. Its container has one row for each other rank.
            group: the process group.
            allow_pickle: pickle the values that JSON cannot hold, and unpickle them; the same on all ranks.

        Returns:
            on `dst` this container, written in place; `None` on other ranks.

        Raises:
            TransferError: a container does not fit its row or did not arrive. Its rank raises it too. The other rows
                are written.
        """
        return collectives.gather_and_stack(self, dst, group, allow_pickle)  # type: ignore[no-any-return]

    def reduce(
        self,
        dst: int,
        op: object = None,
        async_op: bool = False,
        return_premature: bool = False,
        group: object = None,
        *,
        bucket_bytes: int | None = None,
    ) -> list[collectives.PendingReduction] | None:
        """Combine the tensors of all ranks of a group, in place on rank `dst`.

        Args:
            dst: the global rank that gets the result. On other ranks, the tensors do not change.
            op: a `torch.distributed.ReduceOp`; the sum by default.
            async_op: needed for `return_premature`. All tensors are reduced concurrently in any case.
            return_premature: with `async_op`, return before the reduction ends.
            group: the process group.
            bucket_bytes: as for :meth:`all_reduce`.

        Returns:
            with `async_op` and `return_premature`, a list of objects whose `wait()` waits for the end; otherwise
            `None`.

        Raises:
            TransferError: the containers of the ranks differ in keys, shapes or dtypes, `op` does not support a dtype,
                or the ranks pass different arguments. All ranks raise it, and nothing changes. Or the connection broke
                or timed out.
            ValueError: `bucket_bytes` is not positive. Ranks with another value raise a `TransferError`.
        """
        group = as_group(group)
        rank_in(group, dst, "dst")
        found = collectives.reduce(self, dst, op, group, bucket_bytes)
        if async_op and return_premature:
            return found
        for reduction in found:
            reduction.wait()
        return None

    def all_reduce(
        self, op: object = None, *, group: object = None, async_op: bool = False, bucket_bytes: int | None = None
    ) -> list[collectives.PendingReduction] | None:
        """Combine the tensors of all ranks of a group, in place on all of them.

        Example:
            Called by every rank:

            >>> def average(gradients, world_size):
            ...     gradients.all_reduce()
            ...     return gradients.div_(world_size)

        Args:
            op: a `torch.distributed.ReduceOp`; the sum by default.
            group: the process group.
            async_op: return before the reduction ends. The tensors must not be used until then.
            bucket_bytes: copy tensors of one dtype and device into buckets of at most this many bytes, and reduce each
                bucket at once. Larger tensors are reduced in place. The same on all ranks. By default, all tensors of
                up to 256 KiB share one bucket for each dtype and device.

        Returns:
            with `async_op`, a list of objects whose `wait()` waits for the end; otherwise `None`.

        Raises:
            TransferError: the containers of the ranks differ in keys, shapes or dtypes, `op` does not support a dtype,
                or the ranks pass different arguments. All ranks raise it, and nothing changes. Or the connection broke
                or timed out.
            ValueError: `bucket_bytes` is not positive. Ranks with another value raise a `TransferError`.
        """
        found = collectives.reduce(self, None, op, as_group(group), bucket_bytes)
        if async_op:
            return found
        for reduction in found:
            reduction.wait()
        return None

    def full_tensor(self) -> Self:
        """Gather each `DTensor` leaf, for example of a sharded module, to a whole tensor.

        All ranks of the meshes of the tensors must call it.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.full_tensor()["a"] is td["a"]
            True

        Returns:
            a new container that shares all other leaves.
        """
        return gather_leaves(self)
