"""Collectors: in this process, in two processes, asynchronous, by frames and by trajectory, into a buffer."""

import multiprocessing

import torch
from recording import SEED, Record, case, run
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from torchrl.envs.utils import RandomPolicy
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv, NestedCountingEnv

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule


def cart_pole() -> TransformedEnv:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=20))


def seeded(env: EnvBase) -> EnvBase:
    """`env`, seeded before a collector resets it for the first time."""
    env.set_seed(SEED)
    return env


def counting() -> CountingEnv:
    return CountingEnv(max_steps=4)


def leaning(observation: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot((observation[..., 2] > 0).long(), 2)


def upright() -> TensorDictModule:
    return TensorDictModule(leaning, in_keys=["observation"], out_keys=["action"])


def one(observation: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(observation)


def counter() -> TensorDictModule:
    return TensorDictModule(one, in_keys=["observation"], out_keys=["action"])


def linear() -> TensorDictModule:
    return TensorDictModule(nn.Linear(7, 7), in_keys=["observation"], out_keys=["action"])


# Which process numbers its trajectory first is not determined.
NUMBERS = ("collector", "traj_ids")


def everything(record: Record, collector: BaseCollector, leave_out: tuple[NestedKey, ...] = ()) -> None:
    """Records each batch, and closes the collector whatever happens."""
    try:
        for position, batch in enumerate(collector):
            record(f"batch {position}", batch.exclude(*leave_out))
    finally:
        collector.shutdown()


@case
def in_this_process(record: Record) -> None:
    everything(record, Collector(seeded(cart_pole()), upright(), frames_per_batch=32, total_frames=96))


@case
def of_several_environments(record: Record) -> None:
    env = seeded(SerialEnv(2, cart_pole))
    everything(record, Collector(env, upright(), frames_per_batch=32, total_frames=64))


@case
def at_random(record: Record) -> None:
    env = ContinuousActionVecMockEnv()
    everything(record, Collector(env, RandomPolicy(env.action_spec), frames_per_batch=10, total_frames=30))


@case
def random_frames_first(record: Record) -> None:
    env = ContinuousActionVecMockEnv()
    everything(record, Collector(env, linear(), frames_per_batch=8, total_frames=24, init_random_frames=8))


@case
def by_trajectory(record: Record) -> None:
    env = seeded(cart_pole())
    everything(record, Collector(env, upright(), frames_per_batch=30, total_frames=60, split_trajs=True))


@case
def started_anew_each_time(record: Record) -> None:
    options = {"reset_at_each_iter": True, "max_frames_per_traj": 3, "frames_per_batch": 10, "total_frames": 30}
    everything(record, Collector(counting, counter(), **options))


@case
def with_what_is_made_of_a_batch(record: Record) -> None:
    def postproc(batch: TensorDictBase) -> TensorDictBase:
        return batch.select("observation", ("next", "reward")).set("twice", batch["observation"] * 2)

    everything(record, Collector(counting, counter(), frames_per_batch=10, total_frames=20, postproc=postproc))


@case
def nested_keys(record: Record) -> None:
    env = NestedCountingEnv(max_steps=4)
    policy = TensorDictModule(lambda: env.action_spec.one(), in_keys=[], out_keys=[env.action_key])
    everything(record, Collector(env, policy, frames_per_batch=10, total_frames=20))


@case
def into_a_buffer(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=5)
    collector = Collector(counting, counter(), frames_per_batch=10, total_frames=40, replay_buffer=buffer)
    for _ in collector:
        pass
    collector.shutdown()
    record("buffer", buffer[:])
    record("sample", buffer.sample())


@case
def weights_of_the_policy(record: Record) -> None:
    env, policy = ContinuousActionVecMockEnv(), linear()
    collector = Collector(env, policy, frames_per_batch=6, total_frames=18)
    for position, batch in enumerate(collector):
        record(f"batch {position}", batch)
        with torch.no_grad():
            policy.module.weight.mul_(0.5)
        collector.update_policy_weights_()
    record("state", {name: repr(value) for name, value in collector.state_dict().items() if name == "iter"})
    collector.shutdown()


@case
def in_two_processes(record: Record) -> None:
    collector = MultiSyncCollector(
        [cart_pole, cart_pole], upright(), frames_per_batch=40, total_frames=80, cat_results="stack"
    )
    collector.set_seed(SEED)
    everything(record, collector, leave_out=(NUMBERS,))


@case
def in_two_processes_with_new_weights(record: Record) -> None:
    policy = linear()
    envs = [ContinuousActionVecMockEnv, ContinuousActionVecMockEnv]
    multiprocessing.set_start_method("fork", force=True)
    collector = MultiSyncCollector(envs, policy, frames_per_batch=20, total_frames=60, cat_results=0)
    collector.set_seed(SEED)
    try:
        for position, batch in enumerate(collector):
            record(f"batch {position}", batch.exclude(NUMBERS))
            with torch.no_grad():
                policy.module.weight.mul_(0.5)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()


@case
def asynchronous(record: Record) -> None:
    multiprocessing.set_start_method("fork", force=True)
    collector = MultiAsyncCollector([counting, counting], counter(), frames_per_batch=10, total_frames=40)
    batches = []
    try:
        batches.extend(batch.select("observation", "action", "done", "next") for batch in collector)
    finally:
        collector.shutdown()
    record("count", len(batches))
    record("sums", torch.stack([batch["observation"].sum() for batch in batches]).sort().values)


@case
def split_and_padded(record: Record) -> None:
    env = TransformedEnv(CountingEnv(max_steps=4), RewardSum())
    rollout = env.rollout(14, counter(), break_when_any_done=False)
    record("split", split_trajectories(rollout, done_key="done"))
    nested = split_trajectories(rollout, done_key="done", as_nested=True)
    record("lengths", [part["observation"] for part in nested.unbind(0)])


if __name__ == "__main__":
    run()
