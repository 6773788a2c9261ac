"""`EnsembleModule`: copies of a module with different parameters, which run at once."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tensordict.containers.dense import TensorDict
from tensordict.nn.dispatch import dispatch
from tensordict.nn.module import C, TensorDictModuleBase, reset_modules
from tensordict.nn.params import TensorDictParams
from tensordict.ops.modules import is_parameter

__all__ = ["EnsembleModule"]


class EnsembleModule(TensorDictModuleBase):
    """Copies of a module with different parameters, which run at once with :func:`torch.vmap`.

    `params_td` holds the stacked parameters and buffers of the copies, as a :class:`~tensordict.TensorDictParams` of
    batch size `[num_copies]`. Train these. They start as copies of the parameters of `module`; modules with a
    `reset_parameters` then reset theirs. Random operations, such as dropout, differ between copies.

    Args:
        module: a module with in-keys and out-keys, used as a template. Its own parameters are not used.
        num_copies: the number of copies, at least 1.
        expand_input: pass the same input to each copy. `False` splits the input along its first batch dim, one part for
            each copy, as for an ensemble that follows another one in a sequence.

    Raises:
        TypeError: `module` has no in-keys and out-keys.
        ValueError: `num_copies` is not a positive integer; or, when called with `expand_input=False`, the first dim of
            the input does not have `num_copies` elements.
        RuntimeError: a parameter of a lazy module has no size yet.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import EnsembleModule, TensorDictModule, TensorDictSequential
        >>> hidden = TensorDictModule(nn.Linear(4, 8), in_keys=["obs"], out_keys=["hidden"])
        >>> value = TensorDictModule(nn.Linear(8, 1), in_keys=["hidden"], out_keys=["value"])
        >>> net = TensorDictSequential(EnsembleModule(hidden, 3), EnsembleModule(value, 3, expand_input=False))
        >>> result = net(TensorDict(obs=torch.zeros(10, 4), batch_size=[10]))
        >>> result.batch_size, result["value"].shape
        (torch.Size([3, 10]), torch.Size([3, 10, 1]))
    """

    def __init__(self, module: TensorDictModuleBase, num_copies: int, expand_input: bool = True) -> None:
        super().__init__()
        if not self.is_tdmodule_compatible(module):
            raise TypeError(
                f"an ensemble is made of a module with in_keys and out_keys, got {type(module).__name__}; "
                "TensorDictModule(module, in_keys, out_keys) gives it some"
            )
        if type(num_copies) is not int or num_copies < 1:
            raise ValueError(f"num_copies must be a positive integer, got {num_copies!r}")
        self.in_keys = module.in_keys
        self.out_keys = module.out_keys
        self.module = module
        self.num_copies = num_copies
        self.expand_input = expand_input
        self.params_td = TensorDictParams(_stack_parameters(module, num_copies), no_convert="buffer")
        self.reset_parameters()

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Any) -> Any:
        """Run all copies.

        Args:
            tensordict: the input, a container of batch size `[...]`, or `[num_copies, ...]` with `expand_input=False`;
                or (by :class:`dispatch`) the entries at the in-keys. It is not changed.

        Returns:
            A new container of batch size `[num_copies, ...]`.
        """
        if not self.expand_input:
            tensordict = self._divide_input(tensordict)
        # `vmap` expands unmapped entries in its results, so the input need not be expanded in advance.
        dims = (0, None if self.expand_input else 0)
        return torch.vmap(self._run_copy, dims, randomness="different")(self.params_td, tensordict)

    def _divide_input(self, tensordict: C) -> C:
        """Return the input with the copies as its first batch dim."""
        size = tensordict.batch_size
        if not size:
            tensordict = tensordict.copy()
            tensordict.batch_size = [self.num_copies]
        elif size[0] != self.num_copies:
            raise ValueError(
                f"the input of {self.num_copies} copies has batch size {list(size)}: with expand_input=False its first "
                f"dim must have {self.num_copies} elements, one for each copy"
            )
        return tensordict

    def _run_copy(self, params: TensorDictParams, tensordict: object) -> object:
        with params.to_module(self.module):
            return self.module(tensordict)

    def reset_parameters(self) -> None:
        """Reset the parameters of all copies; see :meth:`reset_parameters_recursive`."""
        self.reset_parameters_recursive(self.params_td)

    def reset_parameters_recursive(self, parameters: C | None = None) -> C:  # type: ignore[override]
        """Call `reset_parameters` of the modules in the template, once for the parameters of each copy.

        Args:
            parameters: a container with the structure of the template (see :meth:`TensorDict.from_module`). Each
                element of its batch, of any dims, is a copy. It is reset in place.

        Returns:
            `parameters`.

        Raises:
            ValueError: no parameters are given; :meth:`reset_parameters` resets the ensemble's own.
            KeyError: the parameters do not fit the template.
        """
        if parameters is None:
            raise ValueError(
                "reset_parameters_recursive of an ensemble resets the parameters that it is given: pass a container of "
                "them, or call reset_parameters() for those of the ensemble"
            )
        values: Any = parameters.data
        for index in itertools.product(*map(range, values.batch_size)):
            with values[index].to_module(self.module):
                if isinstance(self.module, EnsembleModule):
                    self.module.reset_parameters()
                else:
                    reset_modules(self.module)
        return parameters


def _stack_parameters(module: nn.Module, count: int) -> TensorDict:
    """Repeat the parameters and buffers of a module `count` times. Tied parameters stay tied."""
    made: dict[int, Tensor] = {}

    def repeat(leaf: Tensor) -> Tensor:
        if is_lazy(leaf):
            raise RuntimeError(
                "a parameter of a lazy module has no size yet: run it once, on an input of the right size"
            )
        found = made.get(id(leaf))
        if found is None:
            found = leaf.detach().expand(count, *leaf.shape).clone()
            if is_parameter(leaf):
                found = nn.Parameter(found, requires_grad=leaf.requires_grad)
            made[id(leaf)] = found
        return found

    return TensorDict.from_module(module)._map(repeat, torch.Size((count,)), 0, None)
