"""Hooks of MkDocs: pages refer to files outside of the site by their paths.

Documents link to sources by relative paths, as a reader of the repository wants it. The site has no
sources, so there such a link becomes its text and the path.
"""

from __future__ import annotations

import os
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  """Returns the page with links to sources as text; MkDocs calls this for every page."""
  docs = os.path.abspath(config["docs_dir"])
  folder = os.path.dirname(page.file.abs_src_path)

  def replace(match: re.Match) -> str:
    text, target = match.groups()
    path = os.path.normpath(os.path.join(folder, target.partition("#")[0]))
    if "://" in target or target.startswith("#") or path.startswith(docs + os.sep):
      return match.group(0)
    relative = os.path.relpath(path, os.path.dirname(docs))
    return text if relative in text else f"{text} (`{relative}`)"

  return _LINK.sub(replace, markdown)
