"""Measurements of the claims of the README and the pages."""
