"""Turns the fields of a dataclass into command-line flags, and flag values back into fields.

The help of a field, without which it gets no flag, is a `:param <name>: <text>` line of the class
docstring, or `field(metadata={"help": …})`, which survives `python -OO`.

Differences from ByteDance's Monolith: links between fields and flags are kept per class, with the
most derived class winning, and fields with a `default_factory` take part.
"""

import dataclasses
import enum
import functools
import inspect
import re
import sys
import typing
from typing import Any, Callable, Optional, TypeVar

from absl import flags, logging

_T = TypeVar("_T", bound=type)

_META_ATTRIBUTE = "_monolith_gflag_meta"
_PARAM_PATTERN = re.compile(r":param\s+([\w.-]+)\s*:\s*(.*)", re.ASCII)


def read_flag(name: str, default: Any) -> Any:
  """Returns the value of a flag, `default` where it is not defined or not parsed yet."""
  try:
    return getattr(flags.FLAGS, name)
  except (AttributeError, flags.UnparsedFlagAccessError):
    return default


class Status(enum.Enum):
  """Says where the scan of a docstring is."""

  BEFORE_PARAMS = 1
  IN_PARAM = 2


def extract_help_info(cls: type, is_nested: bool = True) -> dict[str, str]:
  """Collects the `:param name: text` lines of a class.

  Args:
    cls: the class.
    is_nested: whether base classes count too; entries of the class itself win.

  Returns:
    Name → text, with all white space collapsed and continuation lines joined by one space.
  """
  help_info = {}
  for c in reversed(inspect.getmro(cls)) if is_nested else [cls]:
    if c is object:
      continue
    help_info.update(_parse_doc(c.__dict__.get("__doc__") or ""))
    if dataclasses.is_dataclass(c):
      own = c.__dict__.get("__annotations__", {})
      for field in dataclasses.fields(c):
        if field.name in own and "help" in field.metadata:
          help_info[field.name] = field.metadata["help"]
  return help_info


def _parse_doc(doc: str) -> dict[str, str]:
  help_info, status, name = {}, Status.BEFORE_PARAMS, None
  for line in doc.splitlines():
    line = " ".join(line.split())
    match = _PARAM_PATTERN.match(line)
    if match:
      status, name = Status.IN_PARAM, match.group(1)
      help_info[name] = match.group(2)
    elif line and status is Status.IN_PARAM:
      help_info[name] = f"{help_info[name]} {line}".strip()
  return help_info


def extract_flags(
  gflags: Any,
  dcls: type,
  is_nested: bool = True,
  skip_flags: Optional[typing.Collection[str]] = None,
) -> None:
  """Defines a flag for each typed attribute of a class that has a help text.

  int, bool, str and float become flags of that type, an Enum becomes an enum flag of its
  lower-cased names. Other types, and names that are flags already, are left out.

  Args:
    gflags: the module `absl.flags`.
    dcls: the class.
    is_nested: whether inherited attributes get flags.
    skip_flags: names that get none.
  """
  help_info = extract_help_info(dcls, is_nested)
  names = typing.get_type_hints(dcls) if is_nested else dcls.__dict__.get("__annotations__", {})
  hints = typing.get_type_hints(dcls)
  defaults = _get_defaults(dcls)
  for name in names:
    if name not in help_info or name in (skip_flags or ()):
      continue
    default = defaults.get(name, getattr(dcls, name, None))
    try:
      _define_flag(gflags, name, _strip_optional(hints[name]), default, help_info[name])
    except Exception as e:  # A field without a flag is still a field.
      logging.debug("no flag for %s.%s: %s", dcls.__name__, name, e)


def _define_flag(gflags: Any, name: str, hint: Any, default: Any, text: str) -> None:
  if not isinstance(hint, type):
    raise TypeError(f"{hint} has no flag type")
  full_text = f"{hint.__name__}, default={default}, {text}"
  if issubclass(hint, enum.Enum):
    default_name = None if default is None else default.name.lower()
    gflags.DEFINE_enum(name, default_name, [member.name.lower() for member in hint], full_text)
  elif hint is bool:  # Before int, of which it is a subclass.
    gflags.DEFINE_bool(name, default, full_text)
  elif hint is int:
    gflags.DEFINE_integer(name, default, full_text)
  elif hint is float:
    gflags.DEFINE_float(name, default, full_text)
  elif hint is str:
    gflags.DEFINE_string(name, default, full_text)
  else:
    raise TypeError(f"{hint} has no flag type")


def extract_flags_decorator(
  remove_flags: Optional[typing.Collection[str]] = None, is_nested: bool = True
) -> Callable[[_T], _T]:
  """Returns a class decorator around `extract_flags`; `remove_flags` get no flag."""

  def decorate(cls: _T) -> _T:
    extract_flags(flags, cls, is_nested, remove_flags)
    return cls

  return decorate


