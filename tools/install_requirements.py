"""Installs packages into the environment of this Python, as `pip install` would.

  python tools/install_requirements.py -r FILE
  python tools/install_requirements.py ./third_party/horovod

uv does it in a fifth of pip's time: it downloads and unpacks several wheels at once. It does not
read pip's configuration, so indexes and certificates are taken from there; where uv cannot be had
or cannot install everything, pip does it.
"""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys

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
  return subprocess.run(command, stdout=subprocess.PIPE, text=True)


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
  if _install_with_uv(what):
    return 0
  print("uv could not install everything: pip does it, which takes some minutes.", file=sys.stderr)
  return _pip("install", "--quiet", *what).returncode


if __name__ == "__main__":
  sys.exit(main())
