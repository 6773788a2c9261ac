"""Functions that are recorded in CUDA graphs: on a GPU, and on a CPU with an emulation of the graphs."""

from __future__ import annotations

import contextlib
import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensordict import TensorClass, TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictSequential, cudagraphs
from tensordict.nn.cudagraphs import CudaGraphModule


class Point(TensorClass):
    x: torch.Tensor


class Tape(TorchDispatchMode):
    """Records operations as a CUDA graph does: by the memory they read and write, which is as before afterwards."""

    def __init__(self):
        super().__init__()
        self.steps, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before += [(tensor, tensor.clone()) for tensor in tree_leaves(value)]
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, result))
        return result

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        with torch.no_grad():
            for tensor, value in reversed(self.before):
                tensor.copy_(value)

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, result in self.steps:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


@contextlib.contextmanager
def recording(graph):
    with Tape() as tape:
        yield
    graph.replay = tape.replay


@pytest.fixture(
    params=[
        "emulated",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")],
        ),
    ]
)
def device(request, monkeypatch):
    """The device to record on."""
    if request.param == "cuda":
        return "cuda"
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "is_available": lambda: True,
        "CUDAGraph": SimpleNamespace,
        "graph": recording,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cudagraphs, "_is_on_gpu", lambda tensor: True)
    return "cpu"


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


def test_warm_up_recording_and_replay(device):
    function = Counted(lambda x: x + 1)
    module, results = CudaGraphModule(function, warmup=3), []
    for i in range(8):
        results.append(module(torch.full((2,), float(i), device=device)))
    assert [result.tolist() for result in results] == [[i + 1.0] * 2 for i in range(8)]
    assert function.calls == 4 and module.counter == 8


def test_trees_of_tensors_and_containers(device):
    function = Counted(lambda tree, point, scale=1: ({"k": tree["td"] * scale, "none": None}, [point + 1, tree["x"]]))
    module = CudaGraphModule(function)
    for i in range(5):
        x = torch.full((3,), float(i), device=device)
        td = lazy_stack([TensorDict(a=x), TensorDict(a=x + 1)])
        first, second = module({"td": td, "x": x}, Point(x), scale=2)
        assert first["none"] is None and first["k"]["a"].tolist() == [[2.0 * i] * 3, [2.0 * i + 2] * 3]
        assert type(second[0]) is Point and second[0].x.tolist() == [i + 1.0] * 3 and second[1].tolist() == [i] * 3
        assert second[1] is not x or i < 2
    assert function.calls == 3


def test_what_the_input_is_made_of_may_change(device):
    function = Counted(lambda td, factor: td.apply(lambda x: x * factor))
    module = CudaGraphModule(function, warmup=1)
    x = torch.ones(3, device=device)
    forms = [
        (TensorDict(a=x), 2),
        (TensorDict(a=x, b=x), 2),
        (TensorDict(a=torch.ones(4, device=device)), 2),
        (TensorDict(a=x.int()), 2),
        (TensorDict(a=x, batch_size=[3]), 2),
        (TensorDict(a=x, tag="s"), 2),
        (TensorDict(a=x, tag="t"), 2),
        (TensorDict(a=x), 3),
    ]
    for _ in range(3):
        for td, factor in forms:
            result = module(td, factor)
            assert result.keys() == td.keys() and result.get("tag", None) == td.get("tag", None)
            assert torch.equal(result["a"], td["a"] * factor) and result.batch_size == td.batch_size
    assert function.calls == 2 * len(forms)


def test_only_so_many_forms_are_kept(device):
    module = CudaGraphModule(lambda x, i: x + i)
    for i in range(100):
        assert module(torch.zeros(1, device=device), i).item() == i
    assert len(module._recordings) == 32


def test_modules_over_containers(device):
    net = TensorDictSequential(
        TensorDictModule(lambda x: x + 1, in_keys=["x"], out_keys=[("n", "y")]),
        TensorDictModule(lambda x: x * 2, in_keys=[("n", "y")], out_keys=["z"]),
    )
    function = Counted(net.module[0].module)
    net.module[0].module = function
    module, kept = CudaGraphModule(net), []
    assert (module.in_keys, module.out_keys) == (net.in_keys, net.out_keys)
    for i in range(5):
        td = TensorDict(x=torch.full((2,), float(i), device=device), other=torch.zeros(i, device=device))
        assert module(td) is td and set(td.keys(True, True)) == {"x", "other", ("n", "y"), "z"}
        assert td["z"].tolist() == [2 * i + 2.0] * 2
        y, z = module(x=td["x"])
        assert torch.equal(y, td["n", "y"]) and torch.equal(z, td["z"])
        out = TensorDict()
        assert module(td.select("x"), tensordict_out=out) is out and torch.equal(out["z"], td["z"])
        assert "x" not in out
        kept.append(td)
    assert function.calls == 3 and [td["z"][0].item() for td in kept] == [2, 4, 6, 8, 10]


