"""What every kind of save shares: steps on the disk, reads that are checked, folders that exist whole or not at all.

Saving, loading and inspecting ask a ``Storage`` to list, to read ranges, to write, commit and remove. The local disk
commits by a rename. An object store commits by its seal, a file that is written last and lists the others, whose names
no other save has.

    storage.py       Storage, the seam              place.py       paths and URLs; do all ranks see the same files
    local_disk.py    commit by a rename             object_store.py   s3:// and all that fsspec knows: commit by a seal
    disk.py          one step that a crash can separate from the next
    reading.py       reads with digests
"""
