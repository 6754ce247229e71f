"""Adapters to training programs. Each imports what it adapts to only when it is used."""
