"""
Simulate cloth with a tensorclass, alone and in batches
=======================================================

The state of a simulation is more than one array: the positions of the nodes, their speeds, their
material, the connections between them. A tensorclass keeps these together, under names that an
editor completes, with the physics as methods. A method that is written for one mesh also serves a
batch of meshes, and a whole film of a batch of meshes.
"""

# %%
# Declare the class
# -----------------
#
# Springs connect the nodes. The tensors of a field begin with the batch dims of the mesh, so the
# code below counts dims from the end. The springs are the same for all meshes: an
# ``UnbatchedTensor`` passes through operations unchanged.

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from tensordict import TensorClass, UnbatchedTensor

GRAVITY, SIDE, DT = 9.8, 24, 0.001


class Cloth(TensorClass):
    position: Tensor  # [*batch, nodes, 3]
    velocity: Tensor  # [*batch, nodes, 3]
    stiffness: Tensor  # [*batch]
    springs: UnbatchedTensor  # [springs, 2]: the nodes at both ends
    lengths: UnbatchedTensor  # [springs]: at rest

    def along(self) -> tuple[Tensor, Tensor]:
        """Return the vector between the ends of each spring, and its length."""
        start, end = self.springs.unbind(-1)
        between = self.position[..., end, :] - self.position[..., start, :]
        return between, between.norm(dim=-1)

    def strain(self) -> Tensor:
        """By which part each spring is stretched."""
        return self.along()[1] / self.lengths - 1

    def force(self) -> Tensor:
        start, end = self.springs.unbind(-1)
        between, length = self.along()
        pull = self.stiffness[..., None, None] * (1 - self.lengths / length).unsqueeze(-1) * between
        return torch.zeros_like(self.position).index_add(-2, start, pull).index_add(-2, end, -pull)

    def energy(self) -> dict[str, Tensor]:
        """Of each mesh, in joules; the mass of a cloth is 1 kg."""
        mass = 1 / SIDE**2
        stretched = (self.strain() * self.lengths).square().sum(-1)
        return {
            "moving": 0.5 * mass * self.velocity.square().sum((-1, -2)),
            "height": mass * GRAVITY * self.position[..., 2].sum(-1),
            "stretched": 0.5 * self.stiffness * stretched,
        }

    def step(self) -> "Cloth":
        """The cloth a moment later, above a ball of radius 0.5 that it sticks to."""
        velocity = self.velocity + DT * self.force() * SIDE**2
        velocity[..., 2] -= DT * GRAVITY
        velocity *= 1 - 2 * DT
        position = self.position + DT * velocity
        distance = position.norm(dim=-1, keepdim=True)
        inside = distance < 0.5
        position = torch.where(inside, 0.5 * position / distance, position)
        return self.replace(position=position, velocity=torch.where(inside, 0, velocity))


# %%
# Simulate one mesh
# -----------------
#
# A square sheet lies above the ball. A single mesh has no batch dims.

row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
node = row * SIDE + column
flat = torch.stack([row, column, torch.zeros_like(row)], -1).flatten(0, 1) / (SIDE - 1)
position = 1.8 * (flat - torch.tensor([0.5, 0.5, 0.0])) + torch.tensor([0.06, 0.03, 0.55])
pairs = [(node[:-1], node[1:]), (node[:, :-1], node[:, 1:])]
pairs += [(node[:-1, :-1], node[1:, 1:]), (node[1:, :-1], node[:-1, 1:])]
springs = torch.cat([torch.stack([start.flatten(), end.flatten()], -1) for start, end in pairs])
sheet = Cloth(
    position=position,
    velocity=torch.zeros_like(position),
    stiffness=torch.tensor(1.0),
    springs=UnbatchedTensor(springs),
    lengths=UnbatchedTensor((position[springs[:, 0]] - position[springs[:, 1]]).norm(dim=-1)),
)
print(sheet)

# %%
# Simulate a batch of meshes
# --------------------------
#
# Three sheets of different material fall at once. ``expand`` makes a batch of one mesh, the
# materials are set for it, and ``step`` stays the same.

stiffness = {"rubber": 12.0, "jersey": 50.0, "linen": 300.0}
cloths = sheet.expand(3).replace(stiffness=torch.tensor(list(stiffness.values())))
film = []
for moment in range(1000):
    if moment % 10 == 0:
        film.append(cloths)
    cloths = cloths.step()

# %%
# Stack the states to a film
# --------------------------
#
# Stacked over time, the states are one object of batch size ``[3, 100]``. ``energy`` and
# ``strain``, written for one mesh, compute the values of all meshes at all times. One call saves
# the film, sends it, or cuts a scene out of it: ``film[2, 40:60]``.

film = torch.stack(film, dim=1)
film.names = ["material", "time"]
energy = film.energy()
print(type(film).__name__, film.batch_size, film.names, energy["moving"].shape)

# %%
# Show scenes of the film
# -----------------------
#
# Colours show how much the springs at each node are stretched. Rubber gives way and hangs around
# the ball; linen keeps its size and falls in folds. On the right are the energies of all three,
# each a curve of ``energy``.

strain = film.strain()
at_node = torch.zeros(film.position.shape[:-1])
at_node.index_add_(-1, springs.flatten(), strain.repeat_interleave(2, -1))
at_node /= springs.flatten().bincount()

figure = plt.figure(figsize=(13, 6), layout="constrained")
scenes, curves = figure.subfigures(1, 2, width_ratios=[2.2, 1])
scale = plt.cm.ScalarMappable(plt.Normalize(0, 20), "Spectral_r")
views = scenes.subplots(2, 3, subplot_kw={"projection": "3d", "computed_zorder": False})
for line, material in zip(views, (0, 2)):
    for axes, time in zip(line, (30, 45, 75)):
        surface = film[material, time].position.unflatten(0, (SIDE, SIDE)).movedim(-1, 0)
        colours = scale.to_rgba(100 * at_node[material, time].unflatten(0, (SIDE, SIDE)).numpy())
        axes.plot_surface(*surface.numpy(), facecolors=colours, rcount=SIDE, ccount=SIDE)
        axes.set_title(f"{list(stiffness)[material]}, {time / 100} s")
        axes.set(xlim=(-0.8, 0.8), ylim=(-0.8, 0.8), zlim=(-0.8, 0.6))
        axes.set_box_aspect((1, 1, 0.875), zoom=1.3)
        axes.set_axis_off()
scenes.colorbar(scale, ax=views, label="stretched by, %", shrink=0.6)
for axes, (name, joules) in zip(curves.subplots(3, 1, sharex=True), energy.items()):
    axes.plot(torch.arange(100) / 100, joules.T, label=list(stiffness))
    axes.set(ylabel="joules")
    axes.set_title(f"energy: {name}", fontsize=10)
axes.set(xlabel="seconds")
axes.legend(frameon=False)
plt.show()
