"""Save and load a distributed model and its optimizer as whole tensors.

State on disk is that of one device. ``save_checkpoint`` and ``save_optimizer`` write tensors of one-device shape: each
element is written once, by one of the ranks that hold it. ``save_pretrained`` writes whole tensors on rank 0, one at a
time. A rank that loads reads only the elements that it holds. Saving and loading use the layouts of
``optim/owners.py``, so the plans may differ.

    files/        the seam for storage: checked reads, folders that exist whole or not at all
    one_device/   safetensors and optimizer files as one device has them
    format/       the sharded format: a run in one commit
    sealed.py     a seal for other programs' files
"""
