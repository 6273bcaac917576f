"""The example with KerasRS learns what was planted in its data, in Keras 3."""

import importlib
import importlib.util
import os
import pathlib
import sys
import unittest
from unittest import mock

import pytest
import tensorflow as tf

from tests.keras_versions import needs_keras_3

pytestmark = pytest.mark.thorough

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
# How far below what is possible a model may stay.
_MARGIN = 0.06


@needs_keras_3
@unittest.skipIf(
  importlib.util.find_spec("keras_rs") is None,
  "keras-rs is not installed: the extra `test` has it from Python 3.11 on",
)
class KerasRsTest(unittest.TestCase):
  def test_retrieves_and_ranks(self):
    tf.keras.utils.set_random_seed(1)

    with (
      mock.patch.dict(os.environ, MONOLITH_TABLE_SEED="1"),
      mock.patch.object(sys, "path", [str(_FOLDER), *sys.path]),
    ):
      results = importlib.import_module("retrieve_and_rank").run()

    self.assertEqual(list(results), ["recall at 20", "NDCG at 5"])
    for what, (reached, possible) in results.items():
      self.assertGreater(reached, possible - _MARGIN, what)


if __name__ == "__main__":
  unittest.main()
