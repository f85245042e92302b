"""Measurements of jaxserve; none of this is part of the installed package."""
