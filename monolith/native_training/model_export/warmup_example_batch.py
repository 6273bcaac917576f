"""Writes a warm-up file from a file of ExampleBatches, one request for each of them.

python -m monolith.native_training.model_export.warmup_example_batch --input=FILE --output=FILE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from monolith.native_training.model_export import warmup_data_gen


def main(arguments: Sequence[str] | None = None) -> int:
  """Writes the file that the flags name; returns the exit status."""
  arguments = sys.argv[1:] if arguments is None else arguments
  return warmup_data_gen.main(["--format=example_batch", *arguments])


if __name__ == "__main__":
  sys.exit(main())
