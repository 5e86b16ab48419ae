"""Pipeline parallelism: the schedule of the stages, and the layers that each stage holds."""
