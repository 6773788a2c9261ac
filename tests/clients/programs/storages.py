"""Storages, writers, samplers and checkpointers that `replay_buffers.py` leaves out, and the files they leave."""

import copy
import pickle
from pathlib import Path

import segment_trees  # noqa: F401
import torch
from recording import SEED, Record, case, run, seed
from torchrl.data import (
    CompressedListStorage,
    ConsumingSampler,
    DensifyReward,
    Flat2TED,
    FlatStorageCheckpointer,
    HERReplayBuffer,
    HindsightStrategy,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    OfflineToOnlineReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PromptGroupSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    Sequence,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    StorageEnsemble,
    StreamingSliceSampler,
    TED2Flat,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    WriterEnsemble,
    find_start_stop_traj,
    prefill_replay_buffer,
)
from torchrl.data.replay_buffers import Transition
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler, SchedulerList, StepScheduler
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter
from torchrl.envs import GymEnv, StepCounter, TransformedEnv

from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass


@tensorclass
class Transit:
    observation: torch.Tensor
    reward: torch.Tensor
    words: str
    inner: TensorDict


def steps(count: int, start: int = 0) -> TensorDict:
    """`count` transitions in trajectories of five steps, with versions of a policy."""
    index = torch.arange(start, start + count)
    done = ((index + 1) % 5 == 0).unsqueeze(-1)
    return TensorDict(
        {
            "observation": index.float().unsqueeze(-1) + torch.arange(2) / 10,
            "action": index % 3,
            "policy_version": index // 4,
            "collector": {"traj_ids": index // 5},
            "next": {
                "observation": index.float().unsqueeze(-1) + 1 + torch.arange(2) / 10,
                "reward": index.float().unsqueeze(-1),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        [count],
    )


def rollout(length: int = 30) -> TensorDict:
    """Steps of a cart and its pole, over several episodes, as a collector gives them."""
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.set_seed(SEED)
    torch.manual_seed(SEED)
    data = env.rollout(length, break_when_any_done=False)
    episodes = data["next", "done"].squeeze(-1).cumsum(0)
    data["collector", "traj_ids"] = torch.cat([episodes.new_zeros(1), episodes[:-1]])
    return data


def dumped(record: Record, buffer: ReplayBuffer, other: ReplayBuffer, folder: str = "dumped") -> None:
    """Saves `buffer` in a folder that stays, and loads it."""
    buffer.dumps(folder)
    other.loads(folder)
    record("length", len(other))
    record("loaded", other[:])
    seed()
    record("sampled", other.sample(6))


@case
def files_of_every_storage(record: Record) -> None:
    for name, make in {
        "tensors": lambda: LazyTensorStorage(20),
        "mapped": lambda: LazyMemmapStorage(20),
        "stack": lambda: LazyStackStorage(20),
    }.items():
        buffer = TensorDictReplayBuffer(storage=make(), batch_size=4)
        buffer.extend(steps(12))
        try:
            buffer.dumps(f"{name}/buffer")
        except Exception as error:
            record(f"{name} refused", type(error).__name__)
            continue
        other = TensorDictReplayBuffer(storage=make(), batch_size=4)
        other.loads(f"{name}/buffer")
        record(name, other[:])
        other.extend(steps(12, start=40))
        record(f"{name} extended", other[:])
        print(name, other)
    record("done", torch.ones(1))


@case
def files_of_mapped_storage_in_a_scratch_folder(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir="scratch"), batch_size=4)
    buffer.extend(steps(12))
    record("all", buffer[:])
    loaded = TensorDict.load_memmap("scratch")
    record("loaded", loaded)
    print(loaded)
    record("same memory", bool((buffer.storage._storage["action"] == loaded["action"]).all()))


@case
def mapped_storage_that_exists(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir="scratch"), batch_size=4)
    buffer.extend(steps(6))
    again = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir="scratch", existsok=True), batch_size=4)
    again.extend(steps(8, start=20))
    record("again", again[:])
    refused = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir="scratch", existsok=False))
    try:
        refused.extend(steps(2))
    except RuntimeError:
        record("kept", again[:])


