"""Data sets that grow: many writers add shards, and a reader opens all of them as one container."""

from tensordict.datasets.dataset import Dataset, open_dataset
from tensordict.datasets.loader import DatasetLoader
from tensordict.datasets.maintenance import compact, tidy
from tensordict.datasets.ray import to_ray
from tensordict.datasets.sweeping import Sweep
from tensordict.datasets.writer import DatasetWriter

__all__ = ["Dataset", "DatasetLoader", "DatasetWriter", "Sweep", "compact", "open_dataset", "tidy", "to_ray"]
