"""The ranks: their axes, their places on them, their process groups, devices and hosts.

A ``Mesh`` has a rank's place on each axis of the plan, and on axes that are made of others: the tokens are the ranks of
dp and cp, which have different tokens of a batch, over which losses and gradients are averaged and ZeRO shards; the
factors pp x tokens x tp are the world. Experts divide the ranks of a stage a second time, into copies x ep x etp.

    rank_grid.py      the axes, their order and their sizes, without torch; grids as text
    process_mesh.py   ProcessMesh and ParallelDims: which ranks form the groups of an axis
    axes.py           Mesh and Axis: one rank's place on each axis, with its process group
    process_group.py  starts the process group; the address of rank 0; how long ranks wait for each other
    host.py           cores, memory and GPUs of this host
    host_wire.py      several ranks that share one GPU
    siblings.py       ends a stopped process of the same launcher
    packed_values.py  values as bytes, without pickle
"""