def get_flags_parser(flags: Any, FLAGS: Any) -> Callable[[list[str]], list[str]]:  # noqa: N803
  """Returns a parser for `app.run(flags_parser=…)` that shows error and help, and exits with 1."""

  def parse(argv: list[str]) -> list[str]:
    try:
      return FLAGS(argv)
    except flags.Error as e:
      logging.error("%s\n%s", e, FLAGS.get_help())
      sys.exit(1)

  return parse


def ensure_parsed() -> None:
  """Lets a program that has no command line of flags, a notebook say, use their defaults.

  Flags that a program parses later replace these.

  Raises:
    flags.UnparsedFlagAccessError: the command line has a flag, which would be ignored.
  """
  if flags.FLAGS.is_parsed():
    return
  for argument in sys.argv[1:]:
    name = re.match(r"--?(?:no)?([A-Za-z]\w*)", argument)
    full_name = re.match(r"--?([A-Za-z]\w*)", argument)
    if argument.startswith("--") and any(
      m and m.group(1) in flags.FLAGS for m in (name, full_name)
    ):
      raise flags.UnparsedFlagAccessError(
        f"the command line has {argument}, but flags are not parsed: start the program with "
        "absl.app.run(main), or call flags.FLAGS(sys.argv)"
      )
  flags.FLAGS.mark_as_parsed()


def update(config: Any) -> None:
  """Takes flag values for the fields that were left at their default.

  A field changes if it equals the dataclass' default and the flag of its name does not. Fields
  without a flag, or whose flag cannot be read yet, stay.
  """
  hints = typing.get_type_hints(type(config))
  for name, default in _get_defaults(type(config)).items():
    try:
      value = getattr(flags.FLAGS, name)
    except (AttributeError, flags.UnparsedFlagAccessError):
      continue
    hint = _strip_optional(hints.get(name))
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and isinstance(value, str):
      value = hint[value.upper()]
    if getattr(config, name) == default and value != default:
      setattr(config, name, value)


def LinkDataclassToFlags(  # noqa: N802, the public name
  linked_list: Optional[list[str]] = None, linked_map: Optional[dict[str, str]] = None
) -> Callable[[_T], _T]:
  """Returns a class decorator that ties fields to flags, for `update_by_flags`.

  Args:
    linked_list: fields whose flag has the same name.
    linked_map: field → flag.

  Raises:
    AssertionError: if the class is not a dataclass.
    ValueError: if a field does not exist or a flag is not defined.
  """
  links = {**{name: name for name in linked_list or ()}, **(linked_map or {})}

  def decorate(cls: _T) -> _T:
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} is not a dataclass"
    names = {field.name for field in dataclasses.fields(cls)}
    for name, flag in links.items():
      if name not in names:
        raise ValueError(f"{cls.__name__} has no field {name!r} to link to flag {flag!r}")
      if flag not in flags.FLAGS:
        raise ValueError(f"flag {flag!r}, linked to {cls.__name__}.{name}, is not defined")
    setattr(cls, _META_ATTRIBUTE, {**cls.__dict__.get(_META_ATTRIBUTE, {}), **links})
    return cls

  return decorate


def update_by_flags(cls: _T) -> _T:
  """Decorates a class: after construction, linked fields left at their default take their flag.

  A field changes if it equals its default and its flag differs from the flag's own default.
  """
  original_init = cls.__init__

  @functools.wraps(original_init)
  def init(self, *args, **kwargs):
    original_init(self, *args, **kwargs)
    defaults = _get_defaults(type(self))
    for name, flag in _get_links(type(self)).items():
      value = getattr(flags.FLAGS, flag)
      if getattr(self, name) == defaults.get(name) and value != flags.FLAGS[flag].default:
        setattr(self, name, value)

  cls.__init__ = init
  return cls


def _get_links(cls: type) -> dict[str, str]:
  links = {}
  for c in reversed(inspect.getmro(cls)):
    links.update(c.__dict__.get(_META_ATTRIBUTE, {}))
  return links


def _get_defaults(cls: type) -> dict[str, Any]:
  """Returns field → default; fields without one are left out."""
  defaults = {}
  for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
    if field.default is not dataclasses.MISSING:
      defaults[field.name] = field.default
    elif field.default_factory is not dataclasses.MISSING:
      defaults[field.name] = field.default_factory()
  return defaults


def _strip_optional(hint: Any) -> Any:
  """Turns `Optional[X]` into `X`."""
  if typing.get_origin(hint) is typing.Union:
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if len(arguments) == 1:
      return arguments[0]
  return hint
