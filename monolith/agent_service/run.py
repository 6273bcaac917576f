"""Runs one of the programs of this package: `run --bin_name agent --conf agent.conf`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_PROGRAMS = ("agent", "agent_client", "tfs_client", "agent_controller", "client")


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program with the other flags; returns its exit status."""
  parser = argparse.ArgumentParser(prog="run", description=__doc__, allow_abbrev=False)
  parser.add_argument("--bin_name", choices=_PROGRAMS, required=True, help="which program")
  options, rest = parser.parse_known_args(argv)
  # By name: each of them loads other packages.
  return importlib.import_module(f"monolith.agent_service.{options.bin_name}").main(rest)


if __name__ == "__main__":
  sys.exit(main())
