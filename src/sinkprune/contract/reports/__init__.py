"""The reports that commands write, field by field."""
