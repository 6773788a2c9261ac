"""Containers in Ray's object store and between its actors: a real instance, started here on this machine."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

# A warning of Ray's about its own future, at the start of workers; before Ray is imported.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch

from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    TensorClass,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
)

pytestmark = pytest.mark.seconds

WIDTH = 1 << 18  # elements of a row: 1 MiB


class Rollout(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor
    task: str


@pytest.fixture(scope="module", autouse=True)
def store() -> Iterator[None]:
    here = str(pathlib.Path(__file__).parent)
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=512 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def actors() -> list[Any]:
    return [Actor.remote(seed) for seed in range(2)]


def rollout(seed: int, steps: int) -> TensorDict:
    """Episodes of different lengths, with tokens, texts, a tensorclass and other values."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(100, (n,), generator=generator) for n in range(1, steps + 1)]
    episodes = [
        TensorDict(pixels=torch.rand(n, WIDTH, generator=generator), text=f"episode {n} of {seed}") for n in (1, 2)
    ]
    return TensorDict(
        {
            "tokens": torch.nested.nested_tensor(tokens, layout=torch.jagged),
            "step": Rollout(
                torch.rand(steps, WIDTH, generator=generator), torch.ones(steps), "walk", batch_size=[steps]
            ),
            "info": MetaData({"seed": seed}),
            "scale": UnbatchedTensor(torch.arange(7)),
            "flags": torch.ones(steps, dtype=torch.bool),
            "half": torch.ones(steps, 3, dtype=torch.bfloat16),
            "episodes": lazy_stack(episodes * steps)[:steps],
        },
        [steps],
        names=["time"],
    )


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected) and found.batch_size == expected.batch_size and found.names == expected.names
    assert found.is_locked == expected.is_locked
    assert [row.tolist() for row in found["tokens"].unbind()] == [row.tolist() for row in expected["tokens"].unbind()]
    assert type(found["step"]) is Rollout and found["step"].task == "walk"
    assert found["info"] == expected["info"] and found["scale"].shape == (7,)
    assert type(found["episodes"]) is LazyStackedTensorDict
    for one, other in zip(found["episodes"].tensordicts, expected["episodes"].tensordicts, strict=True):
        assert torch.equal(one["pixels"], other["pixels"]) and one["text"] == other["text"]
    for key in (("step", "obs"), ("step", "reward"), "flags", "half", "scale"):
        assert torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype


