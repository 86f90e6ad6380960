"""Writes baoc/data/python_library.txt.xz, the frozen text of language studies, from this Python's standard library.

    python experiments/analysis/python_library.py OUT.txt.xz  # seconds -> OUT.txt.xz

The files and their order are those of dataset=pysource, one after the other without anything between them. The asset
was made by CPython 3.11.7; another version gives another text, which is refused unless OUT names another place.
"""

import argparse
import hashlib
import lzma
import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.data.python_library import ASSET, SHA256

# Left out of the standard library: tests, files that differ between machines, and generated code.
_NO_SOURCE = {"test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "pydoc_data", "__phello__"}
_NO_SOURCE |= {"site-packages", "dist-packages", "__pycache__"}
_BUILT = ("config-", "_sysconfigdata")  # written when Python was built


def python_source() -> list[Path]:
    """The source of Python's standard library, sorted by path. The content depends on Python's version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NO_SOURCE and not name.startswith(_BUILT)]
        files += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    files = sorted((file for file in files if not file.name.startswith(_BUILT)), key=lambda file: file.as_posix())
    return [root / file for file in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="another file, which may be of another Python")
    out = parser.parse_args().out
    files = python_source()
    text = b"".join(file.read_bytes() for file in files)
    found = hashlib.sha256(text).hexdigest()
    print(f"Python {sys.version.split()[0]}: {len(files)} files, {len(text)} bytes, sha256 {found}")
    if found != SHA256 and out is None:
        sys.exit(f"the frozen text has sha256 {SHA256}: run this with CPython 3.11.7, or name another file to write")
    out = out or ROOT / "baoc" / "data" / ASSET
    out.write_bytes(lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME))
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
