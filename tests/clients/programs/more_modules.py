"""Modules of TorchRL whose documentation has no example: cells, world models, scores, distributions, wrappers."""

import torch
from recording import Record, case, run
from torch import nn
from torchrl.data import Bounded, Composite, OneHot
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import (
    GRU,
    LSTM,
    MLP,
    AdditiveGaussianModule,
    BatchRenorm1d,
    ConsistentDropout,
    Delta,
    DreamerActor,
    EXP3Score,
    GRUCell,
    LMHeadActorValueOperator,
    LSTMCell,
    NormalParamExtractor,
    ObsDecoder,
    ObsEncoder,
    OneHotOrdinal,
    OrnsteinUhlenbeckProcessModule,
    PUCTScore,
    RSSMPosterior,
    RSSMPrior,
    RSSMRollout,
    SafeModule,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    SafeSequential,
    Squeeze2dLayer,
    SqueezeLayer,
    TanhDelta,
    TruncatedNormal,
    UCB1TunedScore,
    UCBScore,
    WorldModelWrapper,
    set_recurrent_mode,
)
from torchrl.modules.mcts import MCTSScores

from tensordict import TensorDict
from tensordict.nn import TensorDictModule


@case
def recurrent_cells(record: Record) -> None:
    data, state = torch.randn(3, 5, 4), torch.randn(3, 6)
    for kind in (LSTMCell, GRUCell):
        cell = kind(4, 6)
        record(kind.__name__, cell(data[:, 0], (state, state) if kind is LSTMCell else state))
    for kind in (LSTM, GRU):
        module = kind(4, 6, num_layers=2, batch_first=True)
        record(kind.__name__, module(data))
        record(f"{kind.__name__} state", dict(module.state_dict()))


@case
def layers(record: Record) -> None:
    data = torch.randn(6, 4, 1, 1)
    record("squeezed", Squeeze2dLayer()(data))
    record("squeezed last", SqueezeLayer((-1,))(data))
    norm = BatchRenorm1d(4, warmup_steps=2)
    for step in range(4):
        record(f"renorm {step}", norm(data[..., 0, 0] * (step + 1)))
    record("renorm state", dict(norm.state_dict()))
    dropout = ConsistentDropout(p=0.5)
    values, mask = dropout(data)
    record("dropout", [values, mask, dropout(data, mask=mask)])


@case
def distributions(record: Record) -> None:
    loc = torch.randn(4, 3)
    for name, made in {
        "delta": Delta(loc),
        "tanh": TanhDelta(loc, low=-2.0, high=2.0),
        "ordinal": OneHotOrdinal(loc),
        "truncated": TruncatedNormal(loc, torch.ones(4, 3), low=-1.0, high=1.0),
    }.items():
        sample = made.sample()
        record(f"{name} sample", sample)
        record(f"{name} log prob", made.log_prob(sample))
        record(f"{name} mode", made.mode)


@case
def safe_sequences(record: Record) -> None:
    spec = Composite(action=Bounded(-1, 1, (2,)))
    module = nn.Sequential(MLP(in_features=4, out_features=4, num_cells=[8]), NormalParamExtractor())
    sequence = SafeProbabilisticTensorDictSequential(
        SafeModule(module, in_keys=["observation"], out_keys=["loc", "scale"], spec=None),
        SafeProbabilisticModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            spec=spec,
            distribution_class=TruncatedNormal,
            distribution_kwargs={"low": -1.0, "high": 1.0},
            return_log_prob=True,
            safe=True,
        ),
    )
    data = TensorDict({"observation": torch.randn(5, 4)}, [5])
    record("random", sequence(data.clone()))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        record("deterministic", sequence(data.clone()))
    record("keys", [list(map(str, sequence.in_keys)), list(map(str, sequence.out_keys))])
    record("distribution", sequence.get_dist(data.clone()).mean)


@case
def noise(record: Record) -> None:
    spec = Bounded(-1, 1, (2,))
    policy = SafeModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"], spec=spec)
    gaussian = AdditiveGaussianModule(spec, sigma_init=0.5, sigma_end=0.1, annealing_num_steps=10)
    process = OrnsteinUhlenbeckProcessModule(spec, annealing_num_steps=10)
    data = TensorDict({"observation": torch.randn(5, 4), "is_init": torch.ones(5, 1, dtype=torch.bool)}, [5])
    for name, module in (("gaussian", gaussian), ("process", process)):
        with set_exploration_type(ExplorationType.RANDOM):
            both = SafeSequential(policy, module)
            for step in range(3):
                record(f"{name} {step}", both(data.clone()))
                module.step(2)
        record(f"{name} state", dict(module.state_dict()))


