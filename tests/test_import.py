"""`import tensordict`: what it brings along beyond torch, and the collector of Python while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from typing import Any

import pytest

# Modules that the package imports only when needed, because they are slow to import.
OPTIONAL = {
    "IPython", "aiohttp", "argcomplete", "asyncio", "cloudpickle", "datasets", "duckdb", "fsspec", "gcsfs", "h5py",
    "lm_eval", "matplotlib", "moto", "obstore", "onnx", "pandas", "polars", "pyarrow", "ray", "redis", "rich", "s3fs",
    "safetensors", "sklearn", "streaming", "tensordict_cli", "torchsnapshot", "tqdm", "zarr",
}  # fmt: skip


def run(program: str) -> Any:
    """Run code in a new process and return its output, parsed as JSON."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return json.loads(result.stdout)


def test_what_comes_along() -> None:
    new = run(
        "import sys, json, torch; before = set(sys.modules); import tensordict; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    others = {name.partition(".")[0] for name in new} - {"tensordict"}
    assert not others & OPTIONAL, others & OPTIONAL
    # Parts of Python's own library and of NumPy that torch does without.
    assert len(others) <= 12, sorted(others)
    assert len([name for name in new if name.startswith("tensordict")]) < 302


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has its lock")
def test_a_free_threaded_python_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is imported, and nothing that a container does, brings the lock back."""
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    assert not run(
        "import json, sys, torch, tensordict, tensordict.nn; "
        "td = tensordict.TensorDict(a=torch.zeros(2), batch_size=2); "
        "td.lock_().clone()[0].to_dict(); print(json.dumps(sys._is_gil_enabled()))"
    )


def test_no_look_at_all_that_torch_has_made() -> None:
    """Collections of the oldest generation would take as long as all the rest."""
    program = """
import gc, json, torch
{0}
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
import tensordict
print(json.dumps([gc.isenabled(), max(seen, default=0), gc.get_freeze_count() > 0]))
"""
    assert run(program.format("")) == [True, 0, False]
    assert run(program.format("gc.disable()")) == [False, 0, False]
    # Objects that a program froze stay frozen.
    enabled, _, frozen = run(program.format("gc.freeze()"))
    assert enabled and frozen
