"""How long `import tensordict` takes after `import torch`: here and with the reference, in turns.

python benchmarks/import_time.py [--rounds 10]

Prints the median and the least seconds of the processor, and of the clock, of each; the reference where
`.venv-reference` is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json, time
def now():
    return time.process_time(), time.perf_counter()
start = now()
import torch
middle = now()
import tensordict
end = now()
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in ((start, middle), (middle, end))]))
"""


def measure(python: Path, path: str, compiled: str) -> list[list[float]]:
    """The seconds that importing torch, and then the package, takes; of the processor and of the clock."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": compiled}
    result = subprocess.run(
        [str(python), "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    found: list[list[float]] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    sides = {"here": (Path(sys.executable), str(ROOT / "src"))}
    reference = ROOT / ".venv-reference/bin/python"
    if reference.exists():
        sides["reference"] = (reference, "")
    times: dict[str, list[list[list[float]]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as compiled:
        # The first one compiles.
        for number in range(args.rounds + 1):
            for name, (python, path) in sides.items():
                found = measure(python, path, f"{compiled}/{name}")
                if number:
                    times[name].append(found)
    print(f"{'':28}{'processor':>20}{'clock':>20}\n{'':28}" + f"{'median':>10}{'least':>10}" * 2)
    for name, rounds in times.items():
        for at, what in enumerate(("import torch", "then import tensordict")):
            cells = ""
            for kind in (0, 1):
                values = [1000 * one[at][kind] for one in rounds]
                cells += f"{statistics.median(values):7.0f} ms{min(values):7.0f} ms"
            print(f"{name + ': ' + what:28}".ljust(36)[:36] + cells)


if __name__ == "__main__":
    main()
