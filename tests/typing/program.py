"""A program as users write them: both type checkers accept it in strict mode, and `test_typing` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    MetaData,
    NestedKey,
    NonTensorData,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    TypedTensorDict,
    cat,
    lazy_stack,
    load_memmap,
    pad_sequence,
    stack,
)
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
    set_interaction_type,
)

OBS, ACTIONS = 4, 2


class Step(TensorClass):
    """Observation and action of an agent at one step."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    task: str = "walk"

    def discounted(self, gamma: float) -> Tensor:
        return self.reward * gamma ** torch.arange(self.reward.shape[0])


class Transition(TensorClass, frozen=True):
    now: Step
    then: Step
    done: Tensor


class Rollout(TypedTensorDict):
    obs: Tensor
    reward: Tensor


@dataclass
class Config:
    folder: Path
    capacity: int = 64
    batch: int = 16
    gamma: float = 0.9


class Replay:
    """A ring of steps in memory-mapped files."""

    def __init__(self, config: Config) -> None:
        spec = Step(torch.zeros(OBS), torch.zeros(()), torch.zeros(()))
        self.storage = spec.expand(config.capacity).memmap_like(config.folder / "replay")
        self.size = 0

    def extend(self, steps: Step) -> None:
        self.storage[self.size : self.size + len(steps)] = steps
        self.size += len(steps)

    def sample(self, count: int) -> Step:
        return self.storage[torch.randint(self.size, (count,))]

    def batches(self, size: int) -> Iterator[Step]:
        yield from self.storage[: self.size].split(size)


class Normalize(TensorDictModuleBase):
    in_keys = ["obs"]
    out_keys = ["normal"]

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @dispatch
    def forward(self, tensordict: TensorDict) -> TensorDict:
        return tensordict.set("normal", tensordict["obs"] / self.scale)


def collect(policy: TensorDictSequential, count: int) -> Step:
    steps: list[Step] = []
    td = TensorDict({"obs": torch.zeros(OBS)})
    for _ in range(count):
        td = policy(td)
        steps.append(Step(obs=td["obs"], action=td["action"].float(), reward=torch.rand(())))
        td = TensorDict(obs=torch.randn(OBS))
    return stack(steps)


def mean_loss(policy: ProbabilisticTensorDictSequential, batch: Step, gamma: float) -> Tensor:
    td = batch.to_tensordict().select("obs", "action")
    dist = policy.get_dist(td)
    return -(dist.log_prob(td["action"].long()) * batch.discounted(gamma)).mean()


def count_of(container: TensorDictBase, keys: list[str]) -> int:
    return sum(container.get_item_shape(key).numel() for key in keys)


def joined(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(map(joined, key))


def train(config: Config) -> float:
    hidden = ["hidden"]
    net = TensorDictModule(nn.Linear(OBS, 8), in_keys=["normal"], out_keys=hidden)
    head = TensorDictModule(nn.Linear(8, ACTIONS), in_keys=hidden, out_keys=["logits"])
    sampler = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        default_interaction_type=InteractionType.RANDOM,
    )
    policy = ProbabilisticTensorDictSequential(Normalize(2.0), net, head, sampler)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    replay = Replay(config)
    with set_interaction_type(InteractionType.RANDOM), torch.no_grad():
        replay.extend(collect(policy, 32))
    loss = torch.zeros(())
    for batch in replay.batches(config.batch):
        loss = mean_loss(policy, batch, config.gamma)
        optimizer.zero_grad()
        # Torch leaves these two without types.
        loss.backward()  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    saved = Step.load_memmap(config.folder / "replay")
    assert_type(saved[0].task, str)
    assert_type(replay.sample(3).to("cpu").reshape(-1).obs, Tensor)
    assert_type(policy.select_out_keys("action"), ProbabilisticTensorDictSequential)
    assert_type(policy.reset_out_keys().in_keys, "list[NestedKey]")
    return loss.item()


def containers(config: Config) -> None:
    td = TensorDict({"a": torch.ones(3), "b": {"c": torch.zeros(3, 2)}}, batch_size=[3], names=["time"])
    for key in td.keys():
        assert key.upper() and td.get_item_shape(key)[0] == 3
    assert sorted(joined(key) for key in td.keys(True, True)) == ["a", "b.c"]
    for name, value in td.items():
        assert name.lower() in td and len(value) == 3
    assert count_of(td, list(td.keys())) == 6
    steps = [Step(torch.ones(n, OBS), torch.zeros(n), torch.ones(n), batch_size=[n]) for n in (1, 2)]
    assert_type(lazy_stack(steps), Step)
    assert_type(cat(steps)[0].reward, Tensor)
    assert_type(pad_sequence(steps), Step)
    lazy = lazy_stack([td, td.clone()], dim=1)
    assert_type(lazy, LazyStackedTensorDict)
    assert_type(lazy.apply(torch.exp), LazyStackedTensorDict)
    doubled = td.apply(lambda x, y: x + y, td)
    assert_type(doubled, TensorDict)
    with td.unlock_(), td.view(3, 1) as viewed:
        viewed["new"] = torch.zeros(3, 1)
    assert_type(td.named_apply(lambda name, x: x * len(name)), TensorDict)
    whole = td.memmap(config.folder / "td", return_early=True)
    assert_type(whole, Future[TensorDict])
    assert_type(whole.result().is_memmap(), bool)
    loaded = load_memmap(config.folder / "td")
    assert loaded.batch_size == td.batch_size
    mapped = MemoryMappedTensor.from_tensor(torch.zeros(3))
    assert_type(mapped[0].clone(), Tensor)
    with td.to_h5(config.folder / "td.h5") as stored:
        assert_type(stored, PersistentTensorDict)
        assert_type(stored.clone(), TensorDict)
    rollout = Rollout(obs=torch.zeros(3, OBS), reward=torch.ones(3), batch_size=[3])
    assert_type(rollout[1:].reward, Tensor)
    now, then = steps[1][:1], steps[1][1:]
    assert_type(Transition(now, then, torch.zeros(1), batch_size=[1])[0].now.obs, Tensor)
    assert_type(MetaData("text").data, str)
    assert NonTensorData(3).data + 1 == 4
    net = nn.Linear(2, 2)
    params = TensorDictParams(TensorDict.from_module(net))
    with params.to_module(net):
        assert_type(params.data, TensorDict)
    both = CompositeDistribution(
        TensorDict({"x": {"loc": torch.zeros(3), "scale": torch.ones(3)}}, batch_size=[3]),
        {"x": torch.distributions.Normal},
    )
    assert_type(both.sample().sum(), TensorDict)
    assert_type(both.entropy(aggregate_probabilities=True), Tensor)


def main(folder: Path) -> float:
    config = Config(folder)
    containers(config)
    return train(config)
