"""Recorders of steps and of videos, environments that reset themselves, solvers of poses."""

import pickle
import unittest.mock
from pathlib import Path

import torch
from collectors import counter, counting, leaning
from recording import SEED, Record, case, run
from torchrl.data import (
    Composite,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    Unbounded,
    VideoClipRef,
)
from torchrl.envs import GymEnv, RobotMacroAction, SerialEnv, TransformedEnv
from torchrl.envs.transforms import (
    AutoResetEnv,
    AutoResetTransform,
    CartesianSolver,
    DecodeVideoTransform,
    StepCounter,
    Transform,
    URScriptPrimitiveTransform,
)
from torchrl.record import TensorDictRecorder, VideoRecorder
from torchrl.record.loggers import CSVLogger

from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule


@case
def steps(record: Record) -> None:
    for name, options in {
        "all": {"skip": 1},
        "every second": {"skip": 2, "skip_reset": False},
        "selected": {"skip": 1, "in_keys": ["observation", "done"]},
    }.items():
        env = TransformedEnv(counting())
        recorder = TensorDictRecorder("kept", **options)
        # The recorder names its files by a tag that its constructor does not set.
        recorder.tag = name.replace(" ", "_")
        env.append_transform(recorder)
        env.rollout(4, counter())
        recorder.dump()
        env.rollout(3, counter())
        recorder.dump("again")
        for path in sorted(Path().glob(f"{recorder.tag}*.t")):
            kept = torch.load(path, weights_only=False)
            record(path.name, [type(kept).__name__, kept])


def make_frames(size: int) -> TensorDict:
    return TensorDict({"pixels": torch.randint(255, (size, 3, 8, 8), dtype=torch.uint8)}, [size])


@case
def videos(record: Record) -> None:
    frames = make_frames(6)
    for kind in ("pt", "memmap"):
        logger = CSVLogger(exp_name=kind, log_dir="logs", video_format=kind)
        recorder = VideoRecorder(logger, tag="film", skip=1)
        for frame in frames:
            record(f"{kind} {recorder.count}", recorder(frame))
        recorder.dump()
        recorder(frames)
        recorder.dump(suffix="batch")
        paths = sorted(path for path in Path("logs", kind).rglob("*") if path.is_file() and path.suffix == f".{kind}")
        record(f"{kind} paths", [str(path) for path in paths])
        if kind == "pt":
            record("loaded", [torch.load(path) for path in paths])
    shape = (1, 6, 3, 8, 8)
    mapped = MemoryMappedTensor.from_filename("logs/memmap/videos/film_0.memmap", torch.uint8, shape)
    record("mapped", mapped)


class Paint(Transform):
    """Paints what is counted into frames."""

    def __init__(self) -> None:
        super().__init__(in_keys=["observation"], out_keys=["pixels"])

    def _apply_transform(self, observation: torch.Tensor) -> torch.Tensor:
        return observation.to(torch.uint8)[..., None, None].expand(*observation.shape[:-1], 3, 5, 5) * 20

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["pixels"] = Unbounded((*observation_spec.shape, 3, 5, 5), dtype=torch.uint8)
        return observation_spec


@case
def videos_of_rollouts(record: Record) -> None:

    for name, base in {"one": counting, "two": lambda: SerialEnv(2, counting)}.items():
        logger = CSVLogger(exp_name=name, log_dir="logs", video_format="pt")
        recorder = VideoRecorder(logger, tag="film", skip=1, max_frames=4)
        env = TransformedEnv(base())
        env.append_transform(Paint())
        env.append_transform(recorder)
        record(name, env.rollout(3, counter()))
        env.transform.dump(step=7)
        record(f"{name} films", [torch.load(path) for path in sorted(Path("logs", name).rglob("*.pt"))])
        env.close()


def paint_frames(source: str, stream: int | None, indices: list[int], device: object) -> torch.Tensor:
    """Stands in for torchcodec, which is not installed: frame `n` has the brightness `n`."""
    return torch.tensor(indices, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2) + 100 * (
        "second" in source
    )


