"""Converts upstream records to rows in verl's schema, one file per family of datasets."""
