"""One forward call of a distributed model: its state, its micro-batches, and what it refuses or warns about.

state.py               the state of one call, set up before the layers run
split_forward.py       micro-batches inside of the call
recompute.py           recomputation of layers        compiled_layers.py  compile="layers"
refused_arguments.py   arguments that a plan cannot serve
generate.py            generate(), and the sampling of tokens
coupled_rows.py        losses that compare rows       writes.py           state that forward writes
uneven_batches.py      warnings of uneven batches     user_hooks.py       the program's hooks get whole values
"""
