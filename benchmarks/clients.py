"""Measures programs that are built on this API, on this package and on the reference, in turns.

    make bench-clients                                            # both environments have TorchRL
    .venv/bin/python benchmarks/clients.py --only sample --rounds 41

Each program has processes of its own (`turns.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from turns import Call, compare, work, workers

STEPS = 1000
SAMPLE = 256
MINIBATCH = 100


def main() -> None:
    """Run the workloads in turns and print the medians; fails where this package is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="workloads whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(lambda name: WORKLOADS[name]())
        return
    rows = {}
    for name in [name for name in WORKLOADS if options.only in name]:
        with workers(__file__, "-clients") as sides:
            rows[name] = compare(name, sides, options.rounds)
    if options.json:
        print(json.dumps(rows))
    else:
        for name, row in rows.items():
            figures = f"{row['ours'] * 1e6:10,.0f} us {row['reference'] * 1e6:10,.0f} us on the reference"
            print(f"{name:46} {figures} {row['ratio']:6.2f}x")
    slower = [name for name, row in rows.items() if row["ratio"] < 1]
    if slower:
        raise SystemExit(f"slower than on the reference: {', '.join(slower)}")


def steps() -> Any:
    """A batch of 1,000 steps of an environment with 17 observations and 6 actions, in trajectories of 100."""
    import torch

    from tensordict import TensorDict

    done = ((torch.arange(STEPS) + 1) % 100 == 0).unsqueeze(-1)
    following = {"observation": torch.randn(STEPS, 17), "reward": torch.randn(STEPS, 1)}
    return TensorDict(
        {
            "observation": torch.randn(STEPS, 17),
            "action": torch.rand(STEPS, 6) * 1.8 - 0.9,
            "done": torch.zeros(STEPS, 1, dtype=torch.bool),
            "next": {**following, "done": done, "terminated": done, "truncated": torch.zeros_like(done)},
        },
        [STEPS],
    )


def ppo_update(minibatch: int) -> Call:
    """One epoch of PPO over a batch of 1,000 steps: advantages, losses, gradients and a step of Adam."""
    import torch
    from torch import nn
    from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    from tensordict.nn import NormalParamExtractor, TensorDictModule

    network = nn.Sequential(MLP(in_features=17, out_features=12, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=17, out_features=1, num_cells=[64, 64]), in_keys=["observation"])
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4)
    data = steps()
    with torch.no_grad():
        data["action_log_prob"] = actor.get_dist(data).log_prob(data["action"])
    sampler = SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(STEPS), sampler=sampler, batch_size=minibatch)

    def call() -> float:
        batch = data.copy()
        with torch.no_grad():
            advantage(batch)
        buffer.extend(batch)
        for part in buffer:
            losses = loss(part)
            total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            total.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return total.item()

    return call


def sample(transform: bool, memory_mapped: bool) -> Call:
    """A sample of 256 of the 1,000 steps in a replay buffer."""
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
    from torchrl.envs.transforms import RewardScaling

    storage = LazyMemmapStorage(STEPS) if memory_mapped else LazyTensorStorage(STEPS)
    buffer = ReplayBuffer(storage=storage, batch_size=SAMPLE)
    buffer.extend(steps())
    if transform:
        buffer.append_transform(RewardScaling(loc=0.0, scale=2.0, in_keys=[("next", "reward")]))

    def call() -> float:
        return buffer.sample()["next", "reward"].sum().item()  # type: ignore[no-any-return]

    return call


def sac_update() -> Call:
    """An update of SAC: a sample of 256 steps out of a memory-mapped buffer, three losses, gradients, targets."""
    import torch
    from torch import nn
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import SACLoss, SoftUpdate

    from tensordict.nn import NormalParamExtractor, TensorDictModule

    network = nn.Sequential(MLP(in_features=17, out_features=12, num_cells=[64, 64]), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    value = ValueOperator(MLP(in_features=23, out_features=1, num_cells=[64, 64]), in_keys=["observation", "action"])
    # The entropy to aim for is told, as otherwise it is asked of the specs of an environment.
    loss = SACLoss(actor, value, num_qvalue_nets=2, target_entropy=-6.0)
    loss.make_value_estimator(gamma=0.99)
    targets = SoftUpdate(loss, eps=0.995)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-5)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(STEPS), batch_size=SAMPLE)
    buffer.extend(steps())

    def call() -> float:
        losses = loss(buffer.sample())
        total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        targets.step()
        return total.item()  # type: ignore[no-any-return]

    return call


