"""A started sshd, with keys of its own, for programs that reach other hosts."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import unittest
from collections.abc import Sequence

from monolith.launch import supervisor
from tests.free_ports import get_free_port
from tests.wait_until import wait_until


def require() -> None:
  """Skips a test where ssh or sshd is missing; with `CI=true` it fails.

  Raises:
    unittest.SkipTest, AssertionError: one of them is.
  """
  if _find_sshd() and shutil.which("ssh"):
    return
  message = "needs ssh and sshd: apt-get install openssh-server"
  if os.environ.get("CI") == "true":
    raise AssertionError(message)
  raise unittest.SkipTest(message)


def _find_sshd() -> str | None:
  return shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")


class SshServer:
  """One sshd, which lets the user of this process in by a key.

  Args:
    folder: where keys and logs go; servers that share it share the key.
    address: where it listens.
    port: where it listens, a free one by default.
    prefix: what starts it, `ip netns exec ...` for another network.

  Attributes:
    command: what `ssh` needs to reach it, but for the host.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    address: str = "127.0.0.1",
    port: int | None = None,
    prefix: Sequence[str] = (),
  ) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("host", "user"):
      if not (folder / name).exists():
        subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    if os.getuid() == 0:
      # Where sshd has never run as a service, root's needs its folder.
      os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    port = port or get_free_port()
    log = folder / f"{address}.log"
    self._process = subprocess.Popen(
      [*prefix, str(_find_sshd()), "-D", "-e", "-p", str(port), "-h", str(folder / "host")]
      + ["-f", "/dev/null", f"-oAuthorizedKeysFile={folder / 'authorized_keys'}"]
      + ["-oStrictModes=no", "-oUsePAM=no", f"-oListenAddress={address}"]
      + [f"-oPidFile={folder / address}.pid", "-oMaxStartups=100"],
      stderr=log.open("wb"),
    )
    self.command = (
      f"{shlex.join(supervisor.SSH)} -p {port} -i {folder / 'user'} -oStrictHostKeyChecking=no "
      f"-oUserKnownHostsFile={folder / 'known'} -oLogLevel=ERROR -F /dev/null"
    )
    wait_until(lambda: self._process.poll() is not None or b"listening" in log.read_bytes())
    if self._process.poll() is not None:
      raise RuntimeError(f"sshd has ended: {log.read_text()}")

  def stop(self) -> None:
    """Ends it; connections that it has go on."""
    self._process.kill()
    self._process.wait()
