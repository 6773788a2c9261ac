"""Checkpoints of `torchrl.checkpoint`: the files they leave, and the state that comes back."""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from recording import SEED, Record, case, run
from torch import nn
from torchrl.checkpoint import (
    Checkpoint,
    CheckpointAdapter,
    CheckpointError,
    CheckpointLoadResult,
    CheckpointOptions,
    CheckpointRotation,
    DumpLoadCheckpointAdapter,
    JSONCheckpointAdapter,
    StateDictCheckpointAdapter,
)
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, TransformedEnv, VecNormV2

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trained(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `module`, after two steps."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(2):
        module(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def results(record: Record, name: str, result: CheckpointLoadResult) -> None:
    for field in ("loaded", "missing", "unrequested"):
        record(f"{name} {field}", sorted(getattr(result, field)))
    record(f"{name} incompatible", sorted(result.incompatible))


def payloads(path: Path) -> list[str]:
    """The files of a checkpoint, in a folder or an archive."""
    if path.is_dir():
        return sorted(found.relative_to(path).as_posix() for found in path.rglob("*") if found.is_file())
    with zipfile.ZipFile(path) as archive:
        return sorted(archive.namelist())


def there_and_back(record: Record, make: Any, changed: Any, state: Any, **options: Any) -> None:
    """Saves what `make` gives after `changed`, and loads it into another one, in both formats."""
    for kind in ("directory", "archive"):
        source, target = make(), make()
        changed(source)
        path = Checkpoint(part=source, format=kind).save(f"{kind}.ckpt", **options)
        record(f"{kind} files", payloads(path))
        results(record, kind, Checkpoint(part=target, format=kind).load(path))
        record(f"{kind} state", state(target))


@case
def modules(record: Record) -> None:
    there_and_back(record, network, trained, lambda module: module.state_dict())


@case
def modules_over_containers(record: Record) -> None:
    def make() -> TensorDictModule:
        return TensorDictModule(network(), in_keys=["a"], out_keys=["b"])

    there_and_back(record, make, lambda module: trained(module.module), lambda module: module.state_dict())


@case
def parameters(record: Record) -> None:
    def make() -> TensorDictParams:
        return TensorDictParams(TensorDict.from_module(network()).detach().clone())

    there_and_back(record, make, lambda params: params.data.add_(1), lambda params: params.data.clone())


@case
def mapped_buffers(record: Record) -> None:
    def make() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=LazyMemmapStorage(8), batch_size=4)

    def fill(buffer: TensorDictReplayBuffer) -> None:
        buffer.extend(TensorDict({"a": torch.arange(8.0), "n": {"b": torch.rand(8, 2)}}, [8]))

    there_and_back(record, make, fill, lambda buffer: buffer[:])


@case
def buffers_in_memory(record: Record) -> None:
    def make() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)

    def fill(buffer: TensorDictReplayBuffer) -> None:
        buffer.extend(TensorDict({"a": torch.arange(8.0), "n": {"b": torch.rand(8, 2)}}, [8]))

    there_and_back(record, make, fill, lambda buffer: buffer[:])


@case
def values_as_json(record: Record) -> None:
    source = {"step": 3, "names": ["a", "b"], "rate": 0.5, "deep": {"none": None, "yes": True}}
    target: dict[str, Any] = {}
    Checkpoint(value=source).save("values")
    results(record, "values", Checkpoint(value=target).load("values"))
    record("loaded", target)
    record("manifest", sorted(Checkpoint.manifest("values")))
    record("is one", [Checkpoint.is_checkpoint("values"), Checkpoint.is_checkpoint(".")])
    print(
        json.loads(Path("values/manifest.json").read_text())["components"]
        if Path("values/manifest.json").exists()
        else ""
    )
    record("one", torch.ones(1))


@case
def payload_formats(record: Record) -> None:
    for kind in ("directory", "archive", "consolidated", "torch"):
        source, target = network(), network()
        trained(source)
        checkpoint = Checkpoint()
        checkpoint.register("module", source, adapter=StateDictCheckpointAdapter(payload_format=kind))
        path = checkpoint.save(f"as_{kind}")
        record(f"{kind} files", payloads(path))
        other = Checkpoint()
        other.register("module", target, adapter=StateDictCheckpointAdapter())
        results(record, kind, other.load(path))
        record(kind, target.state_dict())


@case
def compressed_archives(record: Record) -> None:
    source, target = network(), network()
    trained(source)
    checkpoint = Checkpoint(format="archive", archive_compression="deflate")
    checkpoint.register("module", source, adapter=StateDictCheckpointAdapter("archive", archive_compression="deflate"))
    path = checkpoint.save("packed.zip")
    other = Checkpoint(format="archive", module=target)
    results(record, "packed", other.load(path))
    record("state", target.state_dict())


