"""What the planner says: tables, reasons, costs, and what would make a plan fit."""