@case
def films_read_when_sampled(record: Record) -> None:
    installed = {"_has_torchcodec": True, "_decode_group": paint_frames}
    with (
        unittest.mock.patch.multiple("torchrl.data.video", **installed),
        unittest.mock.patch("torchrl.envs.transforms._video._has_torchcodec", True),
    ):
        film = VideoClipRef(("first.mp4", "second.mp4"), torch.arange(20) % 10, file_id=torch.arange(20) // 10)
        for name, part in {"whole": film, "slice": film[3:12], "one": film[11], "list": film[[1, 15]]}.items():
            record(name, [part.batch_size, part.frame_index, part.file_id, part.decode()])
        record("stacked", torch.stack([film[:3], film[12:15]]).decode())
        record("joined", torch.cat([film[:3], film[12:15]]).decode())
        record("pickled", pickle.loads(pickle.dumps(film)).decode())
        record("in bins", VideoClipRef("first.mp4", torch.arange(12)).rebin(4, frames_per_bin=2).decode())
        record("source", VideoClipRef("first.mp4", torch.arange(3)).source)
        data = TensorDict({"frame": film, "episode": torch.arange(20) // 10}, [20])
        in_slices = SliceSampler(slice_len=4, traj_key="episode")
        for name, storage, sampler in (
            ("tensors", LazyTensorStorage(20), in_slices),
            ("list", ListStorage(20), RandomSampler()),
        ):
            decode = DecodeVideoTransform(in_keys=["frame"], out_keys=["pixels"], dtype=torch.float)
            buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, transform=decode)
            buffer.extend(data)
            sample = buffer.sample()
            record(f"{name} sample", sample["pixels"])
            record(f"{name} keys", sorted(map(str, sample.keys())))


class ResettingCartPole(GymEnv):
    """Begins again by itself, so its last step already gives the first observation of the next episode."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        following = super()._step(tensordict)
        if following["done"].any():
            following.update(super().reset().exclude(*self.done_keys))
        return following

    def _reset(self, tensordict: TensorDictBase | None = None, **options: object) -> TensorDictBase:
        if tensordict is not None and "_reset" in tensordict:
            return tensordict.copy()
        return super()._reset(tensordict, **options)


@case
def resets_by_itself(record: Record) -> None:
    policy = TensorDictModule(leaning, in_keys=["observation"], out_keys=["action"])
    for name, options in {"replaced": {"auto_reset_replace": True}, "kept": {"auto_reset_replace": False}}.items():
        env = ResettingCartPole("CartPole-v1", auto_reset=True, **options)
        env.set_seed(SEED)
        record(f"{name} kind", [isinstance(env, AutoResetEnv), isinstance(env.transform, AutoResetTransform)])
        record(name, env.rollout(90, policy, break_when_any_done=False))
    env = AutoResetEnv(ResettingCartPole("CartPole-v1"), AutoResetTransform(replace=True, fill_float=-1.0))
    env.set_seed(SEED)
    counted = TransformedEnv(env, StepCounter())
    record("filled", counted.rollout(90, policy, break_when_any_done=False))


class Solver(CartesianSolver):
    """Takes the position of the pose for the first three joints."""

    def __call__(
        self,
        target_pose: torch.Tensor,
        start_action: torch.Tensor,
        *,
        orientation_mask: torch.Tensor | None = None,
        waypoints: int | None = None,
    ) -> torch.Tensor:
        end = torch.cat([target_pose[..., :3], start_action[..., 3:]], -1)
        if waypoints is None:
            return end
        parts = torch.linspace(1 / waypoints, 1, waypoints)[:, None]
        return torch.lerp(start_action.unsqueeze(-2), end.unsqueeze(-2), parts)


@case
def poses(record: Record) -> None:
    data = {"robot_qpos": torch.zeros(2, 6), "gripper_qpos": torch.zeros(2, 2)}
    pose = torch.randn(2, 7)
    position, turned = pose[:, :3], torch.nn.functional.normalize(pose[:, 3:], dim=-1)
    transform = URScriptPrimitiveTransform(cartesian_solver=Solver(), macro_steps=3)
    for name, options in {
        "direct": {"quaternion": turned},
        "position alone": {},
        "straight": {"quaternion": turned, "path": "cartesian"},
    }.items():
        action = RobotMacroAction.reach_pose(position=position, steps=3, **options)
        record(name, action)
        record(f"{name} in joints", transform.inv(TensorDict({"action": action, **data}, [2])))


if __name__ == "__main__":
    run()
