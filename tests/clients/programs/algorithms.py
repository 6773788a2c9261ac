"""The trainers of TorchRL's algorithms on small environments: parameters after a few steps, and what they log."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording import SEED, Record, case, run
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    OneHot,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import (
    MLP,
    EGreedyModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    CQLLoss,
    DDPGLoss,
    DQNLoss,
    IQLLoss,
    LossModule,
    ReinforceLoss,
    SACLoss,
    SoftUpdate,
    TD3Loss,
)
from torchrl.objectives.value import GAE
from torchrl.record import CSVLogger
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import (
    A2CTrainer,
    CQLTrainer,
    DDPGTrainer,
    DQNTrainer,
    IQLTrainer,
    OfflineToOnlineTrainer,
    OnPolicyTrainer,
    PPOTrainer,
    ReinforceTrainer,
    SACTrainer,
    TD3Trainer,
)

from tensordict.nn import TensorDictModule, TensorDictSequential

FRAMES = 40


def seeded(name: str) -> TransformedEnv:
    env = TransformedEnv(GymEnv(name), Compose(StepCounter(max_steps=12), RewardSum()))
    env.set_seed(SEED)
    return env


def network(inputs: int, outputs: int) -> MLP:
    return MLP(in_features=inputs, out_features=outputs, num_cells=[8])


def buffer(kind: type[ReplayBuffer] = TensorDictReplayBuffer, **options: Any) -> ReplayBuffer:
    return kind(storage=LazyTensorStorage(40), batch_size=8, **options)


class Concatenated(nn.Module):
    """The value of an action of Pendulum in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(4, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([observation, action], -1))


