"""Measures where the time of a step goes in whole programs, on this package and on the reference.

    make bench-programs                                           # installs TorchRL, verl, rsl_rl and py-spy
    .venv/bin/python benchmarks/programs.py --only rsl_rl --seconds 20

Each program runs in a process of its own for each package (`turns.py`). Medians of turns tell how much faster it is
here. Then `py-spy --native` samples both processes. Each sample counts for torch, for the package or for the program:

- torch: the innermost frames are native code of torch, or Python code of torch.
- package: the innermost Python frame is in `tensordict`, and it has not called torch.
- program: everything else, client libraries included.

If the package took no time at all, a program would be `1 / (1 - share)` times as fast as on the reference: the bound.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clients import MINIBATCH, ppo_update, sac_update, steps
from turns import Call, Worker, compare, environments, work, workers

RATE = 100
SIDES = ("ours", "reference")
_PYTHON_FRAME = re.compile(r"^(?P<name>.*) \((?P<file>[^()]*\.py|<[^()]*>):\d+\)$")
# Inductor names the files that it writes by a hash.
_COMPILED = re.compile(r"\bc[a-z2-7]{50,}(\.main)?\.(py|cpp)")
# The function that each program returns; other frames are the harness, or threads that wait.
_PROGRAM = re.compile(r"\bcall \((programs|clients)\.py:\d+\)$")
_TORCH_LIBRARIES = re.compile(
    r"\((lib(torch|c10|gomp|mkl|shm|caffe2)[^()]*|_C[^()]*\.so)\)$|^(at|c10|torch|mkldnn|dnnl)::"
)


def main() -> None:
    """Measure the programs in turns, sample them, and print where their time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns for the ratio of both packages")
    parser.add_argument("--seconds", type=float, default=15, help="how long each process is sampled")
    parser.add_argument("--only", default="", help="programs whose name contains this text")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _free_large_block()
        work(lambda name: PROGRAMS[name]())
        return
    if not _find_sampler().exists():
        raise SystemExit(f"no sampler at {_find_sampler()}: `make bench-programs` installs it")
    rows = {name: measure(name, options) for name in PROGRAMS if options.only in name}
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one program, and print them."""
    with workers(__file__, "-clients") as sides:
        row: dict[str, Any] = dict(compare(name, sides, options.rounds))
        samples = {side: list(_sample(sides[side], options.seconds)) for side in SIDES}
    for side in SIDES:
        row[f"shares, {side}"] = _count_shares(samples[side])
        row[f"calls, {side}"] = _rank_calls(samples[side])
    row["bound"] = 1 / (1 - row["shares, reference"]["package"])
    print(f"\n{name}: {row['ratio']:.2f} times as fast as on the reference; bound {row['bound']:.2f}")
    for side in SIDES:
        shares = ", ".join(f"{owner} {share:.1%}" for owner, share in row[f"shares, {side}"].items())
        print(f"  {side}: {row[side] * 1e3:.2f} ms a step: {shares} ({len(samples[side])} samples)")
    for call, share in row["calls, ours"].items():
        print(f"    {share:6.2%} {call}")
    return row


def _free_large_block() -> None:
    """Free a block of 30 MiB, as any process with a model has done before long.

    glibc returns free memory to the system above twice the largest block that was freed (at most 32 MiB). Without this,
    the page faults of a step depend on the order of frees, and take a third of the time of a step of verl.
    """
    import torch

    torch.zeros(30 << 20, dtype=torch.uint8)


def _find_sampler() -> Path:
    return environments("-clients")["ours"].with_name("py-spy")


def _sample(worker: Worker, seconds: float) -> Iterator[list[str]]:
    """Sample a worker while it takes turns. Yields the frames of each sample, the innermost last."""
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as file:
        command = [_find_sampler(), "record", "--native", "--format", "raw", "--output", file.name]
        limits = ["--rate", str(RATE), "--duration", str(round(seconds)), "--pid", str(worker.process.pid)]
        sampler = subprocess.Popen([*command, *limits], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while sampler.poll() is None:
            worker.ask("turn")
        if sampler.returncode:
            raise SystemExit(f"py-spy failed: {sampler.stderr.read() if sampler.stderr else ''}")
        for line in file:
            stack, _, count = line.rstrip().rpartition(" ")
            frames = stack.split(";")
            if any(_PROGRAM.search(frame) for frame in frames):
                yield from [frames] * int(count)


def _parse_python(frame: str) -> tuple[str, str] | None:
    """Return the file and the function of a Python frame; `None` for native code."""
    found = _PYTHON_FRAME.match(frame)
    return found and (found["file"], found["name"])


def _find_owner(frames: list[str]) -> str:
    """Return which of the three a sample counts for."""
    for frame in reversed(frames):
        python = _parse_python(frame)
        if python is None:
            if _TORCH_LIBRARIES.search(frame) or _COMPILED.search(frame):
                return "torch"
            continue
        file = python[0]
        if _is_package(file):
            return "package"
        if "/" not in file and file not in ("programs.py", "clients.py"):
            continue  # Python's own library works for its caller
        return "torch" if file.startswith("torch/") or _COMPILED.search(file) else "program"
    return "program"


def _is_package(file: str) -> bool:
    return file.startswith("tensordict/") or "/tensordict/" in file


def _count_shares(samples: list[list[str]]) -> dict[str, float]:
    counts = Counter(map(_find_owner, samples))
    return {owner: counts[owner] / len(samples) for owner in ("torch", "package", "program")}


def _rank_calls(samples: list[list[str]]) -> dict[str, float]:
    """Return the ten calls into the package that take most time in its own code, with their shares of the step."""
    counts: Counter[str] = Counter()
    for frames in samples:
        if _find_owner(frames) != "package":
            continue
        entry = ""
        for python in filter(None, map(_parse_python, reversed(frames))):
            if _is_package(python[0]):
                entry = f"{python[1]} ({python[0]})"
            elif entry:
                break
        counts[entry] += 1
    return {call: count / len(samples) for call, count in counts.most_common(10)}


def dqn_update() -> Call:
    """An update of DQN: a sample of 256 steps, the loss, gradients, a step of Adam and of the target network."""
    import torch
    from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    network = MLP(in_features=17, out_features=6, num_cells=[64, 64])
    actor = QValueActor(network, in_keys=["observation"], spec=OneHot(6))
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True)
    loss.make_value_estimator(gamma=0.99)
    targets = SoftUpdate(loss, eps=0.995)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-4)
    data = steps()
    data["action"] = torch.nn.functional.one_hot(torch.randint(0, 6, data.shape), 6)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(data)), batch_size=256)
    buffer.extend(data)

    def call() -> float:
        total = loss(buffer.sample())["loss"]
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        targets.step()
        return total.item()  # type: ignore[no-any-return]

    return call


def verl_step() -> Call:
    """What a step of verl does to a batch of 256 x 512 tokens: repeat, split, pickle, join, reorder, mini-batches."""
    import pickle

    import numpy as np
    import torch
    from verl import DataProto

    tokens = {name: torch.randint(0, 32_000, (64, 512)) for name in ("prompts", "input_ids", "attention_mask")}
    names = {"uid": np.array([f"prompt {i}" for i in range(64)], dtype=object)}
    prompts = DataProto.from_dict(tensors=tokens, non_tensors=names, meta_info={"temperature": 1.0})

    def call() -> float:
        batch = prompts.repeat(4, interleave=True)
        parts = []
        for part in batch.chunk(4):
            there = pickle.loads(pickle.dumps(part)).to("cpu")
            scores = DataProto.from_dict(tensors={"scores": there.batch["input_ids"].float()})
            parts.append(part.union(pickle.loads(pickle.dumps(scores))))
        joined = DataProto.concat(parts)
        joined.reorder(torch.arange(len(joined)).flip(0))
        total = 0.0
        for mini in joined.make_iterator(64, epochs=1, seed=0, dataloader_kwargs={"shuffle": False}):
            total += mini.select(batch_keys=["scores"]).batch["scores"].mean().item()
        return total

    return call


def rsl_rl_step() -> Call:
    """An iteration of rsl_rl's PPO: 24 steps of 64 environments, returns, and 5 x 4 updates."""
    import torch
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import MLPModel
    from rsl_rl.storage import RolloutStorage

    from tensordict import TensorDict

    environments, moves = 64, 24

    def observe() -> Any:
        return TensorDict({"policy": torch.randn(environments, 48)}, [environments])

    groups = {"actor": ["policy"], "critic": ["policy"]}
    gaussian = {"class_name": "rsl_rl.modules.GaussianDistribution", "init_std": 1.0}
    layers = {"hidden_dims": [64, 64], "activation": "elu"}
    actor = MLPModel(observe(), groups, "actor", 12, distribution_cfg=gaussian, **layers)
    critic = MLPModel(observe(), groups, "critic", 1, **layers)
    algorithm = PPO(actor, critic, RolloutStorage("rl", environments, moves, observe(), [12], "cpu"))
    observations = [observe() for _ in range(moves)]
    rewards, dones = torch.randn(moves, environments), torch.rand(moves, environments) < 0.02

    def call() -> float:
        with torch.inference_mode():
            for step in range(moves):
                algorithm.act(observations[step])
                algorithm.process_env_step(observations[step], rewards[step], dones[step], {})
            algorithm.compute_returns(observations[-1])
        return algorithm.update()["value"]  # type: ignore[no-any-return]

    return call


