"""docs/settings.md names every environment variable and every flag."""

import os
import subprocess
import sys
import unittest

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(_ROOT, "tools"))

import list_settings  # noqa: E402


class SettingsPageTest(unittest.TestCase):
  def test_page_is_current(self):
    with open(list_settings.PAGE) as f:
      page = f.read()

    self.assertEqual(page, list_settings.make_page(), "run: python tools/list_settings.py --write")

  def test_flags_that_a_training_script_defines_are_on_the_page(self):
    program = (
      "import monolith.estimator, monolith.native_training.distributed_ps_sync\n"
      "from absl import flags\n"
      "for module, found in flags.FLAGS.flags_by_module_dict().items():\n"
      "  if 'monolith' in module:\n"
      "    print(*[flag.name for flag in found], sep='\\n')\n"
    )
    printed = subprocess.run(
      [sys.executable, "-c", program],
      cwd=_ROOT,
      check=True,
      capture_output=True,
      text=True,
    ).stdout.split()
    paths = [path for path in list_settings.list_sources() if path.startswith("monolith/")]
    listed = {flag.name for flag in list_settings.find_flags(paths)}

    self.assertGreater(len(printed), 100)
    self.assertEqual(sorted(set(printed) - listed), [])

  def test_variable_without_a_meaning_is_refused(self):
    variables = list_settings.find_variables(list_settings.list_sources())

    list_settings.check_meanings(variables)
    with self.assertRaisesRegex(ValueError, "says nothing about .'MONOLITH_NEW'"):
      list_settings.check_meanings([*variables, "MONOLITH_NEW"])
    with self.assertRaisesRegex(ValueError, "names .'MONOLITH_SOAK'., which no source"):
      list_settings.check_meanings(set(variables) - {"MONOLITH_SOAK"})

  def test_variables_are_found_in_all_languages(self):
    variables = list_settings.find_variables(list_settings.list_sources())

    self.assertIn("MONOLITH_BAD_GRADIENTS", variables)  # through a constant
    self.assertIn("MONOLITH_WITH_HOROVOD_<stage>_G2G", variables)  # a pattern
    self.assertIn("OMPI_COMM_WORLD_RANK", variables)  # from a table
    self.assertIn("MONOLITH_DISABLE_HUGE_PAGES", variables)  # C++
    self.assertIn("MONOLITH_LIBZSTD", variables)  # C++, through a constant
    self.assertIn("Makefile", variables["CI"])  # shell


if __name__ == "__main__":
  unittest.main()
