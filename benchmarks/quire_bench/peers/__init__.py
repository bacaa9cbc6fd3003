"""Other stores that a user would put such objects into, and `quire bench peers`."""
