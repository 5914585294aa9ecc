"""Sheets of small pictures, each with a caption, and the PNG file of a picture."""

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIDE, LINE, GAP = 128, 18, 8  # pixels of a picture's side, of a line of text, and between pictures


def enlarge(picture: Tensor) -> Image.Image:
    """A picture, uint8 (channels, h, w), as a square of SIDE pixels, without blurring the pixels of a small one."""
    tile = Image.fromarray(picture.cpu().expand(3, -1, -1).permute(1, 2, 0).numpy())
    how = Image.Resampling.NEAREST if tile.width <= SIDE else Image.Resampling.LANCZOS
    return tile.resize((SIDE, SIDE), how)


def draw_sheet(title: str, rows: Sequence[Sequence[tuple[Image.Image, str]]]) -> Image.Image:
    """A title, and below it rows of squares of SIDE pixels, each with a caption of two lines at most."""
    font = ImageFont.load_default(13)
    width, height = SIDE + GAP, SIDE + 2 * LINE + GAP
    wide = max([int(font.getlength(title)) + GAP, *(len(tiles) * width for tiles in rows)])
    sheet = Image.new("RGB", (wide + GAP, len(rows) * height + LINE + 12), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((GAP, 6), title, "black", font)
    for row, tiles in enumerate(rows):
        for column, (picture, caption) in enumerate(tiles):
            left, top = GAP + column * width, LINE + 12 + row * height
            sheet.paste(picture, (left, top))
            for line, text in enumerate(caption.split("\n", 1)):
                text = "".join(c if c.isprintable() else "\ufffd" for c in text)
                while font.getlength(text) > SIDE:
                    text = text[:-2] + "…"
                pen.text((left, top + SIDE + 2 + line * LINE), text, ("black", "#606060")[line], font)
    return sheet


def png(picture: Image.Image) -> bytes:
    """The content of a PNG file of the picture."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return buffer.getvalue()
