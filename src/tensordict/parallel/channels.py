"""Process groups as transfers see them: who the peer is, which tags are used, and what memory messages can be in."""

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

# What says that a container has been taken goes the other way under a tag of its own.
_ANSWER = 1 << 30
# Tags that are pseudo-random have this bit, and never are those of a caller who counts from 0.
_RANDOM = 1 << 29


def as_group(group: object) -> dist.ProcessGroup:
    """The process group that a caller means: the default one for `None`, and that of a mesh of one dim.

    Raises:
        ValueError: a mesh of several dims, a group or mesh that this rank is not in, or there is no default group.
        TypeError: it is no group.
        RuntimeError: this torch was built without `torch.distributed`.
    """
    if not dist.is_available():
        raise RuntimeError("this torch was built without torch.distributed; install a torch that has it")
    if group is None:
        if (world := dist.group.WORLD) is None:
            raise ValueError("there is no default process group: call torch.distributed.init_process_group() first")
        return world
    if hasattr(group, "mesh_dim_names"):
        mesh = cast("DeviceMesh", group)
        if mesh.ndim != 1:
            raise ValueError(f"a device mesh of {mesh.ndim} dims is no process group: pass mesh[name], one dim of it")
        if mesh.get_coordinate() is None:
            raise ValueError("this rank is not in the device mesh, and only the ranks in it take part")
        return mesh.get_group()
    if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group (new_group gave it no group), and only those in it take part")
    if not (hasattr(group, "rank") and hasattr(group, "size")):
        raise TypeError(f"group is a process group, a device mesh or None, got {type(group).__name__}")
    return cast("dist.ProcessGroup", group)


def rank_in(group: dist.ProcessGroup, rank: object, word: str) -> int:
    """The rank in a group of a global rank, which a caller calls `word`.

    Raises:
        TypeError: the rank is no int.
        ValueError: it is none of those of the group.
    """
    if type(rank) is not int:
        raise TypeError(
            f"{word} is the rank of a process and an int, got {type(rank).__name__}; pipes of UCXX are not supported"
        )
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise ValueError(f"{word} is the global rank {rank}, and those of the group are {ranks}")
    return ranks.index(rank)


class MessageDevices:
    """The devices that the messages of a process group can be in; the bytes of others are copied to them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            config = dist.get_backend_config(group)
        except (ValueError, TypeError, RuntimeError, KeyError, AttributeError):
            # A group that torch has not registered.
            config = group.name()
        pairs = [part.partition(":")[::2] for part in config.split(",")]
        if ":" not in config:
            pairs = [("cuda" if config == "nccl" else "cpu", config)]
        # Gloo and MPI take tensors on the CPU only in calls between two ranks.
        self._native = {device for device, backend in pairs if device == "cpu" or backend == "nccl"}
        self.main = "cpu" if "cpu" in self._native else "cuda"
        # A thread of its own starts with the first device, whatever the one is that began it.
        self._cuda = torch.device("cuda", torch.cuda.current_device()) if "cuda" in self._native else None

    def kind(self, device: str) -> str:
        """The type of the device that tensors of a type of device are sent from."""
        return device if device in self._native else self.main

    def place(self, device: str) -> torch.device:
        """The device that messages for this type of device are in."""
        return self._cuda if self._cuda is not None and self.kind(device) == "cuda" else torch.device("cpu")

    @property
    def main_device(self) -> torch.device:
        """The device that messages without tensors are in."""
        return self.place(self.main)

    def guard(self) -> AbstractContextManager[object]:
        """In which messages are sent and received, by any thread."""
        return nullcontext() if self._cuda is None else torch.cuda.device(self._cuda)


class Channel(NamedTuple):
    """One direction between this rank and another one.

    group: the process group.
    peer: the rank of the other one in the group.
    name: what errors call it.
    tag: the tag of all messages in this direction.
    devices: the devices that messages are in.
    """

    group: dist.ProcessGroup
    peer: int
    name: str
    tag: int
    devices: MessageDevices

    @staticmethod
    def of(group: object, rank: int | None, group_rank: int | None, tag: int, pseudo_rand: bool, word: str) -> Channel:
        """The channel that the arguments of a public method ask for.

        Args:
            group: a process group, a device mesh of one dim, or `None`.
            rank: the global rank of the peer, or
            group_rank: its rank in the group.
            tag: the tag that the caller counts by.
            pseudo_rand: whether to spread the tags, so that those of different callers do not collide.
            word: `"src"` or `"dst"`, for errors.

        Raises:
            ValueError: not exactly one of the ranks is given, it is not in the group, or the peer is this very rank.
            TypeError: the group is none, or a rank or the tag is no int.
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
        """Begin to send a message, or the answer to what was received."""
        return self._posted(self.group.send, message, answer)

    def recv(self, buffer: Tensor, answer: bool = False) -> dist.Work:
        """Begin to receive a message, or the answer to what was sent."""
        return self._posted(self.group.recv, buffer, answer)

    def _posted(self, call: _Post, message: Tensor, answer: bool) -> dist.Work:
        try:
            return call([message], self.peer, self.tag | _ANSWER if answer else self.tag)
        except RuntimeError as error:
            raise TransferError(f"no connection to {self.name}: {error}") from error

    def buffer(self, nbytes: int) -> Tensor:
        """Memory for a message without tensors."""
        return new_bytes(nbytes, self.devices.main_device)

    def last_tag(self, tensors: int) -> int:
        """What the calls return: the tag that the last tensor would have if each had one."""
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


def from_all(message: Tensor, group: dist.ProcessGroup, call: str) -> list[Tensor]:
    """The messages of all ranks, which are of one length, this one among them."""
    found = [torch.empty_like(message) for _ in range(group.size())]
    wait_for([dist.all_gather(found, message, group=group, async_op=True)], call)
    return found


def broadcast_all(messages: Iterable[Tensor], src: int, group: dist.ProcessGroup) -> None:
    """Bring messages from a global rank to all ranks."""
    wait_for([dist.broadcast(message, src=src, group=group, async_op=True) for message in messages], "broadcast")