@case
def mapped_storage_of_classes(record: Record) -> None:
    data = Transit(
        observation=torch.arange(12.0).view(6, 2),
        reward=torch.arange(6.0),
        words="all the same",
        inner=TensorDict({"deep": torch.arange(6)}, [6]),
        batch_size=[6],
    )
    for name, storage in {
        "mapped": LazyMemmapStorage(6, scratch_dir="scratch"),
        "tensors": LazyTensorStorage(6),
    }.items():
        buffer = ReplayBuffer(storage=storage, batch_size=3)
        buffer.extend(data)
        sample = buffer.sample()
        record(f"{name} class", type(sample).__name__)
        record(f"{name} observation", sample.observation)
        record(f"{name} inner", sample.inner)
        buffer.dumps(name)
        other = ReplayBuffer(storage=type(storage)(6), batch_size=3)
        other.loads(name)
        record(f"{name} loaded class", type(other[:]).__name__)
        record(f"{name} loaded", other[:].observation)
        record(f"{name} words", other[0].words)


@case
def texts_in_storages(record: Record) -> None:
    data = TensorDict(
        {"text": NonTensorStack(*(NonTensorData(word) for word in ("a", "bc", "def", "g"))), "row": torch.arange(4)},
        [4],
    )
    for name, storage in {
        "tensors": LazyTensorStorage(6),
        "list": ListStorage(6),
        "stack": LazyStackStorage(6),
    }.items():
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=3)
        buffer.extend(data.clone())
        buffer.extend(data[:3].clone())
        torch.manual_seed(SEED)
        sample = buffer.sample()
        record(f"{name} row", sample["row"])
        record(f"{name} text", sample["text"])
        record(f"{name} all", buffer[:]["text"])
        record(f"{name} one", buffer[1]["text"])
        print(name, buffer[:])
        buffer.dumps(name) if name == "tensors" else None


@case
def compressed(record: Record) -> None:
    storage = CompressedListStorage(max_size=20, compression_level=3)
    buffer = ReplayBuffer(storage=storage, batch_size=5)
    buffer.extend(TensorDict({"obs": torch.randn(10, 3, 8), "nested": {"step": torch.arange(10)}}, batch_size=[10]))
    record("sampled", buffer.sample(3))
    buffer.extend(TensorDict({"obs": torch.randn(2, 3, 8), "nested": {"step": torch.arange(2)}}, batch_size=[2]))
    record("length", len(buffer))
    record("one", storage[11])
    state = storage.state_dict()
    record("state", sorted(state))
    other = CompressedListStorage(max_size=20)
    other.load_state_dict(state)
    record("restored", other[3])
    tensors = ReplayBuffer(storage=CompressedListStorage(max_size=20), batch_size=5)
    tensors.extend(torch.arange(6.0).view(3, 2))
    tensors.dumps("compressed")
    loaded = ReplayBuffer(storage=CompressedListStorage(max_size=20), batch_size=5)
    loaded.loads("compressed")
    record("loaded", loaded.storage[2])


@case
def flat_checkpoints(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(30))
    buffer.storage.checkpointer = FlatStorageCheckpointer()
    buffer.extend(rollout())
    other = ReplayBuffer(storage=LazyMemmapStorage(30))
    other.storage.checkpointer = FlatStorageCheckpointer()
    dumped(record, buffer, other)


@case
def flat_checkpoints_of_a_ring(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(40))
    buffer.storage.checkpointer = FlatStorageCheckpointer()
    buffer.extend(rollout(40))
    buffer.extend(rollout(15))
    other = ReplayBuffer(storage=LazyTensorStorage(40))
    other.storage.checkpointer = FlatStorageCheckpointer()
    dumped(record, buffer, other)
    other.extend(rollout(10))
    record("extended", other[:])


@case
def hooks_that_flatten(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(30))
    buffer.register_save_hook(TED2Flat())
    buffer.extend(rollout())
    buffer.dumps("flat")
    record("flat", TensorDict.load("flat/storage"))
    other = ReplayBuffer(storage=LazyMemmapStorage(30))
    other.register_load_hook(Flat2TED())
    other.loads("flat")
    record("loaded", other[:])
    record("the same", bool((buffer[:] == other[:]).all()))


@case
def ends_of_trajectories(record: Record) -> None:
    end = torch.zeros(10, dtype=torch.bool)
    end[2] = end[7] = True
    record("by end", find_start_stop_traj(end=end, at_capacity=True, cursor=4))
    trajectory = torch.tensor([5, 5, 5, 0, 0, 1, 1, 1, 5, 5])
    record("by number", find_start_stop_traj(trajectory=trajectory, at_capacity=True))
    data = TensorDict({"next": {"reward": torch.zeros(10, 1), "done": torch.zeros(10, 1, dtype=torch.bool)}}, [10])
    data["next", "done"][[3, 7]] = True
    data["next", "reward"][3] = 3
    data["next", "reward"][7] = 7
    record("rewards", DensifyReward()(data.unsqueeze(0)))


