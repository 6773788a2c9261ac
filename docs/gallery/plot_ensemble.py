"""
Ensembles and uncertainty with vmap
===================================

A network gives an answer everywhere, even where it has seen no data. Several networks with
different initial weights agree where there was data and differ elsewhere, so their spread shows
how far to trust them. Training them one after the other is slow. With their parameters in one
container, they are one network with one more dim.
"""

# %%
# Make measurements with a gap
# ----------------------------

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
# Put 32 networks into one container
# ----------------------------------
#
# ``from_modules`` stacks the parameters of networks of equal structure: the names are the names
# of one network, and each entry has one more dim in front. As ``TensorDictParams`` the container
# is an ``nn.Module``, which any optimizer trains.


def network():
    hidden = [nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(32, 1))


ensemble = TensorDictParams(from_modules(*(network() for _ in range(MEMBERS))))
print({".".join(key): tuple(leaf.shape) for key, leaf in ensemble.items(True, True)})

# %%
# Write the loss for one network
# ------------------------------
#
# The loss is written for a single network: inside the block, the parameters replace the
# parameters of a template. ``torch.vmap`` runs it for all members at once. A container goes
# through ``vmap`` like a tensor.

template = network()


def loss(params, batch):
    with params.to_module(template):
        return (template(batch["x"]) - batch["y"]).square().mean()


losses_of_all = torch.vmap(loss)

# %%
# Train all at once
# -----------------
#
# Each member learns from its own rows, drawn at random with repetition. That is an index of shape
# ``[32, 64]`` into the data, and the result is a container of that batch size, so ``x`` and ``y``
# stay together.

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
# Use one member
# --------------
#
# ``ensemble[3]`` has the parameters of one network under its usual names, so an ordinary network
# loads them. Pass on this element to use one member alone.

alone = network()
ensemble.data[3].to_module(alone)
with torch.no_grad():
    error = (alone(rows[3]["x"]) - rows[3]["y"]).square().mean()
print(f"member 3 alone: loss {error:.4f}; in the ensemble: {losses_of_all(ensemble, rows)[3]:.4f}")

# %%
# See where the ensemble is uncertain
# -----------------------------------

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
