"""Writes docs/settings.md: every environment variable and every flag, found in the sources.

    python tools/list_settings.py           print the page
    python tools/list_settings.py --write   put it into docs/settings.md

Nothing is imported but `gflags_utils`, and nothing is run: variables are the names that Python
reads from `os.environ` or through `env_utils`, C++ from `getenv` and shell scripts as `$MONOLITH_`;
flags are what `DEFINE_*` and `gflags_utils.extract_flags_decorator` define. What a variable means
is in `setting_meanings.py`; one that is missing there, or gone from the sources, is an error.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))
import setting_meanings  # noqa: E402

from monolith.native_training import gflags_utils  # noqa: E402

_LIBRARY = "monolith/"
_FOLDERS = ("benchmarks", "examples", "monolith", "tests", "third_party", "tools")
_SUFFIXES = ("", ".cc", ".cu", ".h", ".py", ".sh")
_GENERATED = ("_pb2.py", "_pb2_grpc.py", "_build_info.py")
_ENV_METHODS = ("get", "pop", "setdefault")
_ENV_READERS = ("get_bool", "get_int", "getenv")
_FLAG_TYPES = {"bool", "int", "float", "str"}
# Tests of the library set the library's variables.
_SKIPPED = ("tests/agent_service/", "tests/core/", "tests/native_training/", "tests/packaging/")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_([A-Z0-9]+|<\w+>|\[\w+\][A-Z0-9]+))+")
_CPP_READ = re.compile(r"\b(?:std::)?getenv\(\s*(?:\"(?P<name>\w+)\"|(?P<constant>\w+))\s*\)")
_SHELL_READ = re.compile(r"\$\$?\{?(MONOLITH_[A-Z0-9_]+|CI)\b")


class Flag(NamedTuple):
  """A flag as the sources define it.

  Attributes:
    name: the flag's name.
    type: `bool`, `integer`, ...
    default: the source text of its default.
    help: its help text.
    path: the file that defines it.
  """

  name: str
  type: str
  default: str
  help: str
  path: str


def list_sources() -> list[str]:
  """Returns the paths of all files that may read a variable or define a flag, sorted."""
  files = [ROOT / "Makefile", ROOT / "setup.py"]
  for folder in _FOLDERS:
    files += (ROOT / folder).rglob("*")
  paths = (file.relative_to(ROOT).as_posix() for file in files if file.suffix in _SUFFIXES)
  return sorted(path for path in paths if not path.endswith(_GENERATED))


def _parse(paths: Iterable[str]) -> dict[str, ast.Module]:
  return {path: ast.parse((ROOT / path).read_text(), path) for path in paths}


# -- Environment variables


def find_variables(paths: Iterable[str]) -> dict[str, list[str]]:
  """Returns variable name -> files that read or set it, sorted."""
  found: dict[str, set[str]] = {}
  names: Iterable[str]
  for path in paths:
    if path.startswith(_SKIPPED):
      continue
    if path.endswith(".py"):
      names = _python_variables(ast.parse((ROOT / path).read_text(), path), path)
    elif path.endswith((".cc", ".cu", ".h")):
      names = _cpp_variables((ROOT / path).read_text())
    elif path.endswith((".sh", "Makefile")):
      names = _SHELL_READ.findall((ROOT / path).read_text())
    else:
      continue
    for name in names:
      found.setdefault(name, set()).add(path)
  return {name: sorted(files) for name, files in sorted(found.items())}


def _cpp_variables(text: str) -> Iterator[str]:
  for match in _CPP_READ.finditer(text):
    name = match.group("name")
    if name is None:
      pattern = rf"\b{match.group('constant')}(?:\[\])?\s*=\s*\"(\w+)\""
      constant = re.search(pattern, text)
      if constant is None:
        raise ValueError(f"cannot tell which variable {match.group(0)} reads")
      name = constant.group(1)
    yield name


def _python_variables(tree: ast.Module, path: str) -> set[str]:
  constants = _constants(tree)
  names: set[str] = set()
  is_indirect = False
  for node in ast.walk(tree):
    argument = _variable_argument(node)
    if argument is None:
      continue
    if isinstance(argument, ast.Name):
      argument = constants.get(argument.id, argument)
    name = _text_of(argument)
    if name is None:
      is_indirect = True
    else:
      names.add(name)
  if is_indirect and path.startswith(_LIBRARY):
    # Through a loop or a table: what looks like a variable in this file is one.
    texts = (_text_of(node) for node in ast.walk(tree) if isinstance(node, ast.expr))
    names.update(text for text in texts if text is not None and _VARIABLE.fullmatch(text))
  return names


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
  """Returns the names that a module gives to constants."""
  return {
    target.id: node.value
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    for target in node.targets
    if isinstance(target, ast.Name)
  }


def _text_of(node: ast.expr) -> str | None:
  """Returns a text, with `<name>` and `[optional]` for what is filled in; `None` if it is none."""
  if isinstance(node, ast.JoinedStr):
    return "".join(_pattern_piece(piece) for piece in node.values)
  return node.value if _is_text(node) else None


def _is_text(node: ast.AST | None) -> bool:
  return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _pattern_piece(piece: ast.expr) -> str:
  if not isinstance(piece, ast.FormattedValue):
    return piece.value
  value = piece.value
  if isinstance(value, ast.IfExp) and _is_text(value.body):
    return f"[{value.body.value}]"
  name = value.func if isinstance(value, ast.Call) else value
  return f"<{ast.unparse(name).rpartition('.')[2].strip('_')}>"


def _is_environ(node: ast.expr) -> bool:
  return isinstance(node, ast.Attribute) and node.attr == "environ"


def _variable_argument(node: ast.AST) -> ast.expr | None:
  """Returns the expression that names a variable, if `node` reads or sets one."""
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
    func = node.func
    if func.attr == "items" and _is_environ(func.value):
      return node
    if node.args and (
      (func.attr in _ENV_METHODS and _is_environ(func.value))
      or (
        func.attr in _ENV_READERS
        and isinstance(func.value, ast.Name)
        and func.value.id in ("env_utils", "os")
      )
    ):
      return node.args[0]
  if isinstance(node, ast.Subscript) and _is_environ(node.value):
    return node.slice
  if isinstance(node, ast.Compare) and _is_environ(node.comparators[0]):
    return node.left
  return None


# -- Flags


def find_flags(paths: Iterable[str]) -> list[Flag]:
  """Returns the flags of Python modules, by file and place."""
  trees = _parse(path for path in paths if path.endswith(".py"))
  classes = {
    node.name: (path, node)
    for path, tree in trees.items()
    for node in tree.body
    if isinstance(node, ast.ClassDef)
  }
  found: list[Flag] = []
  for path, tree in trees.items():
    for node in ast.walk(tree):
      if isinstance(node, ast.Call):
        flag = _defined_flag(node, path, _constants(tree))
        if flag is not None:
          found.append(flag)
      elif isinstance(node, ast.ClassDef):
        found.extend(_class_flags(node, path, classes))
  return found


def _defined_flag(call: ast.Call, path: str, constants: dict[str, ast.expr]) -> Flag | None:
  """Reads `flags.DEFINE_x(name, default, ..., help)`, or the same through a function."""
  define, args = call.func, call.args
  if not _is_define(define):
    if not args or not _is_define(args[0]):
      return None
    define, args = args[0], args[1:]
  kind = define.attr[len("DEFINE_") :]
  keywords = {keyword.arg: keyword.value for keyword in call.keywords}
  name = keywords.get("name", args[0] if args else None)
  if not _is_text(name):
    return None  # The definition of a definer.
  default = keywords.get("default", args[1] if len(args) > 1 else None)
  if isinstance(default, ast.Name):
    default = constants.get(default.id, default)
  text = keywords.get("help", args[3 if kind.startswith("enum") else 2] if len(args) > 2 else None)
  return Flag(
    name.value,
    kind,
    "None" if default is None else ast.unparse(default),
    " ".join(ast.literal_eval(text).split()) if text is not None else "",
    path,
  )


def _is_define(node: ast.expr) -> bool:
  return isinstance(node, ast.Attribute) and node.attr.startswith("DEFINE_")


def _class_flags(
  node: ast.ClassDef, path: str, classes: dict[str, tuple[str, ast.ClassDef]]
) -> Iterator[Flag]:
  """Follows `gflags_utils.extract_flags_decorator`: a field with a help text becomes a flag."""
  removed = None
  for decorator in node.decorator_list:
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(
      "extract_flags_decorator"
    ):
      arguments = {keyword.arg: keyword.value for keyword in decorator.keywords}
      removed = ast.literal_eval(arguments.get("remove_flags", ast.Constant(())))
  if removed is None:
    return
  fields: dict[str, tuple[str, str]] = {}
  helps: dict[str, str] = {}
  for _, ancestor in reversed(list(_with_bases(node, path, classes))):
    documented = type(ancestor.name, (), {"__doc__": ast.get_docstring(ancestor)})
    helps.update(gflags_utils.extract_help_info(documented, is_nested=False))
    for statement in ancestor.body:
      if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        kind = _flag_type(statement.annotation, classes)
        if kind is not None:
          default = "None" if statement.value is None else ast.unparse(statement.value)
          fields[statement.target.id] = (kind, default)
  for name, (kind, default) in fields.items():
    if name in helps and name not in removed:
      yield Flag(name, kind, default, helps[name], path)


def _with_bases(
  node: ast.ClassDef, path: str, classes: dict[str, tuple[str, ast.ClassDef]]
) -> Iterator[tuple[str, ast.ClassDef]]:
  yield path, node
  for base in node.bases:
    name = ast.unparse(base).rpartition(".")[2]
    if name in classes:
      yield from _with_bases(classes[name][1], classes[name][0], classes)


def _flag_type(annotation: ast.expr, classes: dict[str, tuple[str, ast.ClassDef]]) -> str | None:
  text = re.sub(r"^(?:typing\.)?Optional\[(.*)\]$", r"\1", ast.unparse(annotation))
  if text in _FLAG_TYPES:
    return {"int": "integer", "str": "string"}.get(text, text)
  known = classes.get(text.rpartition(".")[2])
  is_enum = known is not None and any("Enum" in ast.unparse(base) for base in known[1].bases)
  return "enum" if is_enum else None


# -- The page


def _code(text: str) -> str:
  return f"`{text}`".replace("|", "\\|")


def _variables_table(variables: dict[str, list[str]]) -> Iterator[str]:
  yield "| variable | what it does | where |"
  yield "|---|---|---|"
  for name, files in variables.items():
    meaning = setting_meanings.MEANINGS[name].replace("|", "\\|")
    where = ", ".join(_code(_short(path)) for path in files)
    yield f"| {_code(name)} | {meaning} | {where} |"


def _short(path: str) -> str:
  return path.replace("monolith/native_training/", "")


def check_meanings(variables: Iterable[str]) -> None:
  """Compares the variables with `setting_meanings`.

  Raises:
    ValueError: a variable has no meaning, or a meaning no variable.
  """
  missing = sorted(set(variables) - set(setting_meanings.MEANINGS))
  stale = sorted(set(setting_meanings.MEANINGS) - set(variables))
  if missing or stale:
    raise ValueError(
      f"tools/setting_meanings.py says nothing about {missing}, and names {stale}, which no source "
      "reads"
    )


def _doors_table() -> Iterator[str]:
  yield "| door | who uses it | what wins |"
  yield "|---|---|---|"
  for door in setting_meanings.DOORS:
    yield f"| {' | '.join(door)} |"


def make_page() -> str:
  """Returns the text of docs/settings.md.

  Raises:
    ValueError: an environment variable has no meaning, or a meaning no variable.
  """
  paths = list_sources()
  variables = find_variables(paths)
  check_meanings(variables)
  library = {n: f for n, f in variables.items() if any(p.startswith(_LIBRARY) for p in f)}
  others = {n: f for n, f in variables.items() if n not in library}
  library = {n: [p for p in f if p.startswith(_LIBRARY)] for n, f in library.items()}
  lines = [
    "# Settings",
    "",
    "Every environment variable and flag, made by `python tools/list_settings.py --write` from the",
    "sources; a test fails when this page is not current. Paths are relative to",
    "`monolith/native_training/` unless they start with another folder of the repository.",
    "",
    "A *switch* is off when empty, `0` or `false`, and on with any other text.",
    "",
    "## Which door is for whom",
    "",
    *_doors_table(),
    "",
    *setting_meanings.RETRIES,
    "",
    "## Environment variables of the library",
    "",
    *_variables_table(library),
    "",
    "## Environment variables of builds, tests and benchmarks",
    "",
    *_variables_table(others),
    "",
    "## Flags",
    "",
    "Grouped by the file that defines them; a program has the flags of the modules it imports.",
  ]
  by_path: dict[str, list[Flag]] = {}
  for flag in find_flags(path for path in paths if path.startswith(_LIBRARY)):
    by_path.setdefault(flag.path, []).append(flag)
  for path, found in sorted(by_path.items()):
    lines += [
      "",
      f"### `{_short(path)}`",
      "",
      "| flag | type | default | help |",
      "|---|---|---|---|",
    ]
    for flag in sorted(found):
      text = flag.help.replace("|", "\\|")
      lines.append(f"| {_code('--' + flag.name)} | {flag.type} | {_code(flag.default)} | {text} |")
  return "\n".join(lines) + "\n"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--write", action="store_true", help="write docs/settings.md")
  if parser.parse_args().write:
    PAGE.write_text(make_page())
  else:
    print(make_page(), end="")


if __name__ == "__main__":
  main()
