"""Optimizers over shards, and the runtime that a distributed model carries.

runtime.py             Runtime: mesh, gradients, guard, plan and features of one model; no_sync, plan_of
trained_parameters.py  creates what synchronises gradients, again when requires_grad changes
gradients.py           the trained parameters of one model, and who averages and steps them
attach_gradients.py    gradient reduction on a model, ZeRO on its optimizer, overflow of a GradScaler
zero/                  ZeRO stages 1 to 3
steps.py               the window of a step, and the order of the hooks around it
whole_steps.py         optimizers whose update reads whole parameters: each is stepped by its owner
elementwise.py         which optimizers may step parts
trial.py               tries an optimizer on small parameters
owners.py              which elements a rank steps, saves and loads
offload.py             the optimizer on the host
state_dicts.py         state_dict and load_state_dict
clip_grad_norm.py      the global norm, under every plan
global_batch.py        gather_rows and global_mean
chained.py             several optimizers as one
balance_experts.py     biases of routers
"""