@case
def world_models(record: Record) -> None:
    encoder, decoder = ObsEncoder(channels=4, num_layers=2), ObsDecoder(channels=4, num_layers=2)
    images = torch.rand(2, 3, 16, 16)
    record("encoded", encoder(images))
    record("decoded", decoder(torch.randn(2, 6), torch.randn(2, 5)).shape)
    prior = TensorDictModule(
        RSSMPrior(OneHot(2), hidden_dim=8, rnn_hidden_dim=8, state_dim=4),
        in_keys=["state", "belief", "action"],
        out_keys=[("next", "prior_mean"), ("next", "prior_std"), "_", ("next", "belief")],
    )
    posterior = TensorDictModule(
        RSSMPosterior(hidden_dim=8, state_dim=4),
        in_keys=[("next", "belief"), ("next", "encoded_latents")],
        out_keys=[("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")],
    )
    rollout = RSSMRollout(prior, posterior)
    data = TensorDict(
        {
            "state": torch.randn(2, 5, 4),
            "belief": torch.randn(2, 5, 8),
            "action": torch.randn(2, 5, 2),
            "next": {"encoded_latents": torch.randn(2, 5, 6)},
        },
        [2, 5],
    )
    record("rollout", rollout(data))
    actor = DreamerActor(out_features=2, depth=1, num_cells=8)
    record("actor", actor(torch.randn(2, 4), torch.randn(2, 8)))
    model = WorldModelWrapper(
        TensorDictModule(nn.Linear(4, 4), ["state"], ["state"]),
        TensorDictModule(nn.Linear(4, 1), ["state"], ["reward"]),
    )
    record("model", model(data.select("state")))
    record("transition", model.get_transition_model_operator()(data.select("state")))
    record("reward", model.get_reward_operator()(data.select("state")))


class Language(nn.Module):
    """A base model with the output of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        return self.embedding(input_ids)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.lm_head = Both(), nn.Linear(6, 10)


class Both(Language):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> object:
        hidden = self.embedding(input_ids)
        return hidden, hidden


@case
def language_heads(record: Record) -> None:
    module = LMHeadActorValueOperator(Headed())
    data = TensorDict({"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.ones(2, 3)}, [2])
    record("out", module(data))
    record("policy", module.get_policy_operator()(data.select("input_ids", "attention_mask")))


@case
def scores_of_tree_search(record: Record) -> None:
    def node() -> TensorDict:
        return TensorDict(
            {
                "win_count": torch.tensor([3.0, 1.0, 2.0]),
                "visits": torch.tensor([5.0, 2.0, 4.0]),
                "total_visits": torch.tensor(11.0),
                "prior_prob": torch.tensor([0.2, 0.5, 0.3]),
                "sum_squared_rewards": torch.tensor([3.0, 1.0, 2.0]),
                "sum_rewards": torch.tensor([3.0, 1.0, 2.0]),
                "weights": torch.ones(3),
                "num_actions": torch.tensor(3),
            },
            [],
        )

    for score in (PUCTScore(c=1.5), UCBScore(c=1.0), UCB1TunedScore(exploration_constant=2.0), EXP3Score(gamma=0.1)):
        found = score(node())
        record(type(score).__name__, found)
    record("kinds", sorted(kind.name for kind in MCTSScores))
    exponential = EXP3Score(gamma=0.1)
    tree = exponential(node())
    exponential.update_weights(tree, 1, 0.7)
    record("updated", tree)


@case
def recurrent_modes(record: Record) -> None:
    from torchrl.modules import GRUModule

    module = GRUModule(input_size=4, hidden_size=6, in_key="observation", out_key="hidden", device="cpu")
    data = TensorDict(
        {
            "observation": torch.randn(3, 5, 4),
            "recurrent_state": torch.zeros(3, 5, 1, 6),
            "is_init": torch.zeros(3, 5, 1, dtype=torch.bool),
        },
        [3, 5],
    )
    data["is_init"][:, 0] = True
    data["is_init"][1, 3] = True
    with set_recurrent_mode(True):
        record("whole", module(data.clone())["hidden"])
    with set_recurrent_mode(False):
        record("step", module(data[:, 0].clone()))


if __name__ == "__main__":
    run()
