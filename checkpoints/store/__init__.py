"""Models as they are loaded, kept with Orbax: folders that restore to any mesh.

A store is a model folder (config.json, tokenizer) with `orbax_store.json`, which says what is in
it, and `weights/`, an Orbax checkpoint a part. `record.py` knows the former, `writer.py` and
`reader.py` the latter, `publishing.py` how a folder takes its place at once.
"""

from checkpoints.store.record import RECORD_FILE, Leaf, Part, Record, is_store, read_record

__all__ = ["RECORD_FILE", "Leaf", "Part", "Record", "is_store", "read_record"]
