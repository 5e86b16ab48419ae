"""What ranks do to a model: tensor and sequence parallelism, batches, losses, gradients and the forward call.

batch/     what a batch holds             tensor_parallel/  tp and sp          forward/      the state of one call
shards/    parts of parameters            experts/          ep and etp         losses/       the mean of the batch
draws/     random numbers of one device   gradients/        buckets and sums   replicas/     equal copies
fake_passes/                              passes without values

collectives.py      collectives over an axis, and their backward     method_chain.py     the steps around a method
dropout_streams.py  seeds of dropout, of each rank                   sequence_parts.py   tokens of each rank of cp
saved_tensors.py    what is kept for backward                        rehearsal.py        runs a part whole and cut
async_numbers.py    numbers that the host reads later                autograd_graph.py   what a graph shows
foreign_hooks.py    hooks and wrappers of other libraries
"""
