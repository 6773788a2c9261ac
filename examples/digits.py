"""Train a classifier of handwritten digits on a memory-mapped TensorDict, then save and reload it.

Run it with `make demo`, or `python examples/digits.py --root DIR` to keep what it writes.
It goes in three steps:

1. *write*: preallocate the data set on disk and fill it chunk by chunk, so it never has to fit in memory;
2. *train*: in a new process, map the files, train on shuffled mini-batches and save a checkpoint;
3. *check*: back in the first process, load the checkpoint and make the same predictions again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from tensordict import TensorDict
from tensordict.utils import print_directory_tree

SEED = 0
EPOCHS = 12
BATCH = 32
CHUNK = 100
HELD_OUT = 360


def write(data_dir: Path) -> None:
    """Preallocate the data set under `data_dir` and fill it in chunks."""
    size = len(load_digits().target)
    first = next(read_chunks())
    # One item, expanded to the size of the data set, is a view that costs nothing. memmap_like takes the names and
    # sizes of the files from it. Nothing is written yet.
    store = first[0].expand(size).memmap_like(data_dir)
    written = 0
    with tqdm(total=size, desc="writing", unit="image") as progress:
        for chunk in read_chunks():
            # Assigning to a slice of the container writes every entry to its own file.
            store[written : written + len(chunk)] = chunk
            written += len(chunk)
            progress.update(len(chunk))
    print(f"wrote {written} images to {data_dir}")


def read_chunks() -> Iterator[TensorDict]:
    """Yield the digits in chunks, as a source too large for memory would."""
    digits = load_digits()
    for start in range(0, len(digits.target), CHUNK):
        # Each image is 8 x 8 pixels of value 0 to 16.
        images = torch.as_tensor(digits.images[start : start + CHUNK], dtype=torch.uint8)
        labels = torch.as_tensor(digits.target[start : start + CHUNK])
        yield TensorDict(image=images, label=labels, batch_size=[len(labels)])


def train(data_dir: Path, checkpoint_dir: Path) -> None:
    """Train on the data set in `data_dir` and save weights, optimizer state and predictions."""
    torch.manual_seed(SEED)
    data = TensorDict.load_memmap(data_dir)  # maps the files; an index reads its rows
    train_indices, test_indices = split(len(data))
    model, optimizer = build()

    bytes_read, started = 0, time.perf_counter()
    for epoch in range(EPOCHS):
        shuffled = train_indices[torch.randperm(len(train_indices))]
        total_loss = 0.0
        for indices in shuffled.split(BATCH):
            batch = data[indices]  # an ordinary TensorDict in memory, of batch size [len(indices)]
            bytes_read += sum(leaf.nbytes for leaf in batch.values(include_nested=True, leaves_only=True))
            total_loss += training_step(model, optimizer, batch) * len(batch)
        print(f"epoch {epoch + 1:2d}: mean loss {total_loss / len(shuffled):.4f}")
    seconds = time.perf_counter() - started

    test = data[test_indices]
    logits = predict(model, test)
    accuracy = (logits.argmax(-1) == test["label"]).float().mean().item()
    print(f"accuracy on {len(test)} held-out images: {accuracy:.4f}")
    print(f"bytes read while training: {bytes_read:,}")
    print(f"time per epoch: {seconds / EPOCHS:.3f} s")

    checkpoint = TensorDict(
        # unflatten_keys turns the key "1.weight" into ("1", "weight"), so that each layer gets a folder.
        weights=TensorDict(model.state_dict()).unflatten_keys("."),
        optimizer=TensorDict({str(i): state for i, state in optimizer.state_dict()["state"].items()}),
        logits=logits,
    )
    checkpoint.memmap(checkpoint_dir, num_threads=2)


def split(size: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the training and of the held-out images, the same ones in every process."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(SEED))
    return order[HELD_OUT:], order[:HELD_OUT]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and its optimizer."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: TensorDict) -> float:
    """Take one optimizer step on `batch` and return its mean loss."""
    loss = nn.functional.cross_entropy(model(pixels(batch)), batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def predict(model: nn.Module, batch: TensorDict) -> Tensor:
    """Return the logits of `batch`, of shape [len(batch), 10]."""
    return model(pixels(batch))


def pixels(batch: TensorDict) -> Tensor:
    """Return the images in the form of the model: float32 in [0, 1], of shape [len(batch), 8, 8]."""
    return batch["image"].float() / 16


def check(data_dir: Path, checkpoint_dir: Path) -> bool:
    """Reload the checkpoint, predict again, train one more step, and check that everything equals the save."""
    data = TensorDict.load_memmap(data_dir)
    train_indices, test_indices = split(len(data))
    checkpoint = TensorDict.load_memmap(checkpoint_dir)
    model, optimizer = restore(checkpoint)
    identical = torch.equal(predict(model, data[test_indices]), checkpoint["logits"])
    print(f"predictions after reloading identical: {identical}")

    # The optimizer is restored too: two copies that continue from the checkpoint stay equal bit by bit, and
    # the checkpoint on disk does not change.
    other_model, other_optimizer = restore(checkpoint)
    batch = data[train_indices[:BATCH]]
    training_step(model, optimizer, batch)
    training_step(other_model, other_optimizer, batch)
    further = TensorDict(model.state_dict()).unflatten_keys(".")
    resumed = bool((further == TensorDict(other_model.state_dict()).unflatten_keys(".")).all())
    moved = bool((further != checkpoint["weights"]).any())
    print(f"training resumes from the reloaded state: {resumed and moved}")
    return identical and resumed and moved


def restore(checkpoint: TensorDict) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer in the saved state."""
    model, optimizer = build()
    model.load_state_dict(checkpoint["weights"].flatten_keys(".").to_dict())
    # Module.load_state_dict copies; Optimizer.load_state_dict keeps its argument's tensors and updates them
    # in place. Without clone() the next step would write into the files of the checkpoint.
    state = {int(i): entry.clone().to_dict() for i, entry in checkpoint["optimizer"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return model, optimizer


def run(root: Path) -> int:
    """Run the three steps under `root`; return the exit status."""
    data_dir, checkpoint_dir = root / "data", root / "checkpoint"
    write(data_dir)
    # Flushed, so that the lines of the two processes keep their order.
    print("training in a new process", flush=True)
    subprocess.run([sys.executable, __file__, "--root", str(root), "--train"], check=True)
    succeeded = check(data_dir, checkpoint_dir)
    print("what was saved:")
    print_directory_tree(root)
    return 0 if succeeded else 1


def main() -> int:
    """Read the command line and run the chosen step."""
    parser = argparse.ArgumentParser(description="Train on a memory-mapped TensorDict of handwritten digits.")
    parser.add_argument("--root", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--train", action="store_true", help="only train on the data set that --root holds")
    args = parser.parse_args()
    if args.train:
        if args.root is None:
            parser.error("--train needs --root, the directory that an earlier run has written to")
        train(args.root / "data", args.root / "checkpoint")
        return 0
    if args.root is not None:
        return run(args.root)
    with tempfile.TemporaryDirectory() as root:
        return run(Path(root))


if __name__ == "__main__":
    sys.exit(main())
