"""Every public class of seven modules of TorchRL is used by a program, or stands here with the reason why it is not."""

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"

# Of each module its public classes, and those of which the documentation has an example, which `documentation.py` runs.
LIST = """
import doctest, importlib, inspect, json, sys

def has_example(value):
    documented = [value, *(member for name, member in vars(value).items() if not name.startswith("_"))]
    return any(">>>" in (inspect.getdoc(member) or "") for member in documented if callable(member))

found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for key in sorted(set(getattr(module, "__all__", None) or dir(module))):
        value = getattr(module, key, None)
        if inspect.isclass(value) and value.__module__.startswith("torchrl") and not key.startswith("_"):
            found.setdefault(name, {})[key] = has_example(value)
print(json.dumps(found))
"""
DOCUMENTED = ("torchrl.modules", "torchrl.objectives", "torchrl.objectives.value")
MODULES = (
    *DOCUMENTED,
    "torchrl.envs.transforms",
    "torchrl.data.replay_buffers",
    "torchrl.collectors",
    "torchrl.checkpoint",
    "torchrl.trainers",
    "torchrl.trainers.algorithms",
)
RAY, VISION, WEIGHTS = "needs a Ray cluster", "needs torchvision", "downloads weights of a network"
GYM = "needs an environment that is not installed"
BASE = "a base class: programs use its subclasses"
REFUSES = "lists cannot be saved: programs reach it through `ListStorage`"
GPU, LANGUAGE, OLD = "needs a GPU", "needs a language model", "its documentation says that it is gone or going"
SERVER = "needs a server, and the package redis"
UNUSED = {
    "AdditiveGaussianWrapper": OLD,
    "CenterCrop": VISION,
    "Crop": VISION,
    "EGreedyWrapper": OLD,
    "EndOfLifeTransform": GYM,
    "GRPOTrainer": LANGUAGE,
    "GrayScale": VISION,
    "HumanoidMacroAction": GYM,
    "ListStorageCheckpointer": REFUSES,
    "MCTSScore": BASE,
    "MPCPlannerBase": BASE,
    "MultiCollector": BASE,
    "NormalParamWrapper": OLD,
    "OrnsteinUhlenbeckProcessWrapper": OLD,
    "PinMemoryTransform": GPU,
    "R3MTransform": WEIGHTS,
    "RayReplayBuffer": RAY,
    "RayTransform": RAY,
    "RayWeightUpdater": RAY,
    "Resize": VISION,
    "SampleUnit": BASE,
    "Sampler": BASE,
    "Storage": BASE,
    "StoreStorage": SERVER,
    "TargetNetUpdater": BASE,
    "VC1Transform": WEIGHTS,
    "VIPRewardTransform": WEIGHTS,
    "VIPTransform": WEIGHTS,
    "ValueEstimatorBase": BASE,
    "ValueNorm": BASE,
    "Writer": BASE,
}


def list_classes() -> dict[str, dict[str, bool]]:
    """The public classes of each module, and whether the documentation of a class has an example."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RL_WARNINGS": "0", "PYTHONWARNINGS": "ignore"}
    python = ROOT / ".venv-clients" / "bin" / "python"
    printed = subprocess.run(
        [python, "-c", LIST, *MODULES], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(printed.stdout.splitlines()[-1])


def find_used_names() -> set[str]:
    """All names that the code of a program uses; an import alone does not count."""
    trees = [ast.parse(path.read_text()) for path in PROGRAMS.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_every_public_class_is_used_or_has_a_reason() -> None:
    used = find_used_names()
    unused = {
        name
        for module, classes in list_classes().items()
        for name, is_shown in classes.items()
        if name not in used and not (module in DOCUMENTED and is_shown)
    }
    assert sorted(unused - UNUSED.keys()) == [], "no program uses them, and UNUSED has no reason"
    assert sorted(UNUSED.keys() - unused) == [], "programs use them, or they are gone: UNUSED need not have them"
