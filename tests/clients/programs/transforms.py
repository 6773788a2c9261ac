"""Transforms, over environments and over containers: what they change, their specs, state and inverses."""

import torch
from recording import SEED, Record, case, run
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv, SerialEnv, TicTacToeEnv, check_env_specs
from torchrl.envs.transforms import (
    ActionDiscretizer,
    ActionMask,
    BinarizeReward,
    BurnInTransform,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    FiniteTensorDictCheck,
    FlattenObservation,
    FrameSkipTransform,
    Hash,
    InitTracker,
    LineariseRewards,
    ModuleTransform,
    MultiAction,
    MultiStepTransform,
    NoopResetEnv,
    ObservationNorm,
    PermuteTransform,
    RandomCropTensorDict,
    RenameTransform,
    Reward2GoTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    Stack,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    ToTensorImage,
    TrajCounter,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.modules import GRUModule
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv, MultiKeyCountingEnv

from tensordict import TensorDict
from tensordict.nn import TensorDictModule


def rolled(record: Record, name: str, transform: Transform, env: EnvBase | None = None, steps: int = 5) -> None:
    """Records a rollout of a pendulum (or `env`) under `transform`, its specs and its state."""
    torch.manual_seed(SEED)
    env = TransformedEnv(GymEnv("Pendulum-v1") if env is None else env, transform)
    env.set_seed(SEED)
    record(f"{name} rollout", env.rollout(steps))
    record(f"{name} specs", [repr(env.observation_spec), repr(env.reward_spec), repr(env.action_spec)])
    record(f"{name} state", dict(transform.state_dict()))


@case
def observations(record: Record) -> None:
    rolled(record, "norm", ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]))
    rolled(record, "standard norm", ObservationNorm(0.5, 2.0, in_keys=["observation"], standard_normal=True))
    rolled(record, "frames", CatFrames(N=3, dim=-1, in_keys=["observation"]))
    rolled(record, "pool", TimeMaxPool(in_keys=["observation"], T=2))
    rolled(record, "clip", ClipTransform(in_keys=["observation"], low=-0.5, high=0.5))
    rolled(record, "unsqueeze", UnsqueezeTransform(dim=-1, in_keys=["observation"], out_keys=["column"]))
    rolled(record, "double", DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"]))
    rolled(record, "cat", Compose(StepCounter(), CatTensors(["observation", "step_count"], "all", del_keys=False)))
    rolled(record, "rename", RenameTransform(["observation"], ["state"]))
    rolled(record, "copy", RenameTransform(["observation"], [("nested", "state")], create_copy=True))
    rolled(record, "exclude", Compose(InitTracker(), ExcludeTransform("is_init")))
    rolled(record, "select", Compose(InitTracker(), SelectTransform("observation")))


@case
def rewards(record: Record) -> None:
    rolled(record, "scale", RewardScaling(loc=1.0, scale=0.1))
    rolled(record, "clip", RewardClipping(-0.5, 0.5))
    rolled(record, "sum", RewardSum())
    rolled(record, "binary", BinarizeReward())
    rolled(record, "sign", SignTransform(in_keys=["reward"]))
    rolled(record, "target", TargetReturn(target_return=10.0))
    rolled(record, "linear", LineariseRewards(in_keys=["reward"], out_keys=["total"], weights=[0.5]))


@case
def time(record: Record) -> None:
    rolled(record, "steps", StepCounter(max_steps=3), steps=6)
    rolled(record, "start", InitTracker())
    rolled(record, "skip", FrameSkipTransform(frame_skip=3))
    rolled(record, "noop", NoopResetEnv(noops=3, random=False))
    rolled(record, "trajectories", TrajCounter(), CountingEnv(max_steps=2))
    rolled(record, "finite", FiniteTensorDictCheck())


@case
def actions(record: Record) -> None:
    rolled(record, "discrete", ActionDiscretizer(num_intervals=5), ContinuousActionVecMockEnv())
    game = TransformedEnv(TicTacToeEnv(), ActionMask(mask_key="mask"))
    record(
        "masked", game.rollout(9, TensorDictModule(lambda: game.action_spec.rand(), in_keys=[], out_keys=["action"]))
    )
    several = TransformedEnv(CountingEnv(max_steps=20), Compose(StepCounter(), MultiAction(stack_rewards=False)))
    policy = TensorDictModule(lambda: torch.ones(3, 1, dtype=torch.int32), in_keys=[], out_keys=["action"])
    record("several", several.rollout(4, policy))


@case
def primers(record: Record) -> None:
    hidden = Composite(hidden=Bounded(0, 1, shape=(4,)), deep=Composite(cell=Unbounded(shape=(2,))))
    rolled(record, "zero", TensorDictPrimer(hidden, default_value=0.0))
    rolled(record, "random", TensorDictPrimer(hidden, random=True))
    rolled(record, "at once", Compose(InitTracker(), TensorDictPrimer(hidden, default_value=1.0), StepCounter()))


@case
def running_statistics(record: Record) -> None:
    rolled(record, "first", VecNorm(in_keys=["observation", "reward"], decay=0.9), steps=8)
    rolled(record, "second", VecNormV2(in_keys=["observation", "reward"], decay=0.9), steps=8)
    several = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
    rolled(record, "several", VecNormV2(in_keys=["observation"], decay=0.9), several, steps=4)


@case
def statistics_of_rollouts(record: Record) -> None:
    norm = ObservationNorm(in_keys=["observation"])
    env = TransformedEnv(GymEnv("Pendulum-v1"), norm)
    env.set_seed(SEED)
    norm.init_stats(num_iter=20)
    record("loc", norm.loc)
    record("scale", norm.scale)
    record("rollout", env.rollout(3))


@case
def images(record: Record) -> None:
    pixels = torch.randint(0, 255, (2, 8, 8, 3), dtype=torch.uint8)
    data = TensorDict({"pixels": pixels, "next": {"pixels": pixels.flip(0)}}, [2])
    keys = {"in_keys": ["pixels", ("next", "pixels")]}
    for name, transform in {
        "tensor": ToTensorImage(**keys),
        "flat": FlattenObservation(-3, -1, **keys),
        "permuted": PermuteTransform((-1, -3, -2), **keys),
        "squeezed": Compose(UnsqueezeTransform(-1, **keys), SqueezeTransform(-1, **keys)),
    }.items():
        record(name, transform(data.clone()))


@case
def trajectories(record: Record) -> None:
    rollout = CountingEnv(max_steps=6).rollout(6)
    rows = TensorDict({"value": torch.arange(40.0).view(4, 10)}, [4, 10])
    record("crop", RandomCropTensorDict(sub_seq_len=3)(rows))
    done = torch.zeros(2, 5, 1, dtype=torch.bool)
    done[:, -1] = True
    data = TensorDict({"next": {"reward": torch.ones(2, 5, 1), "done": done}}, [2, 5])
    record("to go", Reward2GoTransform(gamma=0.9).inv(data))
    record("several steps", MultiStepTransform(n_steps=2, gamma=0.9).inv(rollout.clone()))


@case
def rows_and_groups(record: Record) -> None:
    rolled(record, "hash", Hash(in_keys=["observation"], out_keys=["hash"], hash_fn=lambda value: value.sum().view(1)))
    env = MultiKeyCountingEnv(batch_size=torch.Size([2]))
    rolled(record, "reset keys", Compose(RewardSum(), StepCounter(max_steps=4)), env)


@case
def agents_stacked(record: Record) -> None:
    data = TensorDict({"one": {"value": torch.rand(3)}, "two": {"value": torch.rand(3)}}, [])
    record("stacked", Stack(in_keys=[("one", "value"), ("two", "value")], out_key=("both", "value"))(data))


@case
def inverse(record: Record) -> None:
    double = DTypeCastTransform(torch.float64, torch.float32, in_keys=["observation"], in_keys_inv=["action"])
    record("forward", double(TensorDict({"observation": torch.ones(3, dtype=torch.float64)}, [])))
    record("back", double.inv(TensorDict({"action": torch.ones(3)}, [])))


@case
def composed(record: Record) -> None:
    env = GymEnv("CartPole-v1")
    env.set_seed(SEED)
    env = TransformedEnv(
        env, Compose(InitTracker(), StepCounter(30), RewardSum(), ObservationNorm(0.0, 2.0, in_keys=["observation"]))
    )
    check_env_specs(env)
    record("rollout", env.rollout(40, break_when_any_done=False))
    env.append_transform(RenameTransform(["observation"], ["state"]))
    record("renamed", env.rollout(3))
    record("length", len(env.transform))
    del env.transform[0]
    env.empty_cache()
    record("shorter", env.rollout(3))
    record("cloned", env.transform[1].clone().state_dict())


@case
def burn_in(record: Record) -> None:
    module = GRUModule(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", "hidden", "is_init"],
        out_keys=["embedding", ("next", "hidden")],
        default_recurrent_mode=True,
    )
    data = TensorDict(
        {
            "observation": torch.randn(2, 8, 3),
            "hidden": torch.zeros(2, 8, 1, 4),
            "is_init": torch.zeros(2, 8, 1, dtype=torch.bool),
            "next": {},
        },
        [2, 8],
    )
    record("burned in", BurnInTransform(modules=[module], burn_in=3)(data))


@case
def module_as_transform(record: Record) -> None:
    module = TensorDictModule(torch.sin, in_keys=["observation"], out_keys=["wave"])
    transform = ModuleTransform(module_factory=lambda: module)
    record("called", transform(TensorDict({"observation": torch.arange(3.0)}, [])))


if __name__ == "__main__":
    run()
