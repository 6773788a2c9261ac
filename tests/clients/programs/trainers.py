"""TorchRL's `Trainer`: its hooks, what it logs, its saves in every format, and training that goes on from a save."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import segment_trees  # noqa: F401
import torch
from recording import SEED, Record, case, run
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, OneHot, PrioritizedSampler, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.objectives.value import TD0Estimator
from torchrl.record import CSVLogger
from torchrl.trainers import (
    BatchSubSampler,
    ClearCudaCache,
    CountFramesLog,
    DefaultOptimizationStepper,
    EarlyStopping,
    LogScalar,
    LogTiming,
    LogValidationReward,
    LRSchedulerHook,
    MixedPrecisionOptimizationStepper,
    OptimizationStepper,
    OptimizerHook,
    ReplayBufferTrainer,
    RewardNormalizer,
    SelectKeys,
    TargetNetUpdaterHook,
    Trainer,
    TrainerHookBase,
    UpdateWeights,
    UTDRHook,
    ValueEstimatorHook,
)

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential


def cart_pole() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=15), RewardSum()))


def trainer(frames: int = 60, **options: Any) -> Trainer:
    """A trainer of Q-learning that has no hooks but the optimizer's."""
    torch.manual_seed(SEED)
    env = cart_pole()
    # The collector resets the environment before the trainer seeds it.
    env.set_seed(SEED)
    actor = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[8]), in_keys=["observation"], spec=OneHot(2, dtype=torch.int64)
    )
    explore = EGreedyModule(env.action_spec, annealing_num_steps=100, eps_init=0.5)
    policy = TensorDictSequential(actor, explore)
    loss = DQNLoss(actor, action_space="one-hot", delay_value=True)
    # A loss makes its estimator, which is part of its state, with the first call unless it is told to.
    loss.make_value_estimator(gamma=0.9)
    options = {"optim_steps_per_batch": 3, "log_interval": 20, "seed": SEED, **options}
    return Trainer(
        collector=Collector(env, policy, frames_per_batch=20, total_frames=frames),
        total_frames=frames,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        progress_bar=False,
        **options,
    )


def with_buffer(made: Trainer, **options: Any) -> Trainer:
    storage = options.pop("storage", LazyTensorStorage)(50)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8, **options)
    ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(made)
    return made


class Losses(TrainerHookBase):
    """Keeps what each optimization step gives."""

    def __init__(self) -> None:
        self.kept: list[TensorDictBase] = []

    def __call__(self, batch: TensorDictBase, losses: TensorDictBase) -> None:
        self.kept.append(losses.detach().clone())

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.kept)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = [TensorDict()] * state_dict["count"]

    def register(self, made: Trainer, name: str = "losses") -> None:
        made.register_op("process_loss", self)
        made.register_module(name, self)


def train(record: Record, name: str, made: Trainer) -> None:
    """Trains, and writes down each loss, the parameters and the counters."""
    losses = Losses()
    losses.register(made)
    # `train` ends the collector, which has a state only before.
    shutdown, made.collector.shutdown = made.collector.shutdown, lambda *_, **__: None
    made.train()
    made.collector.shutdown = shutdown
    record(f"{name} losses", losses.kept)
    record(f"{name} parameters", dict(made.loss_module.state_dict()))
    record(f"{name} frames", [made.collected_frames, made._optim_count])
    record(f"{name} optimizer", dict(made.optimizer.state_dict()["state"]))


def logged(record: Record, folder: str) -> None:
    for path in sorted(Path(folder).rglob("*.csv")):
        record(path.relative_to(folder).as_posix(), path.read_text())


@case
def without_hooks(record: Record) -> None:
    made = trainer()
    made.register_op("batch_process", lambda batch: batch.reshape(-1))
    train(record, "plain", made)


@case
def from_a_buffer(record: Record) -> None:
    for name, options in {
        "in memory": {},
        "mapped": {"storage": LazyMemmapStorage},
        "by priority": {"sampler": PrioritizedSampler(50, alpha=0.7, beta=0.9), "priority_key": "td_error"},
    }.items():
        train(record, name, with_buffer(trainer(), **options))


@case
def padded_into_a_buffer(record: Record) -> None:
    made = trainer()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    ReplayBufferTrainer(buffer, max_dims=[24], iterate=False, device="cpu").register(made)
    train(record, "padded", made)
    record("buffer", buffer[:].exclude("collector"))


