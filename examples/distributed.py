"""Two programs on several processes: data-parallel training, and actors that send rollouts to a learner.

    torchrun --standalone --nproc-per-node 3 examples/distributed.py

With 2 to 4 processes, on the CPU (gloo). First every rank trains the same network on its own part of the data, with
averaged gradients. Then rank 0 learns a policy from the rollouts of the other ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tensordict import TensorDict

# --- data-parallel training -------------------------------------------------------------------------------------------


def make_data(examples: int) -> TensorDict:
    """Return points, and a smooth function of them with a little noise."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(examples, 2, generator=generator) * 4 - 2
    values = torch.sin(points[:, :1]) * points[:, 1:] + 0.05 * torch.randn(examples, 1, generator=generator)
    return TensorDict({"point": points, "value": values}, [examples])


def train(rank: int, ranks: int, epochs: int) -> None:
    """Train one network on all ranks."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    params = TensorDict.from_module(net)
    # All begin with the parameters of rank 0.
    params.data.update_(params.data.broadcast(src=0))
    data = make_data(1536)[rank::ranks]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for epoch in range(epochs):
        total = torch.zeros(())
        for batch in data[torch.randperm(len(data))].split(128 // ranks):
            loss = nn.functional.mse_loss(net(batch["point"]), batch["value"])
            optimizer.zero_grad()
            loss.backward()
            # In place: the optimizer reads the same gradients.
            params.apply(lambda parameter: parameter.grad).all_reduce(dist.ReduceOp.AVG)
            optimizer.step()
            total += loss.detach() * len(batch)
        report = TensorDict({"loss": total, "seen": torch.tensor(len(data))})
        report.all_reduce()
        if rank == 0 and epoch in (0, epochs - 1):
            print(f"epoch {epoch + 1}: loss {report['loss'] / report['seen']:.4f} over {report['seen']} examples")
    copies = params.data.all_gather()
    if rank == 0:
        print(f"parameters equal on {len(copies)} ranks: {all((copy == copies[0]).all() for copy in copies)}")


# --- actors and a learner ---------------------------------------------------------------------------------------------

WALKS, STEPS = 64, 12


def make_policy() -> nn.Module:
    """Build a policy: it maps a position on the line to the log-odds of a step to the right."""
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def empty_rollout() -> TensorDict:
    """Return an empty rollout: `WALKS` walks of `STEPS` steps."""
    parts = {name: torch.zeros(WALKS, STEPS, 1) for name in ("position", "right", "reward")}
    return TensorDict({**parts, "made by": "nobody"}, [WALKS], names=["walk"])


@torch.no_grad()
def act_out(policy: nn.Module, name: str) -> TensorDict:
    """Walk along the line with a policy; it is best to be near 0."""
    rollout = empty_rollout()
    rollout["made by"] = name
    position = torch.rand(WALKS, 1) * 4 - 2
    for step in range(STEPS):
        right = torch.bernoulli(torch.sigmoid(policy(position)))
        rollout["position"][:, step] = position
        rollout["right"][:, step] = right
        position = position + 0.3 * (2 * right - 1)
        rollout["reward"][:, step] = -position.abs()
    return rollout


def learn_from(rollouts: TensorDict, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of REINFORCE."""
    returns: Tensor = rollouts["reward"].flip(-2).cumsum(-2).flip(-2)
    advantage = (returns - returns.mean((0, 1))) / (returns.std() + 1e-6)
    odds = policy(rollouts["position"])
    loss = nn.functional.binary_cross_entropy_with_logits(odds, rollouts["right"], weight=advantage)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def act_and_learn(rank: int, ranks: int, rounds: int) -> None:
    """Rank 0 learns, the others act."""
    torch.manual_seed(100 + rank)
    policy = make_policy()
    weights = TensorDict.from_module(policy).data
    if rank > 0:
        for _ in range(rounds):
            weights.recv(0)
            act_out(policy, f"actor {rank}").send(0)
        return
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
    actors = range(1, ranks)
    # One row for every actor, written in place in each round.
    rows = [empty_rollout() for _ in actors]
    makers: set[str] = set()
    for number in range(rounds):
        sent = [work for actor in actors for work in weights.isend(actor, return_early=True)]
        arriving = [row.irecv(actor, return_premature=True)[0] for row, actor in zip(rows, actors, strict=True)]
        for transfer in sent + arriving:
            transfer.wait()
        makers |= {row["made by"] for row in rows}
        rollouts = torch.cat([row.exclude("made by") for row in rows])
        if number in (0, rounds - 1):
            print(f"round {number + 1}: mean reward {rollouts['reward'].mean():.3f} over {len(rollouts)} walks")
        learn_from(rollouts, policy, optimizer)
    print(f"rollouts came from: {', '.join(sorted(makers))}")


def main() -> None:
    """Run both, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not 2 <= ranks <= 4:
        raise SystemExit(f"this program is for 2 to 4 processes, and was started with {ranks}")
    train(rank, ranks, options.epochs)
    act_and_learn(rank, ranks, options.rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
