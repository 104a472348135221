"""The simulator service."""
