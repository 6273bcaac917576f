import dataclasses
import enum
import subprocess
import sys
import unittest
from typing import Optional
from unittest import mock

from absl import flags
from absl.testing import flagsaver

from monolith.native_training import gflags_utils

FLAGS = flags.FLAGS


class Color(enum.Enum):
  RED = 1
  DARK_BLUE = 2


class Documented:
  """Text before the parameters.

  :param test_str: string for test
    and   test another line

  :param test_int:   int for
    test
  :param other.name-x: odd name
  """


class DocumentedChild(Documented):
  """:param test_int: overridden"""


class HelpInfoTest(unittest.TestCase):
  def test_extract_help_info(self):
    self.assertEqual(
      gflags_utils.extract_help_info(Documented),
      {
        "test_str": "string for test and test another line",
        "test_int": "int for test",
        "other.name-x": "odd name",
      },
    )

  def test_own_entries_win(self):
    help_info = gflags_utils.extract_help_info(DocumentedChild)

    self.assertEqual(help_info["test_int"], "overridden")
    self.assertEqual(help_info["other.name-x"], "odd name")
    self.assertEqual(
      gflags_utils.extract_help_info(DocumentedChild, is_nested=False), {"test_int": "overridden"}
    )

  def test_no_docstring(self):
    class Bare:
      pass

    self.assertEqual(gflags_utils.extract_help_info(Bare), {})

  def test_metadata(self):
    @dataclasses.dataclass
    class Config:
      """:param a: from the docstring"""

      a: int = 0
      b: int = dataclasses.field(default=0, metadata={"help": "from the field"})

    self.assertEqual(
      gflags_utils.extract_help_info(Config), {"a": "from the docstring", "b": "from the field"}
    )

  def test_metadata_survives_stripped_docstrings(self):
    program = (
      "import dataclasses\n"
      "from absl import flags\n"
      "from monolith.native_training import gflags_utils\n"
      "@gflags_utils.extract_flags_decorator()\n"
      "@dataclasses.dataclass\n"
      "class Config:\n"
      "  ':param a: lost'\n"
      "  a: int = 0\n"
      "  b: int = dataclasses.field(default=3, metadata={'help': 'kept'})\n"
      "print('a' in flags.FLAGS, flags.FLAGS['b'].default)\n"
    )
    result = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True)
    self.assertEqual(result.stdout, "False 3\n", result.stderr)


class ExtractFlagsTest(unittest.TestCase):
  def test_types(self):
    @gflags_utils.extract_flags_decorator(remove_flags={"ef_removed"})
    @dataclasses.dataclass
    class Config:
      """
      :param ef_int: an int
      :param ef_bool: a bool
      :param ef_str: a str
      :param ef_float: a float
      :param ef_enum: an enum
      :param ef_optional: an optional
      :param ef_dict: has no flag type
      :param ef_removed: is removed
      :param ef_unknown: is no field
      """

      ef_int: int = 1
      ef_bool: bool = True
      ef_str: str = "s"
      ef_float: float = 0.5
      ef_enum: Color = Color.DARK_BLUE
      ef_optional: Optional[int] = None
      ef_dict: Optional[dict[str, int]] = None
      ef_removed: int = 0
      ef_undocumented: int = 0

    self.assertEqual(
      [FLAGS[f"ef_{name}"].default for name in ("int", "bool", "str", "float", "enum", "optional")],
      [1, True, "s", 0.5, "dark_blue", None],
    )
    self.assertEqual(FLAGS["ef_enum"].parser.enum_values, ["red", "dark_blue"])
    self.assertEqual(FLAGS["ef_int"].help, "int, default=1, an int")
    for name in ("dict", "removed", "unknown", "undocumented"):
      self.assertNotIn(f"ef_{name}", FLAGS)

  def test_inherited_fields(self):
    @dataclasses.dataclass
    class Base:
      """:param in_base: of the base"""

      in_base: int = 1

    @dataclasses.dataclass
    class Child(Base):
      """:param in_child: of the child"""

      in_child: int = 2

    gflags_utils.extract_flags(flags, Child, is_nested=False)
    self.assertIn("in_child", FLAGS)
    self.assertNotIn("in_base", FLAGS)

    gflags_utils.extract_flags(flags, Child, is_nested=True, skip_flags=["nothing"])
    self.assertIn("in_base", FLAGS)

  def test_flag_of_another_module_is_kept(self):
    flags.DEFINE_string("ef_existing", "kept", "")

    @gflags_utils.extract_flags_decorator()
    @dataclasses.dataclass
    class Config:
      """:param ef_existing: is defined already"""

      ef_existing: int = 1

    self.assertEqual(FLAGS["ef_existing"].default, "kept")

  def test_wrong_type_on_the_command_line(self):
    values = flags.FlagValues()
    flags.DEFINE_integer("count", 1, "number of things", flag_values=values)
    parse = gflags_utils.get_flags_parser(flags, values)

    self.assertEqual(parse(["program", "--count=2", "rest"]), ["program", "rest"])
    self.assertEqual(values.count, 2)
    for argument in ("--count=many", "--unknown=1"):
      with self.assertLogs("absl", level="ERROR") as logs, self.assertRaises(SystemExit) as context:
        parse(["program", argument])
      self.assertEqual(context.exception.code, 1)
      self.assertIn(argument[2:].split("=")[0], logs.output[0])
      self.assertIn("number of things", logs.output[0])