@case
def parts_of_a_checkpoint(record: Record) -> None:
    source, target = network(), network()
    trained(source)
    Checkpoint(module=source, step={"count": 5}).save("all", metadata={"note": "first"})
    record("metadata", Checkpoint.manifest("all")["metadata"])
    step: dict[str, Any] = {}
    results(record, "step", Checkpoint(module=target, step=step).load("all", components=["step"]))
    record("value", step)
    results(record, "more", Checkpoint(module=target, other={"a": 1}, strict="ignore").load("all", strict="ignore"))
    record("state", target.state_dict())
    try:
        Checkpoint(other={"a": 1}).load("all")
    except CheckpointError as error:
        record("missing", sorted(error.result.missing))
    try:
        Checkpoint(module=nn.Linear(2, 2)).load("all")
    except CheckpointError as error:
        record("incompatible", sorted(error.result.incompatible))


@case
def saved_over_another(record: Record) -> None:
    for value in (1.0, 2.0):
        module = nn.Linear(2, 2)
        nn.init.constant_(module.weight, value)
        path = Checkpoint(module=module).save("same")
    target = nn.Linear(2, 2)
    Checkpoint(module=target).load(path)
    record("weight", target.weight)


@case
def rotated(record: Record) -> None:
    module = nn.Linear(2, 1)
    rotation = CheckpointRotation("kept", keep_last=2, keep_best=("reward", "max"))
    for step, reward in enumerate((1.0, 9.0, 3.0, 2.0, 4.0)):
        nn.init.constant_(module.weight, float(step))
        rotation.save(Checkpoint(module=module), step=step, metadata={"reward": reward})
    record("kept", [path.name for path in rotation.checkpoints()])
    record("latest", rotation.latest().name)
    record("best", rotation.best().name)
    target = nn.Linear(2, 1)
    rotation.load_latest(Checkpoint(module=target))
    record("weight", target.weight)
    Checkpoint(module=target).load(rotation.best())
    record("best weight", target.weight)


@case
def rotated_archives(record: Record) -> None:
    rotation = CheckpointRotation("kept", keep_last=1)
    for step in range(3):
        rotation.save(Checkpoint(value={"step": step}, format="archive"), step=step)
    value: dict[str, Any] = {}
    rotation.load_latest(Checkpoint(value=value))
    record("value", value)
    record("kept", [path.name for path in rotation.checkpoints()])
    record("one", torch.ones(1))


class Counter:
    """A component with `dump` and `load`."""

    def __init__(self) -> None:
        self.data = TensorDict({"count": torch.zeros(3)}, [3])

    def dump(self, path: Path) -> None:
        self.data.memmap(Path(path) / "data")

    def load(self, path: Path) -> None:
        self.data = TensorDict.load_memmap(Path(path) / "data")


class Text(CheckpointAdapter):
    """An adapter of one's own, which writes a text."""

    adapter_id = "own.text"

    def save(self, component: Any, path: Path, **options: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "text.txt").write_text(repr(component.data["count"].tolist()))

    def load(self, component: Any, path: Path, **options: Any) -> None:
        component.data["count"] = torch.tensor(json.loads((Path(path) / "text.txt").read_text()))


@case
def adapters(record: Record) -> None:
    for name, adapter in {"dump": DumpLoadCheckpointAdapter(), "own": Text()}.items():
        source, target = Counter(), Counter()
        source.data["count"] += 5
        checkpoint = Checkpoint()
        checkpoint.register("counter", source, adapter=adapter)
        checkpoint.save(name)
        other = Checkpoint()
        other.register("counter", target, adapter=adapter)
        try:
            other.load(name)
        except Exception as error:
            record(f"{name} error", type(error).__name__)
        record(name, target.data["count"])
    record("ids", [DumpLoadCheckpointAdapter().adapter_id, JSONCheckpointAdapter().adapter_id])
    options = CheckpointOptions(save_kwargs={"a": 1}).merged(CheckpointOptions(load_kwargs={"b": 2}))
    record("options", [sorted(options.save_kwargs), sorted(options.load_kwargs)])


@case
def environments_with_statistics(record: Record) -> None:
    def make() -> TransformedEnv:
        return TransformedEnv(GymEnv("Pendulum-v1"), VecNormV2(in_keys=["observation"]))

    def run_it(env: TransformedEnv) -> None:
        env.set_seed(SEED)
        env.rollout(10)

    there_and_back(record, make, run_it, lambda env: dict(env.state_dict()))


@case
def containers(record: Record) -> None:
    source = TensorDict({"a": torch.arange(3.0), "n": {"b": torch.ones(3, 2)}}, [3])
    target = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, 2)}}, [3])
    path = Checkpoint(data=source).save("data")
    results(record, "data", Checkpoint(data=target).load(path))
    record("loaded", target)


@case
def lists_in_buffers(record: Record) -> None:
    def make() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(storage=ListStorage(8), batch_size=2, collate_fn=torch.stack)

    source = make()
    source.extend(TensorDict({"a": torch.arange(4.0)}, [4]))
    try:
        path = Checkpoint(buffer=source).save("lists")
        target = make()
        Checkpoint(buffer=target).load(path)
        record("loaded", target[:])
    except Exception as error:
        record("refused", type(error).__name__)
    record("one", torch.ones(1))


if __name__ == "__main__":
    run()
