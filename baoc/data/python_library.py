"""A frozen text for comparable runs: the source of the standard library of CPython 3.11.7.

`dataset=pysource` reads it, so that every machine and Python trains on the same bytes: 452 files in the order of their
paths, concatenated. Copyright of the Python Software Foundation; licence and notice are in python_library.LICENSE.
experiments/analysis/python_library.py wrote it.
"""

import hashlib
import lzma
from importlib.resources import files

from baoc.errors import BadInputError

ASSET = "python_library.txt.xz"
NUM_BYTES = 8_791_869
SHA256 = "a54086002a5603858aa21fd68f70c9986968eac87403de9160080e45b0eb66e7"  # of the text, not of the file


def read_python_library() -> bytes:
    """Returns the text. Raises BadInputError if the installed file differs from the frozen one."""
    file = files("baoc.data") / ASSET
    try:
        text = lzma.decompress(file.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise BadInputError(f"the frozen text {file} cannot be read ({error}): install baoc again") from error
    if (sha256 := hashlib.sha256(text).hexdigest()) != SHA256:
        raise BadInputError(f"the frozen text {file} has sha256 {sha256}, not {SHA256}: install baoc again")
    return text