@case
def logging_hooks(record: Record) -> None:
    made = with_buffer(trainer(logger=CSVLogger("run", "logs"), log_timings=False))
    LogScalar(("next", "reward"), "r_training", include_std=True).register(made, "rewards")
    LogScalar(("next", "step_count"), "steps", reduction="max").register(made, "steps")
    LogScalar("action", "action", reduction="sum").register(made, "actions")
    LogScalar(("next", "done"), "done", reduction="mean").register(made, "done")
    CountFramesLog(frame_skip=2).register(made)
    evaluated = cart_pole()
    evaluated.set_seed(SEED)
    LogValidationReward(
        record_interval=1, record_frames=12, policy_exploration=made.collector.policy, environment=evaluated
    ).register(made)
    train(record, "logged", made)
    logged(record, "logs")
    record("kept", {name: [float(value) for value in values] for name, values in made._log_dict.items()})


@case
def timing_hook(record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = with_buffer(trainer(logger=CSVLogger("run", folder), log_timings=True))
        LogTiming(prefix="more", erase=True).register(made, "timing")
        train(record, "timed", made)
        record("timed", sorted(path.name for path in Path(folder).rglob("*.csv")))


@case
def training_hooks(record: Record) -> None:
    made = with_buffer(trainer())
    normalizer = RewardNormalizer(decay=0.9, scale=2.0)
    normalizer.register(made)
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, step_size=1, gamma=0.5)
    LRSchedulerHook(scheduler).register(made)
    TargetNetUpdaterHook(SoftUpdate(made.loss_module, eps=0.9)).register(made, "targets")
    UpdateWeights(
        made.collector, 1, policy_weights_getter=lambda: TensorDict.from_module(made.collector.policy)
    ).register(made)
    UTDRHook(made)
    ClearCudaCache(1).register(made)
    train(record, "hooked", made)
    record("rate", scheduler.get_last_lr())
    record("normalizer", normalizer.state_dict())
    record("state", sorted(made.state_dict()))


@case
def selected_keys(record: Record) -> None:
    made = trainer()
    SelectKeys(["observation", "action", "next"]).register(made)
    BatchSubSampler(batch_size=6, sub_traj_len=3, min_sub_traj_len=2).register(made)
    made.register_op("process_optim_batch", lambda batch: batch.reshape(-1))
    train(record, "part", made)


@case
def parts_of_batches(record: Record) -> None:
    """Hooks that are called by themselves, as their documentation shows."""
    first = torch.stack([torch.arange(10), torch.arange(10, 20)])
    data = TensorDict({"first": first, "second": -first}, [2, 10])
    for length in (-1, 2, 5):
        record(f"of {length}", BatchSubSampler(batch_size=10, sub_traj_len=length)(data.clone()))
    mask = torch.arange(10).expand(2, 10) < torch.tensor([[7], [9]])
    masked = data.clone().set(("collector", "mask"), mask)
    record("masked", BatchSubSampler(batch_size=6, sub_traj_len=2)(masked))
    normalizer = RewardNormalizer()
    rewards = TensorDict({"next": {"reward": torch.randn(3, 4, 1)}}, [3, 4])
    normalizer.update_reward_stats(rewards)
    record("normal", normalizer.normalize_reward(rewards))
    counter = CountFramesLog(frame_skip=4)
    record("frames", [counter(data), counter(masked), counter.state_dict()])
    record("selected", SelectKeys(["first"])(data))
    scalar = LogScalar(("next", "reward"), "reward", include_std=True)
    record("scalar", scalar(rewards))


@case
def estimated_values(record: Record) -> None:
    made = trainer()
    value = TensorDictModule(MLP(in_features=4, out_features=1, num_cells=[4]), ["observation"], ["state_value"])
    ValueEstimatorHook(TD0Estimator(gamma=0.9, value_network=value)).register(made)
    made.register_op("batch_process", lambda batch: batch.reshape(-1))
    kept: list[TensorDictBase] = []
    made.register_op("pre_epoch", lambda batch: kept.append(batch.exclude("collector").clone()))
    train(record, "estimated", made)
    record("batches", kept)


@case
def stopped_early(record: Record) -> None:
    made = with_buffer(trainer(logger=CSVLogger("run", "logs")))
    LogScalar(("next", "reward"), "r_training").register(made)
    EarlyStopping(monitor="r_training", patience=0, wait_for=0).register(made)
    train(record, "stopped", made)
    record("reason", made._stop_reason)


