"""What is trained: the sizes of a model, its adapters and optimizer, and a candidate plan for it.

shapes.py, layer_shape.py    sizes of a model and of a layer      config_file.py   reads a config.json
adapters.py, optimizers.py   LoRA; bytes of optimizer states      measured.py      sizes that a pass has measured
candidate.py                 a plan that may be legal, with its micro-batches
"""
