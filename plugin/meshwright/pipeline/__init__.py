"""Pipeline parallelism: the schedule of the stages, and the layers that each stage holds.

Every rank of pp runs the model's own forward on the same tokens; the layers of other stages return their input. The
executor and the planner's simulation run the same lists of operations (``plan/schedule.py``). Backward runs inside the
call, because the forward of one micro-batch may follow the backward of another. The gradients reach the parameters in
``loss.backward()``, so scaling, accumulation and reduction work as without a pipeline. Random states cross beside the
first micro-batch (``parallel/draws/stage_states.py``).

    cut.py               which layers and weights a stage holds, tied ones included
    stages.py            one stage: the stock forward, ended after its last layer; inputs that cross the stages
    executor.py          runs the operations of a schedule, and zero-bubble's gradients of weights
    links.py             sends and receives between stages
    pipeline_forward.py  ``forward`` of a model with stages; adds up the gradients of tied weights
    layer_order.py       what runs around the layers, seen in a pass without values
    stage_outputs.py     losses and logits on ranks without the last stage
"""
