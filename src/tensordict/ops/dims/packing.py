"""The mixin of `pack`, which joins all leaves to one tensor of features, and `PackLayout`, which takes it apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.convert.python_structures import refuse_exclusive_keys
from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.exceptions import DimError, KeyMismatchError, ShapeError
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.shapes import as_new_dim
from tensordict.ops.dims.batch_ops import drop_dim

if TYPE_CHECKING:
    from tensordict.core.keys import Key


@dataclass(frozen=True)
class PackLayout:
    """The layout of a tensor that :meth:`TensorDictBase.pack` made: the columns of each leaf, and the structure.

    Layouts compare by value and are hashable, and compiled code treats them as constants.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict(p=torch.zeros(5), v=torch.ones(5, 3), batch_size=[5])
        >>> flat, layout = td.pack()
        >>> layout.keys, layout.offsets, layout.numel
        (('p', 'v'), (0, 1), 4)
        >>> layout.unpack(flat[:2])["v"].shape
        torch.Size([2, 3])

    Args:
        keys: the keys of the leaves, in the order of their columns.
        shapes: the feature shape of each leaf, which follows the batch dims.
        dim: the packed dim of the tensor. `pack` counts it from the end, so that the tensor may have other batch dims.
        nested: the nested containers: key, batch dims beyond those of the packed container, and the tensorclass or
            `None`. Containers that are missing here have no further batch dims.
        device: the device of the packed container. The unpacked container then has the device of its tensor.
        cls: the tensorclass of the packed container, or `None`.

    Attributes:
        offsets: the first column of each leaf.
        numel: the number of columns.

    Raises:
        ValueError: there are more keys than shapes or fewer, or two keys lead to the same entry.
    """

    keys: tuple[Key, ...]
    shapes: tuple[torch.Size, ...]
    dim: int = -1
    nested: tuple[tuple[Key, torch.Size, type[Any] | None], ...] = ()
    device: torch.device | None = None
    cls: type[Any] | None = None
    offsets: tuple[int, ...] = field(init=False, compare=False)
    numel: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # `pack` makes a layout at each call, so the common forms take few steps.
        keys = tuple([key if type(key) is str else joined(path_of(key)) for key in self.keys])
        shapes = tuple([torch.Size(shape) for shape in self.shapes])
        if len(keys) != len(shapes):
            raise ShapeError(f"a layout has one shape for each key, got {len(keys)} keys and {len(shapes)} shapes")
        known = set(keys)
        for key in keys:
            path = path_of(key)
            if len(path) > 1 and any(joined(path[:depth]) in known for depth in range(1, len(path))):
                raise ValueError(f"{key!r} leads below another key of the layout")
        if len(known) < len(keys):
            raise ValueError(f"the keys of a layout differ from each other, got {list(keys)}")
        offsets = []
        total = 0
        for shape in shapes:
            offsets.append(total)
            total += shape.numel()
        write = object.__setattr__
        write(self, "keys", keys)
        write(self, "shapes", shapes)
        write(self, "offsets", tuple(offsets))
        write(self, "numel", total)
        if self.nested:
            nested = [(joined(path_of(key)), torch.Size(shape), cls) for key, shape, cls in self.nested]
            write(self, "nested", tuple(nested))
        if self.device is not None:
            write(self, "device", as_device(self.device))

    def unpack(self, flat: Tensor) -> Any:
        """Make a container whose leaves are views of a packed tensor.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> flat, layout = TensorDict(a=torch.zeros(4), b=torch.ones(4, 2), batch_size=[4]).pack()
            >>> layout.unpack(flat * 2)["b"][0]
            tensor([2., 2.])

        Args:
            flat: a tensor with `numel` elements along `dim`. Its other dims become the batch size, so it may have other
                batch dims than the packed container.

        Returns:
            a `TensorDict`, or an instance of the packed tensorclass. Nested tensorclasses keep their class as well.

        Raises:
            TypeError: `flat` is not a tensor.
            IndexError: it has no dim `dim`.
            ValueError: it has another length along this dim.
        """
        given: Any = flat
        if not isinstance(given, Tensor) or isinstance(given, Contract):
            raise TypeError(f"unpack takes a tensor, got {type(flat).__name__}")
        dim = self.dim + flat.ndim if self.dim < 0 else self.dim
        if not 0 <= dim < flat.ndim:
            raise DimError(f"the layout is one of dim {self.dim}, which a tensor of {flat.ndim} dims lacks")
        if flat.shape[dim] != self.numel:
            raise ShapeError(f"the layout has {self.numel} columns along dim {self.dim}, got {flat.shape[dim]}")
        size = drop_dim(flat.shape, dim)
        device = None if self.device is None else flat.device
        nodes: dict[Path, dict[str, Any]] = {(): {}}
        states = {path_of(key): (shape, cls) for key, shape, cls in self.nested}
        for path in states:
            _add_node(nodes, path)
        parts = flat.split_with_sizes([shape.numel() for shape in self.shapes], dim)
        last = dim == flat.ndim - 1
        for key, shape, part in zip(self.keys, self.shapes, parts, strict=True):
            if not shape:
                leaf = part.squeeze(dim)
            else:
                leaf = part if last else part.movedim(dim, -1)
                if len(shape) > 1:
                    leaf = leaf.view(size + shape)
            path = path_of(key)
            _add_node(nodes, path[:-1])[path[-1]] = leaf
        for path, entries in reversed(nodes.items()):
            shape, cls = states.get(path, (torch.Size(()), None)) if path else (torch.Size(()), self.cls)
            made: Any = makers.dense(entries, size + shape, device, None)
            if cls is not None:
                made = cls._wrap_container(made)
            if path:
                nodes[path[:-1]][path[-1]] = made
        return made


def _add_node(nodes: dict[Path, dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return the entries of the container at `path`. Containers that are missing are added, parents first."""
    if path not in nodes:
        _add_node(nodes, path[:-1])[path[-1]] = None  # the container replaces it, and keeps the position
        nodes[path] = {}
    return nodes[path]


