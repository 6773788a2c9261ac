"""
Train a pendulum from a replay buffer on disk
=============================================

An agent that learns from its past needs a place to keep it. Here that place is a ``TensorDict``
whose tensors are files: the buffer may be larger than memory, another process can look into it
while it fills, and the code that fills it works for any entries. The task is the classic one of
reinforcement learning: a motor that is too weak to lift a pendulum has to swing it up.
"""

# %%
# Write the task
# --------------
#
# The world takes a container and returns a container. 32 pendulums swing side by side, so the
# batch size is ``[32]``. A step reads ``observation`` and ``action`` and writes the results under
# ``next``, so a transition with all of its parts is *one* object.

import tempfile
from copy import deepcopy
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from tensordict import TensorDict, load_memmap
from tensordict.nn import TensorDictModule

torch.manual_seed(0)
WORLDS, STEPS = 32, 80
TORQUES = torch.tensor([-2.0, 0.0, 2.0])


def pendulums(angle, speed):
    angle = torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi  # 0 is upright
    observation = torch.stack([angle.cos(), angle.sin(), speed / 4], -1)
    return TensorDict({"angle": angle, "speed": speed, "observation": observation}, angle.shape)


def reset():
    return pendulums(torch.pi + torch.randn(WORLDS) / 2, torch.randn(WORLDS))  # about hanging


def step(state, action):
    torque = TORQUES[action]
    speed = (state["speed"] + 0.96 * state["angle"].sin() + 0.24 * torque).clamp(-8, 8)
    after = pendulums(state["angle"] + 0.08 * speed, speed)
    reward = 1 - (after["angle"] ** 2 + 0.1 * speed**2) / 10
    return state.copy().update({"action": action, "reward": reward, "next": after})


# %%
# Make the buffer
# ---------------
#
# One transition describes all others. ``expand`` makes a view with the number of rows of the
# buffer, at no cost, and ``memmap_like`` makes the files for them. Nothing below names an entry:
# a buffer of images and sentences would need the same few lines. Assigning to rows writes to
# every file, and indexing reads only the rows of the index.


class ReplayBuffer:
    def __init__(self, example, capacity, folder):
        self.rows = example.expand(capacity).memmap_like(folder)
        self.written = 0

    def __len__(self):
        return min(self.written, len(self.rows))

    def extend(self, transitions):
        places = self.written + torch.arange(len(transitions))
        self.rows[places % len(self.rows)] = transitions  # replaces the oldest rows
        self.written += len(transitions)

    def sample(self, size):
        return self.rows[torch.randint(len(self), (size,))]


folder = tempfile.TemporaryDirectory()
example = step(reset(), action=torch.zeros(WORLDS, dtype=torch.long))[0]
buffer = ReplayBuffer(example, 50_000, Path(folder.name) / "buffer")
print(buffer.rows)

# %%
# Learn
# -----
#
# The agent is a network that reads ``observation`` and writes ``values``, one for each torque.
# Q-learning trains it: the value of an action should be the reward plus the value of the best
# next action. ``batch["next"]`` has the same keys as ``batch``, so the same network reads both,
# without any extra code.

body = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
agent = TensorDictModule(body, in_keys=["observation"], out_keys=["values"])
target = deepcopy(agent).requires_grad_(False)
weights, slow_weights = TensorDict.from_module(agent).data, TensorDict.from_module(target).data
optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)


def learn():
    batch = buffer.sample(128)
    done = agent(batch)["values"].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        goal = batch["reward"] + 0.97 * target(batch["next"])["values"].amax(-1)
    optimizer.zero_grad()
    nn.functional.smooth_l1_loss(done, goal).backward()
    optimizer.step()
    slow_weights.lerp_(weights, 0.02)  # all weights of the target follow in one call


@torch.no_grad()
def act(state, chance):
    best = agent(state.copy())["values"].argmax(-1)
    return torch.where(torch.rand(len(best)) < chance, torch.randint(3, best.shape), best)


curve = []
for episode in range(12):
    state, rewards = reset(), []
    for _ in range(STEPS):
        transition = step(state, act(state, chance=max(0.05, 1 - episode / 5)))
        buffer.extend(transition)
        rewards.append(transition["reward"])
        state = transition["next"]
        learn()
    curve.append(torch.stack(rewards).mean(0))
curve = torch.stack(curve)
print(f"mean reward: first {curve[0].mean():.2f}, last {curve[-1].mean():.2f}")

# %%
# Look into the buffer
# --------------------
#
# The buffer consists of files, so any program that knows the path can look at it: a notebook, a
# dashboard, the job that continues tomorrow. Opening it reads no rows; this code reads every
# eighth row, of all entries at once. Early on (dark) the pendulum hangs and spins; later (bright)
# it stands.

history = load_memmap(Path(folder.name) / "buffer")
seen = history[: len(buffer) : 8]

swing = []
state = pendulums(torch.tensor([torch.pi]), torch.zeros(1))  # it hangs, and does not move
for _ in range(STEPS):
    swing.append(step(state, act(state, chance=0.0)))
    state = swing[-1]["next"]
swing = torch.cat(swing)  # many containers of one step become one of many

angles, speeds = torch.linspace(-torch.pi, torch.pi, 121), torch.linspace(-8, 8, 121)
with torch.no_grad():  # a map of states is a batch of two dims
    value = agent(pendulums(*torch.meshgrid(angles, speeds, indexing="xy")))["values"].amax(-1)

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
episodes = range(1, len(curve) + 1)
left.fill_between(episodes, *curve.quantile(torch.tensor([0.1, 0.9]), dim=1), alpha=0.25)
left.plot(episodes, curve.mean(1), linewidth=2)
left.set(title="Training", xlabel="episode", xticks=episodes[1::2], ylabel="reward (1 is best)")
dots = middle.scatter(seen["angle"], seen["speed"], c=range(0, len(buffer), 8), s=3, linewidths=0)
figure.colorbar(dots, ax=middle, label="row of the buffer")
middle.set(title="Every eighth row of the buffer", xlabel="angle (0 is upright)", ylabel="speed")
shade = right.pcolormesh(angles.numpy(), speeds.numpy(), value.numpy(), cmap="magma")
figure.colorbar(shade, ax=right, label="value")
right.scatter(swing["angle"], swing["speed"], s=14, color="white", edgecolors="black")
right.set(title="Value of each state, and one swing", xlabel="angle", ylabel="speed")
plt.show()
folder.cleanup()
