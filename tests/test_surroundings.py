"""Importing and using the package in a process that lacks what most have: torch.distributed, /dev/shm, a home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Uses of a container that must work anywhere.
USES = """
import warnings, sys, tempfile
warnings.simplefilter("error")
import tensordict, tensordict.nn
from tensordict import MemoryMappedTensor, TensorDict

def refused(fn):
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

td = TensorDict(a=torch.arange(4.0), b=torch.ones(4, 2), batch_size=4)
assert (td + 1)[2]["a"] == 3
with tempfile.TemporaryDirectory() as folder:
    assert (td.memmap(folder)[1:] == TensorDict.load_memmap(folder)[1:]).all()
assert td.clone().memmap_()["a"].sum() == 6
"""


def run(program: str, *command: str, **variables: str) -> None:
    """Run a program, after a command that changes its surroundings."""
    text = "import torch\n" + program
    environment = {**os.environ, **variables}
    done = subprocess.run([*command, sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_without_torch_distributed() -> None:
    """As in a torch that was built without it, such as those for some small machines."""
    run(
        f"""
del torch._C._c10d_init
for name in [name for name in sys.modules if name.split(".")[:2] == ["torch", "distributed"]]:
    del sys.modules[name]
import torch.distributed
assert not torch.distributed.is_available()
{USES}
assert td.clone().share_memory_().is_shared()
assert [member["a"].item() for member in td.split(1)] == [0, 1, 2, 3]
for fn in (lambda: td.all_gather(), lambda: td.send(0), lambda: td.init_remote(0)):
    assert refused(fn) == (
        "RuntimeError: this torch was built without torch.distributed; install a torch that has it"
    ), refused(fn)
""".replace("del torch._C", "import sys\ndel torch._C", 1)
    )


def test_without_gloo() -> None:
    run(f"""
import torch.distributed.distributed_c10d as c10d
c10d._GLOO_AVAILABLE = False
assert not torch.distributed.is_gloo_available()
{USES}
assert td.clone().share_memory_().is_shared()
assert "no default process group" in refused(lambda: td.all_gather())
""")


def test_without_shared_memory(tmp_path: Path) -> None:
    """A mount namespace without /dev/shm."""
    script = tmp_path / "without_shm.sh"
    script.write_text(
        "mount --rbind /dev $1 && mount -t tmpfs none /dev || exit 77\n"
        "for name in null zero urandom random; do touch /dev/$name; mount --bind $1/$name /dev/$name || exit 77; done\n"
        'shift; exec "$@"\n'
    )
    (tmp_path / "dev").mkdir()
    command = ["unshare", "-rm", "sh", str(script), str(tmp_path / "dev")]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this system makes no namespaces of mounts")
    run(
        f"""
import os
assert not os.path.exists("/dev/shm")
{USES}
for fn in (lambda: td.clone().share_memory_(), lambda: td.consolidate(share_memory=True)):
    assert "This system has no /dev/shm: mount one, or use memmap_(), which does without" in refused(fn), refused(fn)
assert "entry 'a'" in refused(lambda: td.clone().share_memory_())
assert MemoryMappedTensor.from_tensor(td["a"]).sum() == 6
""",
        *command,
    )


def test_without_a_home() -> None:
    """Nothing can be written where the user's folder would be, nor is it tried."""
    run(
        USES
        + """
from torch import nn
assert not torch.compile(lambda td: td + 1, backend="eager", fullgraph=True)(td)["a"].equal(td["a"])
import tensordict.io.remote.urls, tensordict.datasets
""",
        HOME="/proc/nothing",
        XDG_CACHE_HOME="/proc/nothing",
        XDG_CONFIG_HOME="/proc/nothing",
    )
