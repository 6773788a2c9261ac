"""The transforms of `torch.func` over containers and tensorclasses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictParams, lazy_stack

# Torch compiles parts of forward-mode differentiation with functions that it deprecates.
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Point(TensorClass):
    x: torch.Tensor
    y: torch.Tensor
    label: str = "point"


def make(*batch: int) -> TensorDict:
    return TensorDict(a=torch.randn(*batch, 5), b={"c": torch.randn(batch)}, batch_size=batch)


def total(td):
    return (td["a"] ** 2).sum() + (td["b", "c"] ** 3).sum()


def assert_close(found, expected):
    assert type(found) is type(expected) and found.batch_size == expected.batch_size
    assert set(found.keys(True)) == set(expected.keys(True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(found[key], expected[key])


# --- vmap -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dim", [0, 1, -1, -2])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_dims_in_and_out(in_dim, out_dim):
    td = TensorDict(a=torch.randn(3, 4), b={"c": torch.randn(3, 4)}, batch_size=[3, 4])

    def double(part):
        assert part.batch_size == (td.shape[1 - in_dim % 2],)
        return part * 2

    result = vmap(double, in_dims=in_dim, out_dims=out_dim)(td)
    expected = td * 2 if in_dim % 2 == out_dim else td.transpose(0, 1) * 2
    assert_close(result, expected)


def test_dims_for_each_argument():
    td, x = make(3), torch.randn(3, 5)
    result = vmap(lambda td, x, y: td["a"] * x + y, in_dims=(0, 0, None))(td, x, torch.ones(5))
    torch.testing.assert_close(result, td["a"] * x + 1)
    mixed = TensorDict(a=torch.randn(3, 5), s=torch.randn(5))
    with pytest.raises(ValueError, match="in_dims"):
        vmap(lambda td: td["a"], in_dims=(({"a": 0},),))(mixed)


def test_several_levels():
    td = make(2, 3, 4)

    def inner(td):
        assert td.batch_size == () and td["a"].shape == (5,)
        return td + 1

    assert_close(vmap(vmap(vmap(inner)))(td), td + 1)


def test_results_of_every_kind():
    td = make(3)
    container, tensor, pair = vmap(lambda td: (td["b"], td["a"].sum(), [td["a"], {"k": td}]))(td)
    assert_close(container, td["b"])
    torch.testing.assert_close(tensor, td["a"].sum(-1))
    assert_close(pair[1]["k"], td)


def test_containers_made_inside():
    def build(x):
        return TensorDict(x=x, n={"y": x.sum()}), Point(x, x.sum())

    x = torch.randn(3, 4)
    td, point = vmap(build)(x)
    assert td.batch_size == td["n"].batch_size == (3,)
    assert type(point) is Point and point.batch_size == (3,) and point.label == "point"
    torch.testing.assert_close(point.y, x.sum(1))


def test_tensorclasses_in_and_out():
    points = Point(torch.randn(3, 2), torch.randn(3), label="many", batch_size=[3])

    def shift(point):
        assert type(point) is Point and point.batch_size == () and point.label == "many"
        return Point(point.x + point.y, point.y, label=point.label)

    result = vmap(shift)(points)
    assert type(result) is Point and result.batch_size == (3,) and result.label == "many"
    torch.testing.assert_close(result.x, points.x + points.y[:, None])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stack_dim", [0, 1])
def test_lazy_stacks(dim, stack_dim):
    stack = lazy_stack([make(3) for _ in range(3)], stack_dim)
    dense = stack.to_tensordict()
    result = vmap(lambda td: td * 2, in_dims=dim, out_dims=dim)(stack)
    assert result.batch_size == (3, 3) and (result == dense * 2).all()
    sums = vmap(lambda td: td["a"].sum(), in_dims=dim)(stack)
    torch.testing.assert_close(sums, vmap(lambda td: td["a"].sum(), in_dims=dim)(dense))


@pytest.mark.parametrize("stack_dim", [0, 1])
def test_feature_dims_of_lazy_stacks(stack_dim):
    stack = lazy_stack([TensorDict(a=torch.randn(3, 4), t="text", batch_size=[3]) for _ in range(2)], stack_dim)
    result = vmap(lambda part: part + 1, in_dims=2, out_dims=1)(stack)
    assert isinstance(result, LazyStackedTensorDict) and result[0, 0, 0]["t"] == "text"
    assert torch.equal(result["a"], (stack["a"] + 1).movedim(2, 1)) and len(result.batch_size) == 3
    sums = vmap(lambda part: part["a"].sum(), in_dims=2)(stack)
    torch.testing.assert_close(sums, stack["a"].sum((0, 1)))
    uneven = lazy_stack([TensorDict(a=torch.zeros(3, 4)), TensorDict(a=torch.zeros(3, 5))])
    with pytest.raises(ValueError, match="in_dim"):
        vmap(lambda part: part + 1, in_dims=2)(uneven)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_feature_dim_that_is_a_batch_dim_of_nested_containers(dim, lazy):
    nested = TensorDict(b=torch.randn(2, 3, 4), batch_size=[2, 3, 4]).lock_()
    if lazy:
        nested = lazy_stack(list(nested.unbind(dim)), dim)
    td = TensorDict(a=torch.randn(2, 3, 4), n=nested, m={"c": torch.randn(2, 3, 4), "t": "text"}, batch_size=[2])

    def look(part):
        assert part["n"].batch_size == part["n", "b"].shape == torch.Size([2, 4 if dim == 1 else 3])
        assert part["m"].batch_size == part.batch_size == (2,) and part["m", "t"] == "text"
        return part + 1

    result = vmap(look, in_dims=dim)(td)
    assert result.batch_size == (td["a"].shape[dim], 2)
    assert result["n"].batch_size == result["n", "b"].shape
    assert torch.equal(result["n", "b"], (nested["b"] + 1).movedim(dim, 0))
    assert torch.equal(result["m", "c"], (td["m", "c"] + 1).movedim(dim, 0))


def test_results_that_are_lazy():
    def build(x):
        return lazy_stack([TensorDict(a=x), TensorDict(a=x + 1)])

    result = vmap(build)(torch.arange(3.0))
    assert isinstance(result, LazyStackedTensorDict) and result.batch_size == (3, 2)
    assert result["a"].tolist() == [[0, 1], [1, 2], [2, 3]]


def test_values_go_along():
    td = TensorDict(a=torch.arange(3.0), tag="t", batch_size=[3])
    result = vmap(lambda part: part.copy().set("b", part["a"] * len(part["tag"])))(td)
    assert result["tag"] == "t" and result["b"].tolist() == [0, 1, 2]


def test_names_and_negative_dims_are_those_of_the_batch():
    td = TensorDict(a=torch.randn(2, 3, 4), b={"c": torch.randn(2, 3)}, batch_size=[2, 3], names=["x", "y"])

    def look(part):
        assert part.names == ["x"] and part["b"].batch_size == (2,)
        return part + 1

    result = vmap(look, in_dims=-1, out_dims=-1)(td)
    assert result.names == ["x", None] and result["b"].batch_size == (2, 3)
    assert (result == td + 1).all()
    chunked = vmap(lambda part: part.copy(), in_dims=-1, chunk_size=2)(td)
    assert torch.equal(chunked["a"], td["a"].transpose(0, 1))


def test_writes_stay_inside():
    td, x = TensorDict(a=torch.ones(3), n={"b": torch.ones(3)}, batch_size=[3]), torch.arange(2.0)

    def write(x, part):
        part["c"] = part["n", "d"] = x + part["a"]
        return part

    result = vmap(write, in_dims=(0, None))(x, td)
    assert result.batch_size == (2, 3) and torch.equal(result["n", "d"], (x[:, None] + 1).expand(2, 3))
    assert set(td.keys(True, True)) == {"a", ("n", "b")}


@pytest.mark.parametrize("wrap", [TensorDict.copy, TensorDictParams])
def test_mapped_in_compiled_code(wrap):
    nets = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2)]
    empty = nn.Sequential(nn.Linear(5, 5, device="meta"), nn.Tanh())
    params, td = wrap(TensorDict.from_modules(*nets).data), make(3)

    def call(params, td):
        with params.to_module(empty):
            return td.set("y", empty(td["a"]))

    def run(params, td):
        return vmap(call, (0, None))(params, td), vmap(lambda part: part["a"].sum() + 1)(td)

    result, sums = torch.compile(run, fullgraph=True, backend="eager")(params, td)
    torch.testing.assert_close(result["y"], torch.stack([net(td["a"]) for net in nets]))
    assert result.batch_size == (2, 3) and "y" not in td
    torch.testing.assert_close(sums, td["a"].sum(-1) + 1)


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_randomness(randomness):
    td = TensorDict(a=torch.zeros(64, 8), batch_size=[64])

    def noise(part):
        return part.apply(torch.rand_like)

    mapped = vmap(noise, randomness=randomness)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="random"):
            mapped(td)
        return
    rows = mapped(td)["a"].unique(dim=0)
    assert len(rows) == (64 if randomness == "different" else 1)


def test_bad_dims():
    td = make(3)
    with pytest.raises((ValueError, IndexError), match="in_dim"):
        vmap(lambda td: td, in_dims=2)(td)
    with pytest.raises(ValueError, match="Expected all tensors to have the same size|same size"):
        vmap(lambda td, x: td["a"] + x)(td, torch.zeros(4))


# --- derivatives ------------------------------------------------------------------------------------------------------


def test_gradients_are_containers():
    td = make(2)
    gradient = grad(total)(td)
    assert_close(gradient, TensorDict(a=2 * td["a"], b={"c": 3 * td["b", "c"] ** 2}, batch_size=[2]))
    both = grad_and_value(total)(td)
    assert_close(both[0], gradient)
    torch.testing.assert_close(both[1], total(td))


def test_gradients_of_tensorclasses():
    point = Point(torch.randn(2), torch.randn(2))
    gradient = grad(lambda point: (point.x * point.y).sum())(point)
    assert type(gradient) is Point and gradient.label == "point"
    torch.testing.assert_close(gradient.x, point.y)


def test_gradients_beside_results():
    td = make()
    gradient, aux = grad(lambda td: (total(td), td * 2), has_aux=True)(td)
    assert_close(gradient, grad(total)(td))
    assert_close(aux, td * 2)


@pytest.mark.parametrize("batch", [(3,), (3, 2)])
def test_gradients_of_each_sample(batch):
    td = make(*batch)
    gradients = vmap(grad(total))(td)
    assert gradients.batch_size == gradients["b"].batch_size == batch
    assert_close(gradients, grad(total)(td))
    twice = vmap(grad(lambda td: grad(total)(td)["a"].sum()))(td)
    assert twice.batch_size == batch and (twice["a"] == 2).all()
    assert_close(grad(lambda td: vmap(total)(td).sum())(td), gradients)


@forward_mode
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
@pytest.mark.parametrize("batch", [(), (3, 2)])
def test_jacobians(jacobian, batch):
    td = make(*batch)
    found = jacobian(lambda td: td["a"].flatten() ** 2)(td)
    size = td["a"].numel()
    assert found["a"].shape == (size, *td["a"].shape) and found["b", "c"].shape == (size, *batch)
    torch.testing.assert_close(found["a"].reshape(size, size), torch.diag(2 * td["a"].flatten()))
    assert_close(jacobian(total)(td), grad(total)(td))


def test_jacobians_of_containers():
    x = torch.randn(3)
    found = jacrev(lambda x: TensorDict(sq=x**2, n={"s": x.sum()}))(x)
    assert type(found) is TensorDict
    torch.testing.assert_close(found["sq"], torch.diag(2 * x))
    torch.testing.assert_close(found["n", "s"], torch.ones(3))


@forward_mode
def test_second_derivatives():
    td = TensorDict(a=torch.randn(3))
    found = hessian(lambda td: (td["a"] ** 3).sum())(td)
    torch.testing.assert_close(found["a"]["a"], torch.diag(6 * td["a"]))


@forward_mode
def test_products_with_vectors():
    td, tangent = make(2), make(2)
    value, derivative = jvp(total, (td,), (tangent,))
    torch.testing.assert_close(value, total(td))
    expected = (2 * td["a"] * tangent["a"]).sum() + (3 * td["b", "c"] ** 2 * tangent["b", "c"]).sum()
    torch.testing.assert_close(derivative, expected)
    value, pull = vjp(lambda td: td * 2, td)
    assert_close(value, td * 2)
    assert_close(pull(tangent)[0], tangent * 2)


# --- modules ----------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Takes a container and returns one, or a tensorclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, td, typed=False):
        y = self.linear(td["a"])
        return Point(y, td["b", "c"], batch_size=td.batch_size) if typed else td.copy().set("y", y)


def test_functional_call():
    net, td = Head(), make(3)
    params = TensorDict.from_module(net)
    ones = params.data.apply(torch.ones_like)
    named = {".".join(key): leaf for key, leaf in ones.items(True, True)}
    result = functional_call(net, named, (td,))
    with ones.to_module(net):
        assert_close(result, net(td))
    typed = functional_call(net, named, (td,), {"typed": True})
    assert type(typed) is Point and typed.batch_size == (3,)
    flat = ones.flatten_keys(".")
    assert_close(functional_call(net, dict(flat.items()), (td,)), result)


@pytest.mark.parametrize("wrap", [lambda td: td, TensorDictParams], ids=["TensorDict", "TensorDictParams"])
def test_gradients_for_parameters_of_each_sample(wrap):
    net, td = Head(), make(4)
    params = TensorDict.from_module(net).data.clone()

    def loss(params, td):
        with params.to_module(net):
            return net(td)["y"].pow(2).sum()

    together = grad(loss)(wrap(params.clone()), td)
    apart = vmap(grad(loss), (None, 0))(wrap(params.clone()), td)
    assert type(together) is type(apart) is TensorDict
    for key in params.keys(True, True):
        torch.testing.assert_close(apart[key].sum(0), together[key])
    assert all(type(parameter) is nn.Parameter for parameter in net.parameters())


def test_ensembles_over_data_of_their_own():
    nets = [Head() for _ in range(3)]
    params, data = TensorDict.from_modules(*nets), make(3, 4)
    empty = Head().to("meta")

    def call(params, td):
        with params.to_module(empty):
            return empty(td)

    result = vmap(call)(params, data)
    assert result.batch_size == (3, 4)
    torch.testing.assert_close(result["y"], torch.stack([net(td)["y"] for net, td in zip(nets, data, strict=True)]))
    lazy = TensorDict.from_modules(*nets, lazy_stack=True)
    torch.testing.assert_close(vmap(call)(lazy, data)["y"], result["y"])


def test_modules_are_whole_again_after_a_transform_failed():
    net = nn.Linear(5, 2)
    before = dict(net.named_parameters())

    def loss(params, td):
        with params.to_module(net):
            return net(td["absent"]).sum()

    with pytest.raises(KeyError, match="absent"):
        vmap(grad(loss), (None, 0))(TensorDict.from_module(net).data, make(3))
    assert all(net.get_parameter(name) is value for name, value in before.items())
