"""Workloads on compiled code: what calls of it cost with containers, beside the same code over dicts of tensors.

Everything is compiled before the clock starts, for the backend that leaves the kernels alone: what is measured is how
containers are taken apart and put together around the graph, and the checks whether it still fits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from workload import Context, Limit, State, Workload, flat

# The difference to the dict is 1 to 2 us for each container, whatever its tensors. Small tensors show it; the limit is
# for tensors that are large enough to be worth compiling.
_DICT = (Limit("floor", at_most=1.02, called="a dict of tensors"),)
_SMALL, _LARGE = (32, 4), (32, 8192)
_LEAVES = (4, 20, 100)


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    calls = (
        ("arithmetic", _affine, _affine_of_dict),
        ("get and set", _net, _net_of_dict),
        ("nested keys, read and written", _rewire, _rewired_of_dict),
        ("index and stack", _stack, _stacked_of_dict),
        ("reduce to one tensor", _reduce, _reduced_of_dict),
        ("construct", _construct, _constructed_of_dict),
    )
    many = (
        calls[0],
        calls[1],
        ("vmap", _map_rows, _mapped_of_dict),
        ("regions", _regions, _regions_of_dict),
        ("container + tensor", _add, _added_of_dict),
    )
    return [
        *[_workload(f"{name}, 10 leaves", ours, plain, _LARGE) for name, ours, plain in calls],
        *[_workload(f"{name}, 10 small leaves", ours, plain, _SMALL) for name, ours, plain in calls],
        *[
            _workload(f"{name}, {count} leaves", ours, plain, _LARGE, count, refused=ours is _add)
            for name, ours, plain in many
            for count in _LEAVES
        ],
        Workload("to_module", _module_setup, lambda s: s.compiled(s.params, s.x), _module_floor),
    ]


def _workload(
    name: str,
    ours: Callable[[Any], Any],
    plain: Callable[[Any], Any],
    shape: tuple[int, ...],
    leaves: int = 10,
    refused: bool = False,
) -> Workload:
    def setup(module: ModuleType) -> State:
        data = flat(leaves, *shape)
        # One compiled function each: a function that saw both would check for both.
        return State(
            td=module.TensorDict({"in": module.TensorDict(data, [32])}, [32]),
            data={"in": data},
            compiled=_compile(lambda td: ours(td)),
            compiled_plain=_compile(lambda tree: plain(tree)),
        )

    limits = _DICT if shape is _LARGE else ()
    return Workload(
        name,
        setup,
        lambda s: s.compiled(s.td),
        lambda s: s.compiled_plain(s.data),
        limits=limits,
        reference_refuses=refused,
    )


def _compile(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager")  # type: ignore[no-any-return]


def _affine(td: Any) -> Any:
    return td["in"] * 2 + 1


def _affine_of_dict(tree: Any) -> Any:
    return {name: leaf * 2 + 1 for name, leaf in tree["in"].items()}


def _net(td: Any) -> Any:
    td = td.copy()
    td["in", "out"] = td["in", "k0"] + td["in", "k1"]
    return td["in"].select("out")


def _net_of_dict(tree: Any) -> Any:
    inner = dict(tree["in"])
    inner["out"] = inner["k0"] + inner["k1"]
    return {"out": inner["out"]}


def _rewire(td: Any) -> Any:
    td = td.copy()
    for place in range(3):
        td["out", "deep", f"k{place}"] = td["in", f"k{place}"] * td["in", f"k{place + 1}"]
    return td["out", "deep"]


def _rewired_of_dict(tree: Any) -> Any:
    tree = dict(tree)
    out: dict[str, Any] = tree.setdefault("out", {}).setdefault("deep", {})
    for place in range(3):
        out[f"k{place}"] = tree["in"][f"k{place}"] * tree["in"][f"k{place + 1}"]
    return out


def _map_rows(td: Any) -> Any:
    return torch.vmap(lambda row: row * 2)(td["in"])


def _mapped_of_dict(tree: Any) -> Any:
    return torch.vmap(lambda row: {name: leaf * 2 for name, leaf in row.items()})(tree["in"])


@torch.compiler.nested_compile_region
def _region(td: Any) -> Any:
    return td * 2


@torch.compiler.nested_compile_region
def _region_of_dict(tree: Any) -> Any:
    return {name: leaf * 2 for name, leaf in tree.items()}


def _regions(td: Any) -> Any:
    return _region(_region(td["in"]))


def _regions_of_dict(tree: Any) -> Any:
    return _region_of_dict(_region_of_dict(tree["in"]))


def _add(td: Any) -> Any:
    return td["in"] + td["in", "k0"].sum()


def _added_of_dict(tree: Any) -> Any:
    added = tree["in"]["k0"].sum()
    return {name: leaf + added for name, leaf in tree["in"].items()}


def _stack(td: Any) -> Any:
    return torch.stack([td["in"][:4], td["in"][4:8]])


def _stacked_of_dict(tree: Any) -> Any:
    return {name: torch.stack([leaf[:4], leaf[4:8]]) for name, leaf in tree["in"].items()}


def _reduce(td: Any) -> Tensor:
    total: Any = sum(leaf.sum() for leaf in td.values(True, True))
    return total  # type: ignore[no-any-return]


def _reduced_of_dict(tree: Any) -> Tensor:
    total: Any = sum(leaf.sum() for leaf in tree["in"].values())
    return total  # type: ignore[no-any-return]


def _construct(td: Any) -> Any:
    return type(td)({"x": td["in", "k0"] * 2, "n": {"y": td["in", "k1"] * 2}}, batch_size=[32])


def _constructed_of_dict(tree: Any) -> Any:
    return {"x": tree["in"]["k0"] * 2, "n": {"y": tree["in"]["k1"] * 2}}


def _module_setup(module: ModuleType) -> State:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    params = module.TensorDict.from_module(net).data.clone()
    named = {".".join(key): leaf for key, leaf in params.items(True, True)}

    def swap(params: Any, x: Tensor) -> Any:
        with params.to_module(net):
            return net(x)

    def called(named: Any, x: Tensor) -> Any:
        return torch.func.functional_call(net, named, x)

    return State(
        params=params, named=named, x=torch.ones(5, 4), compiled=_compile(swap), compiled_plain=_compile(called)
    )


def _module_floor(state: State) -> Any:
    return state.compiled_plain(state.named, state.x)