@case
def samples_that_are_consumed(record: Record) -> None:
    buffer = ReplayBuffer(storage=ListStorage(10), sampler=ConsumingSampler(), batch_size=3)
    buffer.extend([torch.tensor(number) for number in range(4)])
    record("sample", buffer.sample())
    record("left", len(buffer))
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=ConsumingSampler(max_sample_count=2), batch_size=4
    )
    other.extend(steps(6))
    for round_ in range(2):
        record(f"round {round_}", other.sample())
        record(f"left {round_}", len(other))


@case
def samples_by_age(record: Record) -> None:
    sampler = StalenessAwareSampler(max_staleness=3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=6)
    buffer.extend(steps(24))
    for version in (5, 6):
        sampler.consumer_version = version
        record(f"version {version}", buffer.sample())
    record("state", sampler.state_dict())


@case
def slices_of_a_stream(record: Record) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), sampler=StreamingSliceSampler(slice_len=3), batch_size=6
    )
    done = torch.zeros(6, 1, dtype=torch.bool)
    buffer.extend(TensorDict({"value": torch.arange(6), ("next", "done"): done}, batch_size=[6]))
    record("sample", buffer.sample())
    buffer.extend(TensorDict({"value": torch.arange(6, 12), ("next", "done"): done}, batch_size=[6]))
    record("later", buffer.sample())


@case
def groups_of_prompts(record: Record) -> None:
    data = TensorDict({"prompt": torch.arange(12) // 4, ("next", "reward"): torch.arange(12.0)}, batch_size=[12])
    for strategy in ("random", "recency", "reward", "variance"):
        sampler = PromptGroupSampler(num_groups=2, group_key="prompt", strategy=strategy)
        buffer = ReplayBuffer(storage=LazyStackStorage(100), sampler=sampler, batch_size=8)
        buffer.extend(data.clone())
        record(strategy, buffer.sample())
    texts = TensorDict({"query": NonTensorStack(*(["one", "two", "one", "two"])), "row": torch.arange(4)}, [4])
    buffer = ReplayBuffer(storage=LazyStackStorage(10), sampler=PromptGroupSampler(num_groups=1), batch_size=2)
    buffer.extend(texts)
    record("texts", buffer.sample()["row"])


@case
def sequences(record: Record) -> None:
    for boundary in ("pad", "stop", "include_reset"):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(10), batch_size=3, sample_unit=Sequence(length=3, episode_boundary=boundary)
        )
        buffer.extend(steps(10))
        sample, info = buffer.sample(return_info=True)
        record(boundary, sample)
        record(f"{boundary} info", {str(key): value for key, value in info.items()})
    index, info = Sequence(length=2, burn_in=1, bootstrap=1).expand(torch.tensor([5]), {}, buffer.storage)
    record("expanded", index)
    record("expanded info", {str(key): value for key, value in info.items()})
    single = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, sample_unit=Transition())
    single.extend(torch.arange(10))
    record("transitions", single.sample())


@case
def priorities_of_a_list(record: Record) -> None:
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=ListStorage(10), collate_fn=torch.tensor)
    buffer.extend(range(10))
    sample, info = buffer.sample(5, return_info=True)
    record("sample", sample)
    record("info", info)
    buffer.update_priority(info["index"], torch.ones(5) * 5)
    sample, info = buffer.sample(5, return_info=True)
    record("later", sample)
    record("later info", info)


@case
def priorities_saved(record: Record) -> None:
    def make() -> TensorDictPrioritizedReplayBuffer:
        return TensorDictPrioritizedReplayBuffer(
            alpha=0.7, beta=0.9, storage=LazyMemmapStorage(20), priority_key="td_error", batch_size=6
        )

    buffer = make()
    data = steps(15)
    data["td_error"] = torch.linspace(0.1, 3.0, 15)
    buffer.extend(data)
    sample = buffer.sample()
    sample["td_error"] = torch.linspace(1.0, 2.0, 6)
    buffer.update_tensordict_priority(sample)
    dumped(record, buffer, make())
    other = make()
    other.load_state_dict(buffer.state_dict())
    seed()
    record("restored", other.sample())


@case
def generations_of_writers(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    index = buffer.extend(torch.arange(4))
    record("first", buffer.writer.generations_of(index))
    buffer.extend(torch.arange(4, 6))
    record("second", buffer.writer.generations_of(index))
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=TensorDictRoundRobinWriter(), batch_size=3)
    record("written", other.extend(steps(8)))
    record("state", other.writer.state_dict())
    other.writer.dumps(Path("writer"))
    record("sample", other.sample())


