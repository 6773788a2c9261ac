"""Functions of older levels for stateless modules, and a switch that makes containers pytree leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor, nn

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract

__all__ = [
    "extract_weights_and_buffers",
    "get_functional",
    "is_functional",
    "make_functional",
    "repopulate_module",
    "set_tensor",
    "set_tensor_dict",
]

_INSTEAD = (
    "take the parameters out with TensorDict.from_module(module), and run the module on others within "
    "`with params.to_module(module):`"
)


def make_functional(
    module: nn.Module,
    funs_to_decorate: Iterable[str] | None = None,
    keep_params: bool = False,
    return_params: bool = True,
) -> NoReturn:
    """Raise an error: the function was removed.

    Raises:
        RuntimeError: always. Use :meth:`TensorDict.from_module` and :meth:`TensorDict.to_module`.
    """
    raise _removal_error("make_functional")


def get_functional(module: nn.Module, funs_to_decorate: Iterable[str] | None = None) -> NoReturn:
    """Raise an error, like :func:`make_functional`.

    Raises:
        RuntimeError: always.
    """
    raise _removal_error("get_functional")


def is_functional(module: nn.Module) -> NoReturn:
    """Raise an error, like :func:`make_functional`.

    Raises:
        RuntimeError: always.
    """
    raise _removal_error("is_functional")


def repopulate_module(model: nn.Module, tensordict: object) -> NoReturn:
    """Raise an error, like :func:`make_functional`.

    Raises:
        RuntimeError: always. `tensordict.to_module(model)` inserts the parameters.
    """
    raise _removal_error("repopulate_module")


def extract_weights_and_buffers(model: nn.Module, *args: object, **kwargs: object) -> NoReturn:
    """Raise an error, like :func:`make_functional`.

    Raises:
        RuntimeError: always. :meth:`TensorDict.from_module` returns the parameters and buffers.
    """
    raise _removal_error("extract_weights_and_buffers")


def set_tensor(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Set an entry of a module without the checks of `setattr`.

    Args:
        module: the module.
        name: the name of the entry. It is no longer a parameter, unless `tensor` is one; a buffer stays a buffer.
        tensor: the entry.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict.nn.functional_modules import set_tensor
        >>> net = nn.Linear(2, 1)
        >>> set_tensor(net, "weight", torch.ones(1, 2))
        >>> net.weight, [name for name, _ in net.named_parameters()]
        (tensor([[1., 1.]]), ['bias'])
    """
    set_tensor_dict(module.__dict__, module, name, tensor)


def set_tensor_dict(module_dict: dict[str, Any], module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Call :func:`set_tensor`; `module_dict` is `module.__dict__`, which `module` provides otherwise."""
    module_dict["_parameters"].pop(name, None)
    if isinstance(tensor, nn.Parameter):
        module_dict.pop(name, None)
        module_dict["_parameters"][name] = tensor
    elif name in module_dict["_buffers"]:
        module_dict["_buffers"][name] = tensor
    else:
        module_dict[name] = tensor


def _removal_error(name: str) -> RuntimeError:
    return RuntimeError(f"{name} has been removed from tensordict: {_INSTEAD}")


class _exclude_td_from_pytree:
    """Make containers leaves for `torch.utils._pytree`, from `set` to `unset`, or in a `with` block.

    `torch.vmap` still maps over them. Setting it a second time, while it is set, has no effect.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn.functional_modules import _exclude_td_from_pytree
        >>> tree = [TensorDict(a=torch.zeros(3), b=torch.ones(3))]
        >>> with _exclude_td_from_pytree():
        ...     len(torch.utils._pytree.tree_leaves(tree))
        1
        >>> len(torch.utils._pytree.tree_leaves(tree))
        2
    """

    def __init__(self) -> None:
        self._taken: dict[type[Any], Any] = {}

    def set(self) -> None:
        """Make containers leaves."""
        for cls in [cls for cls in internals.pytree_nodes if Contract in getattr(cls, "__mro__", ())]:
            self._taken[cls] = internals.pytree_nodes.pop(cls)

    def unset(self) -> None:
        """Undo `set`."""
        internals.pytree_nodes.update(self._taken)
        self._taken.clear()

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *exc_info: object) -> None:
        self.unset()
