"""One file a data set (or family of data sets): from upstream's records to rows of our schema."""
