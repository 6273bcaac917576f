"""Certificates for tests of TLS, made by the program `openssl`."""

from __future__ import annotations

import pathlib
import subprocess


def _openssl(*arguments: str) -> None:
  subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def write(folder: str) -> dict[str, str]:
  """Writes two authorities, and keys and certificates that they signed; returns texts by file."""
  texts = {}
  for authority in ("ca", "other"):
    _openssl(
      *"req -x509 -newkey rsa:2048 -nodes -days 2".split(),
      *("-keyout", f"{folder}/{authority}.key", "-out", f"{folder}/{authority}.crt"),
      *("-subj", f"/CN={authority}"),
    )
  pathlib.Path(folder, "names").write_text("subjectAltName=DNS:localhost")
  for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
    _openssl(
      *"req -newkey rsa:2048 -nodes".split(),
      *("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.csr", "-subj", f"/CN={name}"),
    )
    _openssl(
      *("x509", "-req", "-in", f"{folder}/{name}.csr", "-days", "2", "-CAcreateserial"),
      *("-CA", f"{folder}/{authority}.crt", "-CAkey", f"{folder}/{authority}.key"),
      *("-extfile", f"{folder}/names", "-out", f"{folder}/{name}.crt"),
    )
  for path in [*pathlib.Path(folder).glob("*.crt"), *pathlib.Path(folder).glob("*.key")]:
    texts[path.name] = path.read_text()
  return texts
