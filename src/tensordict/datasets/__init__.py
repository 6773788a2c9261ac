"""Data sets that grow: many writers add shards, and a reader opens all of them as one container."""

from tensordict.convert.images import decode_images
from tensordict.datasets.dataset import Dataset, open_dataset
from tensordict.datasets.hub import load_dataset, push_to_hub
from tensordict.datasets.importing import import_dataset
from tensordict.datasets.loader import DatasetLoader
from tensordict.datasets.maintenance import compact, tidy
from tensordict.datasets.ray import to_ray
from tensordict.datasets.sweeping import Sweep
from tensordict.datasets.writer import DatasetWriter

__all__ = [
    "Dataset",
    "DatasetLoader",
    "DatasetWriter",
    "Sweep",
    "compact",
    "decode_images",
    "import_dataset",
    "load_dataset",
    "open_dataset",
    "push_to_hub",
    "tidy",
    "to_ray",
]
