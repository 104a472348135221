"""Reward models: what reads frames and says whether the task was done."""
