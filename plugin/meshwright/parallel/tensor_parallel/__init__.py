"""Tensor and sequence parallelism: a decoder's layouts, and the hooks at its blocks, embedding, head and towers.

A block has one gather and one reduction. The gathered input is not kept; backward gathers it again, beside matrix
multiplications. The bias of a row-parallel projection is removed during the call and added once after the reduction.
Between blocks each rank has a contiguous slice of the flattened batch's tokens.

    structure.py           the layout of each parameter, from the roles of ``roles/``
    apply.py               gives parameters their shards and adds the hooks; the region between embedding and head
    block_boundary.py      the gather and the reduction of a block
    column_projections.py  the same beside the matrix multiplications of backward
    sequence_parallel.py   sp: each rank's tokens, padding; modules that need all tokens
    vocab_parallel.py      embedding and head, cut by words
    wide_norms.py          norms over channels that ranks share
    second_inputs.py       an encoder's result, biases of positions and features of towers beside the hidden states
    shared_tower.py        the images of a batch, shared by ranks
    float8.py              scales of float8 layers
"""
