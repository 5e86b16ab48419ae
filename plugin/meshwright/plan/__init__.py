"""What a plan says, and what the planner and the runtime both compute from it: schedules, stages, offsets.

parallel_plan.py  ParallelPlan, torch-free  config.py     ToDistributedConfig with all options
text.py       "dp2 tp2+sp zero1", and the names of other frameworks
fields.py     checks of fields              loader_options.py  options of the loader
schedule.py   operations of each schedule   partition.py       layers of each stage
parts.py      the parts of cp, of the head and of flat buckets
"""