@case
def highest_saved(record: Record) -> None:
    def make() -> TensorDictReplayBuffer:
        writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
        return TensorDictReplayBuffer(storage=LazyMemmapStorage(5), writer=writer, batch_size=4)

    buffer = make()
    buffer.extend(steps(12)[torch.randperm(12)])
    dumped(record, buffer, make())


@case
def goals_in_hindsight(record: Record) -> None:
    def near(data: TensorDict) -> torch.Tensor:
        return ((data["achieved_goal"] - data["desired_goal"]).norm(dim=-1, keepdim=True) < 1.5).float()

    for strategy in HindsightStrategy:
        buffer = HERReplayBuffer(reward_fn=near, storage=LazyMemmapStorage(50), batch_size=8, strategy=strategy)
        for position in range(12):
            side = {"desired_goal": torch.zeros(3), "observation": torch.full((4,), float(position))}
            buffer.add(
                TensorDict(
                    {
                        **side,
                        "achieved_goal": torch.full((3,), float(position)),
                        "next": {
                            **side,
                            "achieved_goal": torch.full((3,), position + 1.0),
                            "reward": torch.zeros(1),
                            "done": torch.tensor([position % 4 == 3]),
                        },
                    },
                    batch_size=[],
                )
            )
        record(str(strategy), buffer.sample())


@case
def offline_first(record: Record) -> None:
    offline = ReplayBuffer(storage=LazyTensorStorage(40))
    offline.extend(steps(40))
    buffer = OfflineToOnlineReplayBuffer(
        offline_dataset=offline, online_capacity=20, offline_fraction=0.5, batch_size=8
    )
    buffer.extend(steps(10, start=100))
    record("sampled", buffer.sample())
    record("length", len(buffer))
    online = ReplayBuffer(storage=LazyTensorStorage(50))
    prefill_replay_buffer(online, offline, n_samples=12)
    record("filled", online[:])


@case
def ensembles_of_parts(record: Record) -> None:
    parts = (LazyMemmapStorage(8), LazyTensorStorage(8))
    buffer = ReplayBufferEnsemble(
        *(TensorDictReplayBuffer(storage=storage, batch_size=6) for storage in parts), p=[0.3, 0.7], batch_size=6
    )
    kinds = {"storage": StorageEnsemble, "writer": WriterEnsemble, "sampler": SamplerEnsemble}
    record("kinds", [isinstance(getattr(buffer, name), kind) for name, kind in kinds.items()])
    for position in range(2):
        buffer[position].extend(steps(8, start=10 * position))
    sample = buffer.sample()
    record("sampled", sample)
    record("first", buffer[0, :4])
    record("both", buffer[:, 1:3])
    print(buffer[:, :])
    buffer.dumps("ensemble")
    buffer.loads("ensemble")
    record("loaded", buffer[1, :])


@case
def parameters_on_a_schedule(record: Record) -> None:
    sampler = PrioritizedSampler(20, alpha=0.7, beta=0.6)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)
    buffer.extend(steps(10))
    alpha = LinearScheduler(buffer, param_name="alpha", final_value=0.0, num_steps=4)
    beta = StepScheduler(buffer, param_name="beta", gamma=0.1, n_steps=1, max_value=1.0, mode="additive")
    both = SchedulerList(schedulers=(alpha, beta))
    for position in range(4):
        record(f"sample {position}", buffer.sample())
        both.step()
        record(f"values {position}", [float(buffer.sampler.alpha), float(buffer.sampler.beta)])
    record("state", {name: repr(value) for name, value in alpha.state_dict().items()})
    LambdaScheduler(buffer, param_name="alpha", lambda_fn=lambda step: 0.5**step).step()
    record("lambda", float(buffer.sampler.alpha))


@case
def buffers_as_iterables(record: Record) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=5
    )
    buffer.extend(steps(20))
    for position, batch in enumerate(buffer):
        record(f"batch {position}", batch)
    unshuffled = SliceSamplerWithoutReplacement(slice_len=5, traj_key=("collector", "traj_ids"), shuffle=False)
    by_slice = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=unshuffled, batch_size=10)
    by_slice.extend(steps(20))
    for position, batch in enumerate(by_slice):
        record(f"slices {position}", batch)
        if position == 1:
            break


@case
def buffers_copied(record: Record) -> None:
    for name, storage in {
        "tensors": LazyTensorStorage(20),
        "stack": LazyStackStorage(20),
    }.items():
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(steps(12))
        other = pickle.loads(pickle.dumps(buffer))
        record(f"{name} pickled", other[:])
        other.extend(steps(2, start=70))
        record(f"{name} written", other[-2:] if name != "stack" else other[12:14])
        record(f"{name} untouched", len(buffer))
        print(name, type(other.storage).__name__, len(other))


