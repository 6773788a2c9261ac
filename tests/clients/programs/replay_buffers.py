"""Replay buffers of every storage, sampler and writer: written, sampled, saved and loaded."""

import tempfile

import segment_trees  # noqa: F401
import torch
from recording import Record, case, run
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.envs.transforms import RenameTransform, RewardScaling, ToTensorImage

from tensordict import TensorDict, tensorclass


@tensorclass
class Experience:
    observation: torch.Tensor
    reward: torch.Tensor


def steps(count: int, start: int = 0) -> TensorDict:
    """`count` transitions whose entries say where they come from, in trajectories of seven steps."""
    index = torch.arange(start, start + count)
    done = ((index + 1) % 7 == 0).unsqueeze(-1)
    return TensorDict(
        {
            "observation": index.float().unsqueeze(-1) + torch.arange(3) / 10,
            "action": index % 4,
            "episode": index // 7,
            "next": {"reward": index.float().unsqueeze(-1), "done": done, "terminated": done, "truncated": done},
        },
        [count],
    )


def write_and_sample(record: Record, buffer: ReplayBuffer) -> None:
    record("written", buffer.extend(steps(20)))
    record("sampled", buffer.sample(8))
    record("wrapped", buffer.extend(steps(20, start=20)))
    record("length", len(buffer))
    record("one", buffer[3])
    record("slice", buffer[2:9:3])
    record("list", buffer[[0, 5, 5]])
    if isinstance(buffer.storage, TensorStorage):
        record("mask", buffer[torch.arange(len(buffer)) % 9 == 0])
    record("all", buffer[:])
    sample, info = buffer.sample(6, return_info=True)
    record("sample", sample)
    record("info", info)
    buffer.empty()
    record("emptied", len(buffer))


def save_and_load(record: Record, buffer: ReplayBuffer, other: ReplayBuffer) -> None:
    buffer.extend(steps(20))
    buffer.sample(8)
    with tempfile.TemporaryDirectory() as folder:
        buffer.dumps(folder)
        other.loads(folder)
        record("loaded", other[:])
        other.extend(steps(5, start=50))
        record("extended", other[:])
        record("sampled", other.sample(8))


def state_and_back(record: Record, buffer: ReplayBuffer, other: ReplayBuffer) -> None:
    buffer.extend(steps(20))
    with tempfile.TemporaryFile() as file:
        torch.save(buffer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=False))
    record("restored", other[:])
    record("sampled", other.sample(8))


@case
def list_storage(record: Record) -> None:
    write_and_sample(record, ReplayBuffer(storage=ListStorage(30), collate_fn=torch.stack, batch_size=4))


@case
def list_storage_state(record: Record) -> None:
    state_and_back(record, *(ReplayBuffer(storage=ListStorage(30), collate_fn=torch.stack) for _ in range(2)))


@case
def tensor_storage(record: Record) -> None:
    write_and_sample(record, TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4))


@case
def tensor_storage_saved(record: Record) -> None:
    save_and_load(record, *(TensorDictReplayBuffer(storage=LazyTensorStorage(30)) for _ in range(2)))


@case
def tensor_storage_state(record: Record) -> None:
    state_and_back(record, *(TensorDictReplayBuffer(storage=LazyTensorStorage(30)) for _ in range(2)))


