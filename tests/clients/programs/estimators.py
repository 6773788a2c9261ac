"""Estimates of values: the functions of TorchRL, modules for several agents, losses and policies in compiled code."""

import torch
from losses import ACTIONS, OBSERVED, continuous, gaussian_actor, network, one_hot, ppo, with_advantage
from recording import Record, case, run, slow_case
from torchrl.data import OneHot
from torchrl.modules import QValueActor
from torchrl.objectives import ClipPPOLoss, DQNLoss
from torchrl.objectives.value import MultiAgentGAE, functional

from tensordict import TensorDict
from tensordict.nn import TensorDictModule


def trajectories() -> dict[str, torch.Tensor]:
    shape = (3, 6, 1)
    done = torch.zeros(shape, dtype=torch.bool)
    done[0, 2] = done[1, 5] = done[2, 0] = True
    names = ("state_value", "next_state_value", "reward")
    return {
        **{name: torch.randn(shape) for name in names},
        "done": done,
        "terminated": done & (torch.rand(shape) > 0.3),
    }


@case
def as_functions(record: Record) -> None:
    data = trajectories()
    without_state = {name: value for name, value in data.items() if name != "state_value"}
    for kind in ("", "vec_"):
        for name, options, given in (
            ("generalized_advantage_estimate", {"gamma": 0.9, "lmbda": 0.8}, data),
            ("td1_return_estimate", {"gamma": 0.9}, without_state),
            ("td1_advantage_estimate", {"gamma": 0.9}, data),
            ("td_lambda_return_estimate", {"gamma": 0.9, "lmbda": 0.8}, without_state),
            ("td_lambda_advantage_estimate", {"gamma": 0.9, "lmbda": 0.8}, data),
        ):
            record(f"{kind}{name}", getattr(functional, f"{kind}{name}")(**options, **given))
    record("td0 advantage", functional.td0_advantage_estimate(gamma=0.9, **data))
    record("td0 return", functional.td0_return_estimate(gamma=0.9, **without_state))
    log_pi, log_mu = torch.randn(3, 6, 1), torch.randn(3, 6, 1)
    record("vtrace", functional.vtrace_advantage_estimate(gamma=0.9, log_pi=log_pi, log_mu=log_mu, **data))
    record("reward to go", functional.reward2go(data["reward"], data["done"], 0.9))


@case
def of_several_agents(record: Record) -> None:
    value = TensorDictModule(network(OBSERVED, 1), [("agents", "observation")], [("agents", "state_value")])
    estimator = MultiAgentGAE(gamma=0.9, lmbda=0.8, value_network=value)
    estimator.set_keys(value=("agents", "state_value"))
    data, team = trajectories(), ("reward", "done", "terminated")
    observed = {"agents": {"observation": torch.randn(3, 6, 2, OBSERVED)}}
    following = {"agents": {"observation": torch.randn(3, 6, 2, OBSERVED)}, **{name: data[name] for name in team}}
    record("estimated", estimator(TensorDict({**observed, "next": following}, [3, 6])))


@slow_case
def compiled_policies(record: Record) -> None:
    actor = gaussian_actor()
    data = continuous()
    # Random numbers differ in compiled code, so only the parameters of the distribution are taken.
    compiled = torch.compile(actor[0], fullgraph=True, backend="aot_eager")
    for name, given in (("three", data), ("one", data[0]), ("flat", data.reshape(-1))):
        record(name, compiled(given.select("observation")))


@slow_case
def compiled_losses(record: Record) -> None:
    loss = ppo(ClipPPOLoss)
    loss.make_value_estimator(gamma=0.9, lmbda=0.8)
    data = with_advantage(loss, continuous())
    actor = QValueActor(network(OBSERVED, ACTIONS), in_keys=["observation"], spec=OneHot(ACTIONS))
    values = DQNLoss(actor, action_space="one-hot", delay_value=True)
    values.make_value_estimator(gamma=0.9)
    for name, module, given in (("values", values, one_hot()), ("policies", loss, data)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        compiled = torch.compile(module, backend="aot_eager")
        for step in range(2):
            losses = compiled(given.clone())
            sum(part for key, part in losses.items() if key.startswith("loss") and key != "loss_entropy").backward()
            optimizer.step()
            optimizer.zero_grad()
            record(f"{name} {step}", {key: part for key, part in losses.items() if "entropy" not in key})
        record(f"{name} parameters", dict(module.state_dict()))


if __name__ == "__main__":
    run()
