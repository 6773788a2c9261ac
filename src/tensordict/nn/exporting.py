"""`export`: programs of `torch.export` and ONNX models that take and return tensors by name."""

from __future__ import annotations

import contextlib
import inspect
import io
import keyword
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from tensordict.convert.text_tables import write_text
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, identity, is_node
from tensordict.core.exceptions import ShapeError
from tensordict.core.extras import require
from tensordict.core.keys import Path, joined, path_of
from tensordict.nn.interaction import InteractionType, interaction_type, set_interaction_type
from tensordict.nn.module import TensorDictModuleBase

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from tensordict.ops.collection import TensorCollection

# A protobuf message, and thus an ONNX model in one file, is smaller than this number of bytes.
_ONNX_LIMIT = 2**31


def export(
    module: nn.Module,
    tensordict: TensorCollection,
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic_batch: bool = True,
    overwrite: bool = False,
) -> ExportedProgram:
    """Export a module over containers to a program that takes and returns tensors, and write it to a file.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, export
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=[("agent", "obs")], out_keys=["action"])
        >>> program = export(net, TensorDict({"agent": {"obs": torch.zeros(5, 3)}}, batch_size=[5]))
        >>> program.module()(agent_obs=torch.zeros(7, 3))["action"].shape
        torch.Size([7, 2])

    The program takes the entries at the in-keys as keyword arguments, and returns a dict of the entries at the
    out-keys. A nested key becomes one name, whose parts are joined by `_`. Characters that a name cannot have become
    `_` as well, and a keyword of Python gets a `_` behind it. A key of a container stands for its tensors. Values that
    are no tensors become constants. An output of an ONNX model that has the name of an input gets the suffix `_out`.

    A file can be used without this package: `torch.export.load("net.pt2").module()(agent_obs=obs)`, or the ONNX model
    by any runtime.

    The module is exported in evaluation mode, and distributions without checks of their arguments. Probabilistic
    modules take the deterministic value: the mode of distributions with finitely many values, the mean of others (see
    :class:`InteractionType`). A surrounding :class:`set_interaction_type` chooses another one.

    Args:
        module: a module with in-keys and out-keys, such as a sequence, or a policy with a distribution.
        tensordict: an example of the input. Its entries are not changed.
        path: the file to write, at a path or a URL: `.pt2` for `torch.export.load`, or `.onnx` (with the extra `onnx`).
        dynamic_batch: the program accepts all sizes of the batch dims of `tensordict`. `False` fixes them.
        overwrite: replace an existing file.

    Returns:
        the program. It shares the parameters of the module; a file has a copy.

    Raises:
        TypeError: `module` has no in-keys and out-keys, or an out-key leads to a value that is no tensor.
        KeyError: `tensordict` lacks an in-key.
        ValueError: with `dynamic_batch`, the container has no batch dims, or an empty one; two keys have the same name;
            the path has another suffix; or an ONNX model exceeds 2 GiB.
        ModuleNotFoundError: the extra `onnx` is not installed.
        SaveError: the file exists, and `overwrite` is false.
    """
    suffix = "" if path is None else os.path.splitext(os.fspath(path))[1]
    if path is not None and suffix not in (".pt2", ".onnx"):
        raise ValueError(f"export writes files with the suffix .pt2 or .onnx, got {os.fspath(path)!r}")
    if suffix == ".onnx":
        for name in ("onnx", "onnxscript"):
            require(name, "onnx")
    if not TensorDictModuleBase.is_tdmodule_compatible(module):
        raise TypeError(
            f"export takes a module with in_keys and out_keys, got {type(module).__name__}: wrap it in a "
            "TensorDictModule"
        )
    given = _select_inputs(module, tensordict, dynamic_batch)
    plain = _PlainModule(module, given)
    dims = [torch.export.Dim("batch" if not at else f"batch_{at}") for at in range(given.ndim)] if dynamic_batch else []
    shapes = {name: dict(enumerate(dims)) for name in plain.names}
    leaves = dict(zip(plain.names, [leaf.detach() for leaf in given._leaves()], strict=True))
    with _made_deterministic(module):
        program = torch.export.export(plain, (), leaves, dynamic_shapes=shapes, strict=False)
    if path is not None:
        content = _as_onnx(program, plain.names, shapes) if suffix == ".onnx" else _as_pt2(program)
        write_text(path, overwrite, None, lambda file: file.write(content))
    return program


