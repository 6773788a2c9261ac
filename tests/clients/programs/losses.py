"""Losses of reinforcement learning: their values, gradients, target networks, updates and saved states."""

import torch
from recording import Record, case, run
from torch import nn
from torch.distributions import Categorical
from torchrl.data import Bounded, Composite, OneHot
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    DistributionalQValueActor,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    TanhNormal,
    ValueOperator,
)
from torchrl.modules.models.multiagent import MultiAgentMLP, QMixer
from torchrl.objectives import (
    A2CLoss,
    BCLoss,
    ClipPPOLoss,
    CQLLoss,
    DDPGLoss,
    DiscreteSACLoss,
    DistributionalDQNLoss,
    DQNLoss,
    HardUpdate,
    IQLLoss,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    SoftUpdate,
    TD3Loss,
)
from torchrl.objectives.multiagent import QMixerLoss
from torchrl.objectives.utils import ValueEstimators
from torchrl.objectives.value import GAE, TD0Estimator, TD1Estimator, TDLambdaEstimator, VTrace

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
    TensorDictSequential,
)

OBSERVED, ACTIONS, ROWS, STEPS = 4, 2, 3, 5


def network(inputs: int, outputs: int) -> MLP:
    return MLP(in_features=inputs, out_features=outputs, num_cells=[8], activation_class=nn.Tanh)


