"""Containers from one rank of a `torch.distributed` process group to another, and over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch.distributed as dist
from torch.futures import Future

from tensordict.core.devices import as_device
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel import collectives, transfers
from tensordict.parallel.channels import Channel, as_group, rank_in
from tensordict.parallel.sharded import gather_leaves
from tensordict.parallel.transfers import Receiving, Sending

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    class _MessageOptions(TypedDict, total=False):
        group: object
        init_tag: int
        pseudo_rand: bool
        allow_pickle: bool

    class _To(_MessageOptions, total=False):
        group_dst: int | None

    class _From(_MessageOptions, total=False):
        group_src: int | None


class Communicating(Leaves):
    """`send`, `recv`, `broadcast`, `all_reduce` and their kin.

    The engine is torch's own. A container travels as one description and a few messages of bytes: all small tensors in
    one, each large one in its own, straight from its memory and into that of the receiver. Wherever a `group` is taken,
    it may be a process group, a device mesh of one dim, or `None` for the default group.
    """

    # --- from one rank to another -----------------------------------------------------------------------------------

    def send(
        self,
        dst: int | None = None,
        *,
        group: object = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Send this container to another rank, which calls :meth:`recv` or :meth:`from_remote_init`.

        Args:
            dst: the global rank it goes to, or
            group: the process group, and
            group_dst: the rank in it.
            init_tag: the tag of the messages, the same on both sides.
            pseudo_rand: spread the tags of different callers; the same on both sides.
            consolidated: accepted for compatibility: small tensors go in one message anyway.
            allow_pickle: pickle the values that JSON cannot hold; the receiver has to agree too.

        Raises:
            TransferError: the receiver did not take it, with the reason and the key; or the connection broke, or the
                timeout of the process group passed. A `RuntimeError`.
            SaveError: an entry cannot be sent; both sides raise. A `RuntimeError` too.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank):
            ...     import torch
            ...     from tensordict import TensorDict
            ...     td = TensorDict(a=torch.full((3,), float(rank)))
            ...     td.send(1) if rank == 0 else td.recv(0)
            ...     return td
        """
        channel = Channel.of(group, dst, group_dst, init_tag, pseudo_rand, "dst")
        Sending(channel, self, allow_pickle).wait()

    def recv(
        self,
        src: int | None = None,
        *,
        group: object = None,
        group_src: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        consolidated: bool = False,
        allow_pickle: bool = False,
    ) -> int:
        """Receive what another rank sends with :meth:`send`, in place: the tensors of this container are written to.

        They may lie in memory, in shared memory or in files. Keys, shapes and dtypes must be those of what is sent; the
        order of keys, the names of dims, and the kinds of containers may differ (a lazy stack into a dense container).
        A container that is refused changes nothing; one whose connection breaks on the way may have been written to in
        part. Values that are no tensors become those that were sent.

        Args:
            src: the global rank it comes from, or
            group: the process group, and
            group_src: the rank in it.
            init_tag: the tag of the messages, the same on both sides.
            pseudo_rand: as the sender has it.
            consolidated: accepted for compatibility.
            allow_pickle: load values that were sent pickled, which may run any code.

        Returns:
            the tag that the last tensor would have if each had one: the next free one is one more.

        Raises:
            TransferError: it does not fit, or cannot be written to (the keys are named), the sender could not send it,
                the connection broke, or the timeout of the process group passed; the sender raises too. A
                `RuntimeError`.
        """
        channel = Channel.of(group, src, group_src, init_tag, pseudo_rand, "src")
        receiving = Receiving(channel, self, allow_pickle=allow_pickle)
        receiving.run()
        return channel.last_tag(receiving.count)

    @overload
    def isend(self, dst: int | None = ..., *, return_early: Literal[False] = ..., **options: Unpack[_To]) -> int: ...
    @overload
    def isend(self, dst: int | None = ..., *, return_early: Literal[True], **options: Unpack[_To]) -> list[Sending]: ...
    def isend(
        self,
        dst: int | None = None,
        *,
        group: object = None,
        group_dst: int | None = None,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        return_early: bool = False,
        allow_pickle: bool = False,
    ) -> int | list[Sending]:
        """As :meth:`send`, which waits until the receiver has it; with `return_early`, without waiting.

        Args:
            dst: as for :meth:`send`, like what is not listed here.
            return_early: return what can be waited for. The tensors must not change until it has been.

        Returns:
            with `return_early`, a list of objects whose `wait()` ends the transfer, and raises what :meth:`send` does.
            Otherwise the tag that the last tensor would have.

            A transfer that nobody waits for goes on, and the program ends only when it is done. What goes wrong with
            it is raised by the next call that sends to that rank, or receives from it; when the program ends, it is
            written to standard error.

        Raises:
            TransferError: as :meth:`send`.
        """
        channel = Channel.of(group, dst, group_dst, init_tag, pseudo_rand, "dst")
        sending = Sending(channel, self, allow_pickle=allow_pickle)
        if return_early:
            return [transfers.finish_at_exit(sending)]
        sending.wait()
        return channel.last_tag(sending.count)

    @overload
    def irecv(
        self, src: int | None = ..., *, return_premature: Literal[False] = ..., **options: Unpack[_From]
    ) -> None: ...
    @overload
    def irecv(
        self, src: int | None = ..., *, return_premature: Literal[True], **options: Unpack[_From]
    ) -> list[Future[Self]]: ...
    def irecv(
        self,
        src: int | None = None,
        *,
        group: object = None,
        group_src: int | None = None,
        return_premature: bool = False,
        init_tag: int = 0,
        pseudo_rand: bool = False,
        allow_pickle: bool = False,
    ) -> list[Future[Self]] | None:
        """As :meth:`recv`; with `return_premature` a thread of its own receives, and there is a future to wait for.

        Args:
            src: as for :meth:`recv`, like what is not listed here.
            return_premature: return the futures at once. This container must not be used until they are done.

        Returns:
            with `return_premature`, a list of futures, whose `wait()` gives this container, or raises what :meth:`recv`
            does; otherwise `None`.
        """
        channel = Channel.of(group, src, group_src, init_tag, pseudo_rand, "src")
        receiving = Receiving(channel, self, allow_pickle=allow_pickle)
        if return_premature:
            return [transfers.receive_in_thread(receiving)]
        receiving.run()
        return None

    async def asend(self, dst: int, *, group: object = None, init_tag: int = 0, allow_pickle: bool = False) -> None:
        """As :meth:`send`, for programs with an event loop, which goes on meanwhile.

        After a cancelled call the container still arrives.

        Args:
            dst: the global rank it goes to. The pipes of UCXX that the reference takes are not supported.
            group: the process group.
            init_tag: the tag of the messages.
            allow_pickle: pickle the values that JSON cannot hold.

        Raises:
            TransferError: as :meth:`send`.
        """
        channel = Channel.of(group, dst, None, init_tag, False, "dst")
        await transfers.wait_async(Sending(channel, self, allow_pickle=allow_pickle))

    async def arecv(
        self, src: int, *, device: object = None, group: object = None, init_tag: int = 0, allow_pickle: bool = False
    ) -> Self:
        """As :meth:`recv`, for programs with an event loop, which goes on meanwhile.

        Torch cannot take back what it was told to receive: after a cancelled call, what comes next under its tag is
        still written to this container.

        Args:
            src: the global rank it comes from.
            device: where a new container goes.
            group: the process group.
            init_tag: the tag of the messages.
            allow_pickle: load values that were sent pickled, which may run any code.

        Returns:
            this container, written in place; a new one if this one has no entries.

        Raises:
            TransferError: as :meth:`recv`.
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
        """Send this container to a rank that has none like it, and calls :meth:`from_remote_init`.

        Args:
            dst: the global rank it goes to; ignored with `use_broadcast`.
            group: the process group.
            device: send from this device.
            use_broadcast: send it to all ranks of the group, which call `from_remote_init(..., use_broadcast=True)`.
            _tensorclass_type: accepted for compatibility.
            allow_pickle: pickle the values that JSON cannot hold; the receiver has to agree too.

        Raises:
            TransferError: as :meth:`send`; with `use_broadcast` as :meth:`broadcast`.
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
        """The container that rank `src` sends with :meth:`init_remote` or :meth:`send`.

        Args:
            src: the global rank it comes from.
            group: the process group.
            device: the device of the result.
            use_broadcast: as the sender has it.
            allow_pickle: load values that were sent pickled, which may run any code.

        Returns:
            a new container of the kind that was sent, with all tensors in one storage (:meth:`is_consolidated`).

        Raises:
            TransferError: it cannot be loaded here, such as a tensorclass that this program has not imported; the
                sender raises too. Or the connection broke, or the timeout of the process group passed.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank, td=None):
            ...     from tensordict import TensorDict
            ...     return td.init_remote(dst=1) if rank == 0 else TensorDict.from_remote_init(src=0)
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
        """Bring the container of rank `src` to all ranks of a group; on the others, this one only lends its method.

        Args:
            src: the global rank that has it.
            group: the process group.
            device: the device of the result on the other ranks.
            _tensorclass_type: accepted for compatibility.
            allow_pickle: pickle the values that JSON cannot hold, and load them; the same on all ranks.

        Returns:
            on the other ranks a new container of the kind that was sent, all in one storage; on `src` the very
            container.

        Raises:
            TransferError: it cannot be sent, or a rank cannot take it (no memory, a tensorclass that it does not know,
                a pickled value that it may not load): all ranks raise, with the key or the rank. Or the connection
                broke or timed out.
            ValueError: `src` is none of the ranks of the group, or this rank is not in it.
        """
        place = None if device is None else as_device(device)
        return collectives.broadcast(self, src, as_group(group), place, allow_pickle)  # type: ignore[no-any-return]

    def all_gather(self, *, group: object = None, allow_pickle: bool = False) -> list[Self]:
        """The containers of all ranks of a group; they may differ in keys, shapes and kinds.

        Args:
            group: the process group.
            allow_pickle: pickle the values that JSON cannot hold, and load them; the same on all ranks.

        Returns:
            one container per rank, in their order, each in memory of its own.

        Raises:
            TransferError: one of them cannot be sent, or a rank cannot take it, which all ranks raise, with the key or
                the rank; or the connection broke or timed out.
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
        """Hand one container to every rank of a process group, from the list that rank `src` has.

        Args:
            src: the global rank that has the containers.
            tensordicts: on that rank, one container per rank of the group, in their order; ignored on the others.
                They may differ in keys, shapes and kinds.
            group: the process group.
            device: the device of the results on the other ranks.
            allow_pickle: pickle the values that JSON cannot hold, and load them; the same on all ranks.

        Returns:
            the container of this rank: a new one of the kind that was sent, all in one storage; on `src` the very
            container of the list.

        Raises:
            ValueError: on `src`, there is not one container per rank. None is sent; the others raise `TransferError`.
            TypeError: on `src`, something else is in the list; likewise.
            TransferError: a container could not be sent or was not taken, which its rank and `src` raise; the others
                have theirs. Or the connection broke or timed out.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank, parts=None):
            ...     from tensordict import TensorDict
            ...     return TensorDict().scatter(0, parts if rank == 0 else None)
        """
        place = None if device is None else as_device(device)
        return collectives.scatter(tensordicts, src, as_group(group), place, allow_pickle)  # type: ignore[no-any-return]

    def gather_and_stack(self, dst: int, group: object = None, *, allow_pickle: bool = False) -> Self | None:
        """Write the containers of all other ranks into the rows of that of rank `dst`, in the order of their ranks.

        Args:
            dst: the global rank; its container has one row less than the group has ranks.
            group: the process group.
            allow_pickle: pickle the values that JSON cannot hold, and load them; the same on all ranks.

        Returns:
            on `dst` this container, written in place; `None` on the others.

        Raises:
            TransferError: a container does not fit its row or did not come, which its rank raises too; the other rows
                are written.
        """
        return collectives.gather_and_stack(self, dst, group, allow_pickle)  # type: ignore[no-any-return]

    def reduce(
        self, dst: int, op: object = None, async_op: bool = False, return_premature: bool = False, group: object = None
    ) -> list[collectives.PendingReduction] | None:
        """Combine the tensors of all ranks of a group, in place on rank `dst`.

        Args:
            dst: the global rank that gets the result; the tensors of the others stay as they are.
            op: a `torch.distributed.ReduceOp`; the sum by default.
            async_op: needed for `return_premature`; the tensors are reduced at the same time anyway.
            return_premature: with `async_op`, return what can be waited for.
            group: the process group.

        Returns:
            with `async_op` and `return_premature`, a list of objects whose `wait()` ends the call; otherwise `None`.

        Raises:
            TransferError: the containers of the ranks differ in keys, shapes or dtypes, `op` does not take a dtype, or
                the ranks call with different arguments; all ranks raise, and nothing has changed. Or the connection
                broke or timed out.
        """
        group = as_group(group)
        rank_in(group, dst, "dst")
        found = collectives.reduce(self, dst, op, group)
        if async_op and return_premature:
            return found
        for reduction in found:
            reduction.wait()
        return None

    def all_reduce(
        self, op: object = None, *, group: object = None, async_op: bool = False
    ) -> list[collectives.PendingReduction] | None:
        """Combine the tensors of all ranks of a group, in place on all of them.

        Args:
            op: a `torch.distributed.ReduceOp`; the sum by default.
            group: the process group.
            async_op: return what can be waited for; the tensors must not be used until then.

        Returns:
            with `async_op`, a list of objects whose `wait()` ends the call; otherwise `None`.

        Raises:
            TransferError: the containers of the ranks differ in keys, shapes or dtypes, `op` does not take a dtype, or
                the ranks call with different arguments; all ranks raise, and nothing has changed. Or the connection
                broke or timed out.

        Example:
            Called by every rank:

            >>> def average(gradients, world_size):
            ...     gradients.all_reduce()
            ...     return gradients.div_(world_size)
        """
        found = collectives.reduce(self, None, op, as_group(group))
        if async_op:
            return found
        for reduction in found:
            reduction.wait()
        return None

    def full_tensor(self) -> Self:
        """This container with the whole tensors in the place of `DTensor` leaves, as those of sharded modules are.

        All ranks of the meshes that the tensors are on have to call it.

        Returns:
            a new container; leaves that are no `DTensor` are shared.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.full_tensor()["a"] is td["a"]
            True
        """
        return gather_leaves(self)
