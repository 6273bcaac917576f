"""A serving process for tests of agents: `FakeTFServing` behind the flags that agents pass.

Exits when its port is taken, as a real server does.
"""

from __future__ import annotations

import argparse

from monolith.agent_service.mocked_tfserving import FakeTFServing


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--port", type=int)
  parser.add_argument("--model_config_file")
  options, _ = parser.parse_known_args()
  server = FakeTFServing(port=options.port, model_config_file=options.model_config_file)
  server.start()
  server.wait_for_termination()


if __name__ == "__main__":
  main()