class Twice(OptimizationStepper):
    """Two steps of the optimizer for each batch."""

    def step(self, made: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        DefaultOptimizationStepper().step(made, sub_batch)
        return DefaultOptimizationStepper(["loss"]).step(made, sub_batch)


@case
def steppers(record: Record) -> None:
    train(record, "twice", with_buffer(trainer(optimization_stepper=Twice())))
    train(record, "default", with_buffer(trainer(optimization_stepper=DefaultOptimizationStepper(), clip_norm=0.1)))
    made = trainer(clip_grad_norm=False, clip_norm=0.01)
    made.register_op("batch_process", lambda batch: batch.reshape(-1))
    OptimizerHook(made.optimizer, ["loss"])
    train(record, "clipped", made)


@case
def mixed_precision(record: Record) -> None:
    for name, options in {"whole": {}, "half": {"mixed_precision": True, "gradient_accumulation_steps": 2}}.items():
        # TorchRL cannot average over steps when only some have a gradient norm.
        made = with_buffer(trainer(frames=80, optim_steps_per_batch=1))
        stepper = MixedPrecisionOptimizationStepper(made.optimizer, **options)
        made.optimization_stepper = stepper
        stepper.register(made)
        train(record, name, made)
        record(f"{name} state", stepper.state_dict())


def saved_and_loaded(record: Record, name: str, make: Callable[[], Trainer], path: str | None) -> None:
    """Trains and saves; a second trainer loads the save, and goes on."""
    first, second = make(), make()
    train(record, f"{name} first", first)
    first.save_trainer(force_save=True)
    found = path or sorted(str(kept) for kept in Path("kept").iterdir())[-1]
    second.load_from_file(found)
    record(f"{name} loaded", dict(second.loss_module.state_dict()))
    record(f"{name} counters", [second.collected_frames, second._last_save, second._optim_count])
    record(f"{name} optimizer", dict(second.optimizer.state_dict()["state"]))
    second.total_frames = 120
    second.collector.total_frames = 120
    torch.manual_seed(0)
    train(record, f"{name} second", second)


def saved_by(backend: str) -> Callable[[Record], None]:
    def save(record: Record) -> None:
        os.environ["CKPT_BACKEND"] = backend

        # The files of values with tensors in them differ.
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/saved"

            def make() -> Trainer:
                return with_buffer(trainer(save_trainer_file=path, save_trainer_interval=30))

            try:
                saved_and_loaded(record, backend, make, path)
            finally:
                del os.environ["CKPT_BACKEND"]

    return save


@case
def saved_by_torch(record: Record) -> None:
    saved_by("torch")(record)


@case
def saved_as_containers(record: Record) -> None:
    saved_by("memmap")(record)


@case
def saved_as_checkpoints(record: Record) -> None:
    for kind in ("directory", "archive"):

        def make(kind: str = kind) -> Trainer:
            checkpoint = Checkpoint(format=kind)
            checkpoint.register("random", GlobalRNGState())
            return with_buffer(
                trainer(save_trainer_file=f"saved.{kind}", save_trainer_interval=30, checkpoint=checkpoint)
            )

        saved_and_loaded(record, kind, make, f"saved.{kind}")


@case
def saved_in_rotation(record: Record) -> None:
    def make() -> Trainer:
        return with_buffer(
            trainer(
                checkpoint=Checkpoint(),
                checkpoint_rotation=CheckpointRotation("kept", keep_last=2),
                checkpoint_metadata=lambda made: {"steps": made._optim_count},
                save_trainer_interval=15,
            )
        )

    saved_and_loaded(record, "rotated", make, None)
    record("kept", sorted(path.name for path in Path("kept").iterdir()))


@case
def states(record: Record) -> None:
    made = with_buffer(trainer())
    RewardNormalizer().register(made)
    train(record, "first", made)
    state = made.state_dict()
    record("keys", sorted(state))
    record("counters", dict(state["state"]))
    other = with_buffer(trainer())
    RewardNormalizer().register(other)
    Losses().register(other)
    other.load_state_dict(state)
    record("loaded", dict(other.loss_module.state_dict()))
    record("normalizer", other._modules["reward_normalizer"].state_dict())
    record("buffer", other._modules["replay_buffer"].replay_buffer[:].exclude("collector"))


if __name__ == "__main__":
    run()
