"""Write scikit-image's photo of a cup of coffee to a file: `python photo.py coffee.jpg`."""

from __future__ import annotations

import sys

from PIL import Image
from skimage import data

if __name__ == "__main__":
    photo = data.coffee()  # type: ignore[no-untyped-call]
    Image.fromarray(photo).save(sys.argv[1], quality=95)
