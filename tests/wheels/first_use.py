"""First steps with a newly installed package; run in an environment with nothing else in it."""

import importlib.metadata
import importlib.resources
import importlib.util
import pathlib
import pkgutil
import subprocess
import sys
import sysconfig
import tempfile

import torch

import tensordict
from tensordict import TensorClass, TensorDict, load_memmap
from tensordict.nn import TensorDictModule


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor


def main() -> None:
    installed = pathlib.Path(sysconfig.get_paths()["purelib"]).resolve()
    assert pathlib.Path(tensordict.__file__).resolve().is_relative_to(installed), tensordict.__file__
    assert tensordict.__version__ == importlib.metadata.version("tensordict")
    assert importlib.util.find_spec("h5py") is None

    for line in importlib.resources.files("tensordict.compat").joinpath("client_names.tsv").read_text().splitlines():
        kind, _, rest = line.partition("\t")
        if kind == "name" and rest.startswith("tensordict"):
            pkgutil.resolve_name(rest.split("\t")[0])

    data = TensorDict({"obs": torch.rand(6, 3), "meta": {"name": "walk"}}, batch_size=[6])
    with tempfile.TemporaryDirectory() as folder:
        data.memmap(f"{folder}/saved")
        assert (load_memmap(f"{folder}/saved")["obs"] == data["obs"]).all()
        data.save(f"{folder}/saved.tdz")
        assert load_memmap(f"{folder}/saved.tdz")["meta", "name"] == "walk"
        said = ""
        try:
            data.to_h5(f"{folder}/saved.h5")
        except ImportError as error:
            said = str(error)
        assert "pip install 'tensordict[h5]'" in said, said
        command = pathlib.Path(sys.executable).parent / "tensordict"
        shown = subprocess.run([command, "verify", f"{folder}/saved"], capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr

    module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["obs"], out_keys=["action"])
    assert module(data.select("obs"))["action"].shape == (6, 2)
    steps = torch.stack([Step(obs=torch.zeros(3), reward=torch.ones(())) for _ in range(4)])
    assert type(steps[1:]) is Step and steps.reward.sum() == 4
    doubled = TensorDict(x=torch.arange(4.0), batch_size=[4]).map(double, num_workers=1, mp_start_method="fork")
    assert doubled["x"].tolist() == [0, 2, 4, 6]
    print("works on", sys.version.split()[0], "with torch", torch.__version__)


def double(part: TensorDict) -> TensorDict:
    return part * 2


if __name__ == "__main__":
    main()
