"""Environments, alone, several in one process and in processes of their own: rolled out, reset in part, stepped."""

import torch
from recording import SEED, Record, case, run
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    EnvBase,
    GymEnv,
    ParallelEnv,
    PendulumEnv,
    SerialEnv,
    TicTacToeEnv,
    VmasEnv,
    check_env_specs,
    step_mdp,
)
from torchrl.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    EnvWithTensorClass,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    Str2StrEnv,
)

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule


class Walk(EnvBase):
    """A walk on a line: the action moves by up to one, the reward is the distance walked, and it ends at three."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.start = start
        self.observation_spec = Composite(place=Unbounded(shape=(1,)), steps=Unbounded(shape=(1,), dtype=torch.int64))
        self.action_spec = Bounded(low=-1, high=1, shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict: TensorDictBase | None = None, **options: object) -> TensorDictBase:
        place = torch.full((1,), self.start) + torch.rand(1) / 10
        return TensorDict({"place": place, "steps": torch.zeros(1, dtype=torch.int64)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        place = tensordict["place"] + tensordict["action"]
        state = {"place": place, "steps": tensordict["steps"] + 1}
        return TensorDict({**state, "reward": place.abs(), "done": place.abs() > 3}, [])

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


def cart_pole() -> EnvBase:
    return GymEnv("CartPole-v1")


def upright() -> TensorDictModule:
    """A policy that moves the cart to the side the pole leans to."""
    return TensorDictModule(
        lambda observation: torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2),
        in_keys=["observation"],
        out_keys=["action"],
    )


@case
def gym(record: Record) -> None:
    env = cart_pole()
    env.set_seed(SEED)
    check_env_specs(env)
    record("random", env.rollout(15))
    record("policy", env.rollout(40, upright()))
    record("several episodes", env.rollout(80, upright(), break_when_any_done=False))
    record("specs", [repr(env.observation_spec), repr(env.action_spec), repr(env.reward_spec), repr(env.done_spec)])


@case
def gym_from_pixels_to_steps(record: Record) -> None:
    env = GymEnv("MountainCarContinuous-v0", categorical_action_encoding=True)
    env.set_seed(SEED)
    state = env.reset()
    for position in range(4):
        state["action"] = env.action_spec.rand()
        stepped = env.step(state)
        record(f"step {position}", stepped)
        state = step_mdp(stepped)


@case
def written_in_torch(record: Record) -> None:
    env = Walk()
    check_env_specs(env)
    record("rollout", env.rollout(8))
    policy = TensorDictModule(torch.tanh, in_keys=["place"], out_keys=["action"])
    record("policy", env.rollout(8, policy))
    record("without stop", env.rollout(12, policy, break_when_any_done=False))
    record("lazy", env.rollout(5, return_contiguous=False)[2])
    record("from a state", env.rollout(3, policy, auto_reset=False, tensordict=env.reset()))


@case
def written_in_torch_batched(record: Record) -> None:
    env = PendulumEnv()
    env.set_seed(SEED)
    record("rollout", env.rollout(6))
    parameters = env.gen_params(batch_size=[5])
    record("rows", env.rollout(4, auto_reset=False, tensordict=env.reset(parameters)))


@case
def step_and_reset(record: Record) -> None:
    env = Walk()
    state = env.reset()
    for position in range(3):
        stepped, state = env.step_and_maybe_reset(state.set("action", torch.ones(1)))
        record(f"stepped {position}", stepped)
        record(f"state {position}", state)


@case
def board_game(record: Record) -> None:
    record("rollout", TicTacToeEnv().rollout(9))


@case
def multi_agent(record: Record) -> None:
    env = VmasEnv("balance", num_envs=3, n_agents=2, seed=SEED)
    record("rollout", env.rollout(4))
    record("specs", [repr(env.full_action_spec), repr(env.full_observation_spec)])


@case
def nested_keys(record: Record) -> None:
    env = NestedCountingEnv(nest_reward=True, nest_done=True, nested_dim=3)
    policy = TensorDictModule(lambda: env.action_spec.one(), in_keys=[], out_keys=[env.action_key])
    check_env_specs(env)
    record("rollout", env.rollout(8, policy))
    record("without stop", env.rollout(13, policy, break_when_any_done=False))


@case
def several_agents_with_their_own_done(record: Record) -> None:
    record("rollout", MultiKeyCountingEnv(batch_size=torch.Size([2])).rollout(5))


@case
def agents_of_different_shapes(record: Record) -> None:
    rollout = HeterogeneousCountingEnv(max_steps=4, batch_size=torch.Size([2])).rollout(3)
    record("state", rollout["state"])
    lazy = rollout["lazy"]
    record("shape", tuple(lazy.shape))
    for position, agent in enumerate(lazy.unbind(lazy.ndim - 1)):
        record(f"agent {position}", agent)


@case
def observations_whose_shape_changes(record: Record) -> None:
    rollout = EnvWithDynamicSpec(max_count=5).rollout(4, return_contiguous=False)
    record("steps", [step["observation"] for step in rollout.unbind(rollout.ndim - 1)])


@case
def observations_of_a_class(record: Record) -> None:
    rollout = EnvWithTensorClass().rollout(4)
    record("class", type(rollout["tc"]).__name__)
    record("rollout", rollout)


@case
def observations_of_text(record: Record) -> None:
    env = Str2StrEnv()
    env.set_seed(SEED)
    rollout = env.rollout(4)
    record("observation", rollout["observation"])
    record("action", rollout["action"])
    record("done", rollout["next", "done"])


@case
def batch_locked(record: Record) -> None:
    env = CountingBatchedEnv(max_steps=torch.tensor([2, 4]), batch_size=torch.Size([2]))
    policy = TensorDictModule(lambda: env.action_spec.one(), in_keys=[], out_keys=["action"])
    state = env.rollout(3, policy)[..., -1]["next"]
    state["_reset"] = torch.tensor([[True], [False]])
    record("state", state)
    record("reset in part", env.reset(state))


def vectorised(record: Record, env: EnvBase, policy: TensorDictModule | None) -> None:
    try:
        env.set_seed(SEED)
        record("reset", env.reset())
        record("rollout", env.rollout(6, policy))
        record("without stop", env.rollout(25, policy, break_when_any_done=False))
        state = env.reset()
        state["_reset"] = torch.tensor([[True], [False]])
        record("reset in part", env.reset(state))
        record("specs", repr(env.output_spec))
    finally:
        env.close()


@case
def gym_in_one_process(record: Record) -> None:
    vectorised(record, SerialEnv(2, cart_pole), upright())


@case
def gym_in_processes(record: Record) -> None:
    vectorised(record, ParallelEnv(2, cart_pole, mp_start_method="fork"), upright())


@case
def gym_in_processes_without_buffers(record: Record) -> None:
    vectorised(record, ParallelEnv(2, cart_pole, mp_start_method="fork", use_buffers=False), upright())


@case
def gym_in_processes_over_files(record: Record) -> None:
    vectorised(record, ParallelEnv(2, cart_pole, mp_start_method="fork", memmap=True, shared_memory=False), upright())


@case
def torch_in_one_process(record: Record) -> None:
    policy = TensorDictModule(torch.cos, in_keys=["place"], out_keys=["action"])
    vectorised(record, SerialEnv(2, [Walk, lambda: Walk(2.0)]), policy)


@case
def torch_in_processes(record: Record) -> None:
    policy = TensorDictModule(torch.cos, in_keys=["place"], out_keys=["action"])
    vectorised(record, ParallelEnv(2, [Walk, lambda: Walk(2.0)], mp_start_method="fork"), policy)


@case
def nested_keys_in_processes(record: Record) -> None:
    env = ParallelEnv(2, lambda: NestedCountingEnv(max_steps=3, nest_reward=True), mp_start_method="fork")
    policy = TensorDictModule(lambda: env.full_action_spec[env.action_key].one(), in_keys=[], out_keys=[env.action_key])
    try:
        record("rollout", env.rollout(3, policy))
        record("without stop", env.rollout(7, policy, break_when_any_done=False))
    finally:
        env.close()


@case
def texts_in_processes(record: Record) -> None:
    env = ParallelEnv(2, CountingEnvWithString, mp_start_method="fork")
    try:
        rollout = env.rollout(4)
        record("rollout", rollout.exclude("string", ("next", "string")))
        record("are texts", [[isinstance(text, str) for text in row] for row in rollout["next", "string"]])
    finally:
        env.close()


if __name__ == "__main__":
    run()
