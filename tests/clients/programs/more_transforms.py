"""Transforms that `transforms.py` leaves out, each used as its documentation does, and chains of them."""

import copy
import pickle
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from recording import SEED, Record, case, run
from torch import nn
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    NonTensor,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.data.vla import UniformActionTokenizer, VocabTailActionTokenizer
from torchrl.envs import EnvBase, GymEnv, GymWrapper, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.envs.transforms import (
    ActionChunkTransform,
    ActionScaling,
    ActionTokenizerTransform,
    BatchSizeTransform,
    CatFrames,
    Compose,
    ConditionalPolicySwitch,
    ConditionalSkip,
    DeviceCastTransform,
    DiscreteActionProjection,
    DoubleToFloat,
    ExcludeTransform,
    ExpandAs,
    FlattenAction,
    FlattenObservation,
    InitTracker,
    MacroAction,
    MacroPrimitive,
    MacroPrimitiveTransform,
    MeanActionSelector,
    MultiStepTransform,
    NextObservationDelta,
    NextStateReconstructor,
    ObservationNorm,
    ObservationTransform,
    PermuteTransform,
    PolicyAgeFilter,
    RandomTruncationTransform,
    RemoveEmptySpecs,
    RenameTransform,
    Reward2GoTransform,
    RewardSum,
    RNDTransform,
    RobotMacroAction,
    RobotMacroActionMode,
    RunningMeanStd,
    SatelliteAttitudeTransform,
    SatelliteMacroAction,
    SelectTransform,
    StepCounter,
    SuccessReward,
    TargetMacroAction,
    TensorDictPrimer,
    TerminateTransform,
    Timer,
    Tokenizer,
    ToTensorImage,
    TrajCounter,
    Transform,
    UnaryTransform,
    UnsqueezeTransform,
    URScriptPrimitive,
    URScriptPrimitiveTransform,
    VecGymEnvTransform,
    VecNormV2,
    gSDENoise,
)
from torchrl.testing.mocking_classes import (
    ContinuousActionVecMockEnv,
    CountingEnv,
    DiscreteActionVecMockEnv,
    NestedCountingEnv,
)

from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule


def pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def rolled(record: Record, name: str, env: EnvBase, policy: Any = None, steps: int = 5, **options: Any) -> None:
    """Records and prints a seeded rollout of `env`, with its specs."""
    torch.manual_seed(SEED)
    env.set_seed(SEED)
    rollout = env.rollout(steps, policy, **options)
    record(f"{name} rollout", rollout)
    record(f"{name} specs", [repr(env.input_spec), repr(env.output_spec)])
    record(f"{name} printed", repr(rollout))


@case
def chunks_of_actions(record: Record) -> None:
    chunk = ActionChunkTransform(chunk_size=3)
    data = TensorDict({"action": torch.arange(4).view(1, 4, 1).float()}, batch_size=[1, 4])
    record("of a window", chunk(data.clone()))
    data["next", "done"] = torch.tensor([False, True, False, False]).view(1, 4, 1)
    record("cut at the end of a trajectory", chunk(data))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), transform=chunk, batch_size=2)
    buffer.extend(TensorDict({"action": torch.arange(40.0).view(5, 8, 1)}, [5]))
    record("sampled", buffer.sample())
    record("printed", repr(buffer.sample()))


@case
def scaled_actions(record: Record) -> None:
    env = ContinuousActionVecMockEnv(action_spec=Bounded(low=-2.0, high=4.0, shape=(7,)))
    rolled(record, "env", TransformedEnv(env, ActionScaling()))
    statistics = {"mean": torch.tensor([1.0, 2.0]), "std": torch.tensor([2.0, 4.0])}
    scaling = ActionScaling.from_stats(**statistics)
    data = scaling(TensorDict({"action": torch.tensor([[3.0, 6.0]])}, batch_size=[1]))
    record("forward", data)
    record("back", scaling.inv(data))
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(10), transform=ActionScaling.from_stats(**statistics, in_keys_inv=[]), batch_size=4
    )
    buffer.extend(TensorDict({"action": torch.rand(10, 2)}, batch_size=[10]))
    record("sampled", buffer.sample())
    record("state", dict(scaling.state_dict()))


