"""A first training run: a data set on disk, batches, a model, a checkpoint, and resuming from it.

python examples/training.py --root runs/training              # trains for 5 epochs
python examples/training.py --root runs/training --epochs 8   # continues where the last run stopped
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from tensordict import TensorClass, TensorDict, load_checkpoint, save_checkpoint
from tensordict.nn import TensorDictModule, TensorDictSequential


class Sample(TensorClass):
    """Points of two spirals, labelled with their spiral."""

    point: torch.Tensor  # [..., 2], float32
    label: torch.Tensor  # [...], int64


def spirals(count: int) -> Sample:
    """Return `count` points, half of them on each spiral."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(count) % 2
    along = 0.2 + 0.8 * torch.rand(count, generator=generator)
    angle = 2.5 * torch.pi * along + torch.pi * label
    point = torch.stack([angle.cos(), angle.sin()], dim=-1) * along.unsqueeze(-1)
    return Sample(point=point, label=label, batch_size=[count])


def model() -> TensorDictSequential:
    """Build a model that reads `point` and writes `features` and `logits`."""
    features = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return TensorDictSequential(
        TensorDictModule(features, in_keys=["point"], out_keys=["features"]),
        TensorDictModule(nn.Linear(64, 2), in_keys=["features"], out_keys=["logits"]),
    )


def train(root: Path, epochs: int) -> float:
    """Train up to this number of epochs, from the last checkpoint if one exists, and return the accuracy."""
    if not (root / "data").exists():
        spirals(4096).memmap(root / "data")
    data = Sample.load_memmap(root / "data")  # mapped: a batch reads its rows

    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    start = 0
    if (root / "checkpoint.tdz").exists():
        start = load_checkpoint(root / "checkpoint.tdz", net=net, optimizer=optimizer)["epoch"]

    history = TensorDict(batch_size=[max(epochs - start, 0)])
    for epoch in range(start, epochs):
        for batch in DataLoader(data, batch_size=128, shuffle=True):
            batch = net(batch.to_tensordict())
            loss = nn.functional.cross_entropy(batch["logits"], batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history[epoch - start] = TensorDict(epoch=epoch, accuracy=accuracy(net, data))
        save_checkpoint(root / "checkpoint.tdz", net=net, optimizer=optimizer, epoch=epoch + 1, overwrite=True)
        print(f"epoch {epoch}: accuracy {history[epoch - start]['accuracy']:.3f}")

    if epochs > start:
        history.memmap(root / f"history-{start}")
    return accuracy(net, data)


@torch.no_grad()
def accuracy(net: TensorDictSequential, data: Sample) -> float:
    """Return the share of points with a correct prediction."""
    result = net(data.to_tensordict())
    return float((result["logits"].argmax(-1) == result["label"]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/training"), help="where data and checkpoints lie")
    parser.add_argument("--epochs", type=int, default=5, help="how many there are in all")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    print(f"accuracy: {train(options.root, options.epochs):.3f}")


if __name__ == "__main__":
    main()
