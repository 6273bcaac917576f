"""Scores a file of examples: `monolith_predict`.

    monolith_predict --saved_model=model/exported_models/entry --input=examples.csv
    monolith_predict --server=localhost:8500 --model_name=clicks --input=instances --format=instance

Writes CSV: a line with the names of the outputs, then a line per example.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Sequence
from typing import TextIO

import numpy as np
import tensorflow as tf

from monolith.serving import remote_servers
from monolith.serving.errors import ServingError, invalid
from monolith.serving.sample_files import FORMATS, RecordHeader, read_batches
from monolith.serving.scorer import LocalScorer, RemoteScorer
from monolith.serving.servable import DEFAULT_SIGNATURE


def main(arguments: Sequence[str] | None = None) -> int:
  """Scores what the flags say; returns the exit status."""
  flags = _parse(arguments)
  tf.compat.v1.disable_eager_execution()
  try:
    if flags.ps_address:
      remote_servers.install(remote_servers.parse_addresses(flags.ps_address))
    scorer = (
      LocalScorer(flags.saved_model, flags.signature_name)
      if flags.saved_model
      else RemoteScorer(flags.server, flags.model_name, flags.signature_name)
    )
    with contextlib.ExitStack() as stack:
      stack.callback(scorer.close)
      output = sys.stdout
      if flags.output:
        output = stack.enter_context(tf.io.gfile.GFile(flags.output, "w"))
      count = score_file(scorer, flags, output)
  except (ServingError, tf.errors.OpError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  print(f"{count} examples", file=sys.stderr)
  return 0


def cli() -> None:
  """The console script."""
  sys.exit(main())


def score_file(
  scorer: LocalScorer | RemoteScorer, flags: argparse.Namespace, output: TextIO
) -> int:
  """Writes the scores of a file; returns how many examples it had.

  Raises:
    ServingError: the examples do not fit the model, or it failed.
  """
  header = RecordHeader(*(getattr(flags, name) for name in RecordHeader._fields))
  writer = csv.writer(output, lineterminator="\n")
  count = 0
  for inputs in read_batches(flags.input, flags.format, scorer.signature, flags.batch_size, header):
    outputs = scorer.score(inputs)
    names = sorted(outputs)
    rows = {len(outputs[name]) if outputs[name].ndim else -1 for name in names}
    if len(rows) != 1 or -1 in rows:
      shapes = {name: outputs[name].shape for name in names}
      raise invalid(f"the outputs have shapes {shapes}, want one row per example in each")
    if count == 0:
      writer.writerow(names)
    for row in zip(*(outputs[name] for name in names)):
      writer.writerow([_to_cell(value) for value in row])
    count += rows.pop()
  return count


def _to_cell(value: object) -> str:
  if isinstance(value, bytes):
    return value.decode(errors="backslashreplace")
  if isinstance(value, np.ndarray):
    return " ".join(_to_cell(element) for element in value.ravel())
  return str(value)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="monolith_predict", description=__doc__.split("\n")[0])
  add = parser.add_argument
  add("--saved_model", default="", help="folder of a SavedModel, or of its versions")
  add("--server", default="", help="host:port of a model server, instead")
  add("--model_name", default="default", help="which model of the server")
  add("--signature_name", default=DEFAULT_SIGNATURE, help="which signature")
  add("--input", required=True, help="file of examples")
  add("--format", choices=FORMATS, default="csv", help="its format")
  add("--output", default="", help="file of scores; standard output by default")
  add("--batch_size", type=int, default=512, help="examples at a time")
  add("--ps_address", default="", help="name=host:port|host:port,... of an entry's servers")
  for name in RecordHeader._fields:
    add(f"--{name}", action="store_true", help="part of the header of instances and examples")
  flags = parser.parse_args(arguments)
  if bool(flags.saved_model) == bool(flags.server):
    parser.error("want either --saved_model or --server")
  if flags.batch_size < 1:
    parser.error(f"--batch_size is {flags.batch_size}, want at least 1")
  return flags


if __name__ == "__main__":
  cli()
