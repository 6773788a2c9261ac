"""Specs of every kind: what they draw, project, encode, accept and index, alone, nested, stacked and saved."""

import pickle
import tempfile

import torch
from recording import Record, case, run
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Choice,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
    consolidate_spec,
)

from tensordict import NonTensorData, TensorDict


def leaf_specs() -> dict[str, TensorSpec]:
    """One spec of every kind that describes a tensor."""
    return {
        "bounded": Bounded(low=-2.0, high=3.0, shape=(4,)),
        "integers": Bounded(low=0, high=9, shape=(2, 3), dtype=torch.int64),
        "unbounded": Unbounded(shape=(3,)),
        "binary": Binary(n=5),
        "categorical": Categorical(n=6, shape=(3,)),
        "masked": Categorical(n=4, shape=(), mask=torch.tensor([True, False, True, False])),
        "onehot": OneHot(n=5),
        "many onehot": MultiOneHot([3, 4]),
        "many categorical": MultiCategorical([3, 4, 2]),
    }


def tree() -> Composite:
    """A spec with two levels and a batch size."""
    return Composite(
        observation=Composite(
            state=Unbounded(shape=(2, 3)),
            pixels=Bounded(low=0, high=255, shape=(2, 4, 4, 3), dtype=torch.uint8),
            shape=(2,),
        ),
        action=OneHot(n=4, shape=(2, 4)),
        shape=(2,),
    )


@case
def leaves(record: Record) -> None:
    for name, spec in leaf_specs().items():
        record(f"{name} rand", spec.rand())
        record(f"{name} zero", spec.zero())
        record(f"{name} one", spec.one())
        record(f"{name} many", spec.rand((5,)))
        record(f"{name} holds", spec.is_in(spec.rand()))
        record(f"{name} repr", repr(spec))


@case
def projections(record: Record) -> None:
    for name, spec in leaf_specs().items():
        inside, outside = spec.rand(), torch.full_like(spec.rand(), 7)
        record(f"{name} leaves", spec.project(inside))
        if name not in ("binary", "onehot", "many onehot", "masked", "many categorical"):
            record(f"{name} holds 7", bool(spec.is_in(outside)))
            record(f"{name} projects 7", spec.project(outside))


@case
def encodings(record: Record) -> None:
    record("onehot", OneHot(n=5).encode(torch.tensor(3)))
    record("back", OneHot(n=5).to_numpy(OneHot(n=5).encode(torch.tensor(3))))
    record("categorical", OneHot(n=5).to_categorical(torch.eye(5)[2]))
    record("categorical spec", repr(OneHot(n=5).to_categorical_spec()))
    record("many", MultiCategorical([3, 4]).to_one_hot(torch.tensor([2, 1])))
    record("bounded", Bounded(-1, 1, shape=(2,)).encode([0.5, -0.5]))
    values = {"state": torch.ones(2, 3), "pixels": torch.zeros(2, 4, 4, 3)}
    record("tree", tree().encode({"observation": values, "action": torch.tensor([1, 3])}, ignore_device=True))


@case
def composite(record: Record) -> None:
    spec = tree()
    record("rand", spec.rand())
    record("zero", spec.zero())
    record("rows", spec.rand((3,)))
    drawn = spec.rand()
    record("holds", spec.is_in(drawn))
    drawn["action"] = torch.ones(2, 4, dtype=torch.bool)
    record("holds no longer", spec.is_in(drawn))
    drawn["action"] = torch.eye(4, dtype=torch.bool)[:2]
    drawn["observation", "state"] = torch.full((2, 3), 5.0)
    record("projected", spec.project(drawn))
    record("keys", [str(key) for key in spec.keys(True, True)])
    record("repr", repr(spec))


@case
def shapes_of_a_composite(record: Record) -> None:
    spec = tree()
    for name, changed in {
        "expanded": spec.expand(3, 2),
        "indexed": spec[0],
        "sliced": spec[:1],
        "unsqueezed": spec.unsqueeze(0),
        "squeezed": spec.unsqueeze(0).squeeze(0),
        "reshaped": spec.expand(3, 2).reshape(6),
        "flattened": spec.expand(3, 2).flatten(0, 1),
        "cloned": spec.clone(),
        "double": spec.to(torch.float64),
    }.items():
        record(f"{name} shape", tuple(changed.shape))
        record(name, changed.rand())