@case
def memory_mapped_storage(record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_and_sample(
            record, TensorDictReplayBuffer(storage=LazyMemmapStorage(30, scratch_dir=folder), batch_size=4)
        )


@case
def memory_mapped_storage_saved(record: Record) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        storages = (LazyMemmapStorage(30, scratch_dir=folder) for folder in (one, two))
        save_and_load(record, *(TensorDictReplayBuffer(storage=storage) for storage in storages))


@case
def memory_mapped_storage_state(record: Record) -> None:
    state_and_back(record, *(TensorDictReplayBuffer(storage=LazyMemmapStorage(30)) for _ in range(2)))


@case
def lazy_stack_storage(record: Record) -> None:
    write_and_sample(record, TensorDictReplayBuffer(storage=LazyStackStorage(30), batch_size=4))


@case
def lazy_stack_storage_state(record: Record) -> None:
    state_and_back(record, *(TensorDictReplayBuffer(storage=LazyStackStorage(30)) for _ in range(2)))


@case
def lazy_stack_storage_of_uneven_lengths(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyStackStorage(10), batch_size=3)
    for length in (2, 5, 3):
        buffer.add(TensorDict({"tokens": torch.arange(length), "score": torch.tensor(float(length))}, []))
    sample = buffer.sample()
    record("scores", sample["score"])
    record("tokens", [member["tokens"] for member in sample.unbind(0)])


@case
def storage_with_two_dims(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(24, ndim=2), batch_size=5, dim_extend=0)
    data = TensorDict({"value": torch.arange(60.0).view(15, 4)}, [15, 4])
    buffer.extend(data)
    record("sampled", buffer.sample())
    record("all", buffer[:])


@case
def tensors_without_a_container(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(torch.arange(24.0).view(12, 2))
    record("sampled", buffer.sample())


@case
def pytrees_as_entries(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=4)
    buffer.extend({"pair": (torch.arange(6.0), torch.ones(6, 2)), "nested": {"value": torch.arange(6)}})
    record("sampled", buffer.sample())


@case
def tensorclasses_as_entries(record: Record) -> None:
    for name, storage in (("tensor", LazyTensorStorage(10)), ("memmap", LazyMemmapStorage(10))):
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        rows = torch.arange(12.0)
        buffer.extend(Experience(observation=rows.view(12, 1), reward=rows, batch_size=[12]))
        sample = buffer.sample()
        record(f"{name} keeps its class", type(sample).__name__)
        record(name, sample)
        record(f"{name} field", sample.reward + 1)


@case
def texts_as_entries(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=ListStorage(10), batch_size=3, collate_fn=torch.stack)
    for position, text in enumerate("abcdef"):
        buffer.add(TensorDict({"text": text, "position": torch.tensor(position)}, []))
    sample = buffer.sample()
    record("position", sample["position"])
    record("text", sample["text"])


@case
def sampler_with_replacement(record: Record) -> None:
    write_and_sample(record, TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=RandomSampler()))


@case
def sampler_without_replacement(record: Record) -> None:
    sampler = SamplerWithoutReplacement(drop_last=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=8)
    buffer.extend(steps(20))
    for epoch in range(2):
        for position, sample in enumerate(buffer):
            record(f"{epoch}.{position}", sample)


@case
def sampler_without_replacement_saved(record: Record) -> None:
    def buffer() -> ReplayBuffer:
        sampler = SamplerWithoutReplacement()
        return TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=4)

    save_and_load(record, buffer(), buffer())


@case
def prioritized_sampler(record: Record) -> None:
    sampler = PrioritizedSampler(30, alpha=0.7, beta=0.9)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=6)
    record("written", buffer.extend(steps(20)))
    buffer.update_priority(torch.arange(20), torch.linspace(0.1, 3.0, 20))
    for repetition in range(3):
        sample, info = buffer.sample(return_info=True)
        record(f"sample.{repetition}", sample)
        record(f"info.{repetition}", info)
        buffer.update_priority(sample["index"], sample["next", "reward"].squeeze(-1) + 0.5)
    with tempfile.TemporaryDirectory() as folder:
        buffer.dumps(folder)
        buffer.loads(folder)
        record("loaded", buffer.sample())


@case
def prioritized_buffer(record: Record) -> None:
    storage = LazyTensorStorage(30)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=storage, priority_key="error", batch_size=6)
    data = steps(20)
    data["error"] = torch.linspace(0.1, 2.0, 20)
    buffer.extend(data)
    sample = buffer.sample()
    record("sample", sample)
    sample["error"] = torch.linspace(5.0, 9.0, 6)
    buffer.update_tensordict_priority(sample)
    record("after the update", buffer.sample())


