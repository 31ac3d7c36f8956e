"""Converts upstream records to rows of the dataset schema, one file per dataset or dataset family."""
