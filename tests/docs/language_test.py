"""Comments and docstrings begin with a verb or a noun, not with a clause that has no sentence.

"Which ids are new." and "Of the last write." read as if translated: "Returns the new ids." and
"The stream of the last write." do not.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import unittest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SUFFIXES = {".cc", ".cu", ".h", ".proto", ".py", ".sh"}
_COMMENT = re.compile(r"^\s*(?:#|//+)\s")
_OPENING = re.compile(r'(?:^|\s)(?:#|//+|"""|(?<=\s)/\*)\s?(?:What|Which|Whoever|Of)\b')
_PHRASES = re.compile(r"\b(?:whoever|belongs? into|at the time note)\b", re.IGNORECASE)


def _find_openings(text: str) -> list[int]:
  """Returns the lines with a comment or docstring that begins so, or that has such a phrase."""
  found = []
  previous = ""
  for number, line in enumerate(text.splitlines(), 1):
    continues = (
      _COMMENT.match(line)
      and _COMMENT.match(previous)
      and not previous.rstrip().endswith((".", ":"))
    )
    if (_OPENING.search(line) and not continues) or _PHRASES.search(line):
      found.append(number)
    previous = line
  return found


class LanguageTest(unittest.TestCase):
  def test_openings_are_told_from_the_middle_of_sentences(self):
    for text in ('"""What a test does."""', "  // Of the last write.", "x = 1  # Which is it."):
      self.assertEqual(_find_openings(text), [1], text)
    self.assertEqual(_find_openings("# Ends.\n# Which then?"), [2])
    for text in ("# A list\n# Which goes on.", "# Offers", '"""Returns what."""', "// Whole"):
      self.assertEqual(_find_openings(text), [], text)

  def test_no_comment_begins_so(self):
    listed = subprocess.run(
      ["git", "ls-files"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = []
    for name in listed:
      path = _ROOT / name
      if path.suffix not in _SUFFIXES or name.startswith("third_party/") or not path.is_file():
        continue
      if path == pathlib.Path(__file__).resolve():
        continue
      for number in _find_openings(path.read_text("utf-8", errors="replace")):
        found.append(f"{name}:{number}")

    self.assertEqual(found, [])


if __name__ == "__main__":
  unittest.main()
