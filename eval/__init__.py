"""Measurements of arrays, the report that they make, and the gate that judges it."""
