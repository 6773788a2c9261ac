"""BenchMARL trains for one iteration, by several algorithms: its batches, losses and the parameters it ends with."""

import tempfile
from typing import Any

import torch
import torchrl.collectors
from recording import SEED, Record, case, run

from tensordict import TensorDictBase

# BenchMARL 1.5.2 was written for TorchRL 0.11, where this class had another name.
torchrl.collectors.SyncDataCollector = torchrl.collectors.Collector

from benchmarl.algorithms import IddpgConfig, IppoConfig, MappoConfig, MasacConfig  # noqa: E402
from benchmarl.algorithms.common import AlgorithmConfig  # noqa: E402
from benchmarl.environments import Task, VmasTask  # noqa: E402
from benchmarl.experiment import Callback, Experiment, ExperimentConfig  # noqa: E402
from benchmarl.models.gru import GruConfig  # noqa: E402
from benchmarl.models.mlp import MlpConfig  # noqa: E402


class Watch(Callback):
    """Keeps each collected batch and the losses of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[TensorDictBase] = []
        self.losses: list[TensorDictBase] = []

    def on_batch_collected(self, batch: TensorDictBase) -> None:
        self.batches.append(batch.clone())

    def on_train_step(self, batch: TensorDictBase, group: str) -> None:
        """Nothing to add to the losses."""

    def on_train_end(self, training_td: TensorDictBase, group: str) -> None:
        self.losses.append(training_td.clone())


def configuration(folder: str) -> ExperimentConfig:
    config = ExperimentConfig.get_from_yaml()
    config.loggers, config.create_json, config.save_folder = [], False, folder
    config.render, config.evaluation = False, False
    config.max_n_frames, config.max_n_iters = None, 1
    config.on_policy_collected_frames_per_batch, config.on_policy_n_envs_per_worker = 400, 4
    config.on_policy_minibatch_size, config.on_policy_n_minibatch_iters = 100, 2
    config.off_policy_collected_frames_per_batch, config.off_policy_n_envs_per_worker = 200, 2
    config.off_policy_train_batch_size, config.off_policy_n_optimizer_steps = 32, 4
    config.off_policy_memory_size = 1000
    return config


def train(record: Record, algorithm: AlgorithmConfig, task: Task, model: Any = None) -> None:
    torch.manual_seed(SEED)
    watch, model = Watch(), MlpConfig.get_from_yaml() if model is None else model
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(
            task=task,
            algorithm_config=algorithm,
            model_config=model,
            critic_model_config=MlpConfig.get_from_yaml(),
            seed=SEED,
            config=configuration(folder),
            callbacks=[watch],
        )
        experiment.run()
    record("batches", watch.batches)
    record("losses", watch.losses)
    record("mean return", experiment.mean_return)
    for group, loss in experiment.losses.items():
        record(f"{group} after", dict(loss.state_dict()))


@case
def mappo(record: Record) -> None:
    train(record, MappoConfig.get_from_yaml(), VmasTask.BALANCE.get_from_yaml())


@case
def ippo(record: Record) -> None:
    train(record, IppoConfig.get_from_yaml(), VmasTask.NAVIGATION.get_from_yaml())


@case
def masac(record: Record) -> None:
    train(record, MasacConfig.get_from_yaml(), VmasTask.BALANCE.get_from_yaml())


@case
def iddpg_with_a_recurrent_policy(record: Record) -> None:
    model = GruConfig.get_from_yaml()
    model.hidden_size, model.mlp_num_cells = 8, [8]
    train(record, IddpgConfig.get_from_yaml(), VmasTask.BALANCE.get_from_yaml(), model)


if __name__ == "__main__":
    run()
