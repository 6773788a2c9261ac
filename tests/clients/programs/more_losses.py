"""More losses: of sequences, of world models, of imitation, of several agents and of expected costs."""

import doctest
import inspect
from typing import Any

import torch
from losses import ACTIONS, OBSERVED, Concatenated, continuous, evaluated, network, trained
from recording import Record, case, run
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import DreamerEnv
from torchrl.modules import (
    CrossCriticGroupSpec,
    CrossGroupCritic,
    MultiAgentMLP,
    NormalParamExtractor,
    ProbabilisticActor,
    RSSMPosterior,
    RSSMPrior,
    RSSMRollout,
    TanhDelta,
    TanhNormal,
    WorldModelWrapper,
)
from torchrl.objectives import (
    DreamerActorLoss,
    DreamerModelLoss,
    DreamerV3Loss,
    DreamerValueLoss,
    DTLoss,
    ExponentialQuadraticCost,
    GAILLoss,
    OnlineDTLoss,
    hold_out_net,
    hold_out_params,
)
from torchrl.objectives.multiagent import IPPOLoss
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer, DreamerV3UpdateRatio

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams, TensorDictSequential

AGENTS, STATE, BELIEF, ENCODED = 3, 4, 8, 6


class Sequences(nn.Module):
    """Reads what was observed and what return is asked for, and gives `outputs` numbers for each step."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.cell = nn.GRU(OBSERVED + 1, 8, batch_first=True)
        self.last = nn.Linear(8, outputs)

    def forward(self, observation: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return self.last(self.cell(torch.cat([observation, asked], -1))[0])


def ask_for_returns() -> TensorDict:
    return continuous().set("return_to_go", torch.randn(3, 5, 1))


@case
def decision_transformers(record: Record) -> None:
    keys = ["observation", "return_to_go"]
    spec = Composite(action=Bounded(-1, 1, shape=(ACTIONS,)))
    module = TensorDictModule(Sequences(ACTIONS), in_keys=keys, out_keys=["param"])
    actor = ProbabilisticActor(module, in_keys=["param"], distribution_class=TanhDelta, spec=spec)
    for reduction in ("mean", "sum"):
        evaluated(record, f"offline {reduction}", DTLoss(actor, reduction=reduction), ask_for_returns())
    record("smooth", DTLoss(actor, loss_function="smooth_l1", reduction="none")(ask_for_returns()))
    trained(record, DTLoss(actor), ask_for_returns(), None)


@case
def decision_transformers_online(record: Record) -> None:
    keys = ["observation", "return_to_go"]
    spec = Composite(action=Bounded(-1, 1, shape=(ACTIONS,)))
    module = TensorDictModule(Sequences(2 * ACTIONS), in_keys=keys, out_keys=["params"])
    halves = TensorDictModule(NormalParamExtractor(), in_keys=["params"], out_keys=["loc", "scale"])
    actor = ProbabilisticActor(
        TensorDictSequential(module, halves), in_keys=["loc", "scale"], distribution_class=TanhNormal, spec=spec
    )
    loss = OnlineDTLoss(actor, alpha_init=0.5, min_alpha=0.1, max_alpha=2.0, samples_mc_entropy=3)
    evaluated(record, "online", loss, ask_for_returns())
    record("fixed", OnlineDTLoss(actor, fixed_alpha=True, target_entropy=-3.0)(ask_for_returns()))
    each = OnlineDTLoss(actor, reduction="none", scalar_output_mode="non_tensor")(ask_for_returns())
    record("each", each)
    record("given by name", loss(**{key: ask_for_returns()[key] for key in (*keys, "action")}))
    trained(record, loss, ask_for_returns(), None)


@case
def imitation(record: Record) -> None:
    discriminator = TensorDictSequential(
        TensorDictModule(Concatenated(), ["observation", "action"], ["d_logits"]),
        TensorDictModule(nn.Sigmoid(), ["d_logits"], ["d_logits"]),
    )

    def pairs(*shape: int) -> TensorDict:
        drawn = {
            f"{who}{what}": torch.randn(*shape, size)
            for who in ("", "collector_")
            for what, size in (("observation", OBSERVED), ("action", ACTIONS))
        }
        return TensorDict(drawn, shape)

    for name, options in {"plain": {}, "with a penalty": {"use_grad_penalty": True, "gp_lambda": 2}}.items():
        loss = GAILLoss(discriminator, **options)
        evaluated(record, name, loss, pairs(5))
        evaluated(record, f"{name}, in steps", loss, pairs(3, 5))
    record("each", GAILLoss(discriminator, reduction="none")(pairs(4)))
    trained(record, GAILLoss(discriminator, use_grad_penalty=True), pairs(6), None)


def make_world_model() -> WorldModelWrapper:
    """Makes a model that encodes pixels, follows a hidden state, and draws the pixels and the reward from it."""
    prior = TensorDictModule(
        RSSMPrior(Bounded(-1, 1, (ACTIONS,)), hidden_dim=8, rnn_hidden_dim=BELIEF, state_dim=STATE),
        in_keys=["state", "belief", "action"],
        out_keys=[("next", "prior_mean"), ("next", "prior_std"), "_", ("next", "belief")],
    )
    posterior = TensorDictModule(
        RSSMPosterior(hidden_dim=8, state_dim=STATE, rnn_hidden_dim=BELIEF, obs_embed_dim=ENCODED),
        in_keys=[("next", "belief"), ("next", "encoded_latents")],
        out_keys=[("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")],
    )
    encoder = nn.Sequential(nn.Flatten(-3), network(3 * 4 * 4, ENCODED))
    hidden = [("next", "state"), ("next", "belief")]
    decoder = [
        TensorDictModule(network(STATE + BELIEF, 48), hidden, [("next", "drawn")]),
        TensorDictModule(nn.Unflatten(-1, (3, 4, 4)), [("next", "drawn")], [("next", "reco_pixels")]),
    ]
    return WorldModelWrapper(
        TensorDictSequential(
            TensorDictModule(encoder, [("next", "pixels")], [("next", "encoded_latents")]),
            RSSMRollout(prior, posterior),
            TensorDictSequential(*decoder),
        ),
        TensorDictModule(network(STATE + BELIEF, 1), hidden, [("next", "reward")]),
    )


def make_film() -> TensorDict:
    """Makes two trajectories of five steps, with pixels."""
    following = {"pixels": torch.rand(2, 5, 3, 4, 4), "reward": torch.randn(2, 5, 1)}
    start = {"state": torch.zeros(2, 5, STATE), "belief": torch.zeros(2, 5, BELIEF)}
    return TensorDict({**start, "action": torch.rand(2, 5, ACTIONS), "next": following}, [2, 5])


def optimize(record: Record, name: str, loss: nn.Module, data: TensorDict, kept: slice) -> Any:
    """Records three steps of a loss that gives its losses and the data that it made; returns these data."""
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    for step in range(3):
        losses, made = loss(data.clone())
        sum(part.sum() for part in losses.values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        record(f"{name} {step}", losses)
    record(f"{name} made", made)
    record(f"{name} state", dict(loss.state_dict()))
    return made[kept]


@case
def models_of_the_world(record: Record) -> None:
    for name, options in {
        "plain": {},
        "averaged": {"global_average": True, "lambda_kl": 0.5, "free_nats": 0},
        "clamped later": {"delayed_clamp": True, "reco_loss": "l1", "reward_loss": "smooth_l1"},
    }.items():
        optimize(record, name, DreamerModelLoss(make_world_model(), **options), make_film(), slice(None))


def make_imagined_env() -> DreamerEnv:
    """Makes an environment of a network, which gives the next state and the reward."""
    hidden, action = ["state", "belief"], Bounded(-1, 1, (ACTIONS,))
    prior = RSSMPrior(action, hidden_dim=8, rnn_hidden_dim=BELIEF, state_dim=STATE, action_dim=ACTIONS)
    model = WorldModelWrapper(
        TensorDictModule(prior, [*hidden, "action"], ["_", "_", *hidden]),
        TensorDictModule(network(STATE + BELIEF, 1), hidden, ["reward"]),
    )
    env = DreamerEnv(model, prior_shape=(STATE,), belief_shape=(BELIEF,))
    env.observation_spec = Composite(state=Unbounded(STATE), belief=Unbounded(BELIEF))
    env.state_spec = env.observation_spec.clone()
    env.action_spec = action
    env.reward_spec = Unbounded((1,))
    return env


@case
def policies_and_values_in_imagination(record: Record) -> None:
    hidden = ["state", "belief"]
    actor = ProbabilisticActor(
        TensorDictSequential(
            TensorDictModule(network(STATE + BELIEF, 2 * ACTIONS), hidden, ["params"]),
            TensorDictModule(NormalParamExtractor(), ["params"], ["loc", "scale"]),
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    values = TensorDictModule(network(STATE + BELIEF, 1), hidden, ["state_value"])
    start = TensorDict({"state": torch.randn(6, STATE), "belief": torch.randn(6, BELIEF)}, [6])
    for name, options in {"discounted": {}, "not discounted": {"discount_loss": False}}.items():
        loss = DreamerActorLoss(actor, values, make_imagined_env(), imagination_horizon=4, **options)
        loss.make_value_estimator(gamma=0.9, lmbda=0.8)
        made = optimize(record, f"policy, {name}", loss, start, slice(None))
        loss = DreamerValueLoss(values, gamma=0.9, **options)
        optimize(record, f"value, {name}", loss, made, slice(4))


@case
def independent_agents(record: Record) -> None:
    observed, acted = ("agents", "observation"), ("agents", "action")
    options = {"n_agents": AGENTS, "centralized": False, "share_params": True, "depth": 1, "num_cells": 8}
    module = nn.Sequential(MultiAgentMLP(OBSERVED, 2 * ACTIONS, **options), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(module, [observed], [("agents", "loc"), ("agents", "scale")]),
        in_keys=[("agents", "loc"), ("agents", "scale")],
        out_keys=[acted],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    values = TensorDictModule(MultiAgentMLP(OBSERVED, 1, **options), [observed], [("agents", "state_value")])
    team = {"reward": torch.randn(2, 5, 1), "done": torch.zeros(2, 5, 1, dtype=torch.bool)}
    team["terminated"] = team["done"].clone()
    following = {"agents": {"observation": torch.randn(2, 5, AGENTS, OBSERVED)}, **team}
    data = TensorDict({"agents": {"observation": torch.randn(2, 5, AGENTS, OBSERVED)}, "next": following}, [2, 5])
    with torch.no_grad():
        actor(data)
    for name, more in {"plain": {}, "not normalized": {"normalize_advantage": False, "entropy_coeff": 0.1}}.items():
        loss = IPPOLoss(actor, values, **more)
        loss.set_keys(value=("agents", "state_value"), action=acted)
        evaluated(record, name, loss, data.clone())
    trained(record, loss, data, None)


@case
def one_critic_of_two_groups(record: Record) -> None:
    sizes = {"soldiers": (6, 3), "medics": (4, 2)}
    groups = {
        name: CrossCriticGroupSpec(observed, agents, (name, "observation"), (name, "state_value"))
        for name, (observed, agents) in sizes.items()
    }
    data = {name: {"observation": torch.randn(5, agents, observed)} for name, (observed, agents) in sizes.items()}
    for name, options in {"apart": {}, "shared": {"share_params": True}, "held": {"detach_groups": ["medics"]}}.items():
        valued = CrossGroupCritic(groups, d_model=8, trunk_depth=1, trunk_cells=8, **options)
        result = valued(TensorDict(data, [5]))
        record(name, result)
        (result["soldiers", "state_value"].sum() + result["medics", "state_value"].sum()).backward()
        record(f"{name} gradients", {key: parameter.grad for key, parameter in valued.named_parameters()})


@case
def expected_costs(record: Record) -> None:
    half = torch.randn(6, 3, 3)
    mean, variance = torch.randn(6, 3, requires_grad=True), half @ half.mT
    data = TensorDict({"observation": {"mean": mean, "var": variance}}, [6])
    for reduction in ("mean", "sum", "none"):
        record(reduction, ExponentialQuadraticCost(reduction=reduction)(data))
    cost = ExponentialQuadraticCost(target=torch.ones(3), weights=torch.diag(torch.tensor([1.0, 2.0, 0.5])))
    record("to a target", cost(data))
    cost(data)["loss_cost"].backward()
    record("gradient", mean.grad)
    record("state", dict(cost.state_dict()))
    cost.set_keys(loc="loc", scale="scale")
    record("other keys", cost(TensorDict({"loc": mean, "scale": variance}, [6])))


@case
def held_out(record: Record) -> None:
    module = TensorDictModule(network(OBSERVED, 1), ["observation"], ["value"])
    params = TensorDictParams(TensorDict.from_module(module))
    observed = torch.randn(5, OBSERVED, requires_grad=True)
    with hold_out_net(module):
        module(TensorDict({"observation": observed}, [5]))["value"].sum().backward()
        record("needs gradients inside", [parameter.requires_grad for parameter in module.parameters()])
    record("needs gradients after", [parameter.requires_grad for parameter in module.parameters()])
    record("of the network", [observed.grad, [parameter.grad for parameter in module.parameters()]])
    for name, given in {"container": params, "plain": TensorDict.from_module(module)}.items():
        with hold_out_params(given) as held, held.to_module(module):
            value = module(TensorDict({"observation": observed.detach()}, [5]))["value"]
        record(f"of a {name}", [value, value.requires_grad, type(held).__name__])
    with hold_out_params(params.parameters()) as held:
        record("of an iterable", [list(held), [part.requires_grad for part in held]])


def read_example(value: type) -> dict[str, Any]:
    """Runs the example in the documentation of `value` and returns the variables that it leaves."""
    variables: dict[str, Any] = {"__name__": "example"}
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(value) or ""):
        exec(example.source, variables)
    return variables


@case
def optimizer_of_the_third_dreamer(record: Record) -> None:
    example = read_example(DreamerV3Loss)
    loss, sample = example["loss_module"], example["sample"]
    optimizer = DreamerV3Optimizer(loss.parameters(), lr=1e-2, warmup_steps=2)
    stepper = DreamerV3OptimizationStepper(loss, optimizer, example["target_updater"], warmup_steps=1)
    stepper.warmup(sample)
    for step in range(3):
        record(f"step {step}", stepper.step(None, sample))
        record(f"context {step}", sample["replay_context"])
    record("state", dict(loss.state_dict()))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    record("optimizer", [list(saved), [sorted(map(str, group)) for group in saved["param_groups"]]])
    schedule = DreamerV3UpdateRatio(0.25)
    record("updates", [schedule(frames) for frames in (4, 6, 9, 17)])
    kept = schedule.state_dict()
    record("more", schedule(20))
    schedule.load_state_dict(kept)
    record("again", schedule(20))


if __name__ == "__main__":
    run()
