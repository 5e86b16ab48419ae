"""Monitoring of a run: a card at the start, a line per interval, a log of JSON lines, and a page of plots."""
