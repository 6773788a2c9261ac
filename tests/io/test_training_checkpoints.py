"""`save_checkpoint` and `load_checkpoint`: a run that resumes goes on as if it had not stopped.

test_transaction.py kills saves of checkpoints; tests/parallel/test_sharded_checkpoints.py tests sharded modules.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensordict
from tensordict import TensorDict, TensorDictParams, load, load_checkpoint, save_checkpoint, verify
from tensordict.containers import checkpoints
from tensordict.core.exceptions import SaveError, StateError, UnsupportedEntryError
from tensordict.datasets import DatasetLoader
from tensordict.io import checkpoint_files

DATA = TensorDict({"x": torch.arange(40.0).view(20, 2) / 10}, [20])


class Counter:
    """An object with a state of its own, such as torchdata's StatefulDataLoader."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "_snapshot": {"worker_0": {"rng": torch.arange(3), "done": None}}, 3: (1, True)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state[3] == (1, True) and state["_snapshot"]["worker_0"]["rng"].tolist() == [0, 1, 2]
        self.count = state["count"]


def make(width: int = 4) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 6]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        "loader": DatasetLoader(DATA, 4, seed=1),
        "counter": Counter(),
        "generator": torch.Generator().manual_seed(3),
    }


def stream(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train(run: dict[str, Any], steps: int, batches: Iterator[Any] | None = None) -> list[float]:
    """Train with random numbers of all kinds; the losses."""
    losses = []
    for batch in itertools.islice(batches or stream(run["loader"]), steps):
        noise = random.random() + float(np.random.rand()) + torch.rand(1, generator=run["generator"])
        loss = (run["model"](batch["x"] + noise) - 1).pow(2).mean()
        run["scaler"].scale(loss).backward()
        run["scaler"].step(run["optimizer"])
        run["scaler"].update()
        run["scheduler"].step()
        run["optimizer"].zero_grad()
        run["counter"].count += 1
        losses.append(loss.item())
    return losses


def state_of(run: dict[str, Any]) -> list[torch.Tensor]:
    return [value.clone() for value in run["model"].state_dict().values()]


# --- a run resumes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(early: bool, tmp_path: pathlib.Path) -> None:
    run = make()
    batches = stream(run["loader"])
    train(run, 7, batches)
    values = {"step": 7, "config": {"lr": 0.1, "shape": (1, None), 3: [True]}, "best": float("inf"), "none": None}
    saved: Any = save_checkpoint(tmp_path / "run", **run, **values, return_early=early)
    expected = train(run, 6, batches)
    assert (saved.result() if early else saved) == tmp_path / "run" and os.listdir(tmp_path) == ["run"]
    again = make()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    found = load_checkpoint(tmp_path / "run", **again)
    assert found == values and again["counter"].count == 7
    assert train(again, 6) == expected
    assert verify(tmp_path / "run").ok
    groups = again["optimizer"].param_groups[0]
    assert type(groups["lr"]) is float and type(groups["betas"]) is tuple


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "LBFGS": lambda params: torch.optim.LBFGS(params),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "groups": lambda params: torch.optim.Adam([{"params": [param], "lr": 0.1} for param in params]),
}


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_resume(name: str, tmp_path: pathlib.Path) -> None:
    def prepare() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        return net, KINDS[name](list(net.parameters()))

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(torch.ones(4, 3)).pow(2).sum()
            loss.backward()
            return loss

        return optimizer.step(closure)

    net, optimizer = prepare()
    step(net, optimizer)
    save_checkpoint(tmp_path / "x", model=net, optimizer=optimizer)
    other, fresh = prepare()
    load_checkpoint(tmp_path / "x", model=other, optimizer=fresh)
    for _ in range(3):
        assert step(net, optimizer) == step(other, fresh)
    assert torch.equal(*(next(model.parameters()) for model in (net, other)))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequence": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_resume(name: str, tmp_path: pathlib.Path) -> None:
    def prepare() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.5, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    one, other = prepare(), prepare()
    rates(*one, 3)
    save_checkpoint(tmp_path / "x", optimizer=one[0], scheduler=one[1])
    load_checkpoint(tmp_path / "x", optimizer=other[0], scheduler=other[1])
    assert rates(*one, 4) == rates(*other, 4)


