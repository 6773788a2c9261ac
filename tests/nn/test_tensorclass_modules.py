"""Modules from one tensorclass to another: their types, and the wrapper that reads and writes containers."""

from __future__ import annotations

import copy
import pickle
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn

import tensordict
from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass
from tensordict.nn import TensorClassModuleBase, TensorClassModuleWrapper, TensorDictModule, TensorDictSequential

T = TypeVar("T")


class Pair(TensorClass):
    a: torch.Tensor
    b: torch.Tensor


class Total(TensorClass):
    total: torch.Tensor


class Outer(TensorClass):
    pair: Pair
    c: torch.Tensor
    spare: Pair | None = None
    label: str = "none"


@tensorclass
class Decorated:
    x: torch.Tensor


class Add(TensorClassModuleBase[Pair, Total]):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        assert type(x) is Pair
        return Total(self.scale * (x.a + x.b), batch_size=x.batch_size)


class Shift(TensorClassModuleBase[Outer, Outer]):
    def forward(self, x):
        assert type(x.pair) is Pair and (x.spare is None or type(x.spare) is Pair)
        return Outer(x.pair + 1, x.c, x.spare, x.label + "!", batch_size=x.batch_size)


def pair(**more):
    return TensorDict(a=torch.arange(3.0), b=torch.ones(3), **more, batch_size=[3])


def outer(**more):
    return TensorDict(pair={"a": torch.arange(3.0), "b": torch.ones(3)}, c=torch.zeros(3), **more, batch_size=[3])


def test_called_with_instances():
    seen = []
    module = Add()
    module.register_forward_hook(lambda module, args, result: seen.append((args[0], result)))
    x = Pair(torch.ones(2), torch.ones(2), batch_size=[2])
    result = module(x=x)
    assert type(result) is Total and result.total.tolist() == [2, 2] and result.batch_size == (2,)
    assert seen == [(x, result)]
    assert (Add.input_type, Add.output_type) == (Pair, Total)


def test_types_of_subclasses_and_of_generic_classes():
    class Between(TensorClassModuleBase[T, Total], Generic[T]):
        pass

    class Final(Between[Pair]):
        def forward(self, x):
            return Total(x.a)

    class Sub(Add):
        pass

    class Plain(TensorClassModuleBase[torch.Tensor, torch.Tensor]):
        def forward(self, x):
            return x + 1

    assert (Between.input_type, Between.output_type) == (T, Total)
    assert (Final.input_type, Final.output_type) == (Sub.input_type, Sub.output_type) == (Pair, Total)
    assert Plain()(torch.zeros(2)).tolist() == [1, 1]
    with pytest.raises(TypeError, match="abstract"):
        Between()


def test_as_td_module():
    module = Add().as_td_module()
    assert isinstance(module, TensorClassModuleWrapper) and list(module.state_dict()) == ["tc_module.scale"]
    assert module.in_keys == ["a", "b"] and module.out_keys == ["total"]
    td = pair(other=torch.zeros(3))
    result = module(td.lock_())
    assert type(result) is TensorDict and set(result.keys()) == {"total"} and not result.is_locked
    assert result["total"].tolist() == [1, 2, 3] and result.batch_size == (3,)
    assert set(td.keys()) == {"a", "b", "other"}
    assert module(td["a"], b=td["b"]).tolist() == [1, 2, 3]
    assert module(Pair.from_tensordict(pair()))["total"].tolist() == [1, 2, 3]
    assert module(lazy_stack([pair(), pair()]))["total"].shape == (2, 3)


def test_fields_that_are_tensorclasses_are_nested_keys():
    module = Shift().as_td_module()
    assert module.in_keys == module.out_keys == [("pair", "a"), ("pair", "b"), "c", "spare", "label"]
    td = outer()
    result = module(td)
    assert result["pair", "a"].tolist() == [1, 2, 3] and type(result["pair"]) is TensorDict
    assert result["label"] == "none!" and result.get("spare") is None
    assert td["pair", "a"].tolist() == [0, 1, 2] and type(td["pair"]) is TensorDict
    full = module(outer(spare=pair(), label="x"))
    assert full["label"] == "x!" and full["spare", "a"].tolist() == [0, 1, 2]


def test_decorated_classes():
    class Double(TensorClassModuleBase[Decorated, Decorated]):
        def forward(self, x):
            return x * 2

    assert Double().as_td_module()(x=torch.ones(2)).tolist() == [2, 2]


def test_in_sequences():
    module = TensorDictSequential(
        Add().as_td_module(), TensorDictModule(torch.neg, in_keys=["total"], out_keys=["negative"])
    )
    assert module.in_keys == ["a", "b"] and module(pair())["negative"].tolist() == [-1, -2, -3]


def test_gradients_copies_and_pickles():
    module = Add().as_td_module()
    module(pair())["total"].sum().backward()
    assert module.tc_module.scale.grad.item() == 6
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(pair())["total"].tolist() == [1, 2, 3] and same.tc_module.scale is not module.tc_module.scale


@pytest.mark.parametrize("kinds", [(torch.Tensor, Total), (Pair, torch.Tensor), (TensorDict, Total), (Pair, int)])
def test_types_that_are_no_tensorclasses(kinds):
    class Module(TensorClassModuleBase[kinds[0], kinds[1]]):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="put_type of Module must be a tensorclass"):
        Module().as_td_module()


def test_bad_calls():
    class Wrong(TensorClassModuleBase[Pair, Total]):
        def forward(self, x):
            return x

    class Untyped(TensorClassModuleBase):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="input_type of Untyped.*got None"):
        Untyped().as_td_module()
    with pytest.raises(TypeError, match="wraps a TensorClassModuleBase, got Linear"):
        TensorClassModuleWrapper(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Wrong returned a Pair, but its output_type is Total"):
        Wrong().as_td_module()(pair())
    with pytest.raises(KeyError, match=r"Add reads 'b', a field of Pair.*\['a'\]"):
        Add().as_td_module()(TensorDict(a=torch.ones(2)))
    with pytest.raises(KeyError, match=r"Shift reads \('pair', 'b'\)"):
        Shift().as_td_module()(TensorDict(pair={"a": torch.ones(2)}, c=torch.ones(2)))


def test_compiled():
    td = outer(spare=pair())
    module = Shift().as_td_module()
    result = torch.compile(module, fullgraph=True, backend="eager")(td)
    assert result["pair", "a"].tolist() == [1, 2, 3] and type(result["spare"]) is TensorDict
    x = Pair(torch.ones(2), torch.ones(2), batch_size=[2])
    assert torch.compile(Add(), fullgraph=True, backend="eager")(x).total.tolist() == [2, 2]


def test_names():
    assert tensordict.TensorClassModuleBase is TensorClassModuleBase
    assert tensordict.TensorClassModuleWrapper is TensorClassModuleWrapper


def test_further_arguments_of_the_wrapper():
    module = Add().as_td_module()
    expected = module(pair())
    out = TensorDict(old=torch.zeros(3), batch_size=[3])
    assert module(pair(), tensordict_out=out) is out
    assert sorted(out.keys()) == ["old", "total"] and (out["total"] == expected["total"]).all()
    assert (module(pair(), None)["total"] == expected["total"]).all()
    for args, kwargs in (((1,), {}), ((), {"odd": 1})):
        with pytest.warns(FutureWarning, match="Add takes one container"):
            assert (module(pair(), *args, **kwargs)["total"] == expected["total"]).all()
