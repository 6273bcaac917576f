"""Tables on NumPy arrays: the engine of all of Monolith's tables, without TensorFlow.

  import monolith.table

  table = monolith.table.HashTable(dim=8)
  table.update([7, 9], gradients)          # creates the rows, runs the optimizer
  vectors = table.lookup([7, 9, 11])       # [3, 8]; zeros for 11, which has no row
  table.save("/tmp/users")                 # files that TensorFlow's tables read, too

| name | what it is |
|---|---|
| `HashTable` | a map from int64 ids to rows of floats, each with the state of its optimizer |
| `Optimizer` | what a step does to a row, and with which numbers |
| `lookup_many`, `update_many` | the same calls for several tables at once |
| `load_group`, `save_group` | several tables in one set of files, that of the TensorFlow driver |
| `set_num_threads` | how many threads a call may use |
| `TableError` | what failed is neither an argument nor memory: a file is damaged |

Importing it needs NumPy and `libmonolith_engine.so`, which every build of the package has.
"""

from monolith.table.groups import load_group, save_group
from monolith.table.hash_table import HashTable, lookup_many, update_many
from monolith.table.library import TableError, set_num_threads
from monolith.table.optimizers import Optimizer

__all__ = [
  "HashTable",
  "Optimizer",
  "TableError",
  "load_group",
  "lookup_many",
  "save_group",
  "set_num_threads",
  "update_many",
]
