"""TensorDictParams: a container that is a module."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tensordict import (
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    UnbatchedTensor,
    from_module,
    lazy_stack,
)
from tensordict.core.exceptions import FieldError


def make(**options):
    td = TensorDict(
        a=nn.Parameter(torch.zeros(2, 3)),
        b={"c": torch.zeros(2), "i": torch.zeros(2, dtype=torch.int64)},
        batch_size=[2],
    )
    return TensorDictParams(td, **options)


def test_it_is_a_module_and_a_container():
    params = make()
    assert isinstance(params, nn.Module) and isinstance(params, TensorDictBase)
    assert [name for name, _ in params.named_parameters()] == ["a", "b.c"]
    assert [name for name, _ in params.named_buffers()] == ["b.i"]
    assert type(params["a"]) is nn.Parameter and type(params["b", "i"]) is torch.Tensor
    assert params.batch_size == (2,) and hash(params) == hash(params)
    assert repr(params).startswith("TensorDictParams(params=TensorDict(")


def test_leaves_become_parameters_in_place():
    td = TensorDict(a=torch.zeros(2), n=torch.zeros(2, dtype=torch.int64))
    params = TensorDictParams(td)
    assert params["a"] is td["a"] and type(td["a"]) is nn.Parameter
    assert type(TensorDictParams({"a": torch.zeros(1)})["a"]) is nn.Parameter
    assert type(TensorDictParams(a=torch.zeros(1))["a"]) is nn.Parameter


@pytest.mark.parametrize(
    ("no_convert", "kinds"),
    [
        (False, [True, True, False]),
        ("auto", [True, True, False]),
        (True, [True, False, False]),
        ("buffer", [True, False, False]),
        ("parameter", [True, True, True]),
    ],
)
def test_what_is_converted(no_convert, kinds):
    leaves = list(make(no_convert=no_convert).values(True, True))
    assert [isinstance(leaf, nn.Parameter) for leaf in leaves] == kinds
    assert not leaves[2].requires_grad


def test_bad_arguments():
    with pytest.raises(ValueError, match="no_convert must be"):
        make(no_convert="x")
    with pytest.raises(TypeError, match="got list"):
        TensorDictParams([torch.zeros(1)])
    with pytest.raises(TypeError, match="not from both"):
        TensorDictParams(TensorDict(), a=torch.zeros(1))


def test_what_is_written_is_registered():
    params = make()
    params["z"] = torch.ones(2)
    params["b", "y"] = torch.ones(2)
    params.set("s", [1.0, 2.0])
    params.update({"u": torch.ones(2), "v": {"w": torch.ones(2)}})
    params.set(("deep", "er"), torch.ones(2))
    names = [name for name, _ in params.named_parameters()]
    assert set(names) == {"a", "b.c", "z", "b.y", "s", "u", "v.w", "deep.er"}
    assert params["b", "y"] is dict(params.named_parameters())["b.y"]
    params["n"] = torch.ones(2, dtype=torch.int64)
    assert [name for name, _ in params.named_buffers()] == ["b.i", "n"]
    params.pop("z")
    del params["u"]
    assert not {"z", "u"} & {name for name, _ in params.named_parameters()}


def test_a_write_that_fails_changes_nothing():
    params = make()
    with pytest.raises(RuntimeError, match="'w'"):
        params["w"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="'w'"):
        params.update({"a": torch.ones(2, 3), "w": torch.zeros(3)})
    assert (params["a"] == 0).all() and "w" not in params.keys()


def test_locking():
    params = make(lock=True)
    assert params.is_locked
    with pytest.raises(RuntimeError, match="locked"):
        params["n"] = torch.zeros(2)
    with params.unlock_():
        params["n"] = torch.zeros(2)
    assert params.is_locked and "n" in dict(params.named_parameters())


@pytest.mark.parametrize(
    "operation",
    [
        lambda p: p["b"],
        lambda p: p[0],
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.apply(lambda leaf: leaf + 1),
        lambda p: p + 1,
        lambda p: p.select("a"),
        lambda p: p.flatten_keys("."),
        lambda p: p.unsqueeze(0),
        lambda p: torch.stack([p, p]),
        lambda p: p.unbind(0)[0],
        lambda p: p.to_tensordict(),
        lambda p: p.empty(),
        lambda p: torch.zeros_like(p),
        lambda p: p == p,
    ],
)
def test_results_are_plain_containers(operation):
    assert type(operation(make())) is TensorDict


@pytest.mark.parametrize(
    "operation",
    [
        lambda p: p.clone(),
        lambda p: p.copy(),
        lambda p: p.to("cpu"),
        lambda p: p.to(torch.float64),
        lambda p: p.cpu(),
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
    ],
)
def test_copies_are_params(operation):
    params = make()
    result = operation(params)
    assert type(result) is TensorDictParams and result is not params
    assert [name for name, _ in result.named_parameters()] == ["a", "b.c"]
    result["new"] = torch.zeros(2)
    assert "new" in dict(result.named_parameters()) and "new" not in params.keys()


def test_copies_have_their_own_memory_or_not():
    params = make()
    assert params.clone()["a"] is not params["a"] and params.clone(recurse=False)["a"] is params["a"]
    assert params.to("cpu")["a"] is params["a"]
    double = params.to(torch.float64)
    assert double["a"].dtype == torch.float64 and params["a"].dtype == torch.float32
    assert type(double["a"]) is nn.Parameter


def test_same_operations_give_it_back():
    params = make()
    assert params.lock_() is params and params.unlock_() is params
    assert params.set("q", torch.zeros(2)) is params
    assert params.reshape(-1) is params
    assert params.train() is params and params.eval() is params and not params.training


def test_in_a_module():
    params = make()
    net = nn.ModuleDict({"p": params, "l": nn.Linear(2, 2)})
    assert [name for name, _ in net.named_parameters()] == ["p.a", "p.b.c", "l.weight", "l.bias"]
    assert list(net.state_dict()) == ["p.a", "p.b.c", "p.b.i", "l.weight", "l.bias"]
    state = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    net.load_state_dict(state)
    assert (params["a"] == 1).all() and (params["b", "i"] == 1).all()
    parameter = params["a"]
    net.to(torch.float64)
    assert params["a"] is parameter and params["a"].dtype == torch.float64
    net.to("meta")
    assert params["a"].device.type == "meta" and params["b", "i"].device.type == "meta"
    assert TensorDict.from_module(net)["p"] is params


def test_a_state_dict_has_the_order_of_the_entries():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    assert list(from_module(net, as_module=True).state_dict()) == list(net.state_dict())


def test_state_dict_of_its_own():
    params, other = make(), make()
    with torch.no_grad():
        other["a"].fill_(3)
    assert params.load_state_dict(other.state_dict()) is params
    assert (params["a"] == 3).all()
    with pytest.raises(RuntimeError, match=r'Missing key.*"b.c"'):
        params.load_state_dict({"a": torch.zeros(2, 3)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"x.y"'):
        params.load_state_dict({**other.state_dict(), "x.y": torch.zeros(1)})


def test_training():
    params = TensorDictParams(w=torch.ones(3))
    optimizer = torch.optim.SGD(params.parameters(), lr=1.0)
    (params["w"] * torch.arange(3.0)).sum().backward()
    assert params.grad["w"].tolist() == [0, 1, 2]
    optimizer.step()
    assert params["w"].tolist() == [1, 0, -1]
    assert params.zero_grad() is params and params["w"].grad is None
    params.requires_grad_(False)
    assert not params["w"].requires_grad


def test_to_module_and_swapping_it():
    net = nn.Linear(3, 4)
    params = TensorDictParams(TensorDict.from_module(net).clone())
    with params.to_module(net):
        assert net.weight is params["weight"]
    holder = nn.ModuleDict({"p": make()})
    old = holder["p"]["a"]
    with TensorDict({"p": {"a": torch.ones(2, 3)}}).to_module(holder):
        assert (holder["p"]["a"] == 1).all()
    assert holder["p"]["a"] is old


def test_get_hooks():
    seen = []

    def hook(given, value):
        seen.append(given)
        return value.detach() + 1

    params = make()
    params.register_get_post_hook(hook)
    assert (params["a"] == 1).all() and (params["b", "c"] == 1).all() and (params.get("a") == 1).all()
    assert len(seen) == 3 and all(given is params for given in seen)
    assert type(params["b"]) is TensorDict
    assert type(params[()]) is TensorDict and len(seen) == 3
    assert (next(iter(params.parameters())) == 0).all()
    assert [bool((value == 1).all()) for value in params.values(True, True)][:2] == [True, True]
    assert (dict(params.items())["a"] == 1).all() and type(dict(params.items())["b"]) is TensorDict
    watched = make()
    watched.register_get_post_hook(lambda given, value: None)
    assert type(watched["a"]) is nn.Parameter


def test_from_dict_instance_gives_parameters_again():
    params = TensorDictParams(TensorDict({"a": torch.zeros(2), "n": {"b": torch.ones(2)}}))
    again = params.from_dict_instance(params.to_dict())
    assert type(again) is TensorDictParams
    assert again["n", "b"] is params["n", "b"]
    made = params.from_dict_instance({"a": torch.zeros(2)}, batch_size=[2])
    assert type(made) is TensorDictParams and made.batch_size == (2,)
    assert type(made["a"]) is torch.Tensor
    made["c"] = torch.zeros(2)
    assert type(made["c"]) is torch.nn.Parameter


def test_update_with_clones_stores_parameters():
    params, value = TensorDictParams(TensorDict({"n": {}})), torch.zeros(2)
    params.update({"a": value, "n": {"b": value}, "i": torch.arange(2)}, clone=True)
    assert type(params["a"]) is type(params["n", "b"]) is torch.nn.Parameter
    assert params["a"].is_leaf and params["a"].data_ptr() != value.data_ptr()
    assert len(list(params.parameters())) == 2 and len(list(params.buffers())) == 1


def test_vmap_and_pytree():
    params = make()
    leaves, spec = torch.utils._pytree.tree_flatten(params)
    assert len(leaves) == 3
    assert spec == torch.utils._pytree.tree_flatten(make())[1]
    y = torch.vmap(lambda p: p["a"].sum())(params)
    assert y.shape == (2,)


def test_pytree_functions_that_return_parameters_give_parameters():
    tree_map = torch.utils._pytree.tree_map
    params = TensorDictParams(TensorDict(a=torch.ones(2), n={"b": torch.ones(3)}, i=torch.arange(2)))
    same = tree_map(lambda leaf: leaf, params)
    assert type(same) is TensorDictParams
    assert [same[key] is params[key] for key in ("a", ("n", "b"), "i")] == [True] * 3
    assert list(dict(same.named_parameters())) == ["a", "n.b"] and list(dict(same.named_buffers())) == ["i"]
    assert same is not params and same._param_td is not params._param_td
    frozen = tree_map(lambda leaf: nn.Parameter(leaf.detach() + 1, requires_grad=False), {"net": params.exclude("i")})
    assert type(frozen["net"]) is TensorDict
    frozen = tree_map(
        lambda leaf: nn.Parameter(leaf.detach() + 1, requires_grad=False) if leaf.is_floating_point() else leaf, params
    )
    assert type(frozen) is TensorDictParams and (frozen["n", "b"] == 2).all()
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    frozen["new"] = torch.zeros(1)
    assert type(frozen["new"]) is nn.Parameter
    # Computed tensors do not count as parameters.
    for function in (torch.detach, torch.clone, torch.zeros_like, lambda leaf: leaf * 2):
        assert type(tree_map(function, params)) is TensorDict
    assert tree_map(lambda leaf: None, params) is None
    raw = TensorDictParams(TensorDict(a=torch.ones(2)), no_convert=True)
    assert type(tree_map(lambda leaf: leaf, raw)) is TensorDict
    seen = []
    torch.vmap(lambda x, p: seen.append(type(p)) or x, in_dims=(0, None))(torch.ones(2), params)
    assert seen == [TensorDictParams]


# --- what it wraps ----------------------------------------------------------------------------------------------------


def test_containers_that_make_their_entries_are_refused():
    stack = lazy_stack([TensorDict(a=torch.zeros(2)) for _ in range(3)])
    with pytest.raises(RuntimeError, match="LazyStackedTensorDict makes its entries.*to_tensordict"):
        TensorDictParams(stack)
    with pytest.raises(TypeError, match=r"entry \('n', 'l'\).*LazyStackedTensorDict"):
        TensorDictParams(TensorDict(n={"l": stack}))
    params = make()
    with pytest.raises(RuntimeError, match="LazyStackedTensorDict"):
        params["l"] = lazy_stack([TensorDict(a=torch.zeros(())) for _ in range(2)])
    assert "l" not in params.keys()
    assert [name for name, _ in TensorDictParams(stack.to_tensordict()).named_parameters()] == ["a"]


def test_what_is_locked_is_not_changed():
    td = TensorDict(a=torch.zeros(2), n={"b": torch.zeros(2)}).lock_()
    params = TensorDictParams(td)
    assert not params.is_locked and td.is_locked and type(td["a"]) is type(td["n", "b"]) is torch.Tensor
    assert params["a"].data_ptr() == td["a"].data_ptr()
    params["c"] = torch.ones(2)
    assert "c" not in td.keys()


def test_tensorclasses_and_values_inside():
    class Part(TensorClass):
        x: torch.Tensor
        label: str = "part"

    params = TensorDictParams(TensorDict(p=Part(torch.zeros(2), batch_size=[2]), s="text"))
    assert [name for name, _ in params.named_parameters()] == ["p.x"]
    assert isinstance(params["p"], Part) and params["p"].label == "part" and params["s"] == "text"
    assert list(params.state_dict()) == ["p.x"]


def test_params_in_params():
    inner = make()
    params = TensorDictParams(TensorDict(q=inner))
    assert [name for name, _ in params.named_parameters()] == ["q.a", "q.b.c"]
    assert params["q"] is inner and params["q", "a"] is inner["a"]


def test_names_with_prefix_and_of_one_module():
    params = make()
    assert [name for name, _ in params.named_parameters(prefix="p")] == ["p.a", "p.b.c"]
    assert [name for name, _ in params.named_parameters(recurse=False)] == ["a", "b.c"]
    assert list(map(id, params.parameters(recurse=False))) == [id(params["a"]), id(params["b", "c"])]
    assert next(nn.ModuleList([params]).parameters()) is params["a"]


def test_entries_are_attributes():
    params = make()
    assert params.a is params["a"] and params.b.c is params["b", "c"]
    assert params.training is True and params.keys is not None
    with pytest.raises(AttributeError, match="absent"):
        _ = params.absent
    with pytest.raises(AttributeError, match="_absent"):
        _ = params._absent


def test_a_nested_container_is_a_module_as_an_attribute():
    """Torch finds `b.c` as the parameter `c` of a module `b`."""
    params = make()
    assert type(params.b) is TensorDictParams and params.b._tensordict is params["b"]
    assert params.get_parameter("b.c") is params["b", "c"]
    params.b["new"] = torch.ones(2)
    assert [name for name, _ in params.named_parameters()] == ["a", "b.c", "b.new"]


def test_functional_call_reaches_nested_entries():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = make()

        def forward(self, x):
            return x * self.params["b", "c"]

    net, one = Scaled(), torch.ones(2)
    before = net.params["b", "c"]
    assert torch.func.functional_call(net, {"params.b.c": torch.full((2,), 5.0)}, (one,)).tolist() == [5, 5]
    assert net.params["b", "c"] is before and net(one).tolist() == before.tolist()


@pytest.mark.parametrize(
    "convert",
    [
        lambda: TensorDictParams.from_dict({"a": torch.zeros(2, 3)}, batch_size=[2]),
        lambda: TensorDictParams.from_any({"a": torch.zeros(2, 3)}, batch_size=[2]),
        lambda: TensorDictParams.from_dict({"a": torch.zeros(2, 3)}, auto_batch_size=True)[:, :1].auto_batch_size_(1),
    ],
)
def test_constructors(convert):
    made = convert()
    assert made.batch_size[0] == 2 and made["a"].requires_grad


# --- writes in place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.set_("a", torch.ones(2, 3)),
        lambda p: p.set_at_("a", torch.ones(3), 1),
        lambda p: p.update_({"a": torch.ones(2, 3)}),
        lambda p: p.update_at_({"a": torch.ones(3)}, 1),
        lambda p: p.copy_(TensorDict(a=torch.ones(2, 3))),
        lambda p: p.copy_at_(TensorDict(a=torch.ones(3)), 1),
        lambda p: p.fill_("a", 1.0),
        lambda p: p.apply_(lambda leaf: leaf + 1),
        lambda p: p.set("a", torch.ones(2, 3), inplace=True),
        lambda p: p.update({"a": torch.ones(2, 3)}, inplace=True),
        lambda p: p.data.add_(1),
    ],
)
def test_writes_in_place_go_past_autograd(write):
    params = make()
    parameter = params["a"]
    write(params)
    assert params["a"] is parameter and parameter.is_leaf and parameter.requires_grad
    assert (parameter[1] == 1).all()
    assert params.zero_() is params and (parameter == 0).all()


def test_arithmetic_in_place_is_autograds_business():
    params = make()
    with pytest.raises(RuntimeError, match="'a'.*requires grad"):
        params.add_(1)
    with torch.no_grad():
        params.add_(1)
    assert (params["a"] == 1).all()


# --- buffers ---------------------------------------------------------------------------------------------------------


def kinds(container):
    names = {nn.Parameter: "parameter", nn.Buffer: "buffer"}
    return {
        ".".join(path): next((name for kind, name in names.items() if isinstance(leaf, kind)), "tensor")
        for path, leaf in container._walk()
    }


def given():
    return TensorDict(w=torch.ones(2), i=torch.arange(2), b=nn.Buffer(torch.ones(2)), n={"b": nn.Buffer(torch.ones(1))})


KINDS = {"w": "parameter", "i": "buffer", "b": "buffer", "n.b": "buffer"}


@pytest.mark.parametrize(
    "make",
    [
        TensorDictParams,
        lambda td: TensorDictParams(td.to_dict()),
        lambda td: TensorDictParams(**td.to_dict()),
        lambda td: TensorDictParams(TensorDictParams(td)),
        lambda td: TensorDictParams(td.lock_()),
        lambda td: TensorDictParams(td).clone(),
        lambda td: TensorDictParams(td).to(torch.float64),
        lambda td: TensorDictParams().update(td),
        lambda td: TensorDictParams(td).copy(),
        lambda td: copy.deepcopy(TensorDictParams(td)),
        lambda td: nn.ModuleDict({"p": TensorDictParams(td)}).to(torch.float64)["p"],
    ],
)
def test_buffers_stay_buffers(make):
    td = given()
    params = make(td)
    expected = dict(KINDS)
    assert kinds(params) == expected
    assert sorted(name for name, _ in params.named_buffers()) == ["b", "i", "n.b"]
    params["late"] = torch.arange(3)
    assert isinstance(params["late"], nn.Buffer)


def test_buffers_share_the_memory_of_the_tensors():
    step = torch.zeros((), dtype=torch.int64)
    params = TensorDictParams(TensorDict(step=step, same=step))
    assert params["step"] is params["same"]
    step.add_(1)
    assert params["step"] == 1
    norm = nn.BatchNorm1d(2)
    held = TensorDict.from_module(norm, as_module=True)
    norm(torch.randn(3, 2))
    assert held["num_batches_tracked"] == 1 and isinstance(held["running_mean"], nn.Buffer)
    stack = TensorDict.from_modules(norm, nn.BatchNorm1d(2))
    assert kinds(TensorDictParams(stack)) == {
        "weight": "parameter",
        "bias": "parameter",
        "running_mean": "buffer",
        "running_var": "buffer",
        "num_batches_tracked": "buffer",
    }


@pytest.mark.parametrize(("value", "kind"), [(None, "parameter"), (0, "parameter"), (1, "buffer"), (True, "buffer")])
def test_no_convert_by_its_truth(value, kind):
    assert kinds(TensorDictParams(TensorDict(w=torch.ones(2)), no_convert=value)) == {"w": kind}


def test_attributes_are_entries():
    params = TensorDictParams(TensorDict(w=torch.ones(2)))
    params.v = nn.Parameter(torch.ones(1))
    params.b = nn.Buffer(torch.ones(1))
    params.register_buffer("c", torch.ones(1))
    params.inner = nn.Linear(1, 1)
    assert kinds(params) == {"w": "parameter", "v": "parameter", "b": "buffer", "c": "buffer"}
    names = ["w", "v", "inner.weight", "inner.bias"]
    assert [name for name, _ in params.named_parameters()] == names and len(list(params.parameters())) == 4
    assert list(params.state_dict()) == ["w", "v", "b", "c", "inner.weight", "inner.bias"]


def test_the_end_of_a_block_copies_into_the_parameters():
    for kind in (torch.float64, "cpu"):
        params = TensorDictParams(given())
        before = params["w"]
        with params.to(kind) as moved, torch.no_grad():
            moved["w"].add_(1)
            moved["new"] = torch.ones(3)
        assert params["w"] is before and (before == 2).all() and before.dtype == torch.float32
        assert kinds(params) == {**KINDS, "new": "parameter"}


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_several_get_hooks_and_copies_of_them():
    params = make()
    params.register_get_post_hook(lambda given, value: value + 1)
    params.register_get_post_hook(lambda given, value: value * 2)
    assert (params["a"] == 2).all() and (params.clone()["a"] == 2).all()
    assert params.get("absent", None) is None
    assert params.get("b") is params["b"]


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained():
    params = make()
    params.update_({"a": torch.arange(6.0).view(2, 3), "b": {"i": torch.tensor([3, 4])}})
    return params


def check_saved(loaded, params):
    assert type(loaded) is TensorDict and loaded.batch_size == params.batch_size
    assert set(loaded.keys(True, True)) == set(params.keys(True, True))
    assert (loaded == params).all() and not any(leaf.requires_grad for leaf in loaded.values(True, True))


@pytest.mark.parametrize("save", ["memmap", "save", "dumps"])
def test_saved_as_a_container(trained, tmp_path, save):
    saved = getattr(trained, save)(tmp_path / "saved")
    check_saved(TensorDict.load_memmap(tmp_path / "saved"), trained)
    assert save == "dumps" or type(saved) is TensorDict
    other = make()
    parameter = other["a"]
    assert other.load_memmap_(tmp_path / "saved") is other
    assert other["a"] is parameter and torch.equal(parameter, trained["a"]) and other["b", "i"].tolist() == [3, 4]


def test_a_save_that_does_not_fit(trained, tmp_path):
    TensorDict(a=torch.zeros(2, 3), z=torch.zeros(2), batch_size=[2]).memmap(tmp_path)
    before = trained.clone()
    with pytest.raises(KeyError, match=r"unexpected keys \['z'\], missing keys \['b.c', 'b.i'\]"):
        trained.load_memmap_(tmp_path)
    assert (trained == before).all()
    with pytest.raises(RuntimeError, match="memmap"):
        trained.memmap_(tmp_path / "else")


def test_parameters_over_a_save(trained, tmp_path):
    trained.memmap(tmp_path)
    params = TensorDictParams(TensorDict.load_memmap(tmp_path))
    assert type(params["a"]) is nn.Parameter and torch.equal(params["a"], trained["a"])
    params["a"].sum().backward()
    assert params["a"].grad is not None


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda p, path: p.save(path, archive=True), TensorDict.load),
        (lambda p, path: p.to_safetensors(path), TensorDict.from_safetensors),
        (lambda p, path: p.to_h5(path).close(), lambda path: TensorDict.from_h5(path).to_tensordict()),
        (lambda p, path: p.consolidate(path), TensorDict.from_consolidated),
    ],
    ids=["archive", "safetensors", "h5", "consolidated"],
)
def test_other_formats(trained, tmp_path, write, read):
    path = tmp_path / "saved.tdz"
    write(trained, path)
    loaded = read(path)
    check_saved(loaded.clone() if loaded.is_locked else loaded, trained)


def test_nested_ones_are_saved_as_containers(trained, tmp_path):
    TensorDict(q=trained).memmap(tmp_path)
    check_saved(TensorDict.load_memmap(tmp_path)["q"], trained)
    state = TensorDict(q=trained).state_dict()
    other = TensorDict(q=make().data)
    other.load_state_dict(state)
    assert torch.equal(other["q", "a"], trained["a"])


def test_torch_save(trained):
    file = io.BytesIO()
    torch.save(trained, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is TensorDictParams and torch.equal(again["a"], trained["a"])
    assert [name for name, _ in again.named_parameters()] == ["a", "b.c"]
    file = io.BytesIO()
    torch.save(trained.state_dict(), file)
    file.seek(0)
    other = make().load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other["a"], trained["a"])


def test_assignment_by_index_goes_past_autograd() -> None:
    params = TensorDictParams(TensorDict(w=torch.zeros(3, 2), batch_size=[3]))
    params[0] = TensorDict(w=torch.ones(2))
    params[1:] = 2
    assert params["w"].tolist() == [[1, 1], [2, 2], [2, 2]] and params["w"].requires_grad
    assert params["w"].is_leaf


# --- in lazy stacks, and over tensorclasses ---------------------------------------------------------------------------


class Affine(TensorClass):
    weight: torch.Tensor
    bias: torch.Tensor | None = None


def stacked() -> Any:
    return lazy_stack([TensorDictParams(TensorDict(a=torch.ones(3), i=torch.arange(3))) for _ in range(2)])


def test_members_of_a_lazy_stack_stay_parameters() -> None:
    stack = stacked()
    stack["new"] = torch.ones(2, 3)
    stack.set(("n", "b"), torch.zeros(2, 1))
    stack.update({"u": torch.zeros(2, 1)})
    for member in stack.tensordicts:
        assert type(member) is TensorDictParams
        assert [name for name, _ in member.named_parameters()] == ["a", "new", "n.b", "u"]
    assert type(stack[1]) is TensorDictParams
    assert type((stack + 1)[0]) is TensorDict


def test_a_clone_of_a_lazy_stack_has_parameters_of_its_own() -> None:
    stack = stacked()
    for copied in (stack.clone(), copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert type(copied[0]) is TensorDictParams
        assert [name for name, _ in copied[0].named_parameters()] == ["a"]
        assert [name for name, _ in copied[0].named_buffers()] == ["i"]
        assert copied[0]["a"].is_leaf
        assert copied[0]["a"] is not stack[0]["a"]
        assert copied[0]["i"].data_ptr() != stack[0]["i"].data_ptr()


@pytest.mark.parametrize(
    "of", [lambda params: TensorDict(p=params), lambda params: lazy_stack([params, params.copy()])]
)
@pytest.mark.parametrize(
    "entries",
    [{}, {"n": {}}, {"s": "text"}, {"u": UnbatchedTensor(torch.ones(2))}, {"a": torch.ones(2), "i": torch.arange(2)}],
    ids=["empty", "empty inside", "value", "unbatched", "mixed"],
)
@pytest.mark.parametrize("kwargs", [{}, {"memory_format": torch.contiguous_format}])
def test_a_clone_of_what_holds_params_holds_params(of, entries, kwargs) -> None:
    params = TensorDictParams(TensorDict(entries))
    copied = of(params).clone(**kwargs)[0 if of(params).batch_dims else "p"]
    assert type(copied) is TensorDictParams and copied is not params
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in params.named_parameters()]
    assert not {id(leaf) for leaf in copied.parameters()} & {id(leaf) for leaf in params.parameters()}


def test_a_clone_of_what_holds_tied_params_ties_them() -> None:
    weight = nn.Parameter(torch.ones(2))
    params = TensorDictParams(a=weight, n={"b": weight})
    for copied in (params.clone(), TensorDict(p=params).clone()["p"], lazy_stack([params, params]).clone()[0]):
        assert copied["a"] is copied["n", "b"] and copied["a"] is not weight
        assert len(list(copied.parameters())) == 1


def test_a_clone_has_values_of_its_own() -> None:
    params = TensorDictParams(TensorDict(s=NonTensorData([1, 2])))
    copies = params.clone(), TensorDict(p=params).clone()["p"]
    params["s"].append(3)
    assert [copied["s"] for copied in copies] == [[1, 2], [1, 2]]


def test_params_over_a_tensorclass_keep_the_class() -> None:
    params = TensorDictParams(Affine(weight=torch.ones(3), batch_size=[3]))
    assert [name for name, _ in params.named_parameters()] == ["weight"]
    for made in (params.data, params + 1, params[0], params.detach(), params.apply(lambda x: x), params.exp()):
        assert type(made) is Affine
    assert type(params[:2].weight) is torch.Tensor
    assert params.bias is None
    for again in (params.clone(), params.copy(), params.to(torch.float64), copy.deepcopy(params), params.consolidate()):
        assert type(again) is TensorDictParams
        assert type(again.data) is Affine
    again = pickle.loads(pickle.dumps(params))
    assert type(again.data) is Affine
    assert "Affine" in repr(params)
    assert type(TensorDictParams(params).data) is Affine
    assert type(params.to_tensordict()) is TensorDict
    with pytest.raises(FieldError, match="unknown"):
        params["unknown"] = torch.ones(3)
    params["bias"] = torch.zeros(3)
    assert type(params.bias) is nn.Parameter


def test_nested_tensorclasses_keep_theirs_too() -> None:
    params = TensorDictParams(TensorDict(layer=Affine(weight=torch.ones(3)), x=torch.ones(1)))
    assert type(params.data) is TensorDict
    assert type(params.data["layer"]) is Affine


def test_lazy_stacks_of_modules_without_sizes() -> None:
    modules = [nn.LazyLinear(3), nn.LazyLinear(3)]
    stack = TensorDict.from_modules(*modules, lazy_stack=True)
    assert "UninitializedParameter" in repr(stack)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        stack["weight"]
    for module in modules:
        module(torch.ones(1, 2))
    assert stack["weight"].shape == (2, 3, 2)


def test_moves_to_the_meta_device() -> None:
    params = TensorDictParams(TensorDict(a=torch.ones(3), n={"b": torch.ones(1)}))
    moved = params.to("meta")
    assert [(type(leaf), leaf.device.type) for leaf in moved.values(True, True)] == [(nn.Parameter, "meta")] * 2
    applied = params.apply(lambda x: x.data, device="meta")
    assert {leaf.device.type for leaf in applied.values(True, True)} == {"meta"}
    holder = nn.Module()
    holder.params = params
    assert holder.to("meta").params["n", "b"].device.type == "meta"


@pytest.mark.parametrize("assign", [False, True])
def test_nested_states(assign: bool) -> None:
    source = make()
    state = source.state_dict(flatten=False)
    assert list(state) == ["a", "b"]
    assert list(state["b"]) == ["c", "i"]
    target = make()
    with torch.no_grad():
        state["b"]["c"].fill_(5)
    assert target.load_state_dict(state, assign=assign, from_flatten=False) is target
    assert target["b", "c"].tolist() == [5, 5]
    assert type(target["b", "c"]) is nn.Parameter
    del state["b"]["c"]
    with pytest.raises(RuntimeError, match="b.c"):
        target.load_state_dict(state)
    assert list(source.state_dict(flatten=True)) == list(source.state_dict())


def test_a_module_that_has_parameters_is_assigned() -> None:
    modules = [nn.Module(), nn.Module()]
    for value, module in enumerate(modules):
        module.params = make()
        module.params.data.apply_(lambda leaf, value=value: leaf.fill_(value))
    modules[0].load_state_dict(modules[1].state_dict(), assign=True)
    params = modules[0].params
    assert [name for name, _ in params.named_parameters()] == ["a", "b.c"]
    assert bool((params.data == 1).all())
    assert type(params["b", "i"]) is torch.Tensor


def test_to_an_integer_dtype_gives_buffers() -> None:
    params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    for moved in (params.to(torch.int64), params.to("cpu", torch.int64)):
        assert type(moved) is TensorDictParams and moved["a"].dtype == torch.int64
        assert not list(moved.parameters()) and len(list(moved.buffers())) == 1


def test_to_in_place_moves_the_container_itself() -> None:
    params = TensorDictParams(TensorDict({"a": torch.ones(2)}))
    assert params.to("meta", inplace=True) is params
    assert params.device == torch.device("meta") and params["a"].is_meta
    assert [type(p) for p in params.parameters()] == [torch.nn.Parameter]


def test_leaves_without_elements_are_moved_too() -> None:
    assert TensorDictParams(TensorDict({"a": torch.ones(0)})).to("meta")["a"].is_meta


def test_parameters_in_an_update_are_checked_as_tensors_are() -> None:
    td = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2, 3)}, [2])
    news = {name: nn.Parameter(torch.ones_like(td[name])) for name in ("a", "b")}
    td.update(news)
    assert td["a"] is news["a"] and td["b"] is news["b"]
    with pytest.raises(RuntimeError, match="'b' has shape"):
        td.update({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(3))})
    assert td["a"] is news["a"] and td["b"] is news["b"]


def test_a_copy_has_the_same_parameters() -> None:
    params = TensorDictParams(TensorDict(a=torch.ones(2), u=UnbatchedTensor(torch.ones(2))))
    copied = dict(params.copy().named_parameters())
    assert list(copied) == ["a", "u"] and all(copied[name] is own for name, own in params.named_parameters())
