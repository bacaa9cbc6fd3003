"""`quire bench NAME`: each prints a table, writes JSON and a figure, and names its baseline."""