def test_dtypes_and_shared_weights(tmp_path: pathlib.Path) -> None:
    def tied() -> nn.Module:
        net = nn.Sequential(nn.Embedding(1000, 64, dtype=torch.bfloat16), nn.Linear(64, 1000, dtype=torch.bfloat16))
        net[1].weight = net[0].weight
        net.register_buffer("odd", torch.arange(12, dtype=torch.int16).view(3, 4).T)
        net.register_buffer("wide", torch.tensor([1 + 2j], dtype=torch.complex128))
        return net

    net, other = tied(), tied()
    for early in (False, True):
        future: Any = save_checkpoint(tmp_path / "x", model=net, return_early=early, overwrite=early)
        if early:
            future.result()
        # The weight is stored once.
        assert os.path.getsize(tmp_path / "x") < 1.5 * 1000 * 64 * 2
        load_checkpoint(tmp_path / "x", model=other)
        for key, value in net.state_dict().items():
            found = other.state_dict()[key]
            assert found.dtype is value.dtype and torch.equal(found, value)


def test_what_is_loaded_does_not_lie_over_the_file(tmp_path: pathlib.Path) -> None:
    run = make()
    train(run, 2)
    path = save_checkpoint(tmp_path / "x", **run, tensor=torch.ones(1000))
    content = path.read_bytes()
    again = make()
    found = load_checkpoint(path, **again)
    with open(path, "r+b") as file:
        # Tensors over a map of the file would end this process.
        file.truncate(0)
    train(again, 3)
    found["tensor"] += 1
    assert found["tensor"].sum() == 2000 and not path.read_bytes() and content


def test_containers_and_modules_over_them(tmp_path: pathlib.Path) -> None:
    buffer = TensorDict({"a": torch.arange(3), "n": {"text": "x"}}, [3])
    params = TensorDictParams(TensorDict(w=torch.ones(2), n={"v": torch.zeros(1)}))
    save_checkpoint(tmp_path / "x", buffer=buffer, params=params, step=1)
    empty = TensorDict({"a": torch.zeros(3, dtype=torch.int64), "n": {"text": "y"}}, [3])
    fresh = TensorDictParams(TensorDict(w=torch.zeros(2), n={"v": torch.ones(1)}))
    found = load_checkpoint(tmp_path / "x", buffer=empty, params=fresh)
    assert found == {"step": 1} and (empty == buffer).all() and empty["n", "text"] == "x"
    assert torch.equal(fresh["w"], torch.ones(2)) and torch.equal(fresh["n", "v"], torch.zeros(1))
    # Without an object, the container and the state come back.
    found = load_checkpoint(tmp_path / "x")
    assert (found["buffer"] == buffer).all() and found["params"]["w"].tolist() == [1, 1]
    assert load(tmp_path / "x")["step"] == 1


def test_random_numbers_are_left_alone_on_request(tmp_path: pathlib.Path) -> None:
    save_checkpoint(tmp_path / "with", step=1)
    save_checkpoint(tmp_path / "without", step=1, rng=False)
    for path, rng in (("with", False), ("without", True)):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        load_checkpoint(tmp_path / path, rng=rng)
        drawn = random.random(), np.random.rand(), torch.rand(1).item()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        assert drawn == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
def test_states_on_a_gpu(tmp_path: pathlib.Path, early: bool) -> None:
    """The checkpoint has what was on the device at the call, and the random numbers of the device go on."""
    net = nn.Linear(256, 256, device="cuda")
    expected = net.weight.detach().clone()
    saved: Any = save_checkpoint(tmp_path / "x", model=net, return_early=early)
    with torch.no_grad():
        net.weight.zero_()
    drawn = torch.rand(3, device="cuda")
    if early:
        saved.result()
    other = nn.Linear(256, 256, device="cuda")
    load_checkpoint(tmp_path / "x", model=other)
    assert other.weight.is_cuda and torch.equal(other.weight, expected)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)