def parallel_environment() -> Call:
    """A step of two environments, each in a process of its own."""
    import torch
    from torchrl.envs import ParallelEnv

    environment = ParallelEnv(2, _counting, mp_start_method="fork")
    state = environment.reset()
    action = torch.ones(2, 1)

    def call() -> float:
        stepped = environment.step(state.copy().set("action", action))
        return stepped["next", "observation"].sum().item()  # type: ignore[no-any-return]

    return call


def _counting() -> Any:
    """An environment that adds its action to its observation, and does nothing else."""
    import torch
    from torchrl.data import Composite, Unbounded
    from torchrl.envs import EnvBase

    from tensordict import TensorDict

    class Adding(EnvBase):  # type: ignore[misc, no-any-unimported]
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((17,)))
            self.action_spec = Unbounded((1,))
            self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
            return TensorDict({"observation": torch.zeros(17), "done": torch.zeros(1, dtype=torch.bool)})

        def _step(self, tensordict: Any) -> Any:
            following = tensordict["observation"] + tensordict["action"]
            return TensorDict({"observation": following, "reward": following[:1], "done": following[:1] > 1e9})

        def _set_seed(self, seed: int | None) -> None:
            pass

    return Adding()


def data_proto() -> Call:
    """Imitate verl's `DataProto`, a container with objects, as it moves a batch between workers.

    Split the batch, pickle each part to another process and back, move it to its device, join the parts, and add the
    results of a worker.
    """
    import pickle

    import torch

    from tensordict import TensorDict

    tokens = {name: torch.randint(0, 32_000, (256, 512)) for name in ("prompts", "responses", "input_ids")}
    batch = TensorDict({**tokens, "attention_mask": torch.ones(256, 512, dtype=torch.long)}, [256])
    batch["index"] = torch.arange(256)
    batch.set_non_tensor("meta_info", {"temperature": 1.0})

    def call() -> float:
        parts = []
        for part in batch.chunk(4, dim=0):
            there = pickle.loads(pickle.dumps(part.contiguous())).to("cpu")
            scores = TensorDict({"scores": there["responses"].float().mean(1)}, there.batch_size)
            scores.set_non_tensor("worker", "actor")
            for key in scores.keys():
                there.set(key, scores.get(key))
            parts.append(there)
        joined = torch.cat(parts, 0)
        chosen = joined[joined["index"] % 2 == 0].select("responses", "scores")
        return chosen["scores"].double().mean().item()  # type: ignore[no-any-return]

    return call


def loader_epoch() -> Call:
    """An epoch of torch's `DataLoader` over a saved data set of 4,096 images, 64 at a time, shuffled."""
    import tempfile
    from pathlib import Path

    import torch
    from torch.utils.data import DataLoader

    from tensordict import TensorDict

    # The folder goes with the process.
    folder = tempfile.TemporaryDirectory(prefix="tensordict-clients-")
    pixels = torch.randint(0, 256, (4096, 28, 28), dtype=torch.uint8)
    made = TensorDict({"image": pixels, "label": {"class": torch.randint(0, 10, (4096,))}}, [4096])
    made.memmap(Path(folder.name) / "saved")
    saved = TensorDict.load_memmap(Path(folder.name) / "saved")
    # Rows are taken a batch at a time, by `__getitems__`.
    loader = DataLoader(saved, batch_size=64, shuffle=True, collate_fn=lambda rows: rows)

    def call() -> float:
        assert folder
        return float(sum(int(rows["image"].sum()) + int(rows["label", "class"].sum()) for rows in loader))

    return call


WORKLOADS: dict[str, Callable[[], Call]] = {
    "PPO update, 1,000 steps at once": lambda: ppo_update(STEPS),
    "PPO update, 1,000 steps in parts of 100": lambda: ppo_update(MINIBATCH),
    "SAC update, 256 steps, memory-mapped": sac_update,
    "ParallelEnv, a step of two": parallel_environment,
    "DataProto, 256 x 512 tokens there and back": data_proto,
    "DataLoader, an epoch over a saved data set": loader_epoch,
    "ReplayBuffer.sample, 256 steps": lambda: sample(transform=False, memory_mapped=False),
    "ReplayBuffer.sample, 256 steps, transform": lambda: sample(transform=True, memory_mapped=False),
    "ReplayBuffer.sample, 256 steps, memory-mapped": lambda: sample(transform=False, memory_mapped=True),
}


if __name__ == "__main__":
    main()
