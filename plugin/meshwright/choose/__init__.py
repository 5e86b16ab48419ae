"""The plan of one call: given, saved with the model, or picked by the planner on this machine.

given_plan.py      given: by the call, the launcher, a file or the model's config
picked_plan.py     picked, and why            model_sizes.py  what the planner is told of the model
runnable_plans.py  which plans the runtime takes for the call
"""