def test_numpy_generators_as_values(tmp_path: pathlib.Path) -> None:
    one, other = np.random.default_rng(1), np.random.default_rng(2)
    save_checkpoint(tmp_path / "x", numpy=one.bit_generator.state)
    other.bit_generator.state = load_checkpoint(tmp_path / "x")["numpy"]
    assert one.random() == other.random()


# --- in the background ------------------------------------------------------------------------------------------------


def write_later(write: Callable[[], Any], may_write: threading.Event) -> None:
    may_write.wait()
    write()


def test_training_goes_on_while_it_is_saved(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make()
    train(run, 1)
    before, may_write = state_of(run), threading.Event()
    with monkeypatch.context() as patch:
        plan = checkpoints.plan_archive
        patch.setattr(checkpoints, "plan_archive", lambda *args: partial(write_later, plan(*args), may_write))
        future = save_checkpoint(tmp_path / "x", **run, array=(array := np.zeros(3)), return_early=True)
    assert isinstance(future, Future) and not future.done() and not list(tmp_path.iterdir())
    train(run, 3)
    array += 1
    may_write.set()
    assert future.result() == tmp_path / "x"
    again = make()
    assert load_checkpoint(tmp_path / "x", **again)["array"].tolist() == [0, 0, 0]
    assert all(map(torch.equal, before, state_of(again)))


def test_errors_of_the_background_are_raised_at_the_wait(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tensordict.io.formats.archive.write_plain_archive", full)
        future = save_checkpoint(tmp_path / "x", step=1, return_early=True)
        with pytest.raises(OSError, match="No space left"):
            future.result()
        # An error that was seen is not raised again.
        unseen = save_checkpoint(tmp_path / "x", step=1, return_early=True)
        while not unseen.done():
            pass
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "x", step=2)
    assert not list(tmp_path.iterdir())
    save_checkpoint(tmp_path / "x", step=2)
    assert load_checkpoint(tmp_path / "x")["step"] == 2


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path: pathlib.Path) -> None:
    for early in (False, True):
        with pytest.raises(UnsupportedEntryError, match=r"'config' cannot be saved: a type at \['a'\]\[1\]"):
            save_checkpoint(tmp_path / "x", config={"a": [1, Counter]}, return_early=early)
        with pytest.raises(UnsupportedEntryError, match=r"'model' cannot be saved: .*\['weight'\].*meta device"):
            save_checkpoint(tmp_path / "x", model=nn.Linear(2, 2, device="meta"), return_early=early)
    assert not list(tmp_path.iterdir())


ENDING = """
import sys, time, torch
from tensordict import save_checkpoint
from tensordict.memory import files

run = files.run_all
# The save reaches this when the program has ended, and Python starts no more threads.
files.run_all = lambda *args: (time.sleep(0.5), run(*args))
save_checkpoint(sys.argv[1], model=torch.nn.Linear(2000, 500), step=4, return_early=True)
"""


def test_the_program_waits_at_its_end(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-c", ENDING, str(tmp_path / "x")], check=True, timeout=60)
    assert load_checkpoint(tmp_path / "x", model=nn.Linear(2000, 500))["step"] == 4


FAILING = """
import sys
from tensordict import save_checkpoint
from tensordict.io.formats import archive

def fail(*args):
    raise OSError(28, "No space left on device")

archive.write_plain_archive = fail
save_checkpoint(sys.argv[1], step=4, return_early=True)
"""


def test_an_error_that_nobody_has_seen_is_told_at_the_end(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILING, str(tmp_path / "x")], check=True, timeout=60, capture_output=True, text=True
    )
    assert "UserWarning: the last save in the background failed: [Errno 28] No space left on device" in done.stderr


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    save_checkpoint(tmp_path, keep=1, step=1)
    monkeypatch.setattr(checkpoint_files, "_remove", refuse)
    with pytest.warns(UserWarning, match="the old checkpoint '.*step-00000001.tdz' cannot be removed"):
        assert save_checkpoint(tmp_path, keep=1, step=2).exists()


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_if_one_object_does_not_fit(tmp_path: pathlib.Path) -> None:
    run = make()
    train(run, 1)
    save_checkpoint(tmp_path / "x", **run, step=1)
    other = make()
    other["optimizer"] = make(5)["optimizer"]
    before = state_of(other)
    with pytest.raises(StateError, match=r"'optimizer' does not fit '.*x': parameter 0 of group 0 has shape \[5, 2\]"):
        load_checkpoint(tmp_path / "x", **other)
    with pytest.raises(StateError, match=r"(?s)'model' does not fit '.*x': .*0\.weight.*\[4, 2\].*3\.weight"):
        load_checkpoint(tmp_path / "x", **make(5))
    assert all(map(torch.equal, before, state_of(other))) and not other["optimizer"].state


