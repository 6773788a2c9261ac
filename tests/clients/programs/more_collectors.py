"""More collectors: one other process, one server for all policies, evaluation, profiles, updates of weights."""

import multiprocessing
from typing import Any

import torch
from collectors import NUMBERS, counter, counting, linear
from recording import SEED, Record, case, run, slow_case
from torchrl.collectors import (
    AsyncBatchedCollector,
    AsyncCollector,
    Collector,
    Evaluator,
    MultiAsyncCollector,
    MultiProcessedWeightUpdater,
    ProfileConfig,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import RewardSum, TransformedEnv
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule


def make_summed_env() -> TransformedEnv:
    return TransformedEnv(counting(), RewardSum())


def keep_metrics(metrics: Any) -> dict[str, Any]:
    """Leaves out how quick the evaluation was."""
    return {key: metrics[key] for key in sorted(metrics.keys()) if "fps" not in key and "time" not in key}


@case
def in_one_other_process(record: Record) -> None:
    multiprocessing.set_start_method("fork", force=True)
    for name, make in {
        "asynchronous": lambda **options: AsyncCollector(counting, counter(), **options),
        "of a list": lambda **options: MultiAsyncCollector([counting], counter(), **options),
    }.items():
        collector = make(frames_per_batch=10, total_frames=30)
        try:
            for position, batch in enumerate(collector):
                record(f"{name} {position}", batch.exclude(NUMBERS))
        finally:
            collector.shutdown()


@case
def weights_for_one_other_process(record: Record) -> None:
    multiprocessing.set_start_method("fork", force=True)
    policy = linear()
    collector = AsyncCollector(ContinuousActionVecMockEnv, policy, frames_per_batch=8, total_frames=24)
    collector.set_seed(SEED)
    try:
        for position, batch in enumerate(collector):
            record(f"shape {position}", [batch["action"].shape, batch["observation"].dtype])
            with torch.no_grad():
                policy.module.weight.mul_(0.5)
            collector.update_policy_weights_()
        state = collector.state_dict()
        record("state", sorted(state))
        record("of the worker", sorted(state["worker0"]))
    finally:
        collector.shutdown()
    record("weights", dict(policy.state_dict()))


@case
def one_server_of_all_policies(record: Record) -> None:
    collector = AsyncBatchedCollector(
        [counting], policy=counter(), frames_per_batch=6, total_frames=18, backend="threading"
    )
    try:
        for position, batch in enumerate(collector):
            record(f"batch {position}", [type(batch).__name__, batch.to_tensordict()])
    finally:
        collector.shutdown()


@case
def trajectories_of_several_environments(record: Record) -> None:
    collector = AsyncBatchedCollector(
        [counting, counting],
        policy=counter(),
        frames_per_batch=10,
        total_frames=40,
        backend="threading",
        yield_completed_trajectories=True,
    )
    lengths, sums = [], []
    try:
        for batch in collector:
            lengths.append(batch.shape[0])
            sums.append(batch["observation"].sum())
    finally:
        collector.shutdown()
    record("lengths", sorted(set(lengths)))
    record("sums", torch.stack(sums).unique())


@case
def into_a_buffer_from_a_server(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(40), batch_size=4)
    hooked = []
    collector = AsyncBatchedCollector(
        [counting],
        policy_factory=counter,
        frames_per_batch=5,
        total_frames=20,
        backend="threading",
        replay_buffer=buffer,
        post_collect_hook=lambda batch: hooked.append(batch.numel()),
        postproc=lambda batch: batch.set("twice", batch["observation"] * 2),
    )
    try:
        record("yielded", [batch is None for batch in collector])
    finally:
        collector.shutdown()
    record("hooked", hooked)
    record("buffer", buffer[:])


@case
def evaluated_in_a_thread(record: Record) -> None:
    results = []
    evaluator = Evaluator(
        make_summed_env(),
        counter(),
        num_trajectories=3,
        max_steps=20,
        metrics_fn=lambda batch: {"highest": batch["next", "observation"].max().item()},
        on_result=lambda result: results.append(result.clone()),
        log_prefix="test",
    )
    try:
        record("at once", keep_metrics(evaluator.evaluate(step=1)))
        record("accepted", evaluator.trigger_eval(step=2))
        record("waited", keep_metrics(evaluator.wait(timeout=60)))
        record("pending", evaluator.pending)
        record("results", [keep_metrics(result) for result in results])
    finally:
        evaluator.shutdown()


@case
def evaluated_with_new_weights(record: Record) -> None:
    trained = linear()
    evaluator = Evaluator(
        ContinuousActionVecMockEnv(),
        linear(),
        num_trajectories=2,
        max_steps=4,
        metrics_fn=lambda batch: {"action": batch["action"].sum().item()},
    )
    try:
        first = evaluator.evaluate(weights=trained)
        record("by policy", sorted(keep_metrics(first)))
        record("by container", sorted(keep_metrics(evaluator.evaluate(weights=TensorDict.from_module(trained).data))))
        weights = evaluator.extract_weights(trained)
        record("extracted", weights)
        record("locked", weights.is_locked)
        state = evaluator.state_dict()
        record("state", sorted(state))
        evaluator.load_state_dict(state)
    finally:
        evaluator.shutdown()


@slow_case
def evaluated_in_a_process(record: Record) -> None:
    evaluator = Evaluator(make_summed_env, policy_factory=counter, num_trajectories=2, max_steps=20, backend="process")
    try:
        record("at once", torch.tensor(evaluator.evaluate(step=1)["eval/reward"]))
        record("accepted", evaluator.trigger_eval(step=2))
        record("waited", keep_metrics(evaluator.wait(timeout=200)))
    finally:
        evaluator.shutdown()


@case
def profiled(record: Record) -> None:
    config = ProfileConfig(num_rollouts=4, save_path="trace_{worker_idx}.json", activities=["cpu"], with_stack=False)
    record("paths", [str(config.get_save_path(0)), str(config.get_save_path(2)), str(ProfileConfig().get_save_path(1))])
    record("activities", [str(activity) for activity in config.get_activities()])
    record.error("too few", lambda: ProfileConfig(num_rollouts=1))
    collector = Collector(counting, counter(), frames_per_batch=5, total_frames=20)
    collector.enable_profile(num_rollouts=3, save_path="trace.json", activities=["cpu"], with_stack=False)
    record("kept", type(collector.profile_config).__name__)
    try:
        for position, batch in enumerate(collector):
            record(f"batch {position}", batch)
    finally:
        collector.shutdown()


class HalvedWeights(WeightUpdaterBase):
    """Pushes half of the weights that the server has."""

    def __init__(self, server: TensorDictModule, policy: TensorDictModule) -> None:
        self.server, self.weights = server, TensorDict.from_module(policy)

    def _get_server_weights(self) -> TensorDictBase:
        return TensorDict.from_module(self.server).data * 0.5

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: TensorDictBase) -> None:
        self.weights.data.update_(server_weights)


