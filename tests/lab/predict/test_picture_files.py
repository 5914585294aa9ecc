"""Picture files as the pixels of a model."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from predict_helpers import painted

from kerneq.lab.data import decode
from kerneq.lab.prediction import read_picture

ORIENTATION = 0x0112


@pytest.mark.parametrize("size", [(40, 23), (23, 40), (16, 16), (7, 5)])
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_pictures_are_read_as_the_reader_of_picture_folders_reads_them(tmp_path, size, ending):
    path = tmp_path / f"plain.{ending}"
    painted(*size).save(path)
    expected = decode(path, 16)
    assert torch.equal(read_picture(path, 3, 16), expected)
    opaque = tmp_path / "opaque.png"  # the way of the transparent ones; nothing shows through here
    with Image.open(path) as picture:
        picture.convert("RGBA").save(opaque)
    with Image.open(path) as picture:
        picture.convert("RGB").save(tmp_path / "same.png")
    assert torch.equal(read_picture(opaque, 3, 16), decode(tmp_path / "same.png", 16))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_picture_is_turned_as_its_exif_data_say(tmp_path, orientation, ending):
    upright = painted(48, 32)
    stored = {  # how a camera stores what should be seen as `upright`
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path, plain = tmp_path / f"turned.{ending}", tmp_path / "plain.png"
    stored.save(path, exif=exif)
    upright.save(plain)
    difference = read_picture(path, 3, 16).int() - read_picture(plain, 3, 16).int()
    # A JPEG loses up to 8 levels here, turned or not; a picture turned wrongly is 157 levels off and more.
    assert difference.abs().max() <= (0 if ending == "png" else 20)


@pytest.mark.parametrize("ending", ["jpg", "png", "webp"])
def test_a_picture_with_damaged_exif_data_is_as_it_is(tmp_path, ending):
    plain, *damaged = (tmp_path / f"{name}.{ending}" for name in ("plain", "none", "header", "cut"))
    painted(20, 12).save(plain)
    for path, data in zip(damaged, (b"", b"no TIFF", b"MM\x00*\x00\x00"), strict=True):
        painted(20, 12).save(path, exif=b"Exif\x00\x00" + data)
        assert torch.equal(read_picture(path, 3, 8), read_picture(plain, 3, 8))


def test_a_picture_is_turned_whatever_else_its_exif_data_say(tmp_path):
    turned, odd = tmp_path / "turned.jpg", tmp_path / "odd.jpg"
    tag = struct.pack(">HHI4s", ORIENTATION, 3, 1, b"\0\6\0\0")
    strange = struct.pack(">HHI4s", 0x0100, 2, 4, b"wide")  # a width in letters, which cannot be written again
    for path, tags in ((turned, [tag]), (odd, [strange, tag])):
        exif = b"Exif\0\0" + struct.pack(">2sHIH", b"MM", 42, 8, len(tags)) + b"".join(tags) + bytes(4)
        painted(20, 12).save(path, exif=exif)
    assert torch.equal(read_picture(odd, 3, 8), read_picture(turned, 3, 8))


def test_transparency_is_white_and_grey_is_luma_and_16_bits_become_8(tmp_path):
    clear, half, palette, deep, red = (tmp_path / f"{name}.png" for name in ("clear", "half", "palette", "deep", "red"))
    Image.new("RGBA", (9, 9), (255, 0, 0, 0)).save(clear)
    assert bool((read_picture(clear, 3, 4) == 255).all())
    Image.new("RGBA", (9, 9), (0, 0, 0, 51)).save(half)
    assert bool((read_picture(half, 1, 4) == 204).all())
    indexed = Image.new("P", (9, 9), 1)
    indexed.putpalette([0, 0, 0, 10, 200, 30])
    for picture, invisible in ((indexed, 1), (Image.new("L", (9, 9), 7), 7), (Image.new("RGB", (9, 9), 9), (9, 0, 0))):
        picture.save(palette, transparency=invisible)
        assert bool((read_picture(palette, 3, 4) == 255).all())
    indexed.save(palette, transparency=0)  # another entry of the palette than the one in use
    assert read_picture(palette, 3, 4)[:, 0, 0].tolist() == [10, 200, 30]
    Image.fromarray(np.full((9, 9), 128 * 257, dtype=np.uint16)).save(deep)
    assert read_picture(deep, 1, 4).unique().tolist() == [128]
    chunk = b"tRNS" + (128 * 257).to_bytes(2)  # which Pillow reads, but does not write, of 16 bits
    png = deep.read_bytes()
    head = png.index(b"IDAT") - 4
    deep.write_bytes(png[:head] + (2).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4) + png[head:])
    assert read_picture(deep, 1, 4).unique().tolist() == [255]
    Image.new("RGB", (9, 9), (255, 0, 0)).save(red)
    assert read_picture(red, 1, 4).unique().tolist() == [76] and read_picture(red, 1, 4).shape == (1, 4, 4)


@pytest.mark.parametrize(("bits", "white_first"), [(12, False), (16, False), (16, True)])
def test_a_tiff_is_as_bright_as_it_says_by_its_bits_and_by_where_white_is(tmp_path, bits, white_first):
    side, value = 8, round(200 / 255 * (2**bits - 1))
    stored = 2**bits - 1 - value if white_first else value
    pair = (stored << 12 | stored).to_bytes(3) if bits == 12 else struct.pack("<2H", stored, stored)
    data = pair * (side * side // 2)
    tags = {256: side, 257: side, 258: bits, 259: 1, 262: 0 if white_first else 1, 273: 8, 277: 1, 278: side}
    rows = [struct.pack("<HHII", tag, 3, 1, entry) for tag, entry in (tags | {279: len(data)}).items()]
    directory = struct.pack("<H", len(rows)) + b"".join(rows) + bytes(4)
    path = tmp_path / "scan.tif"
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + directory)
    assert read_picture(path, 1, 4).unique().tolist() in ([199], [200])
