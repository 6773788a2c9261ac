"""Modules that read and write containers: their keys, calls, results, selection, state and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tensordict import LazyStackedTensorDict, TensorClass, TensorDict
from tensordict.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    WrapModule,
    as_tensordict_module,
)


def plus_one(**options):
    return TensorDictModule(lambda x: x + 1, **{"in_keys": ["x"], "out_keys": ["y"], **options})


def halves(**options):
    return TensorDictModule(lambda x: (x + 1, x + 2), **{"in_keys": ["x"], "out_keys": ["y", "z"], **options})


class Point(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        (("x", "z"), [("x", "z")]),
        ([("x", ("z", "w")), "y"], [("x", "z", "w"), "y"]),
    ],
)
def test_keys_are_one_or_a_list(given, keys):
    module = TensorDictModule(lambda *args: args, given, given)
    assert module.in_keys == keys and module.out_keys == keys


@pytest.mark.parametrize("keys", [1, [1], None, [None], {"x"}, ["x", 3], [("x", 3)], [()]])
@pytest.mark.parametrize("which", ["in_keys", "out_keys"])
def test_what_is_no_key_is_refused(keys, which):
    with pytest.raises(ValueError, match=f"{which} must be of type list"):
        plus_one(**{which: keys})


def test_in_keys_may_map_arguments_to_keys():
    td = TensorDict(a=3, n={"b": 1})
    module = TensorDictModule(lambda x, *, y: x - y, {"x": "a", "y": ("n", "b")}, ["z"])
    assert module.in_keys == ["a", ("n", "b")] and module(td)["z"] == 2
    assert module(torch.tensor(5), n_b=torch.tensor(2)) == 3
    twice = TensorDictModule(lambda x, *, y: x - y, {"x": "a", "y": "a"}, ["z"], out_to_in_map=True)
    assert twice(td)["z"] == 0


def test_in_keys_may_map_keys_to_arguments():
    module = TensorDictModule(lambda x, *, y: x - y, {"a": "x", ("n", "b"): "y"}, ["z"], out_to_in_map=False)
    assert module.in_keys == ["a", ("n", "b")]
    assert module(TensorDict(a=3, n={"b": 1}))["z"] == 2


def test_keys_of_an_instance_can_be_set():
    module = plus_one()
    module.in_keys, module.out_keys = [("q", "r")], ["w"]
    td = module(TensorDict(q={"r": 1}))
    assert td["w"] == 2 and "y" not in td.keys()
    assert module.out_keys_source == ["w"]


def test_keys_declared_in_the_class_are_those_of_its_instances():
    class Parent(TensorDictModuleBase):
        in_keys = ("a", "b")
        out_keys = [("c", ("d", "e"))]

        def forward(self, tensordict):
            return tensordict.set(("c", "d", "e"), tensordict["a"])

    class Child(Parent):
        out_keys = ["f"]

        def __init__(self):
            super().__init__()
            self.in_keys = ["q"]

    assert Parent().in_keys == ["a", "b"] and Parent().out_keys == [("c", "d", "e")]
    assert Child().in_keys == ["q"] and Child().out_keys == ["f"] and Parent().in_keys == ["a", "b"]


def test_keys_set_before_init_and_by_properties():
    class Early(TensorDictModuleBase):
        def __init__(self):
            self.in_keys, self.out_keys = ["a"], ["b"]
            super().__init__()

    class Computed(TensorDictModuleBase):
        in_keys = ["a"]

        @property
        def out_keys(self):
            return ["b"]

    assert (Early().in_keys, Early().out_keys, Computed().out_keys) == (["a"], ["b"], ["b"])
    with pytest.raises(RuntimeError, match="Computed does not support select_out_keys"):
        Computed().select_out_keys("b")
    with pytest.raises(AttributeError, match="in_keys"):
        _ = TensorDictModuleBase().in_keys


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_container_is_read_and_written():
    td = TensorDict(x=torch.ones(2, 3), batch_size=[2])
    net = TensorDictModule(nn.Linear(3, 4), ["x"], [("out", "y")])
    assert net(td) is td and td["out", "y"].shape == (2, 4)
    torch.testing.assert_close(td["out", "y"], net.module(td["x"]))


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m(x=x), lambda m, x: m(TensorDict(x=x))["y"]])
def test_entries_are_given_by_position_by_name_or_in_a_container(call):
    assert call(plus_one(), torch.tensor(1)) == 2


def test_other_containers():
    lazy = LazyStackedTensorDict(TensorDict(x=torch.ones(2)), TensorDict(x=torch.zeros(2)))
    assert plus_one()(lazy) is lazy and lazy[1]["y"].tolist() == [1, 1]
    point = Point(x=torch.ones(2), batch_size=[2])
    assert plus_one()(point) is point and point.y.tolist() == [2, 2]
    ragged = LazyStackedTensorDict(TensorDict(x=torch.ones(2)), TensorDict(x=torch.ones(3)))
    lengths = TensorDictModule(lambda x: x.sum(-1), ["x"], ["y"], get_kwargs={"as_padded_tensor": True})
    assert lengths(ragged)["y"].tolist() == [2, 3]


def test_values_that_are_no_tensors():
    upper = TensorDictModule(str.upper, ["s"], ["u"])
    assert upper(TensorDict(s="abc"))["u"] == "ABC" and upper("abc") == "ABC" and upper(s="abc") == "ABC"
    inner = TensorDictModule(lambda td: td + 1, ["n"], ["m"])
    assert inner(TensorDict(n={"x": 1}))["m", "x"] == 2


def test_methods_and_further_arguments():
    class Net(nn.Module):
        def shift(self, x, *, by):
            return x + by

    shift = TensorDictModule(Net(), ["x"], ["y"], method="shift", method_kwargs={"by": 5})
    assert shift(TensorDict(x=1))["y"] == 6 and shift(TensorDict(x=1), by=1)["y"] == 2
    named = TensorDictModule(Net(), {"x": "x"}, ["y"], method="shift", method_kwargs={"by": 5})
    assert named(TensorDict(x=1))["y"] == 6
    assert TensorDictModule(lambda x, k=0: x + k, ["x"], ["y"])(torch.tensor(1), k=3) == 4


def test_a_function_without_arguments_fills_a_container():
    three = TensorDictModule(lambda: torch.tensor(3), [], ["y"])
    assert three(TensorDict())["y"] == 3 and three() == 3


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_inplace_says_where_results_go(inplace):
    td = TensorDict(x=torch.ones(3), batch_size=[3], device="cpu")
    result = plus_one(inplace=inplace)(td)
    assert result["y"].tolist() == [2, 2, 2]
    assert (result is td) == (inplace is True) and ("y" in td.keys()) == (inplace is True)
    assert result.batch_size == (() if inplace is False else (3,))
    assert result.device == (None if inplace is False else torch.device("cpu"))


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_tensordict_out_has_precedence(inplace):
    td, out = TensorDict(x=torch.ones(3)), TensorDict(k=1)
    assert plus_one(inplace=inplace)(td, tensordict_out=out) is out
    assert set(out.keys()) == {"k", "y"} and set(td.keys()) == {"x"}


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "results",
    [
        lambda x: (x, x + 1),
        lambda x: [x, x + 1],
        lambda x: {"y": x, ("n", "z"): x + 1, "more": x},
        lambda x: {"y": x, "n": {"z": x + 1}},
        lambda x: TensorDict({"y": x, ("n", "z"): x + 1}),
    ],
    ids=["tuple", "list", "dict", "nested dict", "container"],
)
def test_what_a_module_may_return(results):
    module = TensorDictModule(results, ["x"], ["y", ("n", "z")])
    td = module(TensorDict(x=1))
    assert set(td.keys(True, True)) == {"x", "y", ("n", "z")} and td["y"] == 1 and td["n", "z"] == 2
    assert module(torch.tensor(1)) == (torch.tensor(1), torch.tensor(2))


def test_a_container_without_the_key_is_itself_the_result():
    assert TensorDictModule(lambda x: TensorDict(q=x), ["x"], ["d"])(TensorDict(x=1))["d", "q"] == 1
    assert TensorDictModule(lambda x: {"q": x}, ["x"], ["d"])(TensorDict(x=1))["d", "q"] == 1
    point = TensorDictModule(lambda x: Point(x=x), ["x"], ["x"])(TensorDict(x=1))
    assert type(point["x"]) is Point


def test_an_underscore_throws_away():
    module = TensorDictModule(lambda x: (x + 1, x + 2, x + 3), ["x"], ["_", "y", "_"])
    assert module.out_keys == ["_", "y", "_"]
    assert set(module(TensorDict(x=1)).keys()) == {"x", "y"} and module(torch.tensor(1)) == 3


@pytest.mark.parametrize(
    ("results", "returned"),
    [
        (lambda x: (x, x, x), "3 values"),
        (lambda x: (x,), "1 values"),
        (lambda x: x, "one Tensor"),
        (lambda x: None, "None"),
        (lambda x: {"y": x}, "one dict"),
    ],
)
def test_a_wrong_number_of_results_names_both(results, returned):
    td = TensorDict(x=1)
    with pytest.raises(RuntimeError, match=rf"in_keys=\['x'\].*returned {returned} for 2 out_keys"):
        TensorDictModule(results, ["x"], ["y", "z"])(td)
    assert set(td.keys()) == {"x"}


def test_no_results_for_no_keys():
    assert set(TensorDictModule(lambda x: None, ["x"], [])(TensorDict(x=1)).keys()) == {"x"}


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["q", ("n", "q")])
def test_a_missing_entry_names_module_key_and_container(key):
    td = TensorDict(x=1, n={"z": 2})
    with pytest.raises(KeyError, match=r"Linear.*reads .*q.*not found.*'x', \('n', 'z'\)"):
        TensorDictModule(nn.Linear(3, 4), ["x", key], ["y"])(td)
    with pytest.raises(KeyError, match="not found"):
        TensorDictModule(lambda *args: 1, ["x", key], ["y"], strict=True)(td)
    assert TensorDictModule(lambda x, q: x if q is None else q, ["x", key], ["y"])(td)["y"] == 1


def test_the_error_of_a_module_is_its_own():
    def fails(x):
        raise LookupError("of the module")

    with pytest.raises(LookupError, match="of the module"):
        TensorDictModule(fails, ["x"], ["y"])(TensorDict(x=1))


@pytest.mark.parametrize("keys", [["y", "z"], [("n", "y"), "z"], ["x", ("x", "z")], ["y", ("l", "z")]])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_call_that_fails_leaves_the_container_as_it_was(keys, lazy):
    def make():
        return TensorDict(x=torch.ones(3), y=torch.zeros(3), l=TensorDict(batch_size=[3]).lock_(), batch_size=[3])

    td = LazyStackedTensorDict(make(), make(), stack_dim=1) if lazy else make()
    before = td.clone()
    results = {
        ("x", "z"): lambda x: (x, x),  # a key through a tensor
        ("l", "z"): lambda x: (x, x),  # a locked container
    }.get(keys[1], lambda x: (x, x.sum()))  # a result without the batch size
    with pytest.raises((RuntimeError, KeyError)):
        TensorDictModule(results, ["x"], keys)(td)
    assert set(td.keys(True)) == set(before.keys(True)) and (td == before).all()


def test_a_locked_container_is_refused():
    td = TensorDict(x=torch.ones(3), y=torch.zeros(3)).lock_()
    with pytest.raises(RuntimeError, match="locked"):
        plus_one()(td)
    assert plus_one(inplace=False)(td)["y"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("inplace", ["full", 3])
def test_unknown_inplace(inplace):
    with pytest.raises(ValueError, match="inplace must be True, False or 'empty'"):
        plus_one(inplace=inplace)


def test_what_cannot_be_called():
    with pytest.raises(ValueError, match="int is not callable"):
        TensorDictModule(3, ["x"], ["y"])
    with pytest.raises(AttributeError, match="Linear has no method 'nope'"):
        TensorDictModule(nn.Linear(1, 1), ["x"], ["y"], method="nope")


# --- selection --------------------------------------------------------------------------------------------------------


def test_selected_out_keys():
    module = halves()
    assert module.select_out_keys("z") is module
    assert module.out_keys == ["z"] and module.out_keys_source == ["y", "z"]
    assert set(module(TensorDict(x=1, w=2)).keys()) == {"x", "w", "z"}
    assert module(torch.tensor(1)) == 3
    assert module.reset_out_keys() is module and module.out_keys == ["y", "z"]
    assert set(module(TensorDict(x=1)).keys()) == {"x", "y", "z"}


def test_selecting_twice_and_selecting_what_is_not_there():
    module = TensorDictModule(lambda x: (x, x, x), ["x"], ["a", "b", "c"]).select_out_keys("b", "c")
    assert module.select_out_keys("c").out_keys == ["c"]
    with pytest.raises(ValueError, match=r"cannot select 'q', which is none of the out-keys \['c'\]"):
        module.select_out_keys("q")
    assert module.out_keys == ["c"] and len(module._forward_hooks) == 1


def test_selection_keeps_what_is_read_and_what_was_there():
    module = TensorDictModule(lambda y: (y + 1, y + 2), ["y"], ["y", "z"]).select_out_keys("z")
    assert set(module(TensorDict(y=1)).keys()) == {"y", "z"}
    out = TensorDict(k=1)
    assert halves().select_out_keys("z")(TensorDict(x=1), tensordict_out=out) is out
    assert set(out.keys()) == {"k", "z"}


def test_selection_of_a_subclass_and_of_nested_keys():
    class Mod(TensorDictModuleBase):
        in_keys = ["a"]
        out_keys = [("n", "b"), ("n", "c")]

        def forward(self, tensordict):
            return tensordict.update({("n", "b"): tensordict["a"], ("n", "c"): tensordict["a"] + 1})

    module = Mod().select_out_keys(("n", "c"))
    assert set(module(TensorDict(a=0)).keys(True, True)) == {"a", ("n", "c")}
    assert Mod().out_keys == [("n", "b"), ("n", "c")]


def test_copies_select_for_themselves():
    module = halves().select_out_keys("y")
    other = copy.deepcopy(module)
    other.reset_out_keys()
    assert set(other(TensorDict(x=1)).keys()) == {"x", "y", "z"}
    assert set(module(TensorDict(x=1)).keys()) == {"x", "y"}


# --- as modules -------------------------------------------------------------------------------------------------------


def test_attributes_of_what_is_wrapped():
    net = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    assert net.in_features == 3 and net.weight is net.module.weight and net.device == torch.device("cpu")
    assert not net.is_functional
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'absent'"):
        _ = net.absent

    def f(x):
        return x

    f.note = "hello"
    assert TensorDictModule(f, ["x"], ["y"]).note == "hello"


def test_a_wrapper_with_a_module_of_its_own():
    class Own(TensorDictModuleWrapper):
        def __init__(self, td_module):
            super().__init__(td_module)
            self._wrapped = self._td_module = nn.Linear(1, 1)

    net = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    own = Own(net)
    assert own._wrapped is own._td_module and own.module is net.module


def test_names_of_the_state():
    net = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    assert list(net.state_dict()) == ["module.weight", "module.bias"]
    assert list(TensorDictModuleWrapper(net).state_dict()) == ["td_module.module.weight", "td_module.module.bias"]
    assert list(WrapModule(nn.Linear(1, 1)).state_dict()) == ["func.weight", "func.bias"]
    assert net.to(torch.float64).weight.dtype == torch.float64
    assert net.share_memory().weight.is_shared()


def test_repr():
    net = TensorDictModule(nn.Linear(2, 3), in_keys=["x"], out_keys=[("a", "y")])
    assert repr(TensorDictModuleWrapper(net)) == (
        "TensorDictModuleWrapper(\n"
        "    td_module=TensorDictModule(\n"
        "        module=Linear(in_features=2, out_features=3, bias=True),\n"
        "        in_keys=['x'],\n"
        "        out_keys=[('a', 'y')]),\n"
        "    in_keys=['x'],\n"
        "    out_keys=[('a', 'y')])"
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied):
    net = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"], inplace="empty")
    other = copied(net)
    x = torch.ones(3)
    assert other.in_keys == ["x"] and other.inplace == "empty"
    torch.testing.assert_close(other(x), net(x))
    assert copied(plus_one())(torch.tensor(1)) == 2


def test_hooks_see_what_the_module_is_called_with():
    seen = []
    net = plus_one()
    net.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    net.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    net(TensorDict(x=1)), net(torch.tensor(1)), net(x=torch.tensor(1))
    assert seen == [1, TensorDict, 1, torch.Tensor, 0, torch.Tensor]


def test_parameters_are_reset():
    net = TensorDictModule(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ["x"], ["y"])
    zeros = TensorDict.from_module(net).data.clone().zero_()
    kept = TensorDict.from_module(net).data.clone()
    fresh = net.reset_parameters_recursive(zeros)
    assert not (zeros == 0).any() and (fresh == zeros).all() and fresh is not zeros
    assert (TensorDict.from_module(net).data == kept).all()
    assert net.reset_parameters_recursive() is None
    assert not (TensorDict.from_module(net).data == kept).any()
    with pytest.raises(RuntimeError, match=r"does not support batched.*got batch size \[3\]"):
        net.reset_parameters_recursive(zeros.expand(3))
    with pytest.warns(UserWarning, match="has reset_parameters"):
        plus_one().reset_parameters_recursive()


class Noted(nn.Module):
    """A module that notes its name when it is reset."""

    def __init__(self, name, notes, *inner):
        super().__init__()
        self.name, self.notes, self.inner = name, notes, nn.ModuleList(inner)

    def reset_parameters(self):
        self.notes.append(self.name)


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (lambda m, a, b, c: m(a), "a"),
        (lambda m, a, b, c: m(nn.Sequential(a, nn.Sequential(b, c), a)), "a b c"),
        (lambda m, a, b, c: m(nn.ModuleList([a, nn.ModuleDict({"x": b, "y": c})])), "a b c"),
        (lambda m, a, b, c: TensorDictSequential(m(a), m(b)), "a a b b"),
        (lambda m, a, b, c: TensorDictSequential({"x": m(a), "y": m(b)}), "a a b b"),
        (lambda m, a, b, c: TensorDictSequential(m(a), TensorDictSequential(m(b), m(nn.Sequential(c)))), "a a b b c"),
        (lambda m, a, b, c: TensorDictSequential(m(a), m(b), m(a)), "a a b b a a"),
        (lambda m, a, b, c: TensorDictSequential(*[m(a), m(b)][:1] * 2), "a a"),
        (lambda m, a, b, c: TensorDictModuleWrapper(m(a)), "a a"),
        (lambda m, a, b, c: TensorDictSequential(TensorDictModuleWrapper(m(a))), "a a a"),
        (lambda m, a, b, c: TensorDictSequential(m(Noted("d", a.notes, a, b)), m(c)), "a b d d c c"),
    ],
)
def test_order_of_resets_is_that_of_the_reference(make, order):
    notes = []
    net = make(lambda inner: TensorDictModule(inner, ["x"], ["x"]), *(Noted(name, notes) for name in "abc"))
    net.reset_parameters_recursive()
    assert " ".join(notes) == order
    notes.clear()
    net.reset_parameters_recursive(TensorDict.from_module(net))
    assert " ".join(notes) == order


def test_seeded_resets_give_the_numbers_of_the_reference():
    def make():
        return TensorDictSequential(
            TensorDictModule(nn.Linear(2, 3), ["a"], ["b"]),
            TensorDictSequential(TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), ["b"], ["c"])),
        )

    # Sums of the parameters that tensordict 0.14.3 and 0.15.3 give.
    expected = [0.0756, 0.036, 0.069, 0.564, 0.2744, -0.2627]
    net = make()
    torch.manual_seed(1)
    net.reset_parameters_recursive()
    sums = [parameter.sum().item() for parameter in net.parameters()]
    assert sums == pytest.approx(expected, abs=1e-4)
    given = TensorDict.from_module(net).data.clone().zero_()
    torch.manual_seed(1)
    net.reset_parameters_recursive(given)
    assert (given == TensorDict.from_module(net).data).all()


def test_is_tdmodule_compatible():
    class Net(nn.Linear):
        in_keys = ["a"]
        out_keys = ["b"]

    assert TensorDictModuleBase.is_tdmodule_compatible(plus_one())
    assert TensorDictModuleBase.is_tdmodule_compatible(Net(1, 1))
    assert not TensorDictModuleBase.is_tdmodule_compatible(nn.Linear(1, 1))


def test_a_wrapper_behaves_as_what_it_wraps():
    wrapper = TensorDictModuleWrapper(halves())
    assert wrapper.in_keys == ["x"] and wrapper.out_keys == ["y", "z"] and wrapper.inplace is True
    assert wrapper(torch.tensor(1)) == (torch.tensor(2), torch.tensor(3))
    assert wrapper.select_out_keys("z") is wrapper and wrapper.out_keys == ["z"]
    assert set(wrapper(TensorDict(x=1)).keys()) == {"x", "z"}
    assert wrapper.reset_out_keys().out_keys == wrapper.out_keys_source == ["y", "z"]
    with pytest.raises(AttributeError, match="absent"):
        _ = wrapper.absent


def test_functions_of_containers():
    td = TensorDict(x=torch.ones(2, 3), batch_size=[2, 3])
    assert WrapModule(lambda td: td.reshape(-1))(td).batch_size == (6,)
    inplace = WrapModule(lambda td: td + 1, inplace=True, in_keys=["x"], out_keys=["x"])
    assert inplace(td) is td and (td["x"] == 2).all() and inplace.in_keys == ["x"]
    assert WrapModule(lambda td: td).in_keys == []


def test_decorated_functions_and_methods():
    @as_tensordict_module(in_keys=["a"], out_keys="b")
    def double(a):
        return 2 * a

    class Scale:
        factor = 5

        @as_tensordict_module(in_keys="c", out_keys="d")
        def scale(self, c):
            return c * self.factor

    assert double(TensorDict(a=1))["b"] == 2 and double(torch.tensor(1)) == 2 and double.__name__ == "double"
    assert Scale().scale(TensorDict(c=2))["d"] == 10


def test_vmap_and_functional_calls():
    assert torch.vmap(plus_one())(torch.ones(3)).tolist() == [2, 2, 2]
    td = torch.vmap(plus_one())(TensorDict(x=torch.ones(3), batch_size=[3]))
    assert td.batch_size == (3,) and td["y"].tolist() == [2, 2, 2]
    net = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
    params = TensorDict.from_module(net).data.expand(5).clone()

    def run(params, x):
        with params.to_module(net):
            return net(x)

    assert torch.vmap(run, (0, None))(params, torch.ones(3)).shape == (5, 4)


@pytest.mark.parametrize("kind", [TensorDictModule, TensorDictSequential])
def test_a_class_may_have_its_options_as_properties(kind):
    """As wrappers of language models in TorchRL have theirs."""

    class Fixed(kind):
        inplace = property(lambda self: "empty", lambda self, value: None)

    made = Fixed(plus_one()) if kind is TensorDictSequential else Fixed(lambda x: x + 1, in_keys=["x"], out_keys=["y"])
    assert list(made(TensorDict(x=torch.ones(1))).keys()) == ["y"]


def test_a_module_takes_the_place_of_a_function():
    module = TensorDictModule(lambda x: x + 1, in_keys=["x"], out_keys=["y"])
    module.module = nn.Identity()
    assert isinstance(module.module, nn.Identity)
    assert module(TensorDict(x=torch.ones(2)))["y"].sum() == 2
    again = pickle.loads(pickle.dumps(module))
    assert isinstance(again.module, nn.Identity)


# --- options that other tests leave out -------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, None])
def test_without_inplace_a_new_container_without_batch_size(inplace):
    td = TensorDict(a=torch.ones(2, 1), batch_size=[2])
    result = TensorDictModule(lambda x: x + 1, ["a"], ["b"], inplace=inplace)(td)
    assert result.batch_size == () and list(result.keys()) == ["b"] and list(td.keys()) == ["a"]


def test_a_direction_without_a_mapping_warns():
    with pytest.warns(UserWarning, match="out_to_in_map=True has no effect, because in_keys is not a mapping"):
        TensorDictModule(lambda x: x, ["a"], ["b"], out_to_in_map=True)


def test_a_selection_leaves_no_empty_containers():
    module = TensorDictModule(lambda x: (x, x, x), ["a"], ["b", ("n", "m", "c"), ("k", "d")])
    module.select_out_keys("b")
    result = module(TensorDict(a=torch.ones(1), k={"own": torch.ones(1)}))
    assert set(result.keys(True)) == {"a", "b", "k", ("k", "own")}
