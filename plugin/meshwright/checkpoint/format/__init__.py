"""The sharded format: all of a run in one folder, written and read by all ranks.

save_checkpoint.py     save                    load_checkpoint.py  load, under any plan
checkpoint_folders.py  checkpoint.json         background.py       saves while training goes on
part_files.py          each rank's two files   rank_state.py       what one rank has and writes
load_weights.py        weights alone           object_states.py    schedulers, scalers, loaders, generators
optimizer_files.py     the optimizer alone
"""
