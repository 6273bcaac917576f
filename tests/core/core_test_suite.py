"""The central tests of `monolith.core` as one suite: `python -m tests.core.core_test_suite`."""

import unittest

from tests.core import base_embedding_host_call_test, base_layer_test, hyperparams_test, util_test

_TEST_CASES = (
  hyperparams_test.ParamsTest,
  base_layer_test.BaseLayerTest,
  base_embedding_host_call_test.BaseEmbeddingHostCallTest,
  util_test.UtilTest,
)


def suite() -> unittest.TestSuite:
  """Returns the tests of all cases."""
  loader = unittest.defaultTestLoader
  return unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in _TEST_CASES)


if __name__ == "__main__":
  unittest.TextTestRunner(verbosity=2).run(suite())
