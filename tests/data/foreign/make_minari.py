"""Make the sample of Minari: `python make_minari.py`, with minari[hdf5,create] 0.5.4 and Gymnasium."""

import os
import pathlib
import shutil

import gymnasium
import numpy as np

HERE = pathlib.Path(__file__).parent / "minari"
os.environ["MINARI_DATASETS_PATH"] = str(HERE)

import minari  # noqa: E402


class Walk(gymnasium.Env):
    """Walks to 4 by steps of one, and sees its place as numbers, as an image, and as text."""

    observation_space = gymnasium.spaces.Dict(
        {
            "place": gymnasium.spaces.Box(-10, 10, (2,), np.float32),
            "camera": gymnasium.spaces.Box(0, 255, (2, 3, 3), np.uint8),
            "words": gymnasium.spaces.Text(16),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def _look(self):
        return {
            "place": np.array([self.at, -self.at], np.float32),
            "camera": np.full((2, 3, 3), self.at, np.uint8),
            "words": f"at {self.at}",
        }

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self._look(), {"left": np.array([4.0])}

    def step(self, action):
        self.at += int(action)
        return self._look(), float(action), self.at >= 4, False, {"left": np.array([4.0 - self.at])}


shutil.rmtree(HERE, ignore_errors=True)
HERE.mkdir()
env = minari.DataCollector(Walk(), record_infos=True, data_format="hdf5")
for actions in ([1, 1, 0, 1, 1], [1, 0, 1]):
    env.reset(seed=0)
    for action in actions:
        env.step(action)
env.create_dataset("walk/tiny-v0", algorithm_name="script", author="nobody", description="a sample for tests")
