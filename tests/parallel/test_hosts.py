"""Ranks on hosts of their own: network namespaces with one cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.seconds

HOST = """
import sys
import torch, torch.distributed as dist
from tensordict import TensorDict, lazy_stack
from tensordict.core.exceptions import TransferError

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
td = TensorDict({"x": torch.full((300_000,), float(rank)), "n": {"y": torch.full((3,), rank), "who": f"host {rank}"}})
if rank == 0:
    td.send(1)
    try:
        td.exclude("x").send(1)
    except TransferError as error:
        assert "'x'" in str(error), error
    else:
        raise AssertionError("a container without 'x' was taken")
else:
    td.recv(0)
    assert (td["x"] == 0).all() and td["n", "who"] == "host 0"
    try:
        td.recv(0)
    except TransferError as error:
        assert "'x'" in str(error), error
    else:
        raise AssertionError("a container without 'x' was taken")
numbers = TensorDict({"x": torch.full((300_000,), rank + 1.0), "y": torch.full((3,), rank)})
numbers.all_reduce()
assert (numbers["x"] == 3).all() and (numbers["y"] == 1).all()
got = (lazy_stack([td, td]) if rank == 1 else td).broadcast(1)
assert got.batch_size == (2,)
print("done", rank)
dist.destroy_process_group()
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces that reach each other by 10.77.0.1 and 10.77.0.2, and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("this machine has no ip command, which makes network namespaces")
    names = [f"td{os.getpid()}a", f"td{os.getpid()}b"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr!r:.200}")
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def test_two_hosts(hosts: list[str], tmp_path: Path) -> None:
    program = tmp_path / "host.py"
    program.write_text(HOST)
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-W", "ignore", str(program), str(rank), str(tmp_path)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(hosts)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert outputs == ["done 0\n", "done 1\n"]