def anonymous() -> int:
    """Return the bytes of this process outside of a store."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) * 1024


# --- the object store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consolidated", [False, True])
def test_put_and_get(consolidated: bool) -> None:
    td = rollout(0, 3)
    if consolidated:
        td = td.consolidate()
    found = ray.get(ray.put(td))
    assert_same(found, td)
    assert found.is_consolidated() == consolidated


def may_open_what_it_has_mapped() -> bool:
    """Return whether this process may open the store of Ray, a mapped file without a name."""
    names = sorted(os.listdir("/proc/self/map_files"))
    try:
        os.close(os.open(f"/proc/self/map_files/{names[0]}", os.O_RDONLY))
    except PermissionError:
        return False
    return True


@pytest.mark.skipif(not may_open_what_it_has_mapped(), reason="needs CAP_CHECKPOINT_RESTORE")
def test_nothing_is_copied_on_the_way_back() -> None:
    td = TensorDict({f"k{i}": torch.full((4, WIDTH), float(i)) for i in range(32)}, [4])
    reference = ray.put(td)
    ray.get(reference)
    before = anonymous()
    found = ray.get(reference)
    assert anonymous() - before < 4 << 20
    assert [found[f"k{i}"][3, -1].item() for i in range(32)] == list(range(32))
    assert anonymous() - before < 4 << 20
    # Only what is written to.
    found["k1"].zero_()
    assert 4 << 20 <= anonymous() - before < 12 << 20


def test_writing_does_not_reach_the_store() -> None:
    reference = ray.put(rollout(1, 3))
    found = ray.get(reference)
    found.zero_()
    found["step"].reward += 5
    found[0] = rollout(2, 3)[0]
    found.set_("flags", torch.zeros(3, dtype=torch.bool))
    found["new"] = torch.ones(3)
    assert_same(ray.get(reference), rollout(1, 3))
    assert found["step"].reward.tolist() == [1, 5, 5]


def test_what_was_got_outlives_its_reference() -> None:
    found = ray.get(ray.put(rollout(3, 3)))
    gc.collect()
    # More than the store holds: what nobody refers to makes room.
    for _ in range(20):
        ray.get(ray.put(TensorDict(x=torch.full((50, WIDTH), -1.0))))
    assert_same(found, rollout(3, 3))


def test_room_is_made_when_it_is_dropped() -> None:
    """A store of 512 MiB is passed through eight times, by containers that are used and written to."""
    for number in range(16):
        td = ray.get(ray.put(TensorDict(x=torch.full((64, 4 * WIDTH), float(number)))))
        td["x"][0] += 1
        assert td["x"][:2, 0].tolist() == [number + 1, number]
        del td


def test_small_containers() -> None:
    td = TensorDict(a=torch.arange(3), b={"c": "text"})
    found = ray.get(ray.put(td))
    found["a"] += 1
    assert found["a"].tolist() == [1, 2, 3] and found["b", "c"] == "text" and td["a"].tolist() == [0, 1, 2]


def test_containers_in_other_objects() -> None:
    td = TensorDict(x=torch.ones(8, WIDTH))
    found = ray.get(ray.put({"batches": [td, td["x"].sum()], "again": (td,)}))
    assert found["batches"][0] is found["again"][0] and found["batches"][1] == 8 * WIDTH


def test_memory_mapped_containers_travel_as_references(tmp_path: pathlib.Path) -> None:
    td = TensorDict(x=torch.ones(8, WIDTH)).memmap(tmp_path)
    found = ray.get(ray.put(td))
    assert found.is_memmap() and found["x"].filename == td["x"].filename
    found["x"][0, 0] = 5
    assert td["x"][0, 0] == 5


# --- tasks and actors -------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Actor:
    """Plays with the weights that it was given."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.policy = torch.nn.Linear(4, 2)

    def play(self, weights: Any, steps: int) -> Any:
        with weights.to_module(self.policy):
            action = self.policy(torch.ones(steps, 4))
        return rollout(self.seed, steps).set("action", action.detach())

    def spoil(self, td: Any) -> float:
        """Write all over an argument."""
        td.zero_()
        td["step"].obs.fill_(-1)
        return float(td["step"].obs.sum())