@case
def slices(record: Record) -> None:
    for name, options in {
        "by end": {"num_slices": 4, "end_key": ("next", "done"), "strict_length": False},
        "by trajectory": {"slice_len": 3, "traj_key": "episode"},
        "cached": {"num_slices": 4, "traj_key": "episode", "cache_values": True},
    }.items():
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SliceSampler(**options), batch_size=12)
        buffer.extend(steps(28))
        sample, info = buffer.sample(return_info=True)
        record(name, sample)
        record(f"{name} info", {str(key): value for key, value in info.items()})


@case
def slices_without_replacement(record: Record) -> None:
    sampler = SliceSamplerWithoutReplacement(num_slices=2, traj_key="episode")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=6)
    buffer.extend(steps(28))
    for repetition in range(3):
        record(str(repetition), buffer.sample())


@case
def slices_by_priority(record: Record) -> None:
    sampler = PrioritizedSliceSampler(40, alpha=0.7, beta=0.9, num_slices=3, traj_key="episode")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler, batch_size=9)
    buffer.extend(steps(28))
    buffer.update_priority(torch.arange(28), torch.linspace(0.1, 3.0, 28))
    for repetition in range(3):
        record(str(repetition), buffer.sample())


@case
def slices_of_a_lazy_stack(record: Record) -> None:
    sampler = SliceSampler(num_slices=2, traj_key="episode")
    buffer = TensorDictReplayBuffer(storage=LazyStackStorage(40), sampler=sampler, batch_size=6)
    buffer.extend(steps(28))
    record("sampled", buffer.sample())


@case
def writer_of_the_highest(record: Record) -> None:
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=writer, batch_size=4)
    data = steps(20)[torch.randperm(20)]
    buffer.extend(data[:10])
    for row in data[10:]:
        buffer.add(row)
    record("kept", buffer[:])


@case
def writer_that_refuses(record: Record) -> None:
    writer = ImmutableDatasetWriter()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=writer, batch_size=4)
    try:
        buffer.extend(steps(3))
    except RuntimeError as error:
        record("refused", str(error))
    record("length", torch.tensor(len(buffer)))


@case
def rewritten_entries(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4)
    buffer.extend(steps(20))
    buffer[2:5] = steps(3, start=100)
    buffer.storage[7] = steps(1, start=200)[0]
    record("all", buffer[:])


@case
def transforms_of_a_buffer(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.append_transform(RewardScaling(loc=1.0, scale=2.0, in_keys=[("next", "reward")]))
    buffer.append_transform(RenameTransform(in_keys=["action"], out_keys=["choice"]))
    buffer.append_transform(ToTensorImage(in_keys=["pixels"]))
    buffer.append_transform(lambda sample: sample.set("twice", sample["observation"] * 2))
    data = steps(10)
    data["pixels"] = torch.randint(0, 255, (10, 5, 5, 3), dtype=torch.uint8)
    buffer.extend(data)
    record("sampled", buffer.sample())


@case
def prefetched(record: Record) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=4, prefetch=1)
    buffer.extend(steps(20))
    for repetition in range(3):
        record(str(repetition), buffer.sample())
    buffer.shutdown()  # waits for the sample that is drawn ahead: in the next case it would take random numbers


@case
def multi_step_returns(record: Record) -> None:
    data = steps(21).view(3, 7)
    data["collector", "mask"] = torch.ones(3, 7, dtype=torch.bool)
    data["next", "observation"] = data["observation"] + 1
    record("returns", MultiStep(gamma=0.9, n_steps=3)(data))


@case
def ensemble_of_buffers(record: Record) -> None:
    """Each buffer holds one step many times: the sample shows which buffers were drawn."""
    buffers = []
    for position in range(2):
        buffers.append(TensorDictReplayBuffer(storage=LazyMemmapStorage(20), batch_size=3))
        buffers[-1].extend(steps(1, start=100 * position).expand(10))
    together = ReplayBufferEnsemble(*buffers, batch_size=6)
    record("sampled", together.sample().exclude("index"))
    record("indexed", together[:, 2:4])


if __name__ == "__main__":
    run()