def test_functions_over_containers(device):
    changed = CudaGraphModule(lambda td: td.set("z", td["x"] + 1).set("x", td["x"] * 2), in_keys=[], out_keys=[])
    new = CudaGraphModule(lambda td: TensorDict(z=td["x"] + 1), in_keys=["x"], out_keys=["z"])
    for i in range(5):
        td = TensorDict(x=torch.full((2,), float(i), device=device))
        assert changed(td) is td and td["z"].tolist() == [i + 1.0] * 2 and td["x"].tolist() == [2.0 * i] * 2
        assert new(td) is not td and new(td)["z"].tolist() == new(td["x"]).tolist() == [2 * i + 1.0] * 2
    with pytest.raises(TypeError, match="must be called with a container"):
        changed(torch.zeros(2))


def test_a_training_step(device):
    net = nn.Linear(3, 1).to(device)
    other = copy.deepcopy(net)
    data = [torch.randn(4, 3, device=device) for _ in range(6)]

    def make(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    recorded, plain = CudaGraphModule(make(net)), make(other)
    for x in data:
        torch.testing.assert_close(recorded(x), plain(x))
    torch.testing.assert_close(net.weight, other.weight)


def test_training_and_evaluation_are_recorded_apart(device):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(device)
    module, x = CudaGraphModule(net, warmup=1), torch.randn(8, 3, device=device)
    with torch.no_grad():
        for training in (True, False, True, False):
            net.train(training)
            for _ in range(3):
                expected = copy.deepcopy(net)(x)
                torch.testing.assert_close(module(x), expected)


def test_gradients_are_refused(device):
    module = CudaGraphModule(lambda x: x + 1)
    with pytest.raises(RuntimeError, match="cannot take tensors that require gradients"):
        module(torch.ones(2, device=device, requires_grad=True))
    net = nn.Linear(2, 2).to(device)
    module, x = CudaGraphModule(net, warmup=1), torch.ones(2, device=device)
    module(x)
    with pytest.raises(RuntimeError, match="cannot return tensors that require gradients"):
        module(x)
    with torch.no_grad():
        torch.testing.assert_close(module(x), net(x))


def test_inputs_elsewhere_are_refused(device, monkeypatch):
    monkeypatch.setattr(cudagraphs, "_is_on_gpu", lambda tensor: tensor.is_cuda)
    with pytest.raises(RuntimeError, match=r"shape \[2\] on cpu: all inputs must be on the GPU"):
        CudaGraphModule(lambda x: x + 1)(TensorDict(a=torch.ones(2)))
    with pytest.raises(ValueError, match="device must be a GPU, got cpu"):
        CudaGraphModule(lambda x: x + 1, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_calls_go_through():
    with pytest.warns(UserWarning, match="there is no GPU") as seen:
        module = CudaGraphModule(TensorDictModule(lambda x: x + 1, in_keys=["x"], out_keys=["y"]))
    assert len(seen) == 1 and seen[0].filename == __file__
    td = TensorDict(x=torch.zeros(2), n="s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert module(td) is td and td["y"].tolist() == [1, 1]
    assert module(x=td["x"]).tolist() == [1, 1] and module(td, tensordict_out=TensorDict())["y"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:there is no GPU")
def test_arguments_state_and_repr():
    with pytest.raises(TypeError, match="got int"):
        CudaGraphModule(3)
    for warmup in (0, -1, 1.5):
        with pytest.raises(ValueError, match="warmup must be an integer greater than 0"):
            CudaGraphModule(torch.neg, warmup=warmup)
    net = nn.Linear(2, 2)
    module, weight = CudaGraphModule(net), net.weight
    module.load_state_dict({name: value * 0 for name, value in module.state_dict().items()})
    assert net.weight is weight and not weight.any() and not isinstance(module, nn.Module)
    assert "Linear(in_features=2, out_features=2" in repr(module) and "warmup=2" in repr(module)
    assert CudaGraphModule(torch.neg).state_dict() == {} and CudaGraphModule(torch.neg).load_state_dict({}) is None
    with pytest.raises(ValueError, match="no state to load"):
        CudaGraphModule(torch.neg).load_state_dict({"a": torch.zeros(1)})