MISFITS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no such entry": (lambda: {"modle": nn.Linear(2, 1)}, "has no entry 'modle'.*did you mean 'model'"),
    "a value": (lambda: {"step": 3}, r"'step' is a int without load_state_dict.*load_checkpoint\(...\)\['step'\]"),
    "a state for a value": (lambda: {"step": nn.Linear(2, 1)}, "'step' was saved as a value"),
    "a container": (lambda: {"model": TensorDict()}, "'model' was saved as a state, and a TensorDict loads"),
    "missing": (lambda: {"model": nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))}, r"(?s)'model'.*1\.weight"),
    "unexpected": (lambda: {"model": nn.Linear(2, 1, bias=False)}, r"(?s)'model'.*Unexpected.*bias"),
    "groups": (
        lambda: {"optimizer": torch.optim.SGD([{"params": [torch.ones(1)]}, {"params": [torch.ones(1)]}])},
        "'optimizer'.*it has 2 groups of parameters, and 1 in the checkpoint",
    ),
    "parameters": (lambda: {"optimizer": torch.optim.SGD([torch.ones(1, 2)])}, "group 0 has 1 parameters, and 2"),
    "a container that differs": (lambda: {"td": TensorDict(b=torch.ones(2))}, "a"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits(name: str, tmp_path: pathlib.Path) -> None:
    net = nn.Linear(2, 1)
    save_checkpoint(
        tmp_path / "x", model=net, optimizer=torch.optim.SGD(net.parameters()), step=1, td=TensorDict(a=torch.ones(1))
    )
    make_objects, message = MISFITS[name]
    with pytest.raises((StateError, KeyError), match=message):
        load_checkpoint(tmp_path / "x", **make_objects())


def test_an_object_that_fails_is_named(tmp_path: pathlib.Path) -> None:
    class Failing(Counter):
        def load_state_dict(self, state: Any) -> None:
            raise LookupError("no room")

    net = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "x", model=net, counter=Counter())
    other = nn.Linear(2, 1)
    before = other.weight.detach().clone()
    with pytest.raises(LookupError, match="no room") as found:
        load_checkpoint(tmp_path / "x", model=other, counter=Failing())
    assert "while 'counter' was loaded" in found.value.__notes__[0] and torch.equal(before, other.weight)


def test_a_name_of_our_own(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="'_rng' of an object begins with '_'"):
        save_checkpoint(tmp_path / "x", _rng=1)


# --- what is on the disk ----------------------------------------------------------------------------------------------


def test_only_a_checkpoint_is_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_text("mine")
    with pytest.raises(SaveError, match="a checkpoint replaces only a checkpoint"):
        save_checkpoint(path, step=1, overwrite=True)
    assert path.read_text() == "mine"
    path.unlink()
    TensorDict(a=torch.ones(3)).save(path, archive=True)
    with pytest.raises(SaveError, match="a checkpoint replaces only a checkpoint"):
        save_checkpoint(path, step=1, overwrite=True)
    assert load(path)["a"].sum() == 3
    path.unlink()
    path.mkdir()
    with pytest.raises(SaveError, match="a checkpoint replaces only a checkpoint"):
        save_checkpoint(path, step=1, overwrite=True)
    assert os.listdir(tmp_path) == ["x"]


