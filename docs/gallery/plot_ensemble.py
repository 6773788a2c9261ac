"""
An ensemble in one call, and what it does not know
==================================================

A network gives an answer everywhere, also where it has seen no data. Several networks, each begun
elsewhere, agree where there was data and differ where there was none: their spread says how far
to trust them. Nobody wants to train them one after the other. With their parameters in one
container, they are one network with one more dim.
"""

# %%
# Measurements with a gap
# -----------------------

import matplotlib.pyplot as plt
import torch
from torch import nn

from tensordict import TensorDict, TensorDictParams, from_modules

torch.manual_seed(0)
MEMBERS = 32


def truth(x):
    return torch.sin(3 * x) + 0.3 * x


x = torch.cat([torch.rand(48) * 1.6 - 2.2, torch.rand(48) * 1.4 + 0.7])
data = TensorDict({"x": x, "y": truth(x) + 0.12 * torch.randn(len(x))}, [len(x)]).unsqueeze(-1)

# %%
# 32 networks are one container
# -----------------------------
#
# ``from_modules`` stacks the parameters of networks that are built alike: the names are those of
# one network, and each entry has one more dim in front. As ``TensorDictParams`` the container is
# an ``nn.Module``, which any optimizer trains.


def network():
    hidden = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(32, 1))


ensemble = TensorDictParams(from_modules(*(network() for _ in range(MEMBERS))))
print({".".join(key): tuple(leaf.shape) for key, leaf in ensemble.items(True, True)})

# %%
# One loss for one network
# ------------------------
#
# The loss is written for one network, as if there were no others: for the length of the block,
# the parameters stand in for those of a template. ``torch.vmap`` runs it for all members at once.
# The container goes through ``vmap`` as a tensor does.

template = network()


def loss(params, batch):
    with params.to_module(template):
        return (template(batch["x"]) - batch["y"]).square().mean()


losses_of_all = torch.vmap(loss)

# %%
# Training
# --------
#
# Each member has rows of its own to learn from, drawn at random with repetition. That is an index
# of shape ``[32, 64]`` into the data, and what comes out is a container of that batch size: ``x``
# and ``y`` cannot get out of step.

rows = data[torch.randint(len(data), (MEMBERS, 64))]
print(rows.batch_size)
optimizer = torch.optim.Adam(ensemble.parameters(), lr=6e-3)
curves = []
for _ in range(400):
    losses = losses_of_all(ensemble, rows)
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
    curves.append(losses.detach())
curves = torch.stack(curves)

# %%
# A member is an element of the batch
# -----------------------------------
#
# ``ensemble[3]`` has the parameters of one network under the names that it knows, so a network
# that knows nothing of ensembles takes them. It is all that has to be handed on if one member is
# to be used alone.

alone = network()
ensemble.data[3].to_module(alone)
with torch.no_grad():
    error = (alone(rows[3]["x"]) - rows[3]["y"]).square().mean()
print(f"member 3 alone: loss {error:.4f}; in the ensemble: {losses_of_all(ensemble, rows)[3]:.4f}")

# %%
# What it does not know
# ---------------------

grid = torch.linspace(-3.2, 3.2, 241).unsqueeze(-1)


def answer(params):
    with params.to_module(template):
        return template(grid).squeeze(-1)


with torch.no_grad():
    answers = torch.vmap(answer)(ensemble)
mean, spread = answers.mean(0), answers.std(0)

figure = plt.figure(figsize=(12, 4.4), layout="constrained")
left, right = figure.subplots(1, 2, width_ratios=[2, 1])
across = grid.squeeze(-1)
for wide in (3, 2, 1):
    band = mean - wide * spread, mean + wide * spread
    left.fill_between(across, *band, color="tab:blue", alpha=0.15, linewidth=0)
left.plot(across, answers.T, color="tab:blue", linewidth=0.4, alpha=0.6)
left.plot(across, mean, color="navy", linewidth=2, label="mean, and 1, 2, 3 standard deviations")
left.plot(across, truth(across), color="black", linestyle="dashed", linewidth=1, label="truth")
left.plot(data["x"], data["y"], "o", color="tab:orange", markersize=4, label="measurements")
left.set(title="Sure where it has seen data", xlabel="x", ylabel="y")
left.set(xlim=(-3.2, 3.2), ylim=(-3.5, 3.5))
left.legend(loc="upper left", frameon=False)
right.semilogy(curves, linewidth=0.8, color="tab:blue", alpha=0.5)
right.set(title=f"{MEMBERS} networks learn at once", xlabel="step", ylabel="loss")
plt.show()
