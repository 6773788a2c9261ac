"""Maps of containers, trees of searches, queries over trajectories, and the containers of robot data."""

import torch
from recording import SEED, Record, case, run
from torchrl.data import (
    BinaryToDecimal,
    HashToInt,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MCTSForest,
    QueryModule,
    RobotDatasetMetadata,
    SipHash,
    TensorDictMap,
    TensorMap,
    Trajectory,
    TrajectoryPredicate,
    Tree,
    UniformActionTokenizer,
    filter_trajectories,
    iter_trajectories,
    traj,
    validate_vla_tensordict,
)
from torchrl.data.replay_buffers import ConditionalUpdateResult
from torchrl.envs import CatTensors, EnvBase, GymEnv, PendulumEnv, StepCounter, UnsqueezeTransform

from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack


@case
def hashes(record: Record) -> None:
    decimal = BinaryToDecimal(num_bits=4, device="cpu", dtype=torch.int32, convert_to_binary=True)
    record("decimal", decimal(torch.Tensor([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 10, 0]])))
    rows = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    record("siphash", SipHash(as_tensor=True)(rows))
    numbers = HashToInt()
    record("numbers", numbers(SipHash(as_tensor=True)(rows)))
    record("again", numbers(SipHash(as_tensor=True)(rows.flip(0))))


@case
def queries(record: Record) -> None:
    query = QueryModule(in_keys=["key1", "key2"], index_key="index", hash_module=SipHash())
    data = TensorDict(
        {
            "key1": torch.Tensor([[1], [1], [1], [2]]),
            "key2": torch.Tensor([[3], [3], [2], [3]]),
            "other": torch.rand(4),
        },
        batch_size=(4,),
    )
    record("found", query(data))
    record(
        "more", query(TensorDict({"key1": torch.ones(2, 1), "key2": torch.tensor([[3.0], [9.0]])}, [2]), extend=True)
    )
    kept = QueryModule(in_keys=["key1", "key2"], index_key="index", hash_module=SipHash(), clone=True)
    kept(data.clone())
    record("kept", kept(data.clone(), extend=False))


def keys(*rows: float) -> TensorDict:
    values = torch.tensor(rows).unsqueeze(-1)
    return TensorDict({"key1": values, "key2": values + 1}, [len(rows)])


@case
def maps(record: Record) -> None:
    storages = {"tensors": LazyTensorStorage(100), "mapped": LazyMemmapStorage(100), "list": ListStorage(100)}
    for name, storage in storages.items():
        query = QueryModule(in_keys=["key1", "key2"], index_key="index")
        table = TensorDictMap(query_module=query, storage=storage, out_keys=["out"])
        table[keys(-1, 1, 3, -3)] = TensorDict({"out": torch.tensor([[10.0], [20], [30], [40]])}, [4])
        record(name, table[keys(3, -1)])
        record(f"{name} contains", table.contains(keys(1, 2, 3)))
        table[keys(1, 5)] = TensorDict({"out": torch.tensor([[21.0], [50]])}, [2])
        record(f"{name} later", table[keys(5, 1, -3)])
        record(f"{name} length", len(table))
        record(f"{name} is a map", isinstance(table, TensorMap))
        print(name, table[keys(3, -1)])


@case
def maps_of_one_storage(record: Record) -> None:
    table = TensorDictMap.from_tensordict_pair(
        keys(0, 1),
        TensorDict({"count": torch.zeros(2), "value": torch.ones(2, 3)}, [2]),
        in_keys=["key1", "key2"],
        max_size=50,
    )
    table[keys(0, 1)] = TensorDict({"count": torch.tensor([3.0, 4]), "value": torch.rand(2, 3)}, [2])
    table[keys(2)] = TensorDict({"count": torch.tensor([5.0]), "value": torch.rand(1, 3)}, [1])
    record("table", table[keys(0, 2, 1)])
    record("length", len(table))


def pendulum() -> tuple[EnvBase, set[str]]:
    """A pendulum whose state is one observation, and the names of its other states."""
    env = PendulumEnv()
    names = list(env.observation_spec.keys(True, True))
    states = set(env.full_state_spec.keys(True, True)) - set(names)
    env = env.append_transform(
        UnsqueezeTransform(in_keys=names, out_keys=[("unsqueeze", name) for name in names], dim=-1)
    )
    env = env.append_transform(CatTensors([("unsqueeze", name) for name in names], "observation"))
    env = env.append_transform(StepCounter())
    env.set_seed(SEED)
    torch.manual_seed(SEED)
    return env, states


def grown() -> tuple[MCTSForest, list[TensorDictBase]]:
    """A forest of three rollouts from one state."""
    env, states = pendulum()
    start, forest, rollouts = env.reset(), MCTSForest(), []

    def grow(state: TensorDictBase) -> TensorDictBase:
        rollout = env.rollout(6, auto_reset=False, tensordict=state).copy()
        rollout.exclude(*states, inplace=True).get("next").exclude(*states, inplace=True)
        forest.extend(rollout)
        rollouts.append(rollout)
        return rollout

    grow(start.clone())
    second = env.rollout(6, auto_reset=False, tensordict=start.clone())
    branch = second[3].exclude("next")
    second.exclude(*states, inplace=True).get("next").exclude(*states, inplace=True)
    forest.extend(second)
    rollouts.append(second)
    grow(branch)
    return forest, rollouts


