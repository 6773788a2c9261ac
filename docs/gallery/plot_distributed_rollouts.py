"""
Collect rollouts from many processes in shared memory
=====================================================

Many processes collect experience at once, while one process learns from it. Two containers in
shared memory connect them: the weights, which the learner writes and the actors read, and the
rollouts, which the actors write and the learner reads. No tensor is sent or pickled. A queue
carries one number for each rollout: its row.
"""

# %%
# Put the weights and the rollouts into shared memory
# ---------------------------------------------------
#
# Walkers in a plane should come to the middle and stay there. ``share_memory_`` moves the tensors
# of a container to memory that other processes see; ``memmap_`` would put them into files, which
# outlive the processes. A row of the buffer is a rollout of all walkers. It also records which
# actor made it, when, and with which version of the weights.

import time

import matplotlib.pyplot as plt
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributions import Normal

from tensordict import TensorDict

torch.manual_seed(0)
ACTORS, ROLLOUTS, WALKERS, STEPS = 3, 60, 16, 12


def make_policy():
    return nn.Linear(2, 2)


policy = make_policy()
net = TensorDict.from_module(policy).data.clone()
weights = TensorDict({"net": net, "version": 0}).share_memory_()
steps = {"position": torch.zeros(2), "action": torch.zeros(2), "reward": torch.zeros(())}
notes = {"actor": 0, "version": 0, "begin": 0.0, "end": 0.0}
row = TensorDict({"steps": TensorDict(steps).expand(STEPS, WALKERS), "notes": notes})
buffer = row.expand(ROLLOUTS).clone().share_memory_()
print(buffer)

# %%
# Act
# ---
#
# An actor takes the next free row, copies the current weights, walks, and assigns the rollout to
# the row: one line for all entries. The copy may meet the learner in the middle of a write, which
# does no harm here; a lock would keep them apart. The first actor is fast and the last one slow,
# like real machines.


@torch.no_grad()
def walk(net):
    position, rollout = 4 * torch.rand(WALKERS, 2) - 2, []
    for _ in range(STEPS):
        action = Normal(net(position), 0.5).sample()
        step = TensorDict({"position": position, "action": action}, [WALKERS])
        position = position + 0.3 * action
        rollout.append(step.set("reward", -position.norm(dim=-1)))
    return torch.stack(rollout)


def act(actor, next_row, done, started):
    torch.set_num_threads(1)
    torch.manual_seed(100 + actor)
    net = make_policy()
    while True:
        with next_row.get_lock():
            number, next_row.value = next_row.value, next_row.value + 1
        if number >= len(buffer):
            return
        begin = time.monotonic() - started
        mine = weights.clone()
        with mine["net"].to_module(net):
            rollout = walk(net)
        time.sleep(0.02 * (actor + 1))
        end = time.monotonic() - started
        notes = {"actor": actor, "version": mine["version"], "begin": begin, "end": end}
        buffer[number] = TensorDict({"steps": rollout, "notes": notes})
        done.put(number)


# %%
# Learn
# -----
#
# The learner waits for three rollouts from any actors, and makes actions more likely if the
# reward after them was better than average. ``update_`` writes into the shared weights; the
# actors find them there at their next rollout.

optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)


def learn(batch):
    returns = batch["steps", "reward"].flip(1).cumsum(1).flip(1)
    advantage = (returns - returns.mean((0, 2), keepdim=True)) / returns.std()
    wanted = Normal(policy(batch["steps", "position"]), 0.5)
    odds = wanted.log_prob(batch["steps", "action"]).sum(-1)
    optimizer.zero_grad()
    (-(advantage * odds).mean()).backward()
    optimizer.step()
    weights.update_({"net": TensorDict.from_module(policy).data, "version": weights["version"] + 1})


context = mp.get_context("fork")  # the processes inherit all definitions above
next_row, done = context.Value("l", 0), context.Queue()
shared = (next_row, done, time.monotonic())
actors = [context.Process(target=act, args=(number, *shared)) for number in range(ACTORS)]
for process in actors:
    process.start()
for _ in range(ROLLOUTS // 3):
    arrived = [done.get(timeout=60) for _ in range(3)]
    learn(buffer[arrived])
for process in actors:
    process.join()

# %%
# Look at the actors
# ------------------
#
# The records are columns like all others. The times, and the rows of each actor, differ from run
# to run.

notes = buffer["notes"]
print("rollouts by actor:", notes["actor"].bincount().tolist())
reward = buffer["steps", "reward"].mean((1, 2))

figure = plt.figure(figsize=(12, 6.4), layout="constrained")
upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.5])
axes = upper.subplots()
shade = plt.cm.ScalarMappable(plt.Normalize(0, ROLLOUTS // 3), "viridis")
columns = [notes[name].tolist() for name in ("actor", "version", "begin", "end")]
for number, (actor, version, begin, end) in enumerate(zip(*columns)):
    axes.barh(actor, end - begin, left=begin, color=shade.to_rgba(version), edgecolor="white")
    axes.text((begin + end) / 2, actor, number, ha="center", va="center", fontsize=6, color="white")
axes.set(title="Rollouts by their rows", xlabel="seconds", yticks=range(ACTORS), ylabel="actor")
upper.colorbar(shade, ax=axes, label="version of the weights")
left, first, last = lower.subplots(1, 3, width_ratios=[1.6, 1, 1])
for actor in range(ACTORS):
    mine = notes["actor"] == actor
    left.plot(notes["end"][mine], reward[mine], "o-", linewidth=0.8, label=f"actor {actor}")
left.set(title="What they found", xlabel="seconds", ylabel="mean reward")
left.legend(frameon=False)
for axes, number in ((first, notes["end"].argmin()), (last, notes["end"].argmax())):
    way = buffer["steps", "position"][number]
    axes.plot(way[..., 0], way[..., 1], linewidth=0.8, color="tab:grey")
    axes.scatter(*way[-1].T, color="tab:red", s=14, zorder=3)
    axes.set(title=f"Row {number}, version {notes['version'][number]}")
    axes.set(aspect="equal", xlim=(-4, 4), ylim=(-4, 4))
plt.show()