class Packing(Contract):
    """`pack`."""

    def pack(self, dim: int = -1, *, layout: PackLayout | None = None) -> tuple[Tensor, PackLayout]:
        """Copy all leaves into one tensor, for example as the input of a network.

        Each leaf is flattened after the batch dims, and the leaves follow each other in alphabetical order of their
        keys, as in `keys(True, True, sort=True)`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"v": torch.ones(5, 3), "body": {"mass": torch.zeros(5)}}, batch_size=[5])
            >>> flat, layout = td.pack()
            >>> flat.shape, layout.keys
            (torch.Size([5, 4]), (('body', 'mass'), 'v'))
            >>> layout.unpack(flat + 1)["v"][0]
            tensor([2., 2., 2.])

        Args:
            dim: the position of the packed dim among the batch dims of the tensor; by default the last one.
            layout: an earlier layout, whose order the columns get. `dim` must be its dim.

        Returns:
            a new contiguous tensor of the dtype and device of the leaves, and the layout, whose
            :meth:`~tensordict.PackLayout.unpack` makes a container of such a tensor. The shape of the tensor is the
            batch size with the number of columns at `dim`. Gradients flow to the leaves.

        Raises:
            TypeError: the leaves differ in dtype, or an entry is not a tensor with the batch dims; see
                :meth:`filter_non_tensor_data`.
            RuntimeError: the leaves are on different devices; or the members of a lazy stack differ in keys or shapes.
            IndexError: `dim` is out of range.
            KeyError: the container has other leaves than the layout.
            ValueError: a leaf has another shape than in the layout, or `dim` is another one.
        """
        size = self._batch_size
        ndim = len(size)
        dim = as_new_dim(dim, ndim) - ndim - 1
        given: Any = layout
        if given is not None and not isinstance(given, PackLayout):
            raise TypeError(f"layout is a PackLayout, got {type(given).__name__}")
        if layout is not None and layout.dim not in (dim, dim + ndim + 1):
            raise ShapeError(f"the layout is one of dim {layout.dim}, got dim={dim}")
        found = _Collection(ndim)
        if self._is_non_tensor:
            raise TypeError(f"a {type(self).__name__} holds values that are no tensors, which cannot be packed")
        found.add_entries(self, ())
        paths = sorted(found.leaves, key=".".join) if layout is None else found.sort_like(layout)
        leaves = [found.leaves[path] for path in paths]
        _check_alike(leaves, paths)
        made = PackLayout(
            keys=paths,  # type: ignore[arg-type]
            shapes=[leaf.shape[ndim:] for leaf in leaves],  # type: ignore[arg-type]
            dim=dim,
            nested=tuple(sorted(found.nested, key=_join_first)),  # type: ignore[arg-type]
            device=self._device,
            cls=_class_of(self),
        )
        if layout is not None and made.shapes != layout.shapes:
            key, ours, theirs = next(
                row for row in zip(made.keys, made.shapes, layout.shapes, strict=True) if row[1] != row[2]
            )
            raise ShapeError(f"entry {key!r} has the feature shape {list(ours)}, and in the layout {list(theirs)}")
        if not leaves:
            return torch.zeros((*size[: dim + ndim + 1], 0, *size[dim + ndim + 1 :]), device=self._device), made
        parts = [
            leaf.unsqueeze(-1) if leaf.ndim == ndim else leaf if leaf.ndim == ndim + 1 else leaf.flatten(ndim)
            for leaf in leaves
        ]
        if dim != -1:
            parts = [part.movedim(-1, dim) for part in parts]
        return torch.cat(parts, dim).contiguous(), made