@case
def forest(record: Record) -> None:
    trees, rollouts = grown()
    record("length", len(trees))
    tree = trees.get_tree(rollouts[0][0])
    record("class", isinstance(tree, Tree))
    record("depth", tree.max_length())
    record("paths", [list(path) for path in tree.valid_paths()])
    for path in tree.valid_paths():
        record(f"rollout {path}", tree.rollout_from_path(path).select("action", ("next", "reward")))
    record("vertices", sorted(tree.vertices(key_type="path")))
    record("count", tree.num_vertices())
    record("edges", [list(edge) for edge in tree.edges()])
    record("children", tree.num_children)
    record("visits", tree.visits)
    record("observation", tree.node_observation)
    record("actions", tree.branching_action)
    record("parent of a child", bool(tree.subtree[0].parent is not None))
    print(tree.to_string(lambda node: "node"))


@case
def forest_in_full(record: Record) -> None:
    trees, rollouts = grown()
    tree = trees.get_tree(rollouts[0][0], compact=False)
    record("depth", tree.max_length())
    record("paths", [list(path) for path in tree.valid_paths()])
    record("count", tree.num_vertices())
    record("child", tree.subtree[0].rollout)
    record("terminal", tree.subtree[0].is_terminal)
    record("names", sorted(str(key) for key in tree.keys()))
    print(tree.to_string(lambda node: "node"))
    found = tree.get_vertex_by_id(tree.subtree[0].node_id)
    record("found", found.node_observation)


def rollout() -> TensorDict:
    env = GymEnv("CartPole-v1")
    env.set_seed(SEED)
    torch.manual_seed(SEED)
    data = env.rollout(40, break_when_any_done=False)
    episodes = data["next", "done"].squeeze(-1).cumsum(0)
    data["collector", "traj_ids"] = torch.cat([episodes.new_zeros(1), episodes[:-1]])
    return data


@case
def trajectories(record: Record) -> None:
    data = rollout()
    found = list(iter_trajectories(data))
    record("lengths", [trajectory.length for trajectory in found])
    record("rewards", [trajectory.total_reward for trajectory in found])
    record("observation", found[0].observation)
    record("by key", found[0]["next", "reward"])
    record("printed", repr(found[0]))
    part = found[0][:3]
    record("part", part.data)
    record("part class", type(part).__name__)
    stacked = lazy_stack(found[:2])
    record("stacked class", type(stacked).__name__)
    record("rows", [row.length for row in stacked.unbind(0)])
    record.error("missing", lambda: found[0].missing)
    record("made", isinstance(Trajectory(data[:4]), Trajectory))
    record("keys", sorted(str(key) for key in found[0].keys()))


@case
def trajectories_that_fit(record: Record) -> None:
    data = rollout()
    predicate = (traj.reward.sum() > 12) & (traj.length < 200)
    record("required", sorted(str(key) for key in predicate.required_keys()))
    record("printed", repr(predicate))
    record("is one", isinstance(predicate, TrajectoryPredicate))
    for name, chosen in {
        "both": predicate,
        "not": ~predicate,
        "either": (traj.length <= 15) | (traj.observation.max() > 1),
        "any": (traj["observation"] > 1.5).any(),
        "last": traj.reward.last() == 1,
    }.items():
        record(name, [trajectory.length for trajectory in filter_trajectories(data, chosen)])
    record("first", torch.tensor([trajectory.length for trajectory in filter_trajectories(data)]))


@case
def conditional_updates(record: Record) -> None:
    result = ConditionalUpdateResult(updated=torch.tensor([True, False]), batch_size=[2])
    record("updated", result.updated)
    record("rejected", result.version_rejected)
    record("row", bool(result[1].updated))
    print(result)


@case
def robots(record: Record) -> None:
    data = TensorDict(
        {
            "observation": {"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8)},
            "language_instruction": NonTensorData("pick the cube"),
            "action": torch.zeros(2, 7),
        },
        batch_size=[2],
    )
    record("faults", validate_vla_tensordict(data))
    record("fewer", validate_vla_tensordict(data.exclude("action"), raise_on_error=False))
    metadata = RobotDatasetMetadata(
        dataset_id="shelf", action_dim=2, action_low=torch.tensor([-1.0, -2]), action_high=torch.ones(2), batch_size=[]
    )
    record("dataset", metadata.dataset_id)
    tokenizer = UniformActionTokenizer.from_metadata(metadata, num_bins=8)
    tokens = tokenizer.encode(torch.tensor([[0.5, -1.5]]))
    record("tokens", tokens)
    record("back", tokenizer.decode(tokens))
    record("clone", metadata.clone().action_low)
    torch.save(metadata, "metadata.pt")
    record("loaded", torch.load("metadata.pt", weights_only=False).action_names)


if __name__ == "__main__":
    run()
