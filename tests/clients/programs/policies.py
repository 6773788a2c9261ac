"""Policies and models that TorchRL builds on modules: actors, exploration, recurrent and multi-agent networks."""

import itertools
from collections.abc import Iterator

import torch
from recording import SEED, Record, case, run, slow_case
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from torchrl.modules import (
    MLP,
    ActorCriticOperator,
    ActorCriticWrapper,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    MaskedCategorical,
    MultiAgentConvNet,
    MultiAgentMLP,
    NoisyLinear,
    OneHotCategorical,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    SafeModule,
    SafeSequential,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
    WorldModelWrapper,
    reset_noise,
    set_recurrent_mode,
)
from torchrl.modules.distributions import IndependentNormal
from torchrl.modules.models.exploration import gSDEModule

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from tensordict.nn import TensorDictSequential as Sequence

OBSERVED, ACTIONS, ROWS = 4, 3, 6


def observations() -> TensorDict:
    return TensorDict({"observation": torch.randn(ROWS, OBSERVED)}, [ROWS])


def network(inputs: int, outputs: int) -> MLP:
    return MLP(in_features=inputs, out_features=outputs, num_cells=[8])


def actor(distribution: type, extract: bool, **options: object) -> ProbabilisticActor:
    """An actor over a network; `extract` splits what it gives into location and scale."""
    module: nn.Module = network(OBSERVED, 2 * ACTIONS if extract else ACTIONS)
    keys = ["loc", "scale"] if extract else ["logits"]
    if extract:
        module = nn.Sequential(module, NormalParamExtractor())
    made = TensorDictModule(module, in_keys=["observation"], out_keys=keys)
    return ProbabilisticActor(made, in_keys=keys, distribution_class=distribution, return_log_prob=True, **options)


@case
def actors(record: Record) -> None:
    for distribution, extract in ((TanhNormal, True), (TruncatedNormal, True), (Normal, True), (Categorical, False)):
        policy = actor(distribution, extract)
        for kind in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC, ExplorationType.MODE):
            if kind is ExplorationType.MODE and distribution is TanhNormal:
                continue
            with set_exploration_type(kind), torch.no_grad():
                record(f"{distribution.__name__} {kind.name}", policy(observations()))
        record(f"{distribution.__name__} log prob", policy.log_prob(policy(observations())))


@case
def state_dependent_exploration(record: Record) -> None:
    """gSDE draws its noise as the exploration type of the whole policy says, and the action that it writes is kept."""
    modules = Sequence(
        TensorDictModule(nn.Linear(OBSERVED, 5), ["observation"], ["state"]),
        TensorDictModule(nn.Linear(5, ACTIONS), ["state"], ["mu"]),
        TensorDictModule(
            gSDEModule(action_dim=ACTIONS, state_dim=5),
            in_keys=["mu", "state", "_eps_gSDE"],
            out_keys=["loc", "scale", "action", "_eps_gSDE"],
        ),
    )
    for default in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
        policy = ProbabilisticActor(
            modules, in_keys=["loc", "scale"], distribution_class=IndependentNormal, default_interaction_type=default
        )
        for kind in (None, ExplorationType.RANDOM, ExplorationType.MEAN):
            with set_exploration_type(kind):
                record(f"{default.name} {kind}", policy(observations()))


@case
def exploration_types(record: Record) -> None:
    names = [str(exploration_type())]
    with set_exploration_type(ExplorationType.MEAN):
        names.append(str(exploration_type()))
        with set_exploration_type(InteractionType.RANDOM):
            names.append(str(exploration_type()))
    record("names", names)
    policy = actor(OneHotCategorical, False, default_interaction_type=InteractionType.MODE)
    record("mode", policy(observations()))
    record("same", torch.tensor(InteractionType is ExplorationType))


@case
def masked_actions(record: Record) -> None:
    made = TensorDictModule(network(OBSERVED, ACTIONS), in_keys=["observation"], out_keys=["logits"])
    policy = ProbabilisticActor(
        made, in_keys={"logits": "logits", "mask": "allowed"}, distribution_class=MaskedCategorical
    )
    data = observations().set("allowed", torch.tensor([True, False, True]).expand(ROWS, ACTIONS))
    record("drawn", policy(data))