class _Collection:
    """The leaves and the nested containers of a tree, with their paths. `ndim`: the batch dims of the root."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim
        self.leaves: dict[Path, Tensor] = {}
        self.nested: list[tuple[Path, torch.Size, type[Any] | None]] = []

    def add_entries(self, node: Contract, path: Path) -> None:
        if not isinstance(node._entries, dict):
            if node._members() is not None:
                refuse_exclusive_keys(node, "pack")
                node = node._dense()
            with node._at_once():
                return self.add_each(node, path)
        self.add_each(node, path)

    def add_each(self, node: Contract, path: Path) -> None:
        for name, value in node._entries.items():
            key = (*path, name)
            if not isinstance(value, Contract):
                if value.is_nested:
                    raise NotImplementedError(f"entry {joined(key)!r} is ragged: make it dense with to_padded_tensor")
                self.leaves[key] = value
            elif value._is_non_tensor or value._is_tensor:
                lacks = "batch dims" if value._is_tensor else "elements (see filter_non_tensor_data)"
                raise TypeError(f"entry {joined(key)!r}, a {type(value).__name__}, cannot be packed: it has no {lacks}")
            else:
                self.nested.append((key, value._batch_size[self.ndim :], _class_of(value)))
                self.add_entries(value, key)

    def sort_like(self, layout: PackLayout) -> list[Path]:
        """Return the paths of the leaves in the order of a layout."""
        paths = [path_of(key) for key in layout.keys]
        if self.leaves.keys() != set(paths):
            odd = [joined(path) for path in self.leaves.keys() ^ set(paths)]
            raise KeyMismatchError(f"the leaves are those of the layout, and only one of the two has {odd}")
        return paths


def _check_alike(leaves: Sequence[Tensor], paths: Sequence[Path]) -> None:
    """Raise unless all leaves have the same dtype and device."""
    for leaf, path in zip(leaves, paths, strict=True):
        if leaf.dtype is not leaves[0].dtype:
            raise TypeError(
                f"entry {joined(path)!r} is of {leaf.dtype}, and {joined(paths[0])!r} of {leaves[0].dtype}: cast the "
                "container first, as with td.float()"
            )
        if leaf.device != leaves[0].device:
            raise RuntimeError(
                f"entry {joined(path)!r} is on {leaf.device}, and {joined(paths[0])!r} on {leaves[0].device}: bring "
                "all of it to one device first, as with td.to(device)"
            )


def _class_of(node: object) -> type[Any] | None:
    return type(node) if getattr(node, "_is_tensorclass", False) else None


def _join_first(row: tuple[Path, object, object]) -> str:
    return ".".join(row[0])
