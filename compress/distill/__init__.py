"""Distillation of a teacher into a student."""
