"""Channels: process groups, peers, tags and the devices of messages, for transfers and collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tensordict.core.exceptions import TransferError
from tensordict.memory.flat_buffers import new_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# `ProcessGroup.send` and `recv`: take the message, the rank of the peer and the tag.
_Post = Callable[[list[Tensor], int, int], "dist.Work"]

# This bit marks the tags of verdicts, which travel from the receiver to the sender.
_ANSWER = 1 << 30
# This bit marks pseudo-random tags, so that they differ from the tags of callers who count from 0.
_RANDOM = 1 << 29


def as_group(group: object) -> dist.ProcessGroup:
    """Return the process group for an argument: the default group for `None`, or the group of a mesh of one dim.

    Raises:
        ValueError: a mesh has several dims, this rank is not in the group or mesh, or a default group does not exist.
        TypeError: `group` is neither a group, a mesh nor `None`.
        RuntimeError: this torch was built without `torch.distributed`.
    """
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed; install a torch that has it")
    if group is None:
        if (world := dist.group.WORLD) is None:
            raise ValueError("no default process group exists: call torch.distributed.init_process_group() first")
        return world
    if hasattr(group, "mesh_dim_names"):
        mesh = cast("DeviceMesh", group)
        if mesh.ndim != 1:
            raise ValueError(
                f"a device mesh of {mesh.ndim} dims is not a process group: pass mesh[name], one dim of it"
            )
        if mesh.get_coordinate() is None:
            raise ValueError("this rank is not in the device mesh, and only the ranks in it take part")
        return mesh.get_group()
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group (new_group gave it no group), and only those in it take part")
    if not (hasattr(group, "rank") and hasattr(group, "size")):
        raise TypeError(f"group is a process group, a device mesh or None, got {type(group).__name__}")
    return cast("dist.ProcessGroup", group)


def rank_in(group: dist.ProcessGroup, rank: object, word: str) -> int:
    """Return the rank in a group for a global rank. `word` is the name of the argument, for errors.

    Raises:
        TypeError: the rank is not an int.
        ValueError: the group does not have this rank.
    """
    if type(rank) is not int:
        raise TypeError(
            f"{word} is the rank of a process and an int, got {type(rank).__name__}; pipes of UCXX are not supported"
        )
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise ValueError(f"{word} is the global rank {rank}, but the group has the ranks {ranks}")
    return ranks.index(rank)


class MessageDevices:
    """The devices that a process group can send from. Messages on other devices are copied to one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            config = dist.get_backend_config(group)
        except (ValueError, TypeError, RuntimeError, KeyError, AttributeError):
            # Torch has not registered this group.
            config = group.name()
        pairs = [part.partition(":")[::2] for part in config.split(",")]
        if ":" not in config:
            pairs = [("cuda" if config == "nccl" else "cpu", config)]
        # Between two ranks, Gloo and MPI send only CPU tensors.
        self._native = {device for device, backend in pairs if device == "cpu" or backend == "nccl"}
        self.main = "cpu" if "cpu" in self._native else "cuda"
        # Remember the current device, because a new thread starts with the first one.
        self._cuda = torch.device("cuda", torch.cuda.current_device()) if "cuda" in self._native else None

    def kind(self, device: str) -> str:
        """Return the type of device that tensors on this type of device are sent from."""
        return device if device in self._native else self.main

    def place(self, device: str) -> torch.device:
        """Return the device that tensors on this type of device are sent from."""
        return self._cuda if self._cuda is not None and self.kind(device) == "cuda" else torch.device("cpu")

    @property
    def main_device(self) -> torch.device:
        """The device for messages without tensors."""
        return self.place(self.main)

    def use_device(self) -> AbstractContextManager[object]:
        """Return a context manager that makes the device of the messages current.

        Every thread must use it to send and receive.
        """
        return nullcontext() if self._cuda is None else torch.cuda.device(self._cuda)