@case
def edited_composite(record: Record) -> None:
    spec = tree()
    spec["reward"] = Unbounded(shape=(2, 1))
    spec["observation", "goal"] = Bounded(-1, 1, shape=(2, 2))
    del spec["action"]
    spec.update(Composite(extra=Binary(n=3, shape=(2, 3)), shape=(2,)))
    record("rand", spec.rand())
    spec.lock_()
    try:
        spec["late"] = Unbounded(shape=(2,))
    except RuntimeError:
        record("locked", True)
    spec.unlock_()
    record("equal", spec == spec.clone())
    record("unequal", spec == tree())


@case
def stacked_specs(record: Record) -> None:
    even = torch.stack([tree(), tree()], 0)
    record("even", even.rand())
    uneven = torch.stack([Composite(value=Bounded(0, 1, shape=(n,)), shape=()) for n in (2, 3)], 0)
    drawn = uneven.rand()
    record("first", drawn[0])
    record("second", drawn[1])
    record("holds", uneven.is_in(drawn))
    record("projected", uneven.project(drawn)[1])
    record("shape", tuple(uneven.shape))
    record("keys", [str(key) for key in uneven.keys()])
    filled = consolidate_spec(torch.stack([Composite(a=Unbounded(shape=(2,))), Composite(b=Unbounded(shape=(2,)))], 0))
    record("consolidated", [member["a"] for member in filled.zero().unbind(0)])


@case
def specs_without_tensors(record: Record) -> None:
    spec = Composite(text=NonTensor(shape=(), example_data="a word"), value=Unbounded(shape=(1,)))
    drawn = spec.rand()
    record("rand", drawn["value"])
    record("text", drawn["text"])
    record("holds", spec.is_in(TensorDict(text=NonTensorData("other"), value=torch.zeros(1))))
    choice = Choice([Bounded(low=n, high=n + 1, shape=(2,)) for n in range(5)])
    record("choice", torch.stack([choice.rand() for _ in range(4)]))
    words = Choice([NonTensorData(word) for word in ("one", "two", "three")])
    record("words", [words.rand().data for _ in range(4)])


@case
def enumerated(record: Record) -> None:
    record("categorical", Categorical(n=4).enumerate())
    record("onehot", OneHot(n=3).enumerate())
    record("many", MultiCategorical([2, 3]).enumerate())
    record("cardinality", [Categorical(n=4).cardinality(), MultiOneHot([2, 3]).cardinality()])
    grid = Composite(a=Categorical(n=2, shape=()), b=OneHot(n=3))
    record("grid", grid.enumerate())
    record("grid cardinality", grid.cardinality())


@case
def saved_specs(record: Record) -> None:
    spec = tree()
    with tempfile.TemporaryFile() as file:
        torch.save(spec, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    record("equal", loaded == spec)
    record("rand", loaded.rand())
    record("pickled", pickle.loads(pickle.dumps(spec)).zero())


@case
def masked_actions(record: Record) -> None:
    spec = OneHot(n=4, shape=(2, 4))
    spec.update_mask(torch.tensor([[True, False, False, True], [False, True, False, False]]))
    record("rand", torch.stack([spec.rand() for _ in range(6)]))
    record("holds", spec.is_in(torch.eye(4, dtype=torch.bool)[1:3]))
    record("projected", spec.project(torch.eye(4, dtype=torch.bool)[1:3]))


@case
def typed_values(record: Record) -> None:
    spec = tree()
    drawn = spec.rand()
    spec.type_check(drawn)
    spec.assert_is_in(drawn)
    try:
        Bounded(0, 1, shape=(2,)).assert_is_in(torch.full((2,), 3.0))
    except AssertionError:
        record("refused", True)
    record("numpy", spec.to_numpy(drawn)["observation"]["state"])
    record("dtype", str(spec["observation", "pixels"].dtype))


if __name__ == "__main__":
    run()
