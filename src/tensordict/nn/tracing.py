"""Trace modules over containers to graphs of `torch.fx`, whose intermediate results bypass the container."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx, nn

from tensordict.core.keys import Key, path_of
from tensordict.nn.dispatch import dispatch
from tensordict.nn.module import Forwarding, Inplace, TensorDictModule, TensorDictModuleBase, output_of
from tensordict.nn.sequence import TensorDictSequential
from tensordict.ops.entries.atomic_updates import set_all


class TDGraphModule(Forwarding):
    """A module that runs a graph on a container, and writes the tensors that the graph returns into the container.

    Attributes that it lacks, such as `graph` and `code`, are looked up in the graph module.

    Args:
        graph_module: the graph module. It returns one tensor, or a tuple of as many tensors as `out_keys` has.
        out_keys: the keys for the tensors.
        in_keys: the keys that the graph reads.
        inplace: the container for the results, as for :class:`~tensordict.nn.TensorDictModule`.
    """

    _forwards_to = "_gm"

    def __init__(
        self,
        graph_module: fx.GraphModule,
        out_keys: list[Key],
        in_keys: Sequence[Key] = (),
        inplace: Inplace | None = True,
    ) -> None:
        super().__init__()
        self.out_keys = out_keys
        self.in_keys = list(in_keys)
        self.inplace = inplace
        self._gm = graph_module

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: Any, tensordict_out: Any = None) -> Any:
        """Run the graph and write its results.

        Args:
            tensordict: a container, or (by :class:`dispatch`) the entries at the in-keys.
            tensordict_out: a container to write into, instead of the one that is read.

        Returns:
            The container that was written into.
        """
        results = self._gm(tensordict)
        if tensordict_out is None:
            tensordict_out = output_of(tensordict, self.inplace)
        values = results if isinstance(results, tuple) else (results,)
        if len(values) != len(self._out_keys):
            raise RuntimeError(f"the graph returned {len(values)} values for {len(self._out_keys)} out_keys")
        set_all(tensordict_out, self._out_keys, values)
        return tensordict_out


def symbolic_trace(td_module: TensorDictModuleBase) -> TDGraphModule:
    """Trace a module over containers, or a sequence of modules, to one graph of `torch.fx`.

    Nested sequences become one graph. Entries that one step writes and another reads become values of the graph. The
    container is read at the in-keys, and written at the out-keys after everything is computed.

    Args:
        td_module: a :class:`~tensordict.nn.TensorDictModule`, or a sequence of them. The graph shares its parameters.

    Returns:
        A module that takes and returns containers, with the attributes of a `torch.fx.GraphModule`.

    Raises:
        TypeError: a module has another type, or a sequence is `partial_tolerant`.
        ValueError: a step reads a container that an earlier step writes into.
        torch.fx.proxy.TraceError: the code of a step cannot be traced, for example because it depends on values.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from tensordict.prototype.fx import symbolic_trace
        >>> net = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), in_keys=["obs"], out_keys=["hidden"]),
        ...     TensorDictModule(torch.tanh, in_keys=["hidden"], out_keys=["action"]),
        ... )
        >>> graph = symbolic_trace(net)
        >>> [node.name for node in graph.graph.nodes]
        ['tensordict', 'getitem', '_0_module', 'tanh', 'output']
        >>> graph(TensorDict(obs=torch.zeros(3)))["action"].shape
        torch.Size([4])
    """
    root = _Steps(td_module)
    graph = fx.Tracer().trace(root)
    for node in graph.nodes:
        # Drop the annotation of the container, because the code of the graph could not name it.
        node.type = None
    out_keys = [key for key in td_module.out_keys if key != "_"]
    return TDGraphModule(
        fx.GraphModule(root, graph, type(td_module).__name__), out_keys, td_module.in_keys, root.inplace
    )


class _Steps(nn.Module):
    """All steps of a module, as one function from a container to a tuple of tensors."""

    def __init__(self, td_module: TensorDictModuleBase) -> None:
        super().__init__()
        self.steps = list(_iter_steps(td_module))
        self.out_keys = [key for key in td_module.out_keys if key != "_"]
        self.inplace: Inplace | None = td_module.inplace  # type: ignore[assignment]
        # Keep the parameter names that the modules have inside the traced module.
        holder = td_module.module if isinstance(td_module, TensorDictSequential) else td_module
        self._modules.update(holder._modules)

    def forward(self, tensordict: Any) -> object:
        written: dict[Key, Any] = {}
        for step in self.steps:
            results: Any = step._call_module([_find_value(tensordict, key, written) for key in step.in_keys])
            keys = step._out_keys
            parts = type(results) is fx.Proxy and len(keys) > 1
            values = [results[i] for i in range(len(keys))] if parts else step._as_results(results)
            written.update((key, value) for key, value in zip(keys, values) if key in step.out_keys)
        values = tuple(_find_value(tensordict, key, written) for key in self.out_keys)
        return values[0] if len(values) == 1 else values


def _iter_steps(module: object) -> Iterator[TensorDictModule]:
    """Yield the modules that call something, in order."""
    if isinstance(module, TensorDictSequential) and type(module).forward is TensorDictSequential.forward:
        if module.partial_tolerant:
            raise TypeError(
                f"{type(module).__name__} cannot be traced: it is partial_tolerant, and its entries decide what runs"
            )
        for step in module:
            yield from _iter_steps(step)
    elif isinstance(module, TensorDictModule) and type(module).forward is TensorDictModule.forward:
        yield module
    else:
        raise TypeError(
            f"{type(module).__name__} cannot be traced: symbolic_trace takes a TensorDictModule, or a "
            "TensorDictSequential of them"
        )


def _find_value(tensordict: Any, key: Key, written: dict[Key, Any]) -> Any:
    """Return the value at a key: a written value, a part of one, or an entry of the container."""
    if key in written:
        return written[key]
    path = path_of(key)
    for other, value in written.items():
        prefix = path_of(other)
        if path[: len(prefix)] == prefix:
            for name in path[len(prefix) :]:
                value = value[name]
            return value
        if prefix[: len(path)] == path:
            raise ValueError(f"a step reads the container {key!r}, into which an earlier one writes {other!r}")
    return tensordict[key]