class Channel(NamedTuple):
    """One direction of messages between this rank and a peer.

    group: the process group.
    peer: the rank of the peer in the group.
    name: the name of the peer in errors.
    tag: the tag of all messages in this direction.
    devices: the devices to send from and receive on.
    """

    group: dist.ProcessGroup
    peer: int
    name: str
    tag: int
    devices: MessageDevices

    @staticmethod
    def of(group: object, rank: int | None, group_rank: int | None, tag: int, pseudo_rand: bool, word: str) -> Channel:
        """Make the channel for the arguments of a public method.

        Args:
            group: a process group, a device mesh of one dim, or `None`.
            rank: the global rank of the peer, or
            group_rank: its rank in the group.
            tag: the tag of the caller.
            pseudo_rand: replace the tag by a pseudo-random one, so that tags of different callers rarely collide.
            word: `"src"` or `"dst"`, for errors.

        Raises:
            ValueError: not exactly one of the ranks is given, it is not in the group, or it is this rank.
            TypeError: `group` is not a group, or a rank or the tag is not an int.
        """
        if (rank is None) == (group_rank is None):
            raise ValueError(f"give either {word}, a global rank, or group_{word}, a rank of the group")
        if group_rank is not None and group is None:
            raise ValueError(f"group_{word} is a rank of the group: pass group too, or {word}")
        group = as_group(group)
        if rank is not None:
            given, peer = rank, rank_in(group, rank, word)
        elif type(group_rank) is int:
            given = peer = group_rank
        else:
            raise TypeError(f"group_{word} is a rank of the group and an int, got {type(group_rank).__name__}")
        if not 0 <= peer < group.size() or peer == group.rank():
            raise ValueError(
                f"{word} is rank {peer} of a group of {group.size()}, and this is rank {group.rank()} of it"
            )
        if type(tag) is not int:
            raise TypeError(f"init_tag is an int, got {type(tag).__name__}")
        if not 0 <= tag < _RANDOM:
            raise ValueError(f"init_tag is 0 to {_RANDOM - 1}, got {tag}")
        if pseudo_rand:
            digest = hashlib.blake2b(str(tag).encode(), digest_size=4).digest()
            tag = _RANDOM | (int.from_bytes(digest, "little") % _RANDOM)
        return Channel(
            group, peer, f"rank {given}" + (" of the group" if rank is None else ""), tag, MessageDevices(group)
        )

    def send(self, message: Tensor, answer: bool = False) -> dist.Work:
        """Begin to send a message, or (with `answer`) the verdict on a received container."""
        return self._post(self.group.send, message, answer)

    def recv(self, buffer: Tensor, answer: bool = False) -> dist.Work:
        """Begin to receive a message, or (with `answer`) the verdict on a container that was sent."""
        return self._post(self.group.recv, buffer, answer)

    def _post(self, call: _Post, message: Tensor, answer: bool) -> dist.Work:
        try:
            return call([message], self.peer, self.tag | _ANSWER if answer else self.tag)
        except RuntimeError as error:
            raise TransferError(f"no connection to {self.name}: {error}") from error

    def buffer(self, nbytes: int) -> Tensor:
        """Allocate memory for a message without tensors."""
        return new_bytes(nbytes, self.devices.main_device)

    def last_tag(self, tensors: int) -> int:
        """Return the tag that the last tensor would have if each had its own tag. `send` and `recv` return it."""
        return self.tag + max(tensors, 1) - 1

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a message.

        Raises:
            TransferError: it did not arrive in time, or the connection broke.
        """
        wait_for([work], f"{what} {self.name}")


def wait_for(works: Iterable[dist.Work], call: str) -> None:
    """Wait for messages.

    Raises:
        TransferError: one did not arrive in time, or the connection broke.
    """
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"{call}: {error}") from error


def gather_messages(message: Tensor, group: dist.ProcessGroup, call: str) -> list[Tensor]:
    """Return the messages of all ranks, which must have the same length. The own message is one of them."""
    found = [torch.empty_like(message) for _ in range(group.size())]
    wait_for([dist.all_gather(found, message, group=group, async_op=True)], call)
    return found


def broadcast_all(messages: Iterable[Tensor], src: int, group: dist.ProcessGroup) -> None:
    """Broadcast messages from a global rank to all ranks."""
    wait_for([dist.broadcast(message, src=src, group=group, async_op=True) for message in messages], "broadcast")
