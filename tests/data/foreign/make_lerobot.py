"""Make the sample of LeRobot: `python make_lerobot.py`, with lerobot 0.4.4 (format v3.0) and av."""

import pathlib
import shutil

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HERE = pathlib.Path(__file__).parent / "lerobot"
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
    "observation.images.wrist": {"dtype": "image", "shape": (16, 24, 3), "names": ["height", "width", "channels"]},
    "observation.images.top": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": (2,), "names": ["a", "b"]},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
}

shutil.rmtree(HERE, ignore_errors=True)
data = LeRobotDataset.create("nobody/sample", fps=10, features=FEATURES, root=HERE, robot_type="none", use_videos=True)
for episode, length in enumerate((6, 4)):
    for step in range(length):
        data.add_frame(
            {
                "observation.state": np.array([episode, step, 0.5], np.float32),
                "observation.images.wrist": np.full((16, 24, 3), 10 * episode + step, np.uint8),
                "observation.images.top": np.full((64, 96, 3), 100 * episode + 10 * step, np.uint8),
                "action": np.array([step, -step], np.float32),
                "next.done": np.array([step == length - 1]),
                "task": f"task {episode}",
            }
        )
    data.save_episode()
data.finalize()
shutil.rmtree(HERE / "images", ignore_errors=True)
