"""Helpers that several callbacks share."""
