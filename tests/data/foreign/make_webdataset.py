"""Make the sample of WebDataset: `python make_webdataset.py`, with webdataset 1.0.2 and Pillow."""

import pathlib
import shutil

import numpy as np
import webdataset

HERE = pathlib.Path(__file__).parent / "webdataset"

shutil.rmtree(HERE, ignore_errors=True)
HERE.mkdir()
with webdataset.ShardWriter(f"{HERE}/digits-%03d.tar", maxcount=3, mtime=0, verbose=0) as sink:
    for number in range(5):
        image = np.full((4, 6, 3), 10 * number, np.uint8)
        sink.write(
            {
                "__key__": f"part/{number:04}",
                "png": image,
                "mask.png": image[..., 0] + 1,
                "cls": number % 2,
                "txt": f"digit {number}",
                "json": {"size": [number, 1], "name": "é"},
                "box.npy": np.arange(4, dtype=np.float32) + number,
            }
        )