def gaussian(env: TransformedEnv) -> ProbabilisticActor:
    module = nn.Sequential(network(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(module, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        spec=env.action_spec,
    )


def critic() -> ValueOperator:
    return ValueOperator(Concatenated(), in_keys=["observation", "action"])


def train(
    record: Record, kind: type[Trainer], env: TransformedEnv, policy: Any, loss: LossModule, **options: Any
) -> None:
    """Trains for a few steps; the collector stays open, so that the trainer has a state to write down."""
    name = kind.__name__
    made = kind(
        collector=Collector(env, policy, frames_per_batch=20, total_frames=FRAMES),
        total_frames=FRAMES,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        logger=CSVLogger(name, "logs"),
        progress_bar=False,
        log_interval=1,
        seed=SEED,
        **options,
    )
    shutdown, made.collector.shutdown = made.collector.shutdown, lambda *_, **__: None
    made.train()
    made.collector.shutdown = shutdown
    record(f"{name} parameters", dict(loss.state_dict()))
    record(f"{name} counters", [made.collected_frames, made._optim_count])
    record(f"{name} state", sorted(made.state_dict()))
    logs = sorted(Path("logs", name).rglob("*.csv"))
    record(f"{name} logs", {path.stem: path.read_text() for path in logs if "time" not in path.parts})
    made.collector.shutdown()


@case
def values_of_actions(record: Record) -> None:
    env = seeded("CartPole-v1")
    actor = QValueActor(network(4, 2), in_keys=["observation"], spec=OneHot(2, dtype=torch.int64))
    explore = EGreedyModule(env.action_spec, annealing_num_steps=50)
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True)
    train(
        record,
        DQNTrainer,
        env,
        TensorDictSequential(actor, explore),
        loss,
        replay_buffer=buffer(),
        greedy_module=explore,
        log_rewards=False,
        target_net_updater=SoftUpdate(loss, eps=0.9),
    )


def deterministic(record: Record, kind: type[Trainer], make: Callable[..., LossModule]) -> None:
    env = seeded("Pendulum-v1")
    actor = TensorDictModule(nn.Sequential(network(3, 1), nn.Tanh()), ["observation"], ["action"])
    loss = make(actor, critic(), env)
    train(
        record,
        kind,
        env,
        actor,
        loss,
        replay_buffer=buffer(),
        log_rewards=False,
        target_net_updater=SoftUpdate(loss, eps=0.9),
    )


@case
def deterministic_policies(record: Record) -> None:
    deterministic(record, DDPGTrainer, lambda actor, value, env: DDPGLoss(actor, value, delay_actor=True))


@case
def twin_delayed_policies(record: Record) -> None:
    def make(actor: TensorDictModule, value: ValueOperator, env: TransformedEnv) -> TD3Loss:
        return TD3Loss(actor, value, action_spec=env.action_spec, num_qvalue_nets=2, delay_actor=True)

    deterministic(record, TD3Trainer, make)


@case
def soft_policies(record: Record) -> None:
    env = seeded("Pendulum-v1")
    actor = gaussian(env)
    loss = SACLoss(actor, critic(), num_qvalue_nets=2)
    train(
        record,
        SACTrainer,
        env,
        actor,
        loss,
        replay_buffer=buffer(),
        target_net_updater=SoftUpdate(loss, eps=0.9),
        log_observations=True,
        log_rewards=False,
    )


def options(loss: LossModule) -> dict[str, Any]:
    return {"log_rewards": False, "target_net_updater": SoftUpdate(loss, eps=0.9)}


@case
def conservative_policies(record: Record) -> None:
    env = seeded("Pendulum-v1")
    actor = gaussian(env)
    loss = CQLLoss(actor, critic(), action_spec=env.action_spec)
    train(record, CQLTrainer, env, actor, loss, replay_buffer=buffer(), **options(loss))


@case
def implicit_policies(record: Record) -> None:
    env = seeded("Pendulum-v1")
    actor = gaussian(env)
    loss = IQLLoss(actor, critic(), ValueOperator(network(3, 1), in_keys=["observation"]))
    train(record, IQLTrainer, env, actor, loss, replay_buffer=buffer(), **options(loss))


@case
def offline_then_online(record: Record) -> None:
    env = seeded("Pendulum-v1")
    actor = gaussian(env)
    offline = buffer(ReplayBuffer)
    offline.extend(env.rollout(20, actor, break_when_any_done=False).detach())
    both = OfflineToOnlineReplayBuffer(offline, online_capacity=40, offline_fraction=0.5, batch_size=8)
    loss = SACLoss(actor, critic(), num_qvalue_nets=2)
    train(
        record,
        OfflineToOnlineTrainer,
        env,
        actor,
        loss,
        replay_buffer=both,
        anneal_frames=FRAMES,
        # The log needs a count of writes, and this buffer has no such count.
        enable_logging=False,
        target_net_updater=SoftUpdate(loss, eps=0.9),
    )


def on_policy(record: Record, kind: type[OnPolicyTrainer], make: Callable[..., LossModule], **options: Any) -> None:
    env = seeded("CartPole-v1")
    actor = ProbabilisticActor(
        TensorDictModule(network(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        spec=GymEnv("CartPole-v1", categorical_action_encoding=True).action_spec,
    )
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), Compose(StepCounter(), RewardSum()))
    env.set_seed(SEED)
    value = ValueOperator(network(4, 1), in_keys=["observation"])
    train(
        record,
        kind,
        env,
        actor,
        make(actor, value),
        replay_buffer=buffer(sampler=SamplerWithoutReplacement()),
        gamma=0.9,
        lmbda=0.8,
        **options,
    )


@case
def proximal_policies(record: Record) -> None:
    on_policy(record, PPOTrainer, ClipPPOLoss, num_epochs=2)


@case
def advantage_policies(record: Record) -> None:
    on_policy(record, A2CTrainer, A2CLoss)


@case
def reinforced_policies(record: Record) -> None:
    on_policy(record, ReinforceTrainer, ReinforceLoss)


@case
def estimators_of_trainers(record: Record) -> None:
    """The estimator that a trainer of a policy makes unless it is told to leave the advantage alone."""
    env = seeded("Pendulum-v1")
    value = ValueOperator(network(3, 1), in_keys=["observation"])
    data = env.rollout(9, gaussian(env), break_when_any_done=False).detach()
    record("estimated", GAE(gamma=0.9, lmbda=0.8, value_network=value, average_gae=True)(data))


if __name__ == "__main__":
    run()
