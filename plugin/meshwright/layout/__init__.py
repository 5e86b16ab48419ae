"""Which elements of a tensor each rank of a mesh holds.

A sharded parameter is an ordinary ``nn.Parameter`` that holds the local shard, with a ``TensorLayout`` on it. So fused
and foreach optimizers work on it, and no DTensor boundary costs time in a module. The layout says which axes cut the
tensor, which axes' ranks have addends of its gradient, and which stages of the pipeline hold it. Each cut is a
``RowLayout``: the rows of the full tensor that each rank of the axis concatenates. This covers column and row cuts,
fused matrices (a piece of each part), replicated key/value heads (a row on several ranks) and uneven vocabularies (rows
of padding). ZeRO cuts the flattened shard once more. What slices, gathers, counts, saves or loads elements reads the
layout: ``TensorLayout.blocks`` are the positions of a rank's elements.

    tensor_layout.py    TensorLayout: all cuts of one tensor
    row_layout.py       RowLayout, one cut, and the arithmetic of the parts that follow
    packed_weights.py   weights that bitsandbytes stores in 4 or 8 bits
"""