flags.DEFINE_integer("test_int1", 2, "")
flags.DEFINE_integer("test_int2", 3, "")
flags.DEFINE_enum("test_enum", "red", ["red", "dark_blue"], "")
flags.DEFINE_list("test_list", ["a"], "")
flags.DEFINE_string("test_linked", "", "")
flags.DEFINE_string("test_linked2", "", "")


class UpdateTest(unittest.TestCase):
  def test_update(self):
    @dataclasses.dataclass
    class Config:
      test_int1: int = 0
      test_int2: int = 0
      test_enum: Color = Color.RED
      no_such_flag: int = 7

    config = Config(test_int1=1, test_int2=0)
    gflags_utils.update(config)
    self.assertEqual((config.test_int1, config.test_int2), (1, 3))
    self.assertEqual((config.test_enum, config.no_such_flag), (Color.RED, 7))

    with flagsaver.flagsaver(test_enum="dark_blue"):
      gflags_utils.update(config)
    self.assertEqual(config.test_enum, Color.DARK_BLUE)

  def test_default_factory(self):
    @dataclasses.dataclass
    class Config:
      test_list: list = dataclasses.field(default_factory=list)

    config = Config()
    gflags_utils.update(config)
    self.assertEqual(config.test_list, ["a"])

  def test_unparsed_flags_are_skipped(self):
    @dataclasses.dataclass
    class Config:
      test_int2: int = 0

    config = Config()
    FLAGS.unparse_flags()
    try:
      gflags_utils.update(config)
    finally:
      FLAGS.mark_as_parsed()
    self.assertEqual(config.test_int2, 0)


class LinkTest(unittest.TestCase):
  def setUp(self):
    @gflags_utils.update_by_flags
    @gflags_utils.LinkDataclassToFlags(linked_map={"v": "test_linked"})
    @dataclasses.dataclass
    class Config:
      v: Optional[str] = None

    self.config_class = Config

  def test_link(self):
    self.assertIsNone(self.config_class().v)
    with flagsaver.flagsaver(test_linked="a"):
      self.assertEqual(self.config_class().v, "a")
    with flagsaver.flagsaver(test_linked="b"):
      self.assertEqual(self.config_class(v="v").v, "v")
    self.assertEqual(self.config_class._monolith_gflag_meta, {"v": "test_linked"})

  def test_link_by_list(self):
    @gflags_utils.update_by_flags
    @gflags_utils.LinkDataclassToFlags(linked_list=["test_linked"])
    @dataclasses.dataclass
    class Config:
      test_linked: Optional[str] = None

    with flagsaver.flagsaver(test_linked="a"):
      self.assertEqual(Config().test_linked, "a")

  def test_link_of_a_base_class(self):
    @gflags_utils.update_by_flags
    @dataclasses.dataclass
    class Child(self.config_class):
      w: int = 0

    with flagsaver.flagsaver(test_linked="a"):
      self.assertEqual(Child().v, "a")

  def test_links_are_kept_per_class_and_the_most_derived_wins(self):
    @gflags_utils.update_by_flags
    @gflags_utils.LinkDataclassToFlags(linked_map={"v": "test_linked2"})
    @dataclasses.dataclass
    class Child(self.config_class):
      pass

    with flagsaver.flagsaver(test_linked2="child"):
      self.assertEqual(Child().v, "child")
      self.assertIsNone(self.config_class().v)
    self.assertEqual(self.config_class._monolith_gflag_meta, {"v": "test_linked"})

  def test_errors(self):
    with self.assertRaisesRegex(AssertionError, "not a dataclass"):
      gflags_utils.LinkDataclassToFlags(linked_list=["test_linked"])(object)
    with self.assertRaisesRegex(ValueError, "no field 'w'"):
      gflags_utils.LinkDataclassToFlags(linked_map={"w": "test_linked"})(self.config_class)
    with self.assertRaisesRegex(ValueError, "flag 'no_such_flag'"):
      gflags_utils.LinkDataclassToFlags(linked_map={"v": "no_such_flag"})(self.config_class)

  def test_unparsed_flags(self):
    FLAGS.unparse_flags()
    try:
      with self.assertRaises(flags.UnparsedFlagAccessError):
        self.config_class()
    finally:
      FLAGS.mark_as_parsed()


class EnsureParsedTest(unittest.TestCase):
  def setUp(self):
    super().setUp()
    FLAGS.unparse_flags()
    self.addCleanup(FLAGS.mark_as_parsed)

  def test_a_program_without_flags_gets_their_defaults(self):
    with mock.patch.object(sys, "argv", ["notebook", "-f", "kernel.json", "data.csv"]):
      gflags_utils.ensure_parsed()
    self.assertTrue(FLAGS.is_parsed())

  def test_a_flag_that_would_be_ignored_is_an_error(self):
    for argument in ("--verbosity=1", "--nologtostderr"):
      with mock.patch.object(sys, "argv", ["program", argument]):
        with self.assertRaisesRegex(flags.UnparsedFlagAccessError, f"has {argument}, but"):
          gflags_utils.ensure_parsed()
    self.assertFalse(FLAGS.is_parsed())


if __name__ == "__main__":
  unittest.main()
