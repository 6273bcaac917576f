"""Starts a job of several processes with one command: `python -m monolith.launch`.

  python -m monolith.launch --num_ps 2 --num_workers 4 train.py --model_dir model

starts two parameter servers and four workers, the first of which is the chief, each with the
`TF_CONFIG` that describes its role. `docs/operating.md` has the details.
"""