@case
def storages_by_hand(record: Record) -> None:
    data = steps(6)
    storage = TensorStorage(data.clone())
    storage.set(torch.tensor([1, 3]), steps(2, start=50))
    storage.set(0, steps(1, start=60)[0])
    record("tensor", storage.get(slice(None)))
    record("list", storage.get([1, 2]))
    record("range", storage.get(range(2, 4)))
    record("mask", storage.get(data["action"] == 0))
    mapped = LazyMemmapStorage(8)
    mapped.set(range(6), data)
    mapped.set(7, data[2])
    record("mapped", mapped.get(slice(0, 8)))
    record("class", type(mapped.get(0)["observation"]).__name__)
    record("length", len(mapped))
    lists = ListStorage(4)
    lists.set([0, 1], [data[0], data[1]])
    record("in a list", lists.get([1, 0]))
    record("contains", [0 in lists, 3 in lists])
    record("state", mapped.state_dict()["_storage"])
    other = LazyMemmapStorage(8)
    other.load_state_dict(mapped.state_dict())
    record("restored", other.get(slice(0, 6)))
    stack = LazyStackStorage(8)
    stack.set(range(6), data)
    record("stacked", type(stack.get(range(3))).__name__)
    record("stack", stack.get(range(3)))


@case
def uneven_rows(record: Record) -> None:
    rows = lazy_stack(
        [TensorDict({"tokens": torch.arange(length), "words": NonTensorData("x" * length)}, []) for length in (1, 4, 2)]
    )
    for name, storage in {"list": ListStorage(8), "stack": LazyStackStorage(8)}.items():
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=3, collate_fn=lambda rows: lazy_stack(list(rows)))
        buffer.extend(rows.clone())
        sample = buffer.sample()
        record(f"{name} class", type(sample).__name__)
        for position, row in enumerate(sample.unbind(0)):
            record(f"{name} {position}", row["tokens"])
            record(f"{name} {position} words", row["words"])
        print(name, sample)
        padded = sample.get("tokens", as_padded_tensor=True)
        record(f"{name} padded", padded)
        nested = sample.get("tokens", as_nested_tensor=True)
        record(f"{name} nested", list(nested.unbind()))


@case
def with_two_dims(record: Record) -> None:
    data = steps(20).view(4, 5)
    for name, storage in {
        "tensors": LazyTensorStorage(20, ndim=2),
        "mapped": LazyMemmapStorage(20, ndim=2),
    }.items():
        sampler = SliceSampler(slice_len=2, end_key=("next", "done"), strict_length=False)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=6, dim_extend=0)
        buffer.extend(data)
        torch.manual_seed(SEED)
        sample, info = buffer.sample(return_info=True)
        record(name, sample)
        record(f"{name} info", {str(key): value for key, value in info.items()})


@case
def remote_buffer_in_this_process(record: Record) -> None:
    buffer = RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    buffer.extend(steps(8))
    record("sample", buffer.sample())


@case
def refused_writes(record: Record) -> None:
    writer = ImmutableDatasetWriter()
    buffer = TensorDictReplayBuffer(storage=TensorStorage(steps(6)), writer=writer, batch_size=3)
    record("sample", buffer.sample())
    record.error("refused", lambda: buffer.add(steps(1)[0]))
    empty = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=3)
    record.error("empty", empty.sample)
    small = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=3)
    record.error("too many", lambda: small.extend(steps(9)))
    record("kept", small[:])
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(6), batch_size=3)
    other.extend(steps(2))
    record.error("another key", lambda: other.extend(TensorDict({"another": torch.ones(2)}, [2])))
    try:
        other.extend(TensorDict({"observation": torch.ones(2, 5)}, [2]))
    except RuntimeError:
        record("of another shape", "refused")
    record("after", other[:2])


@case
def copies_of_containers_in_buffers(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    data = steps(6)
    buffer.extend(data)
    data.zero_()
    record("not shared", buffer[:])
    view = buffer[:3]
    view["observation"].fill_(7)
    record("view", buffer[:])
    sample = buffer.sample()
    sample.set_("action", torch.full((4,), 9))
    record("sample is a copy", buffer[:]["action"])
    one = buffer[2]
    one.set_("action", torch.tensor(5))
    record("one is a view", buffer[:]["action"])
    record("copy", copy.deepcopy(buffer[:]))


if __name__ == "__main__":
    run()
