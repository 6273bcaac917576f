"""Checks the subject of a commit: `commit_subject.py FILE`, as Git's hook `commit-msg` calls it.

CONTRIBUTING.md has the rule; whether a verb is in the imperative is left to the reader.
"""

from __future__ import annotations

import pathlib
import re
import sys

_LONGEST = 72
# They tell what the author did, or that the work is not done.
_BEGINNINGS = re.compile(r"(say|write down|wip|fixup!|squash!)(?!\w)", re.IGNORECASE)


def find_fault(message: str) -> str:
  """Returns what is wrong with a message's subject, as a sentence, or nothing."""
  subject = message.split("\n", 1)[0]
  if not subject.strip():
    return "the subject is empty"
  if len(subject) > _LONGEST:
    return f"the subject has {len(subject)} characters, want at most {_LONGEST}"
  if found := _BEGINNINGS.match(subject):
    return f"the subject begins with {found[0]!r}, want a verb for what the commit changes"
  if not subject[0].isupper() or subject.endswith("."):
    return "the subject wants a capital letter first and no full stop"
  return ""


def main(arguments: list[str]) -> int:
  (path,) = arguments
  fault = find_fault(pathlib.Path(path).read_text("utf-8"))
  if fault:
    print(f"error: {fault}: CONTRIBUTING.md", file=sys.stderr)
  return 1 if fault else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
