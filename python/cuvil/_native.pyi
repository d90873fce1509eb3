"""Typed face of the extension module."""
