"""Rows read from and written to a container on a Redis server, here and in the reference (0.14.3), on one server.

    python benchmarks/redis_rows.py                      # both; .venv-behaviour must have the package redis
    python benchmarks/redis_rows.py --keys 100 --seconds 2

Each operation is timed for a second or so, in turns of both sides, and the fastest of the turns counts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
SIDES = {"ours": sys.executable, "reference": str(ROOT / ".venv-behaviour" / "bin" / "python")}

PROGRAM = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
import tensordict.store
socket, keys, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
td = TensorDict({f"k{i}": torch.rand(10_000, 64) for i in range(keys)}, batch_size=[10_000])
store = td.to_store(unix_socket_path=socket)
row, index = td[5].clone(), torch.randint(10_000, (256,))
rows = td[256:512].clone()
operations = {
    "a row": lambda: store[5],
    "256 rows in a slice": lambda: store[256:512],
    "256 random rows": lambda: store[index],
    "an entry": lambda: store["k0"],
    "all": lambda: store.to_tensordict(),
    "write a row": lambda: store.__setitem__(5, row),
    "write 256 rows": lambda: store.__setitem__(slice(256, 512), rows),
    "write 256 random rows": lambda: store.__setitem__(index, rows),
}
times = {}
for name, call in operations.items():
    call()
    best, end = float("inf"), time.perf_counter() + seconds / 4
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    times[name] = best * 1e6
store.clear_redis()
print(json.dumps(times))
"""


def measure(side: str, socket: str, keys: int, seconds: float) -> dict[str, float]:
    """Microseconds by operation."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if side == "reference":
        env.pop("PYTHONPATH", None)
    command = [SIDES[side], "-c", PROGRAM, socket, str(keys), str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd="/")
    if run.returncode:
        raise SystemExit(f"{side}: {run.stderr}")
    found: dict[str, float] = json.loads(run.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=4, help="the number of entries, each of 64 floats a row")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each operation is timed")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not os.path.exists(socket):
                time.sleep(0.01)
            best: dict[str, dict[str, float]] = {side: {} for side in SIDES}
            for _ in range(options.turns):
                for side, known in best.items():
                    for name, spent in measure(side, socket, options.keys, options.seconds / options.turns).items():
                        known[name] = min(spent, known.get(name, spent))
        finally:
            server.kill()
            server.wait()
    for name, spent in best["ours"].items():
        other = best["reference"][name]
        print(f"{name:24}{spent:10.0f} us   reference {other:10.0f} us   {other / spent:6.2f} times as fast")


if __name__ == "__main__":
    main()