def gaussian_actor() -> ProbabilisticActor:
    module = nn.Sequential(network(OBSERVED, 2 * ACTIONS), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(module, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
        spec=Composite(action=Bounded(-1, 1, shape=(ACTIONS,))),
    )


def discrete_actor() -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network(OBSERVED, ACTIONS), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def value() -> ValueOperator:
    return ValueOperator(network(OBSERVED, 1), in_keys=["observation"])


class Concatenated(nn.Module):
    """The value of an action in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(OBSERVED + ACTIONS, 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.network(torch.cat([observation, action], -1))


def critic() -> ValueOperator:
    return ValueOperator(Concatenated(), in_keys=["observation", "action"])


def transitions(action: torch.Tensor) -> TensorDict:
    """Three trajectories of five steps; the last step of the second one ends it."""
    done = torch.zeros(ROWS, STEPS, 1, dtype=torch.bool)
    done[1, -1] = True
    following = {"reward": torch.randn(ROWS, STEPS, 1), "done": done, "terminated": done.clone()}
    return TensorDict(
        {
            "observation": torch.randn(ROWS, STEPS, OBSERVED),
            "action": action,
            "next": {"observation": torch.randn(ROWS, STEPS, OBSERVED), **following},
        },
        [ROWS, STEPS],
    )


def continuous() -> TensorDict:
    return transitions(torch.rand(ROWS, STEPS, ACTIONS) * 1.8 - 0.9)


def discrete() -> TensorDict:
    return transitions(torch.randint(ACTIONS, (ROWS, STEPS)))


def one_hot() -> TensorDict:
    return transitions(nn.functional.one_hot(torch.randint(ACTIONS, (ROWS, STEPS)), ACTIONS))


def gradients(loss: LossModule) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in loss.named_parameters()}


def evaluated(record: Record, name: str, loss: LossModule, data: TensorDictBase) -> None:
    """Records what the loss gives for `data`, the gradients of its sum, its keys and its state."""
    record(f"{name} in keys", sorted(map(str, loss.in_keys)))
    record(f"{name} out keys", sorted(map(str, loss.out_keys)))
    losses = loss(data)
    record(f"{name} losses", losses)
    sum(part for key, part in losses.items() if key.startswith("loss")).backward()
    record(f"{name} gradients", gradients(loss))
    record(f"{name} state", dict(loss.state_dict()))
    record(f"{name} td_error", data.get("td_error"))
    loss.zero_grad()


def trained(record: Record, loss: LossModule, data: TensorDictBase, updater: SoftUpdate | HardUpdate | None) -> None:
    """Records five steps of Adam, with the target networks following."""
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    for step in range(5):
        losses = loss(data.clone())
        sum(part for key, part in losses.items() if key.startswith("loss")).backward()
        optimizer.step()
        optimizer.zero_grad()
        if updater is not None:
            updater.step()
        record(f"step {step}", losses)
    record("after", dict(loss.state_dict()))
    fresh = {name: torch.zeros_like(entry) for name, entry in loss.state_dict().items()}
    state = {name: entry.clone() for name, entry in loss.state_dict().items()}
    loss.load_state_dict(fresh)
    record("of zeros", loss(data.clone()))
    loss.load_state_dict(state)
    record("restored", dict(loss.state_dict()))


def ppo(kind: type[PPOLoss], **options: object) -> PPOLoss:
    return kind(gaussian_actor(), value(), **options)


def with_advantage(loss: LossModule, data: TensorDictBase) -> TensorDictBase:
    with torch.no_grad():
        data = loss.actor_network(data) if hasattr(loss, "actor_network") else data
    GAE(gamma=0.9, lmbda=0.8, value_network=loss.critic_network)(
        data, params=loss.critic_network_params, target_params=loss.target_critic_network_params
    )
    return data


@case
def proximal_policy(record: Record) -> None:
    for name, kind in {"plain": PPOLoss, "clipped": ClipPPOLoss, "with a penalty": KLPENPPOLoss}.items():
        loss = ppo(kind, entropy_coeff=0.1)
        evaluated(record, name, loss, with_advantage(loss, continuous()))


@case
def proximal_policy_discrete(record: Record) -> None:
    loss = ClipPPOLoss(discrete_actor(), value(), normalize_advantage=True, clip_value=0.2)
    evaluated(record, "clipped", loss, with_advantage(loss, discrete()))


@case
def proximal_policy_of_shared_layers(record: Record) -> None:
    common = TensorDictModule(network(OBSERVED, 6), in_keys=["observation"], out_keys=["hidden"])
    policy = ProbabilisticActor(
        TensorDictModule(network(6, ACTIONS), in_keys=["hidden"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    both = ActorValueOperator(common, policy, ValueOperator(network(6, 1), in_keys=["hidden"]))
    loss = ClipPPOLoss(both.get_policy_operator(), both.get_value_operator())
    data = one_hot()
    with torch.no_grad():
        both(data)
    data = data.exclude("state_value", "hidden", "logits")
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.9)
    evaluated(record, "shared", loss, data)


@case
def proximal_policy_trained(record: Record) -> None:
    loss = ppo(ClipPPOLoss, entropy_coeff=0.01)
    trained(record, loss, with_advantage(loss, continuous()), None)


@case
def soft_actor_critic(record: Record) -> None:
    loss = SACLoss(gaussian_actor(), critic(), num_qvalue_nets=2)
    evaluated(record, "two critics", loss, continuous())
    evaluated(record, "with a value", SACLoss(gaussian_actor(), critic(), value()), continuous().view(-1)[:14])
    choices = QValueActor(network(OBSERVED, ACTIONS), in_keys=["observation"], spec=OneHot(ACTIONS))
    actor = ProbabilisticActor(
        TensorDictModule(network(OBSERVED, ACTIONS), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    loss = DiscreteSACLoss(actor, choices, action_space="one-hot", num_actions=ACTIONS)
    evaluated(record, "discrete", loss, one_hot())


@case
def soft_actor_critic_trained(record: Record) -> None:
    loss = SACLoss(gaussian_actor(), critic(), num_qvalue_nets=3, delay_qvalue=True)
    loss.make_value_estimator(gamma=0.95)
    trained(record, loss, continuous(), SoftUpdate(loss, tau=0.1))


@case
def q_learning(record: Record) -> None:
    actor = QValueActor(network(OBSERVED, ACTIONS), in_keys=["observation"], spec=OneHot(ACTIONS))
    for name, options in {"plain": {}, "double": {"double_dqn": True}, "without delay": {"delay_value": False}}.items():
        evaluated(record, name, DQNLoss(actor, action_space="one-hot", **options), one_hot())
    atoms = DistributionalQValueActor(
        MLP(in_features=OBSERVED, out_features=(7, ACTIONS), num_cells=[8]),
        in_keys=["observation"],
        support=torch.linspace(-2, 2, 7),
        spec=OneHot(ACTIONS),
    )
    loss = DistributionalDQNLoss(atoms, gamma=0.9, delay_value=True)
    loss(one_hot().view(-1))["loss"].backward()
    record("atoms", gradients(loss))


@case
def q_learning_trained(record: Record) -> None:
    actor = QValueActor(network(OBSERVED, ACTIONS), in_keys=["observation"], spec=OneHot(ACTIONS))
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True, double_dqn=True)
    trained(record, loss, one_hot(), HardUpdate(loss, value_network_update_interval=2))


@case
def deterministic_policies(record: Record) -> None:
    actor = TensorDictModule(network(OBSERVED, ACTIONS), in_keys=["observation"], out_keys=["action"])
    evaluated(record, "ddpg", DDPGLoss(actor, critic(), delay_actor=True, delay_value=True), continuous())
    loss = TD3Loss(actor, critic(), action_spec=Bounded(-1, 1, shape=(ACTIONS,)), num_qvalue_nets=2)
    evaluated(record, "td3", loss, continuous())


@case
def other_losses(record: Record) -> None:
    loss = A2CLoss(gaussian_actor(), value())
    evaluated(record, "a2c", loss, with_advantage(loss, continuous()))
    loss = ReinforceLoss(gaussian_actor(), value())
    evaluated(record, "reinforce", loss, with_advantage(loss, continuous()))
    evaluated(record, "iql", IQLLoss(gaussian_actor(), critic(), value()), continuous())
    evaluated(record, "cql", CQLLoss(gaussian_actor(), critic(), action_spec=Bounded(-1, 1, (ACTIONS,))), continuous())
    evaluated(record, "redq", REDQLoss(gaussian_actor(), critic(), num_qvalue_nets=4, sub_sample_len=2), continuous())
    evaluated(record, "cloning", BCLoss(gaussian_actor()), continuous())


@case
def mixed_values_of_agents(record: Record) -> None:
    agents, group = 3, ("agents", "observation")
    network = MultiAgentMLP(OBSERVED, ACTIONS, agents, centralized=False, share_params=True, num_cells=[8])
    values = TensorDictModule(network, in_keys=[group], out_keys=[("agents", "action_value")])
    picked = [("agents", "action"), ("agents", "action_value"), ("agents", "chosen_action_value")]
    module = QValueModule(action_value_key=picked[1], out_keys=picked, action_space="categorical")
    choice = TensorDictSequential(values, module)
    mixer = TensorDictModule(
        QMixer(state_shape=(6,), mixing_embed_dim=4, n_agents=agents, device="cpu"),
        in_keys=[("agents", "chosen_action_value"), "state"],
        out_keys=["chosen_action_value"],
    )
    loss = QMixerLoss(choice, mixer, action_space="categorical", delay_value=True)
    loss.set_keys(
        action=("agents", "action"),
        action_value=("agents", "action_value"),
        local_value=("agents", "chosen_action_value"),
        global_value="chosen_action_value",
    )
    done = torch.zeros(6, 1, dtype=torch.bool)
    step = {"agents": {"observation": torch.randn(6, agents, OBSERVED)}, "state": torch.randn(6, 6)}
    data = TensorDict(step, [6])
    data["agents", "action"] = torch.randint(ACTIONS, (6, agents))
    data["next"] = (
        data.select(group, "state").clone().update({"reward": torch.randn(6, 1), "done": done, "terminated": done})
    )
    evaluated(record, "mixed", loss, data)


@case
def value_estimates(record: Record) -> None:
    network = value()
    data = continuous()
    for name, estimator in {
        "GAE": GAE(gamma=0.9, lmbda=0.8, value_network=network),
        "averaged GAE": GAE(gamma=0.9, lmbda=0.8, value_network=network, average_gae=True),
        "shifted GAE": GAE(gamma=0.9, lmbda=0.8, value_network=network, shifted=True),
        "TD0": TD0Estimator(gamma=0.9, value_network=network),
        "TD1": TD1Estimator(gamma=0.9, value_network=network),
        "TD lambda": TDLambdaEstimator(gamma=0.9, lmbda=0.8, value_network=network),
    }.items():
        record(name, estimator(data.clone()))
    actor = gaussian_actor()
    with torch.no_grad():
        played = actor(data.clone())
    trace = VTrace(gamma=0.9, actor_network=actor, value_network=network)
    record("VTrace", trace(played))


@case
def target_networks(record: Record) -> None:
    loss = SACLoss(gaussian_actor(), critic(), num_qvalue_nets=2)
    targets = loss.target_qvalue_network_params
    record("are parameters", isinstance(loss.qvalue_network_params, TensorDictParams))
    record("targets", targets)
    record("names", sorted(name for name, _ in loss.named_parameters()))
    record("buffers", sorted(name for name, _ in loss.named_buffers()))
    updater = SoftUpdate(loss, eps=0.9)
    with torch.no_grad():
        loss.qvalue_network_params.apply_(lambda parameter: parameter.add_(1.0))
    updater.step()
    record("after a step", targets)
    record("required", [parameter.requires_grad for parameter in targets.values(True, True)])
    copied = loss.to(torch.float64)
    record("in double", copied.target_qvalue_network_params)
    with loss.qvalue_network_params[0].to_module(loss.qvalue_network):
        record("called", loss.qvalue_network(continuous().to(torch.float64)))


@case
def sequences(record: Record) -> None:
    first = TensorDictModule(network(OBSERVED, 6), in_keys=["observation"], out_keys=[("nested", "hidden")])
    second = TensorDictModule(network(6, 1), in_keys=[("nested", "hidden")], out_keys=["value"])
    both = TensorDictSequential(first, second)
    data = continuous()
    record("called", both(data))
    record("by position", both(data["observation"])[1])
    params = TensorDict.from_module(both)
    record("params", params)
    stacked = torch.stack([params.detach(), params.detach() * 0.5])
    with params.to_module(both):
        record("functional", both(data.select("observation")))

    def call(params: TensorDict, data: TensorDict) -> TensorDict:
        with params.to_module(both):
            return both(data)

    record("ensemble", torch.vmap(call, (0, None))(stacked, data.select("observation"))["value"])


@case
def selected_losses(record: Record) -> None:
    """`select_out_keys`, which all losses document; their out-keys are a property with a setter."""
    cases = {
        "ppo": (with_advantage, lambda: ppo(PPOLoss), "loss_objective"),
        "sac": (lambda loss, data: data, lambda: SACLoss(gaussian_actor(), critic()), "loss_qvalue"),
    }
    for name, (prepare, make, key) in cases.items():
        torch.manual_seed(0)
        loss = make()
        data = prepare(loss, continuous())
        written = loss.out_keys
        losses = loss.select_out_keys(key)(data.clone())
        record(f"{name} selected", [losses[key], [other for other in written if other in losses]])
        record(f"{name} keys", loss.out_keys)
        losses = loss.reset_out_keys()(data.clone())
        record(f"{name} reset", {other: losses[other] for other in written})


if __name__ == "__main__":
    run()
