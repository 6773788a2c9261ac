"""How long a training loop stands still for a checkpoint, and how long resuming takes, beside torch's own ways.

    .venv/bin/python benchmarks/checkpoints.py            # a model of 64 MiB with the state of Adam, 192 MiB in all
    .venv/bin/python benchmarks/checkpoints.py --quick    # does it all run? The figures are noisy

The same model, optimizer and step go through `save_checkpoint`, `torch.save` and `torch.distributed.checkpoint` (DCP),
in turns, in one process. `stands still` is the time until the call returns, `done` until the file is there, `resume`
the time to load into a new model and a new optimizer. Medians over the rounds, files in the page cache. As many bytes
are written and deleted before each save, untimed. DCP flushes its files to the disk by default; here it does not, as
the others. The figures are multiples of the time of `torch.save` and `torch.load` in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tensordict import load_checkpoint, save_checkpoint

Run = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to save: `save` returns the function that waits for the end of the save."""

    name: str
    save: Callable[[Run, str], Callable[[], object]]
    load: Callable[[Run, str], object]


def done() -> None:
    pass


def save_ours(run: Run, path: str) -> Callable[[], object]:
    save_checkpoint(path, **run, step=7, overwrite=True)
    return done


def save_ours_early(run: Run, path: str) -> Callable[[], object]:
    return save_checkpoint(path, **run, step=7, overwrite=True, return_early=True).result


def load_ours(run: Run, path: str) -> None:
    load_checkpoint(path, **run)


def save_torch(run: Run, path: str) -> Callable[[], object]:
    torch.save({**{name: obj.state_dict() for name, obj in run.items()}, "step": 7}, path)
    return done


def load_torch(run: Run, path: str, mmap: bool = False) -> None:
    states = torch.load(path, weights_only=True, mmap=mmap)
    for name, obj in run.items():
        obj.load_state_dict(states[name])


def states_of(run: Run) -> dict[str, Any]:
    model, optimizer = get_state_dict(run["model"], run["optimizer"])
    return {"model": model, "optimizer": optimizer, "step": 7}


def save_dcp(run: Run, path: str) -> Callable[[], object]:
    dcp.save(states_of(run), storage_writer=dcp.FileSystemWriter(path, sync_files=False), no_dist=True)
    return done


def save_dcp_early(run: Run, path: str) -> Callable[[], object]:
    writer = dcp.FileSystemWriter(path, sync_files=False)
    future: Any = dcp.async_save(states_of(run), storage_writer=writer, no_dist=True)
    return future.result  # type: ignore[no-any-return]


def load_dcp(run: Run, path: str) -> None:
    states = states_of(run)
    dcp.load(states, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    set_state_dict(
        run["model"], run["optimizer"], model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )


WAYS = [
    Way("torch.save, torch.load", save_torch, load_torch),
    Way("torch.save, torch.load(mmap=True)", save_torch, lambda run, path: load_torch(run, path, mmap=True)),
    Way("dcp.save", save_dcp, load_dcp),
    Way("dcp.async_save", save_dcp_early, load_dcp),
    Way("save_checkpoint", save_ours, load_ours),
    Way("save_checkpoint(return_early=True)", save_ours_early, load_ours),
]


def make(layers: int, width: int, trained: bool = False) -> Run:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.Adam(net.parameters())
    if trained:
        net(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def warm(folder: Path, nbytes: int) -> None:
    """Write and delete as many bytes, so that every save finds memory that is ready to be written to."""
    path = folder / "warm"
    path.write_bytes(bytes(nbytes))
    path.unlink()
    os.sync()


def measure(layers: int, width: int, rounds: int, folder: Path) -> dict[str, dict[str, float]]:
    run = make(layers, width, trained=True)
    weights = list(run["model"].parameters())
    nbytes = 3 * sum(weight.nbytes for weight in weights)
    found: dict[str, dict[str, list[float]]] = {
        way.name: {"stands still": [], "done": [], "resume": []} for way in WAYS
    }
    for _ in range(rounds):
        for way in WAYS:
            path = folder / "saved"
            warm(folder, nbytes)
            gc.collect()
            start = time.perf_counter()
            wait = way.save(run, str(path))
            found[way.name]["stands still"].append(time.perf_counter() - start)
            wait()
            found[way.name]["done"].append(time.perf_counter() - start)
            fresh = make(layers, width)
            for weight in fresh["model"].parameters():
                nn.init.zeros_(weight)
            start = time.perf_counter()
            way.load(fresh, str(path))
            found[way.name]["resume"].append(time.perf_counter() - start)
            pairs = zip(weights, fresh["model"].parameters(), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), way.name
            moments = [[state["exp_avg"] for state in one["optimizer"].state.values()] for one in (run, fresh)]
            assert len(moments[0]) == len(weights) and all(map(torch.equal, *moments)), way.name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {name: {what: statistics.median(times) for what, times in parts.items()} for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", module="torch")
    rounds = options.rounds or (1 if options.quick else 7)
    sizes = {"few large": (4, 256), "many small": (50, 32)}
    if not options.quick:
        sizes = {"few large": (16, 1024), "many small": (1000, 64)}
    print(f"{machine.describe()['machine']}; torch {torch.__version__}, {options.threads} thread(s), {rounds} rounds")
    kept = {}
    for title, (layers, width) in sizes.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            figures = kept[title] = measure(layers, width, rounds, Path(folder))
        base = figures[WAYS[0].name]
        mib = 3 * layers * (width * width + width) * 4 / 2**20
        print(f"\n{title}: {layers} layers of {width}, {mib:.0f} MiB; torch.save {base['done']:.3f} s, ", end="")
        print(f"torch.load {base['resume']:.3f} s")
        print("| | stands still | done | resume |\n|---|---|---|---|")
        for name, parts in figures.items():
            against = {"stands still": base["done"], "done": base["done"], "resume": base["resume"]}
            print(f"| {name} |", " | ".join(f"{parts[what] / against[what]:.2f}" for what in parts), "|")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
