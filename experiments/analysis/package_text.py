"""Writes a text of Python source that is large enough to be read once: long runs of language studies repeat nothing.

    python experiments/analysis/package_text.py OUT.xz  # seconds -> OUT.xz

Source files of installed packages (PACKAGES, at the versions of constraints.txt), without tests, in the order of the
SHA-256 of their paths, until that many bytes are there. Files of the first two megabytes are held out, so that no held
file is partly trained on. The text is not shipped: its packages have licences of their own. `SHA256` names the one that
experiments/results/role_table.csv was made with.
"""

import argparse
import hashlib
import lzma
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "torch", "sympy", "scipy", "numpy", "sklearn", "pandas", "networkx", "optuna", "lightning", "datasets", "diffusers",
)  # fmt: skip
HELD_OUT = 2_000_000  # bytes at least, from the beginning
LARGEST = 200_000  # bytes of a file: larger ones are tables
SHA256 = "4bde5719b21cee993baa8a4f654ab13a537937d6fceedd391788cd5fefa03913"


def source_files() -> Iterator[tuple[str, Path]]:
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"{name} is not installed: install the packages of constraints.txt")
        root = Path(spec.submodule_search_locations[0])
        for path in root.rglob("*.py"):
            inside = path.relative_to(root)
            if "tests" not in inside.parts and "testing" not in inside.parts:
                yield f"{name}/{inside.as_posix()}", path


def collect(num_bytes: int) -> tuple[bytes, int]:
    """The text, and how many bytes of whole files at its beginning are held out."""
    ordered = sorted(source_files(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    parts: list[bytes] = []
    total, held = 0, 0
    for _, path in ordered:
        if not 200 <= path.stat().st_size <= LARGEST:
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if not held and total >= HELD_OUT:
            held = total
        if total >= num_bytes:
            break
    return b"".join(parts), held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=48)
    given = parser.parse_args()
    text, held = collect(int(given.megabytes * 1e6))
    print(f"{len(text)} bytes, the first {held} held out, sha256 {hashlib.sha256(text).hexdigest()}")
    given.out.write_bytes(lzma.compress(held.to_bytes(8, "big") + text, preset=6))
    print(f"{given.out}: {given.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