@case
def actions_as_tokens(record: Record) -> None:
    tokenizer = UniformActionTokenizer(256, low=-1.0, high=1.0)
    transform = ActionTokenizerTransform(tokenizer)
    data = transform(TensorDict({"action": torch.tensor([[-1.0, 0.0, 1.0]])}, batch_size=[1]))
    record("tokens", data)
    record("back", transform.inv(data.select("vla_action")))
    decode = ActionTokenizerTransform(tokenizer, mode="decode")
    record("decoded", decode(data.select("vla_action")))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), transform=transform, batch_size=2)
    buffer.extend(TensorDict({"action": torch.rand(8, 3) * 2 - 1}, batch_size=[8]))
    record("sampled", buffer.sample())
    env = TransformedEnv(pendulum(), ActionTokenizerTransform(UniformActionTokenizer(8, low=-2.0, high=2.0)))
    rolled(record, "env", env)
    tail = VocabTailActionTokenizer(16, full_vocab_size=100)
    record("tail", tail.encode(torch.linspace(-1, 1, 5)))


class AutoResettingGymEnv(GymEnv):
    """A gym environment that starts anew by itself."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict = super()._step(tensordict)
        if tensordict["done"].any():
            tensordict.update(super().reset().exclude(*self.done_keys))
        return tensordict

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        if tensordict is not None and "_reset" in tensordict:
            return tensordict.copy()
        return super()._reset(tensordict)


@case
def environments_that_start_anew(record: Record) -> None:
    for name, options in {"replaced": {"auto_reset_replace": True}, "as it is": {"auto_reset_replace": False}}.items():
        env = AutoResettingGymEnv("CartPole-v1", auto_reset=True, **options)
        env.set_seed(SEED)
        env.base_env._env.reset(seed=SEED)
        record(name, env.rollout(40, break_when_any_done=False))


@case
def gym_vectors(record: Record) -> None:
    env = GymWrapper(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    record("is the transform of vectors", isinstance(env.transform, VecGymEnvTransform))
    rolled(record, "two", env, steps=40, break_when_any_done=False)


class Stateless(EnvBase):
    """An environment of any batch size."""

    batch_locked = False

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(3))
        self.reward_spec = Unbounded(1)
        self.action_spec = Unbounded(1)

    def _reset(self, tensordict: TensorDictBase | None, **options: Any) -> TensorDictBase:
        shape = torch.Size([]) if tensordict is None else tensordict.batch_size
        return self.observation_spec.rand(shape).update(self.full_done_spec.zero(shape))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        shape = tensordict.batch_size
        result = self.observation_spec.rand(shape)
        return result.update(self.full_done_spec.zero(shape)).update(self.full_reward_spec.zero(shape))

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


@case
def batch_sizes(record: Record) -> None:
    rolled(
        record, "reshaped", TransformedEnv(pendulum(), BatchSizeTransform(reshape_fn=lambda data: data.reshape(1, 1)))
    )
    rolled(record, "given", TransformedEnv(Stateless(), BatchSizeTransform(batch_size=[5])))

    def reset(data: TensorDictBase, data_reset: TensorDictBase) -> TensorDictBase:
        return data_reset.expand(4).clone()

    env = TransformedEnv(Stateless(), BatchSizeTransform(batch_size=[4], reset_func=reset))
    rolled(record, "by a function", env)


@case
def policies_that_switch(record: Record) -> None:
    right = TensorDictModule(lambda: torch.ones((), dtype=torch.int64), in_keys=[], out_keys=["action"])
    left = TensorDictModule(lambda: torch.zeros((), dtype=torch.int64), in_keys=[], out_keys=["action"])
    env = cart_pole().append_transform(
        Compose(
            StepCounter(step_count_key="step_count_total"),
            ConditionalPolicySwitch(condition=lambda data: data.get("observation")[..., 0] >= 0, policy=left),
            StepCounter(step_count_key="step_count_main"),
        )
    )
    rolled(record, "one", env, right, steps=30)


@case
def skipped_steps(record: Record) -> None:
    inner = TransformedEnv(pendulum(), StepCounter(step_count_key="inner_count"))
    middle = TransformedEnv(
        inner,
        Compose(
            StepCounter(step_count_key="middle_count"),
            ConditionalSkip(cond=lambda data: data["step_count"] % 2 == 1),
        ),
        auto_unwrap=False,
    )
    outer = TransformedEnv(middle, StepCounter(step_count_key="step_count"), auto_unwrap=False)
    rolled(record, "one", outer, steps=8)


@case
def skipped_steps_of_some(record: Record) -> None:
    def one() -> TransformedEnv:
        return TransformedEnv(pendulum(), StepCounter(step_count_key="inner_count"))

    env = TransformedEnv(SerialEnv(2, one), StepCounter(step_count_key="step_count"))
    env.append_transform(ConditionalSkip(cond=lambda data: data["step_count"].squeeze(-1) % 2 == torch.tensor([0, 1])))
    rolled(record, "two", env, steps=6)


@case
def pixels(record: Record) -> None:
    image = TensorDict({"pixels": torch.randint(0, 255, (2, 12, 10, 3), dtype=torch.uint8)}, [2])
    image = ToTensorImage(in_keys=["pixels"])(image)
    record("permuted", PermuteTransform((-2, -1, -3), in_keys=["pixels"])(image.clone()))
    frames = CatFrames(N=2, dim=-3, in_keys=["pixels"], padding="constant")
    record("frames", frames.unfolding(image.unsqueeze(0).set(("next", "done"), torch.zeros(1, 2, 1, dtype=torch.bool))))
    record("are of observations", issubclass(CatFrames, ObservationTransform))


@case
def devices(record: Record) -> None:
    env = TransformedEnv(pendulum(), DeviceCastTransform("cpu"))
    rolled(record, "env", env)
    record("device", str(env.device))
    data = TensorDict({"obs": torch.ones(1, dtype=torch.double)}, [], device="cpu")
    moved = DeviceCastTransform("cpu", in_keys=["obs"], out_keys=["moved"])(data)
    record("moved", moved)
    record("moved device", str(moved.device))


@case
def actions_of_fewer_kinds(record: Record) -> None:
    action = torch.zeros(3, dtype=torch.long)
    action[-1] = 1
    record(
        "projected",
        DiscreteActionProjection(num_actions_effective=2, max_actions=3).inv(TensorDict({"action": action}, [])),
    )
    env = TransformedEnv(DiscreteActionVecMockEnv(), DiscreteActionProjection(num_actions_effective=7, max_actions=10))
    rolled(record, "env", env)


class Doubles(EnvBase):
    """An environment whose every number is a double."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(obs=Unbounded((), dtype=torch.float64))
        self.action_spec = Unbounded((), dtype=torch.float64)
        self.reward_spec = Unbounded((1,), dtype=torch.float64)
        self.done_spec = Unbounded((1,), dtype=torch.bool)

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        return TensorDict({"done": torch.zeros((1,), dtype=torch.bool), **self.observation_spec.rand()}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = {"done": torch.zeros((1,), dtype=torch.bool)}
        return TensorDict({"reward": self.reward_spec.rand(), **done, **self.observation_spec.rand()}, [])

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


@case
def doubles(record: Record) -> None:
    data = TensorDict({"obs": torch.ones(1, dtype=torch.double), "other": torch.ones(1, dtype=torch.double)}, [])
    record("chosen", DoubleToFloat(in_keys=["obs"])(data.clone()))
    record("all", DoubleToFloat()(data))
    rolled(record, "env", TransformedEnv(Doubles(), DoubleToFloat()))


@case
def entries_as_wide_as_others(record: Record) -> None:
    env = TransformedEnv(
        VmasEnv("balance", num_envs=3, n_agents=2, seed=SEED), ExpandAs(in_key="done", ref_key=("agents", "reward"))
    )
    record("reset", env.reset())
    record("step", env.rand_step(env.reset()))


class Wide(Stateless):
    """An environment whose actions have two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.action_spec = Bounded(low=-1.0, high=1.0, shape=(3, 5))


@case
def flat_actions(record: Record) -> None:
    rolled(record, "env", TransformedEnv(Wide(), FlattenAction(first_dim=-2, last_dim=-1)))
    flatten = FlattenAction(in_keys=["action"], action_shape=(3, 5))
    data = flatten(TensorDict({"action": torch.arange(15.0).view(3, 5)}, []))
    record("flat", data)
    record("back", flatten.inv(data))


@case
def macro_actions(record: Record) -> None:
    expand = MacroPrimitiveTransform(macro_steps=2, action_dim=3)
    record("of a tensor", expand.inv(TensorDict({"action": torch.ones(1, 3)}, batch_size=[1])))
    steps = torch.tensor([2])
    for name, action in {
        "wait": MacroAction(
            mode=torch.tensor([int(MacroPrimitive.WAIT)]), steps=steps, settle_steps=torch.tensor([0]), batch_size=[1]
        ),
        "target": TargetMacroAction(
            mode=torch.tensor([int(MacroPrimitive.MOVE)]),
            steps=steps,
            settle_steps=torch.tensor([1]),
            target=torch.rand(1, 3),
            batch_size=[1],
        ),
    }.items():
        record(f"{name} class", type(action).__name__)
        record(f"{name} printed", repr(action))
        record(name, action)
        data = TensorDict({"action": action, "start": torch.zeros(1, 3)}, batch_size=[1])
        record(f"{name} cloned", type(data.clone()["action"]).__name__)
        record(f"{name} stacked", torch.stack([data, data]))
    record(
        "moved",
        expand.inv(
            TensorDict(
                {
                    "action": TargetMacroAction(
                        mode=torch.tensor([1]),
                        steps=steps,
                        settle_steps=torch.tensor([0]),
                        target=torch.rand(1, 3),
                        batch_size=[1],
                    )
                },
                [1],
            )
        ),
    )


@case
def attitudes_of_satellites(record: Record) -> None:
    data = TensorDict(
        {
            "action": torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
            "bus_quat": torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
            "bus_omega": torch.zeros(1, 3),
            "gimbal_angles": torch.cat([torch.zeros(1, 4), torch.ones(1, 4)], -1),
        },
        batch_size=[1],
    )
    transform = SatelliteAttitudeTransform(num_cmgs=4, macro_steps=2, settle_steps=0)
    record("tensor", transform.inv(data.clone()))
    data["action"] = SatelliteMacroAction(
        mode=torch.tensor([1]),
        steps=torch.tensor([2]),
        settle_steps=torch.tensor([0]),
        target=torch.tensor([[0.9, 0.1, 0.0, 0.0]]),
        batch_size=[1],
    )
    record("macro", transform.inv(data))


@case
def primitives_of_robots(record: Record) -> None:
    data = {"robot_qpos": torch.zeros(1, 6), "gripper_qpos": torch.zeros(1, 2)}
    for name, action in {
        "joints": RobotMacroAction.reach_joints(joints=torch.ones(1, 6), steps=2),
        "gripper": RobotMacroAction.open_gripper(batch_size=[1]),
    }.items():
        record(f"{name} mode", RobotMacroActionMode(int(action.mode)).name)
        record(name, URScriptPrimitiveTransform().inv(TensorDict({"action": action, **data}, batch_size=[1])))
    record("name", str(URScriptPrimitive.OPEN_GRIPPER))


@case
def beliefs(record: Record) -> None:
    env = TransformedEnv(pendulum(), MeanActionSelector())
    policy = TensorDictModule(
        lambda mean, var: (mean[..., :1], var[..., :1, :1]),
        in_keys=[("observation", "mean"), ("observation", "var")],
        out_keys=[("action", "mean"), ("action", "var")],
    )
    rolled(record, "env", env, policy, steps=3)


@case
def differences_of_observations(record: Record) -> None:
    env = TransformedEnv(pendulum(), NextObservationDelta())
    env.set_seed(SEED)
    state = env.reset()
    stepped, state = env.step_and_maybe_reset(state.set("action", env.action_spec.rand()))
    record("stepped", stepped)
    record("state", state)
    rollout = env.rollout(5)
    record("rollout", rollout)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=NextObservationDelta(), batch_size=4)
    buffer.extend(rollout)
    record("stored", buffer.storage[:])
    record("sampled", buffer.sample())


@case
def states_of_the_next_step(record: Record) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")),
        transform=NextStateReconstructor(),
        batch_size=8,
    )
    data = TensorDict(
        {
            "observation": torch.arange(8, dtype=torch.float32).view(8, 1),
            ("next", "reward"): torch.zeros(8, 1),
            ("next", "done"): torch.tensor([[False]] * 7 + [[True]]),
            ("collector", "traj_ids"): torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        },
        batch_size=[8],
    )
    buffer.extend(data)
    record("sampled", buffer.sample())


@case
def policies_that_are_too_old(record: Record) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=PolicyAgeFilter(lambda: 3, max_policy_lag=1))
    data = TensorDict({"observation": torch.randn(4, 3), "policy_version": torch.tensor([0, 2, 2, 3])}, batch_size=[4])
    record("written", buffer.extend(data))
    record("length", len(buffer))
    record("sampled", buffer.sample(3))


@case
def truncations_at_random(record: Record) -> None:
    cut = RandomTruncationTransform(prob=0.4, min_horizon=2, max_horizon=6)
    env = TransformedEnv(SerialEnv(2, pendulum), Compose(StepCounter(), cut))
    rolled(record, "env", env, steps=12, break_when_any_done=False)


class WithEmptySpecs(EnvBase):
    """An environment with containers that have no entry."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3,)), other=Composite(another=Composite()))
        self.action_spec = Unbounded((3,))
        self.done_spec = Categorical(2, (1,), dtype=torch.bool)
        self.full_done_spec["truncated"] = self.full_done_spec["terminated"].clone()
        self.reward_spec = Composite(reward=Unbounded((1,)), other_reward=Composite())

    def _reset(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        return self.observation_spec.rand().update(self.full_done_spec.zero())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = TensorDict({}, []).update(self.observation_spec.rand()).update(self.full_done_spec.zero())
        return result.update(self.full_reward_spec.rand())

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


@case
def empty_specs(record: Record) -> None:
    rolled(record, "with", WithEmptySpecs())
    env = TransformedEnv(WithEmptySpecs(), RemoveEmptySpecs())
    rolled(record, "without", env)
    check_env_specs(env)


@case
def curiosity(record: Record) -> None:
    target = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    predictor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    transform = RNDTransform(target, predictor)
    env = TransformedEnv(GymEnv("CartPole-v1"), transform)
    env.set_seed(SEED)
    record("rollout", env.rollout(5))
    record("state", dict(transform.state_dict()))
    statistics = RunningMeanStd(shape=(4,))
    statistics.update(torch.randn(32, 4))
    record("normalised", statistics.normalize(torch.randn(8, 4)))


@case
def rewards_of_success(record: Record) -> None:
    data = TensorDict({"success": torch.tensor([[True], [False]])}, batch_size=[2])
    record("called", SuccessReward(scale=2.0)(data))


@case
def ends_on_a_condition(record: Record) -> None:
    env = TransformedEnv(CountingEnv(max_steps=10), TerminateTransform(lambda data: data["observation"] > 3))
    policy = TensorDictModule(lambda: torch.ones(1, dtype=torch.int32), in_keys=[], out_keys=["action"])
    rolled(record, "env", env, policy, steps=8)


@case
def times(record: Record) -> None:
    rollout = pendulum().append_transform(Timer()).rollout(4)
    names = ("time_step", "time_policy", "time_reset")
    record("keys", sorted(str(key) for key in rollout.keys(True, True)))
    record("are times", [bool((rollout[name] >= 0).all()) for name in names if name in rollout.keys()])
    record("shape", rollout["time_step"] >= 0)


@case
def functions_of_one_entry(record: Record) -> None:
    env = pendulum().append_transform(
        UnaryTransform(
            in_keys=["observation"], out_keys=["text"], fn=lambda tensor: str([round(x, 3) for x in tensor.tolist()])
        )
    )
    rolled(record, "text", env, steps=3)
    double = UnaryTransform(
        in_keys=["a"], out_keys=["b"], in_keys_inv=["b"], out_keys_inv=["a"], fn=torch.exp, inv_fn=torch.log
    )
    data = double(TensorDict({"a": torch.arange(3.0)}, []))
    record("forward", data)
    record("back", double.inv(data))
    raw = UnaryTransform(in_keys=["t"], out_keys=["l"], fn=lambda text: torch.tensor(len(text)), use_raw_nontensor=True)
    record("length", raw(TensorDict({"t": NonTensorData("word")}, []))["l"])


class Words:
    """A tokenizer that numbers the letters of a text."""

    pad_token_id = 0
    vocab_size = 30

    def __call__(self, text: Any, **options: Any) -> dict[str, torch.Tensor]:
        text = [text] if isinstance(text, str) else list(text)
        ids = torch.zeros(len(text), 6, dtype=torch.long)
        for row, word in enumerate(text):
            ids[row, : len(word)] = torch.tensor([ord(letter) - 96 for letter in word[:6]])
        return {"input_ids": ids, "attention_mask": ids != 0}

    def encode(self, text: str, **options: Any) -> torch.Tensor:
        return self(text)["input_ids"]

    def batch_decode(self, ids: torch.Tensor, **options: Any) -> list[str]:
        return ["".join(chr(96 + number) for number in row if number) for row in ids.tolist()]

    def decode(self, ids: torch.Tensor, **options: Any) -> str:
        return "".join(chr(96 + number) for number in ids.flatten().tolist() if number)


@case
def texts_as_tokens(record: Record) -> None:
    transform = Tokenizer(in_keys=["text"], out_keys=["tokens"], tokenizer=Words(), max_length=6)
    data = TensorDict({"text": "abc", "number": torch.ones(())}, [])
    record("one", transform(data))
    rows = TensorDict({"text": ["ab", "fed"], "number": torch.ones(2)}, [2])
    record("rows", transform(rows))


@case
def noise_that_depends_on_the_state(record: Record) -> None:
    env = TransformedEnv(pendulum(), Compose(InitTracker(), gSDENoise(shape=(1, 3))))
    rolled(record, "env", env, steps=3)
    rolled(record, "dims", TransformedEnv(pendulum(), gSDENoise(state_dim=3, action_dim=1)), steps=3)


class Doubled(Transform):
    """A transform of one's own, as the tutorials write it."""

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return obs * 2

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec["double"] = observation_spec["observation"].clone()
        return observation_spec


@case
def transforms_of_ones_own(record: Record) -> None:
    env = TransformedEnv(pendulum(), Doubled(in_keys=["observation"], out_keys=["double"]))
    rolled(record, "env", env)
    counted = TransformedEnv(env, StepCounter())
    rolled(record, "twice", counted)
    record("parent", counted.transform[1].parent.rollout(2).batch_size)
    record("container", type(counted.transform[0].container).__name__)


CHAIN = (
    lambda: InitTracker(),
    lambda: StepCounter(max_steps=4),
    lambda: RewardSum(),
    lambda: CatFrames(N=2, dim=-1, in_keys=["observation"], out_keys=["frames"]),
    lambda: VecNormV2(in_keys=["observation"], out_keys=["normed"]),
    lambda: UnsqueezeTransform(-2, in_keys=["observation"], out_keys=["row"]),
    lambda: TrajCounter(),
    lambda: TensorDictPrimer(Composite(hidden=Unbounded(shape=(2,))), default_value=0.5),
    lambda: RenameTransform(["observation"], [("nested", "observation")], create_copy=True),
    lambda: ExcludeTransform("row"),
)


def chained() -> TransformedEnv:
    return TransformedEnv(pendulum(), Compose(*(make() for make in CHAIN)))


@case
def chain_in_one(record: Record) -> None:
    rolled(record, "one", chained(), steps=10, break_when_any_done=False)


@case
def chain_as_a_lazy_stack(record: Record) -> None:
    env = chained()
    env.set_seed(SEED)
    rollout = env.rollout(6, return_contiguous=False, break_when_any_done=False)
    record("class", type(rollout).__name__)
    record("rollout", rollout)
    record("printed", repr(rollout[2]))


@case
def chain_of_several(record: Record) -> None:
    rolled(record, "serial", SerialEnv(2, chained), steps=6, break_when_any_done=False)
    outside = TransformedEnv(
        SerialEnv(2, pendulum),
        Compose(
            InitTracker(),
            StepCounter(max_steps=3),
            RewardSum(),
            TensorDictPrimer(Composite(hidden=Unbounded(shape=(2, 2)), shape=(2,)), random=True),
        ),
    )
    rolled(record, "outside", outside, steps=7, break_when_any_done=False)


@case
def chain_copied(record: Record) -> None:
    env = chained()
    rolled(record, "first", env)
    other = TransformedEnv(pendulum(), env.transform.clone())
    rolled(record, "cloned", other)
    record("copied", dict(copy.deepcopy(env.transform[4]).state_dict()))
    record("state", dict(env.transform.state_dict()))
    other.transform.load_state_dict(env.transform.state_dict())
    rolled(record, "loaded", other)
    pickled = pickle.loads(pickle.dumps(Compose(StepCounter(3), RewardSum())))
    rolled(record, "pickled", TransformedEnv(pendulum(), pickled))


@case
def chain_taken_apart(record: Record) -> None:
    env = chained()
    part = env.transform[:4]
    record("names", [type(transform).__name__ for transform in part])
    rolled(record, "part", TransformedEnv(pendulum(), part.clone()))
    env.insert_transform(0, Doubled(in_keys=["observation"], out_keys=["double"]))
    rolled(record, "inserted", env)
    env.transform.pop(0)
    rolled(record, "popped", env)
    record("printed", repr(env.transform))


@case
def chain_in_a_buffer(record: Record) -> None:
    env = TransformedEnv(pendulum(), Compose(InitTracker(), StepCounter()))
    env.set_seed(SEED)
    rollout = env.rollout(10)
    for name, storage in {
        "tensors": LazyTensorStorage(20),
        "files": LazyMemmapStorage(20),
        "list": ListStorage(20),
        "stack": LazyStackStorage(20),
    }.items():
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
        buffer.append_transform(ObservationNorm(0.5, 2.0, in_keys=["observation", ("next", "observation")]))
        buffer.append_transform(SelectTransform("observation", "next", "step_count", "index", keep_rewards=True))
        buffer.append_transform(FlattenObservation(-1, -1, in_keys=["observation"]))
        buffer.extend(rollout.clone())
        torch.manual_seed(SEED)
        record(name, buffer.sample())


@case
def returns_in_a_buffer(record: Record) -> None:
    env = TransformedEnv(CountingEnv(max_steps=4), StepCounter())
    policy = TensorDictModule(lambda: torch.ones(1, dtype=torch.int32), in_keys=[], out_keys=["action"])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=5)
    buffer.append_transform(MultiStepTransform(n_steps=2, gamma=0.9))
    for _ in range(3):
        buffer.extend(env.rollout(6, policy, break_when_any_done=False))
    record("several steps", buffer[:])
    together = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=1)
    together.append_transform(Reward2GoTransform(gamma=0.9, out_keys=["to_go"]))
    together.extend(env.rollout(8, policy).unsqueeze(0))
    record("to go", together.sample())


@case
def nested_rewards(record: Record) -> None:
    env = TransformedEnv(
        NestedCountingEnv(nest_reward=True, nest_done=True, nested_dim=2, max_steps=3),
        Compose(RewardSum(), StepCounter(), InitTracker()),
    )
    policy = TensorDictModule(lambda: env.action_spec.one(), in_keys=[], out_keys=[env.action_key])
    rolled(record, "env", env, policy, steps=6, break_when_any_done=False)


@case
def texts_in_primers(record: Record) -> None:
    primer = TensorDictPrimer(
        Composite(prompt=NonTensor(shape=(), example_data="none"), mask=Binary(3, shape=(3,), dtype=torch.bool)),
        default_value={"prompt": lambda: NonTensorData("hello"), "mask": lambda: torch.ones(3, dtype=torch.bool)},
    )
    env = TransformedEnv(pendulum(), primer)
    rolled(record, "env", env, steps=3)


if __name__ == "__main__":
    run()
