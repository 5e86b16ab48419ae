"""What a plan says, and what the planner and the runtime both compute from it: schedules, stages, offsets."""