def test_an_older_checkpoint_is_replaced_only_on_request(tmp_path: pathlib.Path) -> None:
    path = save_checkpoint(tmp_path / "x", step=1)
    for early in (False, True):
        with pytest.raises(SaveError, match="x' exists: pass overwrite=True"):
            save_checkpoint(path, step=2, return_early=early)
    assert load_checkpoint(path)["step"] == 1 and os.listdir(tmp_path) == ["x"]
    save_checkpoint(path, step=2, overwrite=True)
    assert load_checkpoint(path)["step"] == 2
    save_checkpoint(tmp_path / "run", step=2, keep=2, values=1)
    save_checkpoint(tmp_path / "run", step=2, keep=2, values=2)
    assert load_checkpoint(tmp_path / "run")["values"] == 2


def test_keep(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    names = []
    for step in (10, 20, 30, 40):
        assert save_checkpoint(folder, keep=3, step=step) == folder / f"step-{step:08d}.tdz"
        names.append(sorted(os.listdir(folder)))
    assert list(map(len, names)) == [1, 2, 3, 3] and names[-1][0] == "step-00000020.tdz"
    assert load_checkpoint(folder)["step"] == 40 and load_checkpoint(folder / "step-00000030.tdz")["step"] == 30
    # The run goes on from step 20: the order of the saves counts, and not the step.
    save_checkpoint(folder, keep=3, step=25)
    assert load_checkpoint(folder)["step"] == 25 and len(os.listdir(folder)) == 3
    save_checkpoint(folder, keep=1, step=5)
    assert os.listdir(folder) == ["step-00000005.tdz"]


def test_keep_removes_only_what_it_made(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    save_checkpoint(folder, keep=9, step=1)
    save_checkpoint(folder / "step-00000002.tdz", step=2)  # saved without `keep`
    shutil.copy(folder / "step-00000001.tdz", folder / "best.tdz")
    shutil.copy(folder / "step-00000001.tdz", folder / "step-00000009.tdz")  # another name
    (folder / "step-00000003.tdz").write_bytes(b"unreadable")
    TensorDict(a=torch.ones(1)).save(folder / "step-00000004.tdz")
    (tmp_path / "elsewhere").mkdir()
    save_checkpoint(tmp_path / "elsewhere", keep=1, step=5)
    (folder / "step-00000005.tdz").symlink_to(tmp_path / "elsewhere" / "step-00000005.tdz")
    (folder / "step-00000006").symlink_to(tmp_path / "elsewhere")
    (folder / "step-00000007").mkdir()
    others = set(os.listdir(folder)) - {"step-00000001.tdz"}
    for step in (20, 21):
        save_checkpoint(folder, keep=1, step=step)
    assert set(os.listdir(folder)) == others | {"step-00000021.tdz"}
    assert os.listdir(tmp_path / "elsewhere") == ["step-00000005.tdz"]
    with pytest.raises(SaveError, match=r"step-00000003\.tdz' is not a checkpoint.*name the checkpoint to load"):
        load_checkpoint(folder)
    assert load_checkpoint(folder / "step-00000021.tdz")["step"] == 21


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_keep_is_a_number(keep: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="keep is the number of checkpoints"):
        save_checkpoint(tmp_path, keep=keep, step=1)
    for step in (None, "x", -1, True):
        with pytest.raises(ValueError, match="pass step=, an int"):
            save_checkpoint(tmp_path, keep=1, step=step)
    assert not list(tmp_path.iterdir())


def test_nothing_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "x")
    with pytest.raises(SaveError, match="is a folder without checkpoints"):
        load_checkpoint(tmp_path)
    TensorDict(a=torch.ones(1)).save(tmp_path / "td")
    with pytest.raises(SaveError, match="without checkpoints"):
        load_checkpoint(tmp_path / "td")
    TensorDict(a=torch.ones(1)).save(tmp_path / "td.tdz")
    with pytest.raises(SaveError, match="is not a checkpoint"):
        load_checkpoint(tmp_path / "td.tdz")
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(SaveError, match="is not a checkpoint"):
        load_checkpoint(tmp_path / "x.pt")


def test_files_that_are_cut_off(tmp_path: pathlib.Path) -> None:
    run = make()
    path = save_checkpoint(tmp_path / "x", **run)
    content = path.read_bytes()
    before = state_of(run)
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(SaveError, match="x' is not a checkpoint, or it is broken"):
            load_checkpoint(path, **run)
        with pytest.raises(SaveError, match="replaces only a checkpoint"):
            save_checkpoint(path, **run, overwrite=True)
    assert all(map(torch.equal, before, state_of(run)))


HEADERS: dict[str, Any] = {
    "no dict": 1,
    "empty": {},
    "another format": {"format": "x", "version": 1, "kinds": {}, "shapes": {}},
    "newer": {"format": checkpoint_files.FORMAT, "version": 2, "kinds": {}, "shapes": {}},
    "no kinds": {"format": checkpoint_files.FORMAT, "version": 1, "shapes": {}},
    "no shapes": {"format": checkpoint_files.FORMAT, "version": 1, "kinds": {}},
    "odd kinds": {"format": checkpoint_files.FORMAT, "version": 1, "kinds": {1: [2]}, "shapes": {}},
    "entries that are not there": {"format": checkpoint_files.FORMAT, "version": 1, "kinds": {"y": "x"}, "shapes": {}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_descriptions_that_nobody_wrote(name: str, tmp_path: pathlib.Path) -> None:
    entry = tensordict.NonTensorData(HEADERS[name])
    TensorDict(_checkpoint=entry, model=tensordict.NonTensorData({"weight": 1})).save(tmp_path / "x.tdz")
    with pytest.raises(SaveError, match="x.tdz' is"):
        load_checkpoint(tmp_path / "x.tdz", model=nn.Linear(1, 1))


STATES: dict[str, Any] = {
    "number": 1,
    "list": [1],
    "another model": {"weight": torch.ones(7)},
    "part": {"%part": "x"},
    "parts": {"weight": {"%part": [1]}, "bias": {"%part": "('model', 'bias')"}},
    "optimizer": {"state": 1, "param_groups": [{"params": [0, 1]}]},
    "odd groups": {"state": {}, "param_groups": [1]},
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_nobody_wrote(name: str, tmp_path: pathlib.Path) -> None:
    state = tensordict.NonTensorData(STATES[name])
    header = {
        "format": checkpoint_files.FORMAT,
        "version": 1,
        "kinds": {"model": "state", "opt": "state"},
        "shapes": {},
    }
    td = TensorDict(_checkpoint=tensordict.NonTensorData(header), model=state, opt=state, _rng=state)
    td.save(tmp_path / "x.tdz")
    net = nn.Linear(1, 1)
    before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters())
    for objects in ({"model": net}, {"opt": optimizer}, {}):
        with pytest.raises((SaveError, StateError), match="x.tdz'"):
            load_checkpoint(tmp_path / "x.tdz", **objects)
    assert torch.equal(before, net.weight)


def test_no_pickle_is_loaded(tmp_path: pathlib.Path) -> None:
    path = save_checkpoint(tmp_path / "x", model=nn.Linear(2, 2), step=1)
    with zipfile.ZipFile(path) as archive:
        assert all(name.endswith(("meta.json", ".memmap")) for name in archive.namelist())
    marker = tmp_path / "ran"
    with zipfile.ZipFile(tmp_path / "evil.tdz", "w") as archive:
        archive.writestr("meta.json", '{"shape": [], "device": null, "_type": "<class \'tensordict._td.TensorDict\'>", '
                         '"_checkpoint": {"type": "NonTensorData"}}')  # fmt: skip
        archive.writestr("_checkpoint/meta.json", '{"_type": "<class \'tensordict.tensorclass.NonTensorData\'>"}')
        archive.writestr("_checkpoint/other.pickle", pickle.dumps({"data": Evil(str(marker))}))
    with pytest.raises(SaveError, match=r"evil.tdz' is not a checkpoint"):
        load_checkpoint(tmp_path / "evil.tdz")
    assert not marker.exists()


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_link_is_followed_and_its_mode_kept(tmp_path: pathlib.Path) -> None:
    save_checkpoint(tmp_path / "real", step=1)
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "last").symlink_to("real")
    save_checkpoint(tmp_path / "last", step=2, durable=True, overwrite=True)
    assert (tmp_path / "last").is_symlink() and load_checkpoint(tmp_path / "real")["step"] == 2
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