@case
def actions_of_parts(record: Record) -> None:
    def parameters(observation: torch.Tensor) -> TensorDict:
        normal = {"loc": observation, "scale": observation.exp()}
        return TensorDict({"move": normal, "choice": {"logits": observation}}, observation.shape[:1])

    made = TensorDictModule(parameters, in_keys=["observation"], out_keys=["params"])
    kinds = {"move": Normal, "choice": Categorical}
    for aggregate in (True, False):
        with set_composite_lp_aggregate(aggregate):
            policy = ProbabilisticActor(
                made,
                in_keys=["params"],
                out_keys=[("action", "move"), ("action", "choice")],
                distribution_class=CompositeDistribution,
                distribution_kwargs={
                    "distribution_map": kinds,
                    "name_map": {"move": ("action", "move"), "choice": ("action", "choice")},
                },
                return_log_prob=True,
            )
            drawn = policy(observations())
            record(f"drawn {aggregate}", drawn)
            record(f"log prob {aggregate}", policy.log_prob(drawn))


@case
def values_of_actions(record: Record) -> None:
    for space in ("one-hot", "categorical"):
        record(
            space, QValueActor(network(OBSERVED, ACTIONS), in_keys=["observation"], action_space=space)(observations())
        )
    masked = QValueActor(
        network(OBSERVED, ACTIONS), in_keys=["observation"], action_space="one-hot", action_mask_key="allowed"
    )
    record("masked", masked(observations().set("allowed", torch.tensor([False, True, True]).expand(ROWS, ACTIONS))))


