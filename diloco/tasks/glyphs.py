"""Images of characters in the fonts that matplotlib brings along.

A *glyph* is one character in one font, 24 x 24 pixels, on a common base line
and in its true size. Its class is the *kind* of its character: the first word
of its Unicode name and its category, as "LATIN Lu" or "BRAILLE So", where
enough characters share both, and the category alone, as "Sm", where not. So a
kind can be told of a character that was never seen, and of a font that was
never seen. Capital A is drawn alike in Latin, Greek and Cyrillic: no model
reaches a loss of zero.

Two sets are held out: "characters" are characters that training has in no
font; "fonts" are the others in a family that training has not at all. A glyph
that is drawn as one in training is in neither, whatever it is called.
"""

import collections
import dataclasses
import functools
import pathlib
import threading
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from diloco import errors
from diloco.tasks import streams, task

SIZE = 24  # pixels of an image, along each side
HELDOUT_SETS = ("characters", "fonts")
_HELDOUT_FAMILY = "DejaVuSansMono"  # of files; a fifth of all glyphs
# Fonts of TeX, whose codes are not Unicode's, and one of placeholders.
_SKIPPED_FONTS = ("cm", "LastResort")
_SKIPPED_CATEGORIES = "CZ"  # what has no shape
_LEAST_CHARACTERS = 24  # of a kind
_POINTS = 16  # of a font, at one pixel a point
_BASE_LINE = 18  # pixels from the top

_load_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Glyphs:
  """All glyphs and their split."""

  images: np.ndarray  # [N, 24, 24], uint8, 255 for ink
  labels: np.ndarray  # [N], int32, index of a kind
  kinds: tuple[str, ...]  # sorted
  splits: Mapping[str, np.ndarray]  # by name: indices of glyphs

  def rows(self, split: task.Split) -> list[dict[str, Any]]:
    """Returns the glyphs of a split, in its order: {"image", "label"}."""
    which = self.splits[split]
    found = zip(self.images[which], self.labels[which], strict=True)
    return [{"image": image, "label": label} for image, label in found]


def load(heldout_fraction: float) -> Glyphs:
  """Draws all glyphs, once per process; it takes some seconds.

  Raises:
    UserError: so few, or so many, are held out that a split is empty.
  """
  # Islands may be threads of one process: they share one copy.
  with _load_lock:
    return _split(heldout_fraction)


@functools.lru_cache(maxsize=2)
def _split(heldout_fraction: float) -> Glyphs:
  fonts, codes, images = _draw_all()
  names = kinds(set(codes.tolist()))
  classes = tuple(sorted(set(names.values())))
  number = {name: index for index, name in enumerate(classes)}
  labels = np.array([number.get(names.get(c, ""), -1) for c in codes.tolist()])
  heldout = {
    c for c in names if streams.is_heldout(f"U+{c:04X}", heldout_fraction)
  }
  of_character = np.isin(codes, sorted(heldout))
  of_font = np.char.startswith(fonts, _HELDOUT_FAMILY)
  known = labels >= 0
  splits = {
    "train": known & ~of_character & ~of_font,
    "characters": known & of_character & ~of_font,
    "fonts": known & ~of_character & of_font,
  }
  trained = {image.tobytes() for image in images[splits["train"]]}
  unseen = np.array([image.tobytes() not in trained for image in images])
  for name in HELDOUT_SETS:
    splits[name] &= unseen
  splits[task.HELDOUT] = splits["characters"] | splits["fonts"]
  for split, chosen in splits.items():
    if not chosen.any():
      raise errors.UserError(
        f"heldout_fraction={heldout_fraction}",
        f"there is no glyph left for {split}",
        "hold out another share",
      )
  return Glyphs(
    images,
    labels.astype(np.int32),
    classes,
    {split: np.flatnonzero(chosen) for split, chosen in splits.items()},
  )


def kinds(codes: Iterable[int]) -> dict[int, str]:
  """Returns each character's kind; all there are decide which kinds are."""
  fine = {code: _first_word(code) for code in codes}
  counts = collections.Counter(fine.values())
  coarse = {
    code: name
    if counts[name] >= _LEAST_CHARACTERS
    else unicodedata.category(chr(code))
    for code, name in fine.items()
  }
  counts = collections.Counter(coarse.values())
  return {
    code: name
    for code, name in coarse.items()
    if counts[name] >= _LEAST_CHARACTERS
  }


def _first_word(code: int) -> str:
  name = unicodedata.name(chr(code), "?").replace("-", " ")
  return f"{name.split()[0]} {unicodedata.category(chr(code))}"


@functools.cache
def _draw_all() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns of each glyph the font's name, the code point and the image."""
  # Imported here: it takes half a second, and few runs draw glyphs.
  import matplotlib
  from matplotlib import ft2font

  fonts, codes, images = [], [], []
  folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
  for path in sorted(folder.glob("*.ttf")):
    if path.name.startswith(_SKIPPED_FONTS):
      continue
    font = ft2font.FT2Font(str(path))
    font.set_size(_POINTS, 72)
    for code in sorted(font.get_charmap()):
      if unicodedata.category(chr(code))[0] not in _SKIPPED_CATEGORIES:
        image = _draw(font, code, ft2font.LoadFlags.NO_HINTING)
        if image.any():
          fonts.append(path.stem)
          codes.append(code)
          images.append(image)
  return np.array(fonts), np.array(codes), np.stack(images)


def _draw(font: Any, code: int, flags: Any) -> np.ndarray:
  """One glyph on the base line, its box in the middle; the rest is cut off."""
  image = np.zeros((SIZE, SIZE), np.uint8)
  glyph = font.load_char(code, flags=flags)
  left, _, right, top = (edge // 64 for edge in glyph.bbox)
  column = (SIZE - (right - left)) // 2 - left
  font.draw_glyph_to_bitmap(image, column, _BASE_LINE - top - 1, glyph)
  return image
