"""Installs packages into the environment of this Python, as `pip install` would.

  python tools/install_requirements.py -r FILE
  python tools/install_requirements.py ./third_party/horovod

uv does it in a fifth of pip's time: it downloads and unpacks several wheels at once. It does not
read pip's configuration, so indexes and certificates are taken from there; where uv cannot be had
or cannot install everything, pip does it.
"""

from __future__ import annotations

import ast
import csv
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tensorflow_versions  # noqa: E402

UV = "uv>=0.5,<1"
# pip's settings, with uv's options; each value may name several.
_OPTIONS = {
  "index-url": "--index-url",
  "extra-index-url": "--extra-index-url",
  "find-links": "--find-links",
  "trusted-host": "--allow-insecure-host",
}
_SECTIONS = ("global", "install", ":env:")  # later ones win


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
  # Where pip's configuration says so, it would install into the home folder: not from here.
  environment = {**os.environ, "PIP_USER": "0"}
  return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)


def pip_settings(listing: str) -> dict[str, str]:
  """Returns the settings that `pip config list` printed, without their sections."""
  found: dict[tuple[int, str], str] = {}
  for line in listing.splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.partition(".")
    if section in _SECTIONS and value:
      found[_SECTIONS.index(section), name] = str(ast.literal_eval(value))
  return {name: found[section, name] for section, name in sorted(found)}


def uv_arguments(settings: dict[str, str]) -> list[str]:
  """Returns the options that let uv look where pip would look."""
  arguments = ["--index-strategy", "unsafe-best-match"]  # the best version of all indexes, as pip
  for name, option in _OPTIONS.items():
    for value in settings.get(name, "").split():
      arguments += [option, value]
  if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
    arguments.append("--no-index")
  return arguments


def forget_incomplete_packages(folder: pathlib.Path) -> list[str]:
  """Removes the metadata of packages of which files are missing or cut short; returns their names.

  An interrupted installation, or a full disk, leaves such ones. pip and uv look at metadata alone:
  without it they install the package again.

  Args:
    folder: that of the packages.
  """
  names = []
  for metadata in sorted(folder.glob("*.dist-info")):
    if not _is_complete(metadata):
      names.append(metadata.name.partition("-")[0])
      shutil.rmtree(metadata)
  return names


def _is_complete(metadata: pathlib.Path) -> bool:
  try:
    with open(metadata / "RECORD", encoding="utf-8", newline="") as stream:
      rows = list(csv.reader(stream))
      for path, _, size in rows:
        # Compiled modules, and RECORD itself, have no size.
        if size and (metadata.parent / path).stat().st_size < int(size):
          return False
  except (OSError, ValueError, csv.Error):  # a file is missing, or RECORD is cut short or damaged
    return False
  return bool(rows)


def _install_with_uv(what: list[str]) -> bool:
  if _pip("install", "--quiet", UV).returncode != 0:
    return False
  settings = pip_settings(_pip("config", "list").stdout)
  environment = dict(os.environ)
  # uv builds in environments that do not know the one that they are for.
  if not environment.get(tensorflow_versions.VARIABLE):
    environment[tensorflow_versions.VARIABLE] = tensorflow_versions.target().minor
  if "cert" in settings:
    environment.setdefault("SSL_CERT_FILE", settings["cert"])
  if "proxy" in settings:
    environment.setdefault("ALL_PROXY", settings["proxy"])
  command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode"]
  command += ["--python", sys.executable, *uv_arguments(settings), *what]
  return subprocess.run(command, env=environment).returncode == 0


def main() -> int:
  what = sys.argv[1:]
  if not what:
    print(__doc__, file=sys.stderr)
    return 2
  # Another Python than that of an environment has packages that its distribution looks after.
  if sys.prefix != sys.base_prefix:
    incomplete = forget_incomplete_packages(pathlib.Path(sysconfig.get_path("purelib")))
    if incomplete:
      print(f"Incomplete, and installed again where needed: {', '.join(incomplete)}", flush=True)
  if _install_with_uv(what):
    return 0
  print("uv could not install everything: pip does it, which takes some minutes.", file=sys.stderr)
  return _pip("install", "--quiet", *what).returncode


if __name__ == "__main__":
  sys.exit(main())
