"""Make the samples of TensorFlow Datasets, one of them of RLDS: `python make_rlds.py`.

It needs tensorflow-cpu 2.21 and tensorflow-datasets 4.9.10.
"""

import pathlib
import shutil
import tempfile

import numpy as np
import tensorflow_datasets as tfds

HERE = pathlib.Path(__file__).parent


class Robot(tfds.core.GeneratorBasedBuilder):
    """Two episodes in the layout of RLDS, as those of Open X-Embodiment have it."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = HERE

    def _info(self):
        step = {
            "observation": tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(4, 6, 3), encoding_format="png"),
                    "state": tfds.features.Tensor(shape=(3,), dtype=np.float32),
                    "packed": tfds.features.Tensor(shape=(2, 2), dtype=np.int16, encoding="bytes"),
                    "squeezed": tfds.features.Tensor(shape=(2,), dtype=np.float64, encoding="zlib"),
                    "bytes": tfds.features.Tensor(shape=(2,), dtype=np.uint8),
                }
            ),
            "action": tfds.features.Tensor(shape=(2,), dtype=np.float64),
            "boxes": tfds.features.Sequence(tfds.features.Tensor(shape=(2,), dtype=np.int32)),
            "words": tfds.features.Sequence(tfds.features.Text()),
            "reward": tfds.features.Scalar(dtype=np.float32),
            "is_first": tfds.features.Scalar(dtype=np.bool_),
            "is_last": np.bool_,
            "is_terminal": np.bool_,
            "language_instruction": tfds.features.Text(),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "steps": tfds.features.Dataset(step),
                    "episode_metadata": tfds.features.FeaturesDict(
                        {
                            "file_path": tfds.features.Text(),
                            "score": tfds.features.Scalar(dtype=np.int64),
                        }
                    ),
                }
            )
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for episode, length in enumerate((3, 2)):
            steps = [
                {
                    "observation": {
                        "image": np.full((4, 6, 3), 10 * episode + step, np.uint8),
                        "state": np.array([step, -step, 0.5], np.float32),
                        "packed": np.full((2, 2), -step, np.int16),
                        "squeezed": np.array([step, 0.25], np.float64),
                        "bytes": np.array([step, 255], np.uint8),
                    },
                    "action": np.array([step, episode], np.float64),
                    "boxes": np.full((step, 2), episode, np.int32),
                    "words": ["w"] * step,
                    "reward": np.float32(step == length - 1),
                    "is_first": step == 0,
                    "is_last": step == length - 1,
                    "is_terminal": step == length - 1,
                    "language_instruction": f"go to {episode}",
                }
                for step in range(length)
            ]
            yield str(episode), {"steps": steps, "episode_metadata": {"file_path": f"{episode}.h5", "score": episode}}


class Pictures(tfds.core.GeneratorBasedBuilder):
    """Examples without steps: an image, a class, boxes of which each example has another number, and words."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = HERE

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(None, None, 3)),
                    "label": tfds.features.ClassLabel(names=["cat", "dog"]),
                    "box": tfds.features.Sequence(tfds.features.Tensor(shape=(2,), dtype=np.float32)),
                    "points": tfds.features.Tensor(shape=(None, 3), dtype=np.float32),
                    "words": tfds.features.Sequence(tfds.features.Text()),
                    "name": tfds.features.Text(),
                }
            )
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(3):
            yield (
                str(number),
                {
                    "image": np.full((2 + number, 3, 3), number, np.uint8),
                    "label": number % 2,
                    "box": np.full((number, 2), number, np.float32),
                    "points": np.full((1 + number, 3), number, np.float32),
                    "words": ["w"] * number,
                    "name": f"n{number}",
                },
            )


for builder, name in ((Robot, "rlds"), (Pictures, "tfds")):
    with tempfile.TemporaryDirectory() as folder:
        made = builder(data_dir=folder)
        made.download_and_prepare()
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(made.data_dir, HERE / name)
