"""`core/torch_internals.py`: what takes the place of a private name on a torch that lacks it.

The module is executed again by itself, with a `hasattr` that denies the name. The package then uses what that found.
"""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import h5py
import pytest
import torch
from torch import Tensor

from tensordict import (
    MemoryMappedTensor,
    PersistentTensorDict,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    pad_sequence,
    parse_tensor_dict_string,
)
from tensordict.core import foreach
from tensordict.core import torch_internals as internals
from tensordict.nn import CudaGraphModule
from tensordict.nn.distributions import TruncatedNormal


def executed(deny: Callable[[object, str], bool]) -> ModuleType:
    """Execute the module as on a torch that lacks the names in `deny`."""
    spec = importlib.util.spec_from_file_location(internals.__name__, internals.__file__)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    module.hasattr = lambda holder, name: not deny(holder, name) and hasattr(holder, name)
    spec.loader.exec_module(module)
    return module  # type: ignore[no-any-return]


NOTHING = executed(lambda holder, name: True)
PATHS = sorted(NOTHING.LACKING)
LISTS = [path for path in PATHS if path.startswith("torch._foreach_")]
OTHERS = [path for path in PATHS if path not in LISTS]
# Names that some supported torches lack, and the first torch that has each.
LATER = {"torch._foreach_clone": (2, 12)}


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes one private name from the package."""

    def take(path: str) -> None:
        denied: list[tuple[int, str]] = []
        holder: Any = torch
        *modules, name = path.split(".")[1:]
        for part in modules:
            holder = getattr(holder, part)
        denied.append((id(holder), name))
        module = executed(lambda holder, name: (id(holder), name) in denied)
        assert path in module.LACKING or "vmap._" in path, "the module does not ask for it"
        for own, value in vars(module).items():
            if not own.startswith("__") and own not in ("hasattr", "Decorator", "pytree_nodes", "collate_functions"):
                monkeypatch.setattr(internals, own, value)
        monkeypatch.setattr(foreach, "_transformed", module.transforms_active)
        monkeypatch.setattr(foreach, "_any_requires_grad", module.any_requires_grad)

    return take


def test_this_torch_has_all_that_it_should() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert set(internals.LACKING) == {path for path, first in LATER.items() if version < first}


def test_what_is_lost_is_told() -> None:
    assert len(LISTS) > 80 and len(OTHERS) > 30
    assert all(lost.startswith(("slower: ", "missing: ")) for lost in NOTHING.LACKING.values())


def test_importing_without_all_of_them() -> None:
    """A container is made, computed with, saved and loaded."""
    program = f"""
import importlib.util, json, sys, tempfile, warnings
warnings.simplefilter("error")
import torch
spec = importlib.util.spec_from_file_location("tensordict.core.torch_internals", {internals.__file__!r})
module = importlib.util.module_from_spec(spec)
module.hasattr = lambda holder, name: False
spec.loader.exec_module(module)
sys.modules["tensordict.core.torch_internals"] = module
import tensordict.nn
from tensordict import TensorDict
assert tensordict.core.foreach.internals is module
td = TensorDict(a=torch.ones(3), b=TensorDict(c=torch.ones(3, 2), batch_size=3), batch_size=3)
with tempfile.TemporaryDirectory() as folder:
    td.memmap(folder)
    loaded = TensorDict.load_memmap(folder)
total = (loaded + td.clone() * 2).sin_().zero_().exp().norm().sum(reduce=True)
try:
    torch.vmap(lambda x: x)(td)
except Exception as error:
    refused = str(error)
