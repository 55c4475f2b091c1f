"""Write scikit-image's photo of a cup of coffee to a file: `python photo.py coffee.jpg`."""

from __future__ import annotations

import argparse
import sys

from PIL import Image
from skimage import data

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="the picture to write, as coffee.jpg")
    file = parser.parse_args().file
    photo = data.coffee()  # type: ignore[no-untyped-call]
    Image.fromarray(photo).save(file, quality=95)
    sys.stderr.write(f"wrote {file}\n")
