"""The parts from which a family is written."""