class _PlainModule(nn.Module):
    """A module over containers, as a module that takes tensors by name and returns a dict of tensors.

    Args:
        module: the module.
        example: a container with the entries that it reads.
    """

    def __init__(self, module: Any, example: Any) -> None:
        super().__init__()
        self.module = module
        self.names = _name_all([path for path, _ in example._walk()], "in_keys")

        # Torch reads the names of the arguments from the signature, and takes no dynamic shapes for `**kwargs`.
        def forward(*args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
            leaves = [*args, *[kwargs[name] for name in self.names[len(args) :]]]
            size, values = leaves[0].shape[: example.ndim], iter(leaves)
            result = module(example._map(lambda leaf: next(values), size, len(size), identity))
            found = dict(_iter_outputs(module, result))
            return dict(zip(_name_all(found, "out_keys"), found.values(), strict=True))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in self.names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _select_inputs(module: Any, tensordict: Any, dynamic_batch: bool) -> Any:
    """Return a dense container with the entries that a module reads. Batch dims of size 1 become larger.

    Torch treats sizes of 0 and 1 in an example as constants.
    """
    if not isinstance(tensordict, Contract):
        raise TypeError(f"export takes an example of the input in a container, got {type(tensordict).__name__}")
    keys = [key for key in module.in_keys if key != "_"]
    if missing := [key for key in keys if not tensordict._has(path_of(key))]:
        raise KeyError(
            f"{type(module).__name__} reads {missing}, and the example has the entries "
            f"{[joined(path) for path, _ in tensordict._walk()]}"
        )
    given: Any = tensordict.select(*keys)._dense()
    for path, leaf in given._walk():
        if leaf.shape[: given.ndim] != given.batch_size:
            raise TypeError(
                f"entry {joined(path)!r} has no batch dims, and a program cannot take it: use a plain tensor"
            )
    if not given._leaves():
        raise ValueError(f"a program takes tensors, and there are none at the in_keys {keys}")
    if dynamic_batch:
        if not given.ndim or 0 in given.batch_size:
            raise ShapeError(
                f"dynamic_batch=True lets batch dims vary, and the example has batch_size={list(given.batch_size)}: "
                "give it a batch size without zeros, or pass dynamic_batch=False"
            )
        for dim, size in enumerate(given.batch_size):
            if size == 1:
                given = torch.cat([given, given], dim)
    return given


def _iter_outputs(module: Any, result: Any) -> Iterator[tuple[Path, Tensor]]:
    """Yield the path and the value of each tensor at the out-keys of a module."""
    for key in module.out_keys:
        if key == "_":
            continue
        path, value = path_of(key), result.get(key)
        if is_node(value) and not value._is_non_tensor:
            yield from ((path + inner, leaf) for inner, leaf in value._walk())
        elif isinstance(value, Tensor):
            yield path, value
        else:
            raise TypeError(
                f"a program returns tensors, and {type(module).__name__} writes another value at {key!r}: leave it out "
                "with select_out_keys"
            )


def _name_all(paths: Iterable[Path], what: str) -> list[str]:
    """Return a name for each path that can be the name of an argument."""
    named: dict[str, Path] = {}
    for path in paths:
        name = re.sub(r"\W", "_", "_".join(path))
        if keyword.iskeyword(name) or name == "self":
            name += "_"
        elif not name.isidentifier():
            name = f"_{name}"
        if (other := named.setdefault(name, path)) != path:
            raise ValueError(
                f"the {what} {joined(other)!r} and {joined(path)!r} have the same name in a program, {name!r}: "
                "rename one"
            )
    return list(named)


@contextlib.contextmanager
def _made_deterministic(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode, choose deterministic values, and switch off the checks of distributions.

    The checks read values of tensors, which do not exist while torch traces.
    """
    modes = {part: part.training for part in module.modules()}
    validates = internals.do_distributions_validate()
    try:
        module.eval()
        Distribution.set_default_validate_args(False)
        with set_interaction_type(interaction_type() or InteractionType.DETERMINISTIC, thread_local=True):
            yield
    finally:
        Distribution.set_default_validate_args(validates)
        for part, mode in modes.items():
            part.training = mode


def _as_pt2(program: ExportedProgram) -> memoryview:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getbuffer()


def _as_onnx(program: ExportedProgram, names: list[str], shapes: dict[str, Any]) -> bytes:
    nbytes = sum(value.nbytes for value in program.state_dict.values())
    if nbytes >= _ONNX_LIMIT:
        raise ValueError(
            f"the parameters take {nbytes:,} bytes, and an ONNX file is smaller than 2 GiB: write several files with "
            "torch.onnx.export(export(module, tensordict), dynamo=True).save(path, external_data=True)"
        )
    spec = program.call_spec.out_spec
    results: dict[str, int] = internals.tree_unflatten(range(spec.num_leaves), spec)
    outputs = [f"{name}_out" if name in names else name for name in results]
    model: Any = torch.onnx.export(program, dynamo=True, verbose=False, output_names=outputs, dynamic_shapes=shapes)
    return model.model_proto.SerializeToString()  # type: ignore[no-any-return]
