"""
Turn a folder of images into a data set that grows
==================================================

Images often come as in ImageNet: a folder for each class, a small file for each image. That is
good for looking at them, and slow for training: each mini-batch opens and decodes hundreds of
files. This program reads such a folder once, into a data set of tensors that are ready to use.
Then more images arrive, and the data set grows.
"""

# %%
# Paint a folder of images
# ------------------------
#
# This example paints four classes, in different sizes, like photographs.

import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.datasets import DatasetLoader

random.seed(0)
CLASSES = ["boat", "house", "sun", "tree"]


def paint(kind):
    width, height = random.randint(72, 128), random.randint(72, 128)
    sky, ground, colour = (
        tuple(random.choices(range(low, low + 90), k=3)) for low in (150, 40, 110)
    )
    image = Image.new("RGB", (width, height), sky)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0.7 * height, width, height), fill=ground)
    x, y = random.uniform(0.35, 0.65) * width, random.uniform(0.45, 0.7) * height
    r = random.uniform(14, 26)
    if kind == "boat":
        hull = [(x - r, y), (x + r, y), (x + r / 2, y + r / 2), (x - r / 2, y + r / 2)]
        pen.polygon(hull, fill=colour)
        pen.polygon([(x, y - 1.4 * r), (x, y - 3), (x + r, y - 3)], fill="white")
    elif kind == "house":
        pen.rectangle((x - r, y - r / 2, x + r, y + r), fill=colour)
        roof = [(x - 1.3 * r, y - r / 2), (x + 1.3 * r, y - r / 2), (x, y - 1.5 * r)]
        pen.polygon(roof, fill="firebrick")
    elif kind == "sun":
        pen.circle((x, y - r), r, fill=(255, random.randint(150, 230), 40))
    else:
        pen.rectangle((x - 3, y, x + 3, y + r), fill="saddlebrown")
        crown = [(x - r, y + 4), (x + r, y + 4), (x, y - 2 * r)]
        pen.polygon(crown, fill=(30, random.randint(90, 170), 50))
    return image


def paint_folder(folder, images):
    for number in range(images):
        kind = CLASSES[number % 4]
        (folder / kind).mkdir(parents=True, exist_ok=True)
        paint(kind).save(folder / kind / f"{number:04}.png")


scratch = tempfile.TemporaryDirectory()
root = Path(scratch.name)
paint_folder(root / "monday", 240)

# %%
# Turn an image into a row
# ------------------------
#
# A row holds everything about an image: the pixels, the class as a number, and values such as the
# path. The image is cropped and scaled once, so that no epoch has to do it again.


def read(path):
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(ImageOps.fit(image, (64, 64))))
        size = torch.tensor(image.size)
    row = {"image": pixels, "label": CLASSES.index(path.parent.name), "size": size}
    return TensorDict({**row, "path": str(path.relative_to(root))})


first = sorted((root / "monday").rglob("*.png"))[0]
print(read(first))

# %%
# Write the data set
# ------------------
#
# The writer takes rows one by one, and starts a new shard (a folder of memory-mapped tensors)
# when one is full. The first row fixes the form of all others. A row that does not fit raises an
# error with the key, and nothing of it is written. A data set of any size opens at once: an index
# reads only its rows.

with DatasetWriter(root / "data", rows_per_shard=100) as writer:
    for path in sorted((root / "monday").rglob("*.png")):
        writer.append(read(path))
    try:
        writer.append(read(first).set("image", torch.zeros(32, 32, 3, dtype=torch.uint8)))
    except ValueError as error:
        print(error)

data = open_dataset(root / "data")
print(len(data), "rows;", data[-1]["path"])

# %%
# Add rows later
# --------------
#
# On Tuesday another 160 images arrive. Another writer adds them; it could run on another machine
# at the same time, because writers share nothing but the folder. A reader that has the data set
# open gets the new rows with ``refresh``.

paint_folder(root / "tuesday", 160)
with DatasetWriter(root / "data", rows_per_shard=100) as writer:
    for path in sorted((root / "tuesday").rglob("*.png")):
        writer.append(read(path))

print("new rows:", data.refresh(), "of", len(data))

# %%
# Train on it
# -----------
#
# ``DatasetLoader`` shuffles without a list of rows, and reads ahead. It calls the transform with
# whole batches; here the transform flips a random half of the images. The state that a job needs
# to continue after a stop is a small dict.


def augment(batch):
    flipped = torch.rand(len(batch)) < 0.5
    image = torch.where(flipped.view(-1, 1, 1, 1), batch["image"].flip(2), batch["image"])
    return batch.set("image", image)


loader = DatasetLoader(data, batch_size=24, seed=0, transform=augment)
torch.manual_seed(0)
batches = iter(loader)
batch = next(batches)
state = loader.state_dict()
print({key: state[key] for key in ("epoch", "start", "seed", "rows")})

# %%
# Show a mini-batch and the mean of each class
# --------------------------------------------
#
# The upper rows show the first mini-batch, with images of both days. Below is the mean of all
# images of a class, one line of code each, because a mask selects rows in all shards. The boats
# are the smallest, and blurred most.

figure, axes = plt.subplot_mosaic(
    [[f"image {8 * row + column}" for column in range(8)] for row in range(3)]
    + [[f"mean {column // 2}" for column in range(8)]] * 2,
    figsize=(10, 7),
    layout="constrained",
)
for number, row in enumerate(batch):
    axes[f"image {number}"].imshow(row["image"].numpy())
    day, name = row["path"].split("/")[:2]
    axes[f"image {number}"].set_title(f"{day}, {name}", fontsize=8)
for label, name in enumerate(CLASSES):
    images = data[data["label"] == label]["image"]
    axes[f"mean {label}"].imshow(images.float().mean(0).numpy() / 255)
    axes[f"mean {label}"].set_title(f"mean of {len(images)} images: {name}")
for axis in axes.values():
    axis.axis("off")
plt.show()
scratch.cleanup()
