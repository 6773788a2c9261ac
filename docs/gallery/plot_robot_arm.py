"""
Store robot trajectories of different lengths
=============================================

A robot tries to reach things, and the attempts take different times. Padding all of them to the
longest would store numbers that nobody measured. Here the attempts keep their lengths: in memory
as a lazy stack, and in a Zarr group, from which one attempt, or one quantity of all attempts, is
read without the rest.
"""

# %%
# Make the arm
# ------------
#
# The arm has three links in a plane, and a motor at each joint. ``spots`` returns the places of
# shoulder, elbow, wrist and hand, for angles of any batch size.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import pad

from tensordict import TensorDict, from_zarr, lazy_stack

torch.manual_seed(0)
LINKS = torch.tensor([0.9, 0.7, 0.4])
TARGETS = {
    "cup": torch.tensor([1.2, 0.9]),
    "door": torch.tensor([-0.9, 1.3]),
    "lamp": torch.tensor([0.4, 1.85]),
}
TICK = 0.05


def spots(angle):
    heading = angle.cumsum(-1)
    links = LINKS.unsqueeze(-1) * torch.stack([heading.cos(), heading.sin()], -1)
    return pad(links.cumsum(-2), (0, 0, 1, 0))


# %%
# Record one attempt
# ------------------
#
# Each tick is a container without batch dims. Stacked, the ticks are an attempt, whose batch dim
# is time. The motors pull the hand to the target, with noise. The attempt ends when the hand
# reaches the target, or after six seconds.


def attempt(target):
    angle, speed = torch.tensor([1.6, 1.2, 0.9]) + 0.25 * torch.randn(3), torch.zeros(3)
    ticks = []
    for _ in range(int(6 / TICK)):
        joint = spots(angle)
        hand = joint[-1]
        lever = hand - joint[:-1]
        turn = torch.stack([-lever[:, 1], lever[:, 0]])  # how the hand moves when a joint turns
        torque = 5 * (target - hand) @ turn - 2 * speed + 0.8 * torch.randn(3)
        ticks.append(
            TensorDict({"joints": {"angle": angle, "speed": speed, "torque": torque}, "hand": hand})
        )
        if (target - hand).norm() < 0.03 and speed.norm() < 1:
            break
        speed = speed + TICK * torque
        angle = angle + TICK * speed
    return torch.stack(ticks)


# %%
# Stack many attempts
# -------------------
#
# A lazy stack keeps its members. Its dims have names; the size of the second one is -1, because
# it differs between members.

tasks = [task for task in TARGETS for _ in range(16)]
attempts = lazy_stack([attempt(TARGETS[task]) for task in tasks])
attempts.names = ["attempt", "time"]
print(attempts.batch_size, attempts.names)
print("ticks of the first attempts:", [len(member) for member in attempts[:6]])

# %%
# Save them to Zarr
# -----------------
#
# ``densify`` makes one ragged tensor of each entry: the ticks of all attempts one after the
# other, and the start of each attempt. Zarr can store this, and other programs can read it. A
# value with one entry for each attempt, such as its task, is an entry like any other.

dense = attempts.densify(layout=torch.jagged)
dense["task"] = tasks
dense["reached"] = torch.tensor([len(member) < 6 / TICK for member in attempts])
scratch = tempfile.TemporaryDirectory()
dense.to_zarr(Path(scratch.name) / "attempts.zarr", chunks="rows").close()

store = from_zarr(Path(scratch.name) / "attempts.zarr")
print({key: tuple(leaf.shape) for key, leaf in store.items(True, True)})

# %%
# Read one attempt or one quantity
# --------------------------------
#
# An index reads the ticks of one attempt; a key reads one quantity of all attempts. Pad ragged
# data here, where it is useful: with NaN, so that the mean covers the attempts that still
# continue.

one = store[3]
print(one["task"], one["hand"].shape, one["joints", "angle"].shape)
hands = store["hand"].to_padded_tensor(torch.nan)
goals = torch.stack([TARGETS[task] for task in store["task"]])
distance = (hands - goals.unsqueeze(1)).norm(dim=-1)
reached = store["reached"]

# %%
# Draw the picture
# ----------------
#
# On the left one attempt, every fourth tick from dark to bright; in the middle the paths of all
# hands; on the right their distances from the targets. The lamp is almost out of reach, and the
# arm often hunts for it until the time is over.

figure = plt.figure(figsize=(13, 4.2), layout="constrained")
left, middle, right = figure.subplots(1, 3, width_ratios=[1.3, 1.4, 1])
poses = spots(one["joints", "angle"])[::4]
for pose, colour in zip(poses, plt.colormaps["viridis"](torch.linspace(0, 1, len(poses)).numpy())):
    left.plot(pose[:, 0], pose[:, 1], "o-", color=colour, linewidth=1.8, markersize=4)
left.plot(*one["hand"].T, color="tab:red", linewidth=1.5)
left.set(title=f"One attempt: {one['task']}, {len(one['hand']) * TICK:.1f} s", aspect="equal")
seconds = torch.arange(distance.shape[1]) * TICK
for number, (task, target) in enumerate(TARGETS.items()):
    mine = torch.tensor([name == task for name in store["task"]])
    middle.plot(*hands[mine].permute(2, 1, 0), color=f"C{number}", linewidth=0.6, alpha=0.8)
    middle.plot(*target, "k*", markersize=11, zorder=3)
    middle.annotate(task, target, xytext=(7, 7), textcoords="offset points")
    right.semilogy(seconds, distance[mine].T, color=f"C{number}", linewidth=0.4, alpha=0.5)
    label = f"{task}: {reached[mine].sum()} of {mine.sum()} reached"
    right.plot(seconds, distance[mine].nanmean(0), color=f"C{number}", linewidth=2.5, label=label)
middle.set(title=f"{len(store)} attempts", aspect="equal", ylim=(-0.1, 2.1))
right.set(title="Way to go", xlabel="seconds", ylabel="distance of the hand")
right.legend(frameon=False)
plt.show()
store.close()
scratch.cleanup()
