"""Which modules of TorchRL and BenchMARL can be imported, and why the others cannot."""

import importlib
import pkgutil
import warnings
from pathlib import Path

import torch
import torchrl.collectors
from recording import Record, case, run

torchrl.collectors.SyncDataCollector = torchrl.collectors.Collector


def imported(record: Record, library: str) -> None:
    """Records for every module of `library` what its import raises; nothing, if it succeeds."""
    package = importlib.import_module(library)
    names = [library]
    names += [
        module.name for module in pkgutil.walk_packages(package.__path__, f"{library}.", onerror=lambda name: None)
    ]
    failures, installed = 0, str(Path(package.__path__[0]).parent)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failures += 1
            record(name, f"{type(error).__name__}: {error}".splitlines()[0].replace(installed, ""))
        else:
            record(name, "imported")
    record("imported", torch.tensor(len(names) - failures))


@case
def torchrl_modules(record: Record) -> None:
    warnings.simplefilter("ignore")
    imported(record, "torchrl")


@case
def benchmarl_modules(record: Record) -> None:
    imported(record, "benchmarl")


if __name__ == "__main__":
    run()