print(json.dumps([total.item(), torch.stack([td, td])[1, 0]["b", "c"].tolist(), refused]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    total, row, refused = json.loads(done.stdout)
    assert total == pytest.approx(3**0.5 + 6**0.5) and row == [1, 1]
    assert refused


# --- calls on lists ---------------------------------------------------------------------------------------------------

_PURE = [
    "abs",
    "acos",
    "asin",
    "atan",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "floor",
    "frac",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "round",
    "sigmoid",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
_TWO = ["add", "sub", "mul", "div", "pow", "clamp_min", "clamp_max", "maximum", "minimum"]


def _containers() -> tuple[TensorDict, TensorDict]:
    torch.manual_seed(0)
    return tuple(  # type: ignore[return-value]
        TensorDict(a=torch.rand(3), b=TensorDict(c=torch.rand(3, 2), d=torch.rand(3)), batch_size=3) for _ in range(2)
    )


def _computed(name: str) -> TensorDict:
    one, two = _containers()
    bare = name.removesuffix("_")
    end = name[len(bare) :]
    if bare in _PURE:
        return getattr(one, name)()  # type: ignore[no-any-return]
    if bare in _TWO:
        return getattr(one, name)(two)  # type: ignore[no-any-return]
    if bare == "lerp":
        return getattr(one, name)(two, 0.25)  # type: ignore[no-any-return]
    if bare in ("addcmul", "addcdiv"):
        return getattr(one, name)(two, two, value=0.5)  # type: ignore[no-any-return]
    if name == "clone":
        return one.clone()
    if name == "copy_":
        return one.update_(two)
    if name == "zero_":
        for leaf in one.values(True, True):
            leaf.requires_grad_().sum().backward()
        one.zero_grad(set_to_none=False)
        return one.apply(lambda leaf: leaf.grad)  # type: ignore[return-value]
    assert (bare, end) in (("norm", ""), ("max", "")), f"no use of {name}"
    return one.norm() if bare == "norm" else one.amax()


@pytest.mark.parametrize("path", LISTS)
def test_lists(path: str, lacking: Callable[[str], None]) -> None:
    name = path.removeprefix("torch._foreach_")
    expected = _computed(name)
    lacking(path)
    found = _computed(name)
    torch.testing.assert_close(found.to_dict(), expected.to_dict())


def test_lists_in_compiled_code(lacking: Callable[[str], None]) -> None:
    lacking("torch._foreach_mul")
    one, two = _containers()
    compiled = torch.compile(lambda one, two: (one * two).to_dict(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(one, two), (one * two).to_dict())


def test_in_place_calls_without_lists_change_nothing_when_a_leaf_is_refused(lacking: Callable[[str], None]) -> None:
    lacking("torch._foreach_add_")
    one, two = _containers()
    one["b", "d"].requires_grad_()
    before = one.clone()
    with pytest.raises(RuntimeError, match="leaf of the autograd graph"):
        one.add_(two)
    assert (one == before).all()


# --- the rest: each name has one use ----------------------------------------------------------------------------------


def _ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=layout)


def _overlap() -> object:
    td = TensorDict(a=torch.zeros(1).expand(3), b=torch.ones(3), c=torch.ones(3), batch_size=3)
    with pytest.raises(RuntimeError, match="written-to tensor|lie in one place"):
        td.add_(torch.ones(3))
    return td["b"]


def _stored(use: Callable[[Any], Any]) -> Any:
    with h5py.File(io.BytesIO(), "w") as file:
        td = PersistentTensorDict(group=file, batch_size=[3])
        td["a"] = torch.arange(3.0)
        return use(td)


def _shared() -> object:
    td = TensorDict(a=torch.arange(3.0), batch_size=3).consolidate(share_memory=True)
    assert td["a"].is_shared()
    return td["a"]


def _call_lazy_modules() -> Any:
    modules = [torch.nn.LazyLinear(2) for _ in range(2)]
    weights = TensorDict.from_modules(*modules, as_module=True)

    def call(weights: Any, x: torch.Tensor) -> torch.Tensor:
        with weights.to_module(modules[0]):
            return modules[0](x)

    return torch.vmap(call)(weights, torch.ones(2, 3)).shape


def _vmapped() -> object:
    td = TensorDict(a=torch.arange(6.0).view(2, 3), batch_size=2)
    return torch.vmap(lambda x: x + 1)(td)["a"]


def _vmapped_stack() -> object:
    td = lazy_stack([TensorDict(a=torch.arange(3.0), batch_size=3)] * 2, 1)
    return torch.vmap(lambda x: x["td"] + 1, in_dims=1)({"td": td})["a"]


def _collated() -> object:
    loader = torch.utils.data.DataLoader(TensorDict(a=torch.arange(4.0), batch_size=4), batch_size=2)
    return next(iter(loader))["a"]


def _legacy_loss() -> object:
    td = TensorDict(a=torch.arange(3.0), batch_size=3)
    return torch.nn.functional.mse_loss(td, td + 2, size_average=False)["a"]  # type: ignore[arg-type, call-overload]


def _fake() -> object:
    with internals.FakeTensorMode():
        fake = TensorDict(a=torch.ones(3), batch_size=3)
    return parse_tensor_dict_string(repr(fake))["a"].shape


def _grad() -> object:
    td = TensorDict(a=torch.ones(3, requires_grad=True), b=torch.ones(3), batch_size=3)
    with pytest.raises(RuntimeError, match="entry 'a'"):
        td.update_(TensorDict(a=torch.zeros(3), b=torch.zeros(3)))
    return td["b"]


def _mapped(use: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: use(MemoryMappedTensor.from_tensor(torch.arange(3.0)))


def _over_a_file() -> object:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8))
        file.flush()
        return internals.new_shared_storage_over(file.fileno(), 8).nbytes()


def _flat() -> object:
    return TensorDict(a=torch.arange(3.0), b=torch.ones(3), batch_size=3).sum(reduce=True)


def _padded() -> object:
    return pad_sequence([TensorDict(a=torch.ones(n), batch_size=n) for n in (2, 3)])["a"]


def _to_pytree() -> object:
    made = TensorDict.from_pytree([torch.ones(2), {"b": torch.zeros(2)}])
    return made.to_pytree()[1]["b"]


def _cuda_graph() -> object:
    if torch.cuda.is_available():
        return CudaGraphModule(lambda x: x + 1, warmup=1)(torch.ones(3, device="cuda"))
    with pytest.warns(UserWarning, match="GPU"):
        return CudaGraphModule(lambda x: x + 1, warmup=1)(torch.ones(3))


def _decorated() -> object:
    class Setting(internals.Decorator):  # type: ignore[misc]
        entered = 0

        def __enter__(self) -> None:
            Setting.entered += 1

        def __exit__(self, *error: object) -> None:
            pass

        def clone(self) -> Setting:
            return Setting()

    @Setting()
    def once() -> int:
        return Setting.entered

    return once(), once()


def _keys(kind: str) -> Callable[[], object]:
    def use() -> object:
        td = TensorDict(a=torch.ones(1))
        tree = td if kind == "names" else lazy_stack([td, td])
        return len(torch.utils._pytree.tree_flatten_with_path(tree)[0])

    return use


_C, _F, _V = "torch._C.", "torch._C._functorch.", "torch._functorch.vmap."
_P, _N = "torch.utils._pytree.", "torch.Tensor."
# The use of each name, and whether it does without the name what it does with it.
USES: dict[str, tuple[Callable[[], Any], bool]] = {
    f"{_C}_nn.flatten_dense_tensors": (_flat, True),
    f"{_C}_nn.pad_sequence": (_padded, True),
    f"{_C}_any_requires_grad": (_grad, True),
    f"{_N}_is_view": (_mapped(lambda x: x[1:].sum()), True),
    "torch._debug_has_internal_overlap": (_overlap, True),
    "torch._is_all_true": (lambda: TruncatedNormal(torch.zeros(2), torch.ones(2), -1.0, 1.0).mode, True),
    f"{_C}DisableTorchFunctionSubclass": (lambda: UnbatchedTensor(torch.ones(2)) + torch.ones(2), False),
    f"{_N}_make_wrapper_subclass": (lambda: _stored(lambda td: td.apply(lambda leaf: leaf + 1)["a"]), False),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": (
        lambda: internals.is_wrapper(torch.ones(2)), True
    ),
    "torch.ops.aten._to_copy.default": (lambda: _stored(lambda td: td.to("cpu")["a"]), True),
    "torch._subclasses.fake_tensor.FakeTensor": (lambda: isinstance(torch.ones(2), internals.FakeTensor), True),
    "torch._subclasses.fake_tensor.FakeTensorMode": (_fake, False),
    "torch.UntypedStorage._new_shared": (_shared, True),
    "torch.UntypedStorage._new_shared_fd_cpu": (
        lambda: _over_a_file(), False
    ),
    "torch.UntypedStorage._share_fd_cpu_": (
        lambda: internals.share_descriptor(torch.ones(3).share_memory_().untyped_storage())[1], False
    ),
    "torch.UntypedStorage._cdata": (lambda: TensorDict(a=torch.ones(3)).consolidate().is_consolidated(), True),
    f"{_N}_nested_tensor_size": (lambda: TensorDict(a=_ragged(torch.strided), batch_size=2).clone()["a"][1], True),
    "torch._nested_view_from_buffer": (lambda: (TensorDict(a=_ragged(torch.strided), batch_size=2) + 1)["a"][1], True),
    f"{_F}is_batchedtensor": (_vmapped, True),
    f"{_F}is_functorch_wrapped_tensor": (_vmapped, True),
    f"{_F}get_unwrapped": (_vmapped, True),
    f"{_F}peek_interpreter_stack": (_vmapped, True),
    f"{_C}_are_functorch_transforms_active": (_vmapped, True),
    "torch.compiler._is_exporting_flag": (internals.is_exporting, True),
    f"{_V}_add_batch_dim": (_vmapped, False),
    f"{_C}_functorch.maybe_get_bdim": (_call_lazy_modules, False),
    "torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack": (_call_lazy_modules, False),
    f"{_N}_make_subclass": (_call_lazy_modules, False),
    f"{_V}_remove_batch_dim": (_vmapped, False),
    f"{_P}register_pytree_node": (_flat, True),
    f"{_P}SUPPORTED_NODES": (_to_pytree, True),
    f"{_P}MappingKey": (_keys("names"), True),
    f"{_P}SequenceKey": (_keys("numbers"), True),
    f"{_P}tree_flatten": (_cuda_graph, False),
    f"{_P}tree_map": (lambda: _stored(lambda td: td._leaves()[0] + 1), False),
    f"{_P}tree_unflatten": (_vmapped_stack, False),
    f"{_P}_broadcast_to_and_flatten": (_vmapped_stack, False),
    "torch.utils._contextlib._DecoratorContextManager": (_decorated, True),
    "torch.utils.data._utils.collate.default_collate_fn_map": (_collated, True),
    "torch.nn._reduction.legacy_get_string": (_legacy_loss, False),
}  # fmt: skip


def test_each_name_has_a_use() -> None:
    assert set(USES) == set(OTHERS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("path", USES)
def test_without(path: str, lacking: Callable[[str], None]) -> None:
    use, works = USES[path]
    expected = use()
    lacking(path)
    if works:
        torch.testing.assert_close(use(), expected)
    else:
        with pytest.raises(
            RuntimeError, match=rf"needs {path}, which torch .* does not have; torch 2\.\d+ to 2\.\d+ have"
        ):
            use()
