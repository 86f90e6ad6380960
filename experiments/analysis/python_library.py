"""Writes baoc/data/python_library.txt.xz, the frozen text of language studies, from this Python's standard library.

    python experiments/analysis/python_library.py [OUT.txt.xz]

The files and their order are those of dataset=pysource, one after the other without anything between them. The asset
was made by CPython 3.11.7; another version gives another text, which is refused unless OUT names another place.
"""

import hashlib
import lzma
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.data.python_library import ASSET, SHA256  # noqa: E402
from baoc.data.text_files import python_source  # noqa: E402


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "baoc" / "data" / ASSET
    files = python_source().files
    text = b"".join(file.read_bytes() for file in files)
    found = hashlib.sha256(text).hexdigest()
    print(f"Python {sys.version.split()[0]}: {len(files)} files, {len(text)} bytes, sha256 {found}")
    if found != SHA256 and len(sys.argv) < 2:
        sys.exit(f"the frozen text has sha256 {SHA256}: run this with CPython 3.11.7, or name another file to write")
    out.write_bytes(lzma.compress(text, format=lzma.FORMAT_XZ, check=lzma.CHECK_SHA256, preset=9 | lzma.PRESET_EXTREME))
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