def training_loop() -> Call:
    """An epoch of training on a saved data set of 4,096 images, which torch's `DataLoader` shuffles and reads."""
    import tempfile

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    # The folder goes with the process.
    folder = tempfile.TemporaryDirectory(prefix="tensordict-programs-")
    pixels = torch.randint(0, 256, (4096, 28, 28), dtype=torch.uint8)
    TensorDict({"image": pixels, "label": torch.randint(0, 10, (4096,))}, [4096]).memmap(Path(folder.name) / "saved")
    loader = DataLoader(
        TensorDict.load_memmap(Path(folder.name) / "saved"),  # type: ignore[arg-type]
        batch_size=64,
        shuffle=True,
        collate_fn=lambda rows: rows,
    )
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    model = TensorDictSequential(
        TensorDictModule(lambda image: image.float() / 255, ["image"], ["input"]),
        TensorDictModule(network, ["input"], ["logits"]),
    )
    optimizer = torch.optim.Adam(model.parameters())

    def call() -> float:
        assert folder
        for rows in loader:
            rows = model(rows.to_tensordict())
            loss = nn.functional.cross_entropy(rows["logits"], rows["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return 0.0  # the order of the rows is drawn

    return call


def compiled_step() -> Call:
    """A compiled update of a policy: modules that read and write a container, a loss, gradients and a step of SGD."""
    import torch
    from torch import nn

    from tensordict.nn import TensorDictModule, TensorDictSequential

    model = TensorDictSequential(
        TensorDictModule(nn.Linear(17, 64), ["observation"], ["hidden"]),
        TensorDictModule(nn.Tanh(), ["hidden"], ["hidden"]),
        TensorDictModule(nn.Linear(64, 6), ["hidden"], ["prediction"]),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = steps()

    @torch.compile
    def compute_loss(batch: Any) -> Any:
        out = model(batch.copy())
        return ((out["prediction"] - out["action"]) ** 2).mean() + (out["next", "reward"] * 0).sum()

    def call() -> float:
        loss = compute_loss(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # type: ignore[no-any-return]

    return call


PROGRAMS: dict[str, Callable[[], Call]] = {
    "TorchRL, PPO: 1,000 steps in parts of 100": lambda: ppo_update(MINIBATCH),
    "TorchRL, SAC: 256 steps, memory-mapped": sac_update,
    "TorchRL, DQN: 256 steps": dqn_update,
    "verl, DataProto: 256 x 512 tokens": verl_step,
    "rsl_rl, PPO: 24 steps of 64 environments": rsl_rl_step,
    "training on a saved data set: an epoch": training_loop,
    "compiled update: 1,000 steps": compiled_step,
}


if __name__ == "__main__":
    main()
