"""Train an agent with TorchRL: proximal policy optimisation (PPO) on CartPole, a pole to balance on a cart.

Run it with `make demo-rl`. Everything that TorchRL hands around is a TensorDict: what the environments return, what
the policy reads and writes, the batch of the collector, the mini-batches of the replay buffer and the losses.
It stops when the last 20 episodes have a mean return above 150 (the pole was balanced for 150 steps), at the latest
after two minutes, prints the curve and saves it as a plot under `runs/`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path

import matplotlib
import torch
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tensordict import TensorDict
from tensordict.nn import TensorDictModule

ENVIRONMENTS = 8
FRAMES = 1024  # collected between two updates, over all environments
EPOCHS = 6
MINIBATCH = 256
GOAL = 150.0
SECONDS = 120.0


def make_env(seed: int) -> EnvBase:
    """Eight carts side by side, whose containers have the batch size [8]."""
    carts = SerialEnv(ENVIRONMENTS, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    env = TransformedEnv(carts, RewardSum())  # adds the entry "episode_reward"
    env.set_seed(seed)
    return env


def network(outputs: int) -> MLP:
    return MLP(in_features=4, out_features=outputs, num_cells=[64, 64], activation_class=nn.Tanh)


def make_policy() -> ProbabilisticActor:
    """Reads "observation", writes "logits", then draws "action" from the distribution they describe."""
    scores = TensorDictModule(network(outputs=2), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(scores, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)


def update(
    batch: TensorDict, loss: ClipPPOLoss, optimizer: torch.optim.Optimizer, buffer: TensorDictReplayBuffer
) -> None:
    """Improves policy and value on one batch, in shuffled mini-batches."""
    buffer.extend(batch.reshape(-1))  # [environments, steps] becomes [environments * steps]
    for _ in range(EPOCHS):
        for minibatch in buffer:
            losses = loss(minibatch)
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def train(seed: int) -> list[tuple[int, float]]:
    """Trains until the goal or the time is reached; returns pairs of steps taken and mean return."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are slower in several threads
    policy = make_policy()
    value = ValueOperator(network(outputs=1), in_keys=["observation"])
    loss = ClipPPOLoss(policy, value, clip_epsilon=0.2, entropy_coeff=0.01)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value, average_gae=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    sampler = SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(FRAMES), sampler=sampler, batch_size=MINIBATCH)
    options = {"frames_per_batch": FRAMES, "total_frames": -1, "auto_register_policy_transforms": False}
    collector = Collector(make_env(seed), policy, **options)

    curve: list[tuple[int, float]] = []
    last: deque[float] = deque(maxlen=20)
    start = time.perf_counter()
    for position, batch in enumerate(collector, start=1):
        finished = batch["next", "done"]
        last.extend(batch["next", "episode_reward"][finished].tolist())
        curve.append((position * FRAMES, sum(last) / len(last)))
        seconds = time.perf_counter() - start
        print(f"{curve[-1][0]:6d} steps  {seconds:5.1f} s  mean return {curve[-1][1]:6.1f}", flush=True)
        if curve[-1][1] > GOAL or seconds > SECONDS:
            break
        with torch.no_grad():
            advantage(batch)  # adds "advantage" and "value_target"
        update(batch, loss, optimizer, buffer)
        collector.update_policy_weights_()
    collector.shutdown()
    return curve


def plot(curve: list[tuple[int, float]], path: Path) -> None:
    """Saves the curve as a picture."""
    matplotlib.use("Agg")  # draws into a file, without a screen
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(*zip(*curve, strict=True), marker="o", markersize=3)
    axes.axhline(GOAL, linestyle="--", linewidth=1, color="gray")
    axes.set(title="PPO on CartPole", xlabel="steps taken", ylabel="mean return of the last 20 episodes")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("runs/rl/cartpole.png"), help="where the curve is saved")
    arguments = parser.parse_args()
    curve = train(arguments.seed)
    plot(curve, arguments.plot)
    print(f"the curve is in {arguments.plot}")
    if curve[-1][1] <= GOAL:
        raise SystemExit(f"the mean return did not reach {GOAL:.0f} within {SECONDS:.0f} seconds")


if __name__ == "__main__":
    main()
