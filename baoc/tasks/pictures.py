"""Images side by side in one PNG file, written without an image library."""

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

LEAST_PIXELS = 32  # an image is enlarged to at least this many pixels a side, as 8 x 8 ones are hard to see


def write_grid(images: Tensor, path: Path, *, columns: int) -> None:
    """Writes images (N, C, S, S) with values in [-1, 1] row by row: 1 channel as grey, 3 as RGB.

    Of latents (other channel counts) the first three channels are shown, each scaled to its own range.
    """
    images = images.detach().float().cpu().nan_to_num(nan=-1.0)
    if images.shape[1] not in (1, 3):
        images = images[:, :3]
        low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
        images = (images - low) / (high - low).clamp_min(1e-12) * 2 - 1
    images = images if images.shape[1] in (1, 3) else images[:, :1]
    pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    enlarge = -(-LEAST_PIXELS // pixels.shape[-1])
    pixels = pixels.repeat_interleave(enlarge, -1).repeat_interleave(enlarge, -2)
    path.write_bytes(png(_tiled(pixels, columns=columns)))


def png(pixels: Tensor) -> bytes:
    """(H, W, 1 or 3) uint8 as a PNG file (ISO/IEC 15948): 8 bits a channel, no filter, one zlib stream."""
    height, width, channels = pixels.shape
    colour = {1: 0, 3: 2}[channels]
    unfiltered = torch.zeros(height, 1, dtype=torch.uint8)  # each row begins with the number of its filter
    rows = torch.cat([unfiltered, pixels.reshape(height, -1)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.numpy().tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _tiled(pixels: Tensor, *, columns: int) -> Tensor:
    """(N, C, S, S) -> (rows * (S + 1) + 1, columns * (S + 1) + 1, C), a white line between images."""
    count, channels, size, _ = pixels.shape
    rows = -(-count // columns)
    canvas = torch.full((rows * (size + 1) + 1, columns * (size + 1) + 1, channels), 255, dtype=torch.uint8)
    for index, image in enumerate(pixels):
        top, left = index // columns * (size + 1) + 1, index % columns * (size + 1) + 1
        canvas[top : top + size, left : left + size] = image.permute(1, 2, 0)
    return canvas
