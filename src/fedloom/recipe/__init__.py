"""A recipe as it is written: read, checked word by word, refused with every problem at once."""
