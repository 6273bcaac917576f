"""Asks a debugging server for variables or rows of tables, and prints them as JSON.

    python -m monolith.native_training.debugging.debugging_client --host=… --port=… \\
        --type=debugging_variables --variable_names=global_step:0
    python -m monolith.native_training.debugging.debugging_client --host=… --port=… \\
        --type=debugging_features --feature_names=user,item --feature_ids=0,1

It needs nothing but the standard library and absl, and does not load TensorFlow.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from monolith.native_training.debugging.messages import (
  FEATURE_IDS,
  FEATURE_NAMES,
  FEATURES_PATH,
  MSG,
  STATUS,
  SUCCESS,
  VARIABLE_NAMES,
  VARIABLES_PATH,
)

FLAGS = flags.FLAGS

_VARIABLES = "debugging_variables"
_FEATURES = "debugging_features"
# The server asks the parameter servers, which are busy.
_TIMEOUT_SECS = 120

# The server has flags of these names, too.
if "host" not in FLAGS:
  flags.DEFINE_string("host", "127.0.0.1", "address of the server")
if "port" not in FLAGS:
  flags.DEFINE_integer("port", 8080, "port of the server")
flags.DEFINE_enum("type", _VARIABLES, [_VARIABLES, _FEATURES], "what to ask for")
flags.DEFINE_list("variable_names", [], "variables as the graph names them, global_step:0")
flags.DEFINE_list("feature_ids", [], "ids of the rows")
flags.DEFINE_string("feature_name", None, "a feature whose rows to look up")
flags.DEFINE_list("feature_names", [], "features whose rows to look up")


class DebuggingError(RuntimeError):
  """The server cannot be reached, or it says that something went wrong."""


def fetch_variables(host: str, port: int, variable_names: Sequence[str]) -> dict[str, str]:
  """Returns the values of variables as text; those that the model does not have are left out.

  Args:
    host: the server's address.
    port: the server's port.
    variable_names: their names in the training graph.

  Raises:
    DebuggingError: the server cannot be reached, or failed.
  """
  return _post(host, port, VARIABLES_PATH, {VARIABLE_NAMES: list(variable_names)})


def fetch_features(
  host: str, port: int, feature_names: Sequence[str], feature_ids: Sequence[int]
) -> dict[str, dict[str, str]]:
  """Returns rows of tables: feature name -> id as text -> `EntryDump` as text.

  Args:
    host: the server's address.
    port: the server's port.
    feature_names: unknown ones are left out.
    feature_ids: those that have no row are left out.

  Raises:
    DebuggingError: the server cannot be reached, or failed.
  """
  body = {FEATURE_NAMES: list(feature_names), FEATURE_IDS: list(feature_ids)}
  return _post(host, port, FEATURES_PATH, body)


def _post(host: str, port: int, path: str, body: dict[str, Any]) -> Any:
  url = f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
  request = urllib.request.Request(
    url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
  )
  # Without a proxy: the server is one of the machines that train.
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  try:
    with opener.open(request, timeout=_TIMEOUT_SECS) as response:
      text = response.read().decode()
  except urllib.error.HTTPError as error:
    with error:
      reason = error.read().decode(errors="replace").strip()
    raise DebuggingError(f"{url} answered {error.code} {error.reason}: {reason}") from error
  except OSError as error:  # URLError is one, and so is a connection that breaks off.
    raise DebuggingError(f"{url} cannot be reached: {error}") from error
  try:
    reply = json.loads(text)
    status, message = reply[STATUS], json.loads(reply[MSG])
  except (KeyError, TypeError, ValueError) as error:
    raise DebuggingError(f"{url} is no debugging server, it answered {text!r}") from error
  if status != SUCCESS:
    raise DebuggingError(f"{url} failed: {message}")
  return message


def main(argv: Sequence[str]) -> None:
  """Prints what the flags ask for.

  Raises:
    app.UsageError: flags that the type needs are missing.
    DebuggingError: the server cannot be reached, or failed.
  """
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected arguments: {argv[1:]}")
  if FLAGS.type == _VARIABLES:
    if not FLAGS.variable_names:
      raise app.UsageError("--variable_names is missing")
    result = fetch_variables(FLAGS.host, FLAGS.port, FLAGS.variable_names)
  else:
    names = [*FLAGS.feature_names, *([FLAGS.feature_name] if FLAGS.feature_name else [])]
    if not names or not FLAGS.feature_ids:
      raise app.UsageError("--feature_ids, and --feature_names or --feature_name, are needed")
    result = fetch_features(FLAGS.host, FLAGS.port, names, _to_ids(FLAGS.feature_ids))
  print(json.dumps(result, indent=2, sort_keys=True))


def _to_ids(texts: Sequence[str]) -> list[int]:
  try:
    return [int(text) for text in texts]
  except ValueError as error:
    raise app.UsageError(f"--feature_ids={','.join(texts)} are not all integers") from error


if __name__ == "__main__":
  app.run(main)