@case
def shared_layers(record: Record) -> None:
    common = SafeModule(network(OBSERVED, 5), in_keys=["observation"], out_keys=["hidden"])
    made = TensorDictModule(network(5, ACTIONS), in_keys=["hidden"], out_keys=["logits"])
    policy = ProbabilisticActor(made, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    value = ValueOperator(MLP(in_features=5 + ACTIONS, out_features=1, num_cells=[8]), in_keys=["hidden", "action"])
    both = ActorCriticOperator(common, policy, value)
    record("both", both(observations()))
    record("policy", both.get_policy_operator()(observations()))
    record("critic", both.get_critic_operator()(both.get_policy_operator()(observations())))
    record("keys", [str(both.in_keys), str(both.out_keys), str(both.get_policy_head().in_keys)])
    wrapper = ActorCriticWrapper(actor(OneHotCategorical, False), ValueOperator(network(OBSERVED, 1), ["observation"]))
    record("wrapper", wrapper(observations()))
    world = WorldModelWrapper(common, TensorDictModule(network(5, 1), in_keys=["hidden"], out_keys=["reward"]))
    record("world", world(observations()))


@case
def exploring(record: Record) -> None:
    choices = QValueActor(network(OBSERVED, ACTIONS), in_keys=["observation"], spec=OneHot(ACTIONS))
    greedy = EGreedyModule(spec=choices.spec, eps_init=0.8, eps_end=0.1, annealing_num_steps=10)
    policy = Sequence(choices, greedy)
    for position in range(3):
        record(f"greedy {position}", policy(observations()))
        greedy.step()
    record("eps", greedy.eps)
    bounded = Bounded(-1, 1, shape=(ACTIONS,))
    moves = TensorDictModule(network(OBSERVED, ACTIONS), in_keys=["observation"], out_keys=["action"])
    gaussian = AdditiveGaussianModule(spec=bounded, sigma_init=0.5, device="cpu")
    record("gaussian", Sequence(moves, gaussian)(observations()))
    spec = Composite(action=Bounded(-1, 1, shape=(ROWS, ACTIONS)), shape=(ROWS,))
    process = Sequence(moves, OrnsteinUhlenbeckProcessModule(spec=spec))
    data = observations().set("is_init", torch.ones(ROWS, 1, dtype=torch.bool))
    for position in range(3):
        data = process(data)
        record(f"process {position}", data)
        data["is_init"] = torch.zeros(ROWS, 1, dtype=torch.bool)
    record("process state", dict(process.state_dict()))


@case
def recurrent(record: Record) -> None:
    for name, kind in {"lstm": LSTMModule, "gru": GRUModule}.items():
        module = kind(input_size=OBSERVED, hidden_size=5, in_key="observation", out_key="embedding")
        env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
        env.append_transform(module.make_tensordict_primer())
        env.set_seed(SEED)
        head = TensorDictModule(
            lambda hidden: nn.functional.one_hot(hidden[..., :2].argmax(-1), 2), ["embedding"], ["action"]
        )
        rollout = env.rollout(12, Sequence(module, head), break_when_any_done=False)
        record(f"{name} rollout", rollout)
        with torch.no_grad(), set_recurrent_mode(True):
            record(f"{name} at once", module(rollout.exclude("embedding")))
        record(f"{name} keys", [str(module.in_keys), str(module.out_keys)])


@case
def agents(record: Record) -> None:
    for name, options in {
        "shared": {"centralized": False, "share_params": True},
        "own": {"centralized": False, "share_params": False},
        "central": {"centralized": True, "share_params": False},
    }.items():
        model = MultiAgentMLP(n_agent_inputs=OBSERVED, n_agent_outputs=2, n_agents=3, num_cells=[8], **options)
        module = TensorDictModule(model, in_keys=[("agents", "observation")], out_keys=[("agents", "out")])
        data = TensorDict({"agents": {"observation": torch.randn(ROWS, 3, OBSERVED)}}, [ROWS])
        record(name, module(data))
        module(data)["agents", "out"].sum().backward()
        record(f"{name} gradients", {key: parameter.grad for key, parameter in model.named_parameters()})
        record(f"{name} state", dict(model.state_dict()))


def train(record: Record, name: str, model: nn.Module, inputs: torch.Tensor) -> None:
    """Two steps of an optimizer that has the parameters of `model` before its first call."""
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    record(f"{name} before", [key for key, _ in model.named_parameters()])
    for step in range(2):
        out = model(inputs)
        record(f"{name} {step}", out)
        optimizer.zero_grad()
        out.square().sum().backward()
        record(f"{name} gradients {step}", {key: parameter.grad for key, parameter in model.named_parameters()})
        optimizer.step()
    record(f"{name} state", dict(model.state_dict()))
    record(f"{name} repr", repr(model))


def kinds_of_agents() -> Iterator[tuple[str, dict[str, object]]]:
    for share, central, container in itertools.product((False, True), repeat=3):
        options = {"share_params": share, "centralized": central, "use_td_params": container}
        yield f"share={share} central={central} container={container}", {"n_agents": 3, **options}


@case
def agents_of_unknown_inputs(record: Record) -> None:
    for name, options in kinds_of_agents():
        for depth in (1, 0):
            model = MultiAgentMLP(n_agent_inputs=None, n_agent_outputs=2, num_cells=8, depth=depth, **options)
            train(record, f"{name} depth={depth}", model, torch.randn(ROWS, 3, OBSERVED))


@case
def convolutions_of_unknown_inputs(record: Record) -> None:
    for name, options in kinds_of_agents():
        model = MultiAgentConvNet(num_cells=[4, 4], kernel_sizes=3, **options)
        train(record, name, model, torch.randn(2, 3, 3, 8, 8))


@case
def resetting_agents_of_unknown_inputs(record: Record) -> None:
    for share in (False, True):
        model = MultiAgentMLP(None, 2, 3, centralized=False, share_params=share, num_cells=[8])
        inputs = torch.randn(ROWS, 3, OBSERVED)
        model(inputs)
        model.reset_parameters()
        record(f"reset {share}", model(inputs))
        net = model.get_stateful_net()
        record(f"stateful {share}", dict(net.named_parameters()))
        model.from_stateful_net(net)
        record(f"from stateful {share}", model(inputs))


@case
def checked_outputs(record: Record) -> None:
    module = SafeModule(
        nn.Linear(OBSERVED, ACTIONS),
        in_keys=["observation"],
        out_keys=["action"],
        spec=Bounded(-0.1, 0.1, shape=(ACTIONS,)),
        safe=True,
    )
    record("projected", module(observations()))
    both = SafeSequential(module, SafeModule(nn.Linear(ACTIONS, 1), ["action"], ["value"], spec=Unbounded((1,))))
    record("both", both(observations()))
    record("spec", repr(both.spec))
    record("random", module.random(observations()))


@case
def noisy(record: Record) -> None:
    module = TensorDictModule(NoisyLinear(OBSERVED, 2), in_keys=["observation"], out_keys=["out"])
    data = observations()
    record("first", module(data.clone()))
    module.apply(reset_noise)
    record("second", module(data.clone()))


@case
def parameters_of_models(record: Record) -> None:
    policy = actor(TanhNormal, True)
    params = TensorDict.from_module(policy)
    record("params", params)
    data = observations()

    def act(params: TensorDictBase) -> TensorDictBase:
        with params.to_module(policy), set_exploration_type(ExplorationType.DETERMINISTIC):
            return policy(data.clone())

    halved = params.detach() * 0.5
    record("halved", act(halved))
    record("vmapped", torch.vmap(act)(torch.stack([halved, params.detach()])))
    record("state", dict(policy.state_dict()))


@slow_case
def exported_agents(record: Record) -> None:
    for share in (False, True):
        options = {"n_agents": 2, "centralized": False, "share_params": share, "use_td_params": False}
        net = MultiAgentConvNet(in_features=3, num_cells=[4, 4], kernel_sizes=3, **options)
        record(f"parameters {share}", [name for name, _ in net.named_parameters()])
        pixels = torch.randn(1, 2, 3, 8, 8)
        exported = torch.export.export(net, (pixels,), strict=True)
        record(f"exported {share}", exported.module()(pixels))


if __name__ == "__main__":
    run()