@ray.remote(num_cpus=0)
class Learner:
    """Learns from rollouts, which it normalizes in place."""

    def __init__(self) -> None:
        self.policy = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)

    def weights(self) -> Any:
        return TensorDict.from_module(self.policy).data

    def learn(self, *rollouts: Any) -> tuple[list[Any], float]:
        for td in rollouts:
            td["step"].reward.sub_(td["step"].reward.mean())
            td["step"].obs.mul_(2)
        found = [(td["info"]["seed"], len(td), td["episodes"][0]["text"]) for td in rollouts]
        loss = self.policy(torch.cat([td["action"] for td in rollouts]).repeat(1, 2)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found, float(loss)


def test_actors_and_a_learner(actors: list[Any]) -> None:
    learner = Learner.remote()
    losses = []
    for _ in range(3):
        weights = learner.weights.remote()
        rollouts = [actor.play.remote(weights, 3 + seed) for seed, actor in enumerate(actors)]
        found, loss = ray.get(learner.learn.remote(*rollouts))
        assert found == [(0, 3, "episode 1 of 0"), (1, 4, "episode 1 of 1")]
        losses.append(loss)
        # Writes of the learner stay private.
        for seed, reference in enumerate(rollouts):
            assert_same(ray.get(reference).exclude("action"), rollout(seed, 3 + seed))
    assert losses[2] < losses[0]


def test_actors_do_not_see_what_another_one_writes(actors: list[Any]) -> None:
    reference = ray.put(rollout(4, 3))
    assert ray.get([actor.spoil.remote(reference) for actor in actors]) == [-3 * WIDTH] * 2
    assert_same(ray.get(reference), rollout(4, 3))


def test_parameters() -> None:
    params = TensorDictParams(TensorDict(w=torch.ones(512, WIDTH // 64), b=torch.zeros(3)))

    @ray.remote(num_cpus=0)
    def grad(params: Any) -> Any:
        (params["w"].sum() * 2 + params["b"].sum()).backward()
        return params.grad, type(params).__name__

    found, kind = ray.get(grad.remote(params))
    assert kind == "TensorDictParams"
    assert (found["w"] == 2).all() and (found["b"] == 1).all()


def test_a_dead_actor_is_an_error() -> None:
    actor = Actor.remote(0)
    reference = ray.put(rollout(5, 3))
    assert ray.get(actor.spoil.remote(reference)) == -3 * WIDTH
    ray.kill(actor)
    start = time.monotonic()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.spoil.remote(reference), timeout=60)
    assert time.monotonic() - start < 60
    assert_same(ray.get(reference), rollout(5, 3))


# --- classes of a script ----------------------------------------------------------------------------------------------

SCRIPT = """
import pickle, sys, threading
import torch
from ray import cloudpickle
from tensordict import TensorClass, TypedTensorDict, tensorclass

lock = threading.Lock()  # What a script has besides its classes need not be something that can be pickled.


class Step(TensorClass["autocast"]):
    obs: torch.Tensor
    count: "int"
    after: "Step | None" = None
    odd: "Nowhere" = None

    def total(self):
        return self.obs.sum()


class Wide(Step):
    more: torch.Tensor = None


@tensorclass(frozen=True)
class Fixed:
    obs: torch.Tensor


class Typed(TypedTensorDict):
    obs: torch.Tensor


obs = torch.ones(2)
values = [
    Step(obs=obs, count="3", after=Step(obs=obs, count=1, batch_size=[2]), batch_size=[2]),
    Wide(obs=obs, count=3, more=obs, batch_size=[2]),
    Fixed(obs=obs, batch_size=[2]),
    Typed(obs=obs, batch_size=[2]),
]
with open(sys.argv[1], "wb") as file:
    pickle.dump([cloudpickle.dumps(value) for value in values], file)
"""

READER = """
import pickle, sys
import torch
from torch.utils._pytree import tree_map

with open(sys.argv[1], "rb") as file:
    step, wide, fixed, typed = [pickle.loads(content) for content in pickle.load(file)]
assert [type(value).__name__ for value in (step, wide, fixed, typed)] == ["Step", "Wide", "Fixed", "Typed"]
assert isinstance(wide, type(step)) and type(step).__module__ == "__main__"
assert step.count == 3 and type(step.after) is type(step) and step.total() == 2 and step.odd is None
again = type(step)(obs=torch.zeros(2), count="7", batch_size=[2])  # cast still
assert again.count == 7 and (again + 1).obs.tolist() == [1, 1]
assert tree_map(lambda x: x * 2, wide).more.tolist() == [2, 2]
assert torch.stack([fixed, fixed]).obs.shape == (2, 2) and typed.obs is typed["obs"]
try:
    fixed.obs = torch.zeros(2)
except AttributeError:
    print("done")
"""


def test_classes_of_a_script_travel_without_it(tmp_path: pathlib.Path) -> None:
    """Ray pickles them by value, and must not take along what else there is in the script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, tmp_path / "script.py", tmp_path / "values"], **run)
    found = subprocess.run([sys.executable, "-c", READER, tmp_path / "values"], **run)
    assert found.stdout == "done\n"
    assert (tmp_path / "values").stat().st_size < 100_000