@case
def updaters_of_weights(record: Record) -> None:
    server = linear()
    weights = TensorDict.from_module(server).data
    policy = linear()
    plain = VanillaWeightUpdater.from_policy(policy)
    with torch.no_grad():
        plain.push_weights(weights)
    record("plain", dict(policy.state_dict()))
    got = linear()
    getter = VanillaWeightUpdater(weight_getter=lambda: weights * 2, policy_weights=TensorDict.from_module(got).data)
    getter()
    record("of a getter", dict(got.state_dict()))
    several = {torch.device("cpu"): TensorDict.from_module(linear()), torch.device("cpu:1"): weights.clone().zero_()}
    updater = MultiProcessedWeightUpdater(
        get_server_weights=lambda: TensorDict.from_module(server), policy_weights=several
    )
    updater.push_weights(worker_ids=torch.device("cpu"))
    record("of one worker", [copy.data for copy in several.values()])
    updater()
    record("of all workers", [copy.data for copy in several.values()])
    remote = RemoteModuleWeightUpdater()
    remote(weights)
    record.error("remote without weights", remote.push_weights)
    halved, calls = HalvedWeights(server, policy), []
    halved.register_post_hook(lambda: calls.append("pushed"))
    halved()
    record("halved", dict(policy.state_dict()))
    halved(server)
    record("given", dict(policy.state_dict()))
    record("calls", calls)
    record.error("of a number", lambda: halved(3))


@case
def updaters_of_a_collector(record: Record) -> None:
    for name, make in {
        "plain": lambda server, policy: VanillaWeightUpdater(
            weight_getter=lambda: TensorDict.from_module(server).data,
            policy_weights=TensorDict.from_module(policy).data,
        ),
        "halved": HalvedWeights,
    }.items():
        server, policy = linear(), linear()
        env = ContinuousActionVecMockEnv()
        updater = make(server, policy)
        collector = Collector(env, policy, frames_per_batch=6, total_frames=18, weight_updater=updater)
        try:
            for position, batch in enumerate(collector):
                record(f"{name} {position}", batch)
                collector.update_policy_weights_()
        finally:
            collector.shutdown()
        record(f"{name} weights", dict(policy.state_dict()))


if __name__ == "__main__":
    run()
